"""``python -m bench synthesis``: both lowerings, checked and timed."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from bench import synthesis
from bench.__main__ import main
from bench.shapes import Size

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")


def test_command_times_both_lowerings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "synthesis.csv"
    line = f"synthesis --device cpu --shape 1x3x13x10 --levels 2 --rounds 1 --csv {path}"
    assert main(line.split()) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == [synthesis.EAGER, *synthesis.LOWERINGS]
    assert all(float(row["ms"]) > 0 and float(row["error"]) < 1e-6 for row in rows)
    assert "1x3x13x10" in capsys.readouterr().out


@pytest.mark.parametrize("before", [None, "pointwise"])
def test_each_lowering_has_code_of_its_own(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv(synthesis.OPTION, raising=False)
    else:
        monkeypatch.setenv(synthesis.OPTION, before)
    tensors = synthesis.make_tensors(Size(1, 2, 6, 5), 1, torch.float32, torch.device("cpu"))
    calls = {}
    for name in synthesis.LOWERINGS:
        _, codes = run_and_get_code(synthesis._compiled, name, tensors)
        calls[name] = "torch.ops.wtconv.synthesis.default(" in codes[0].split("def call(")[1]
    assert calls == {"extern": True, "pointwise": False}
    assert os.environ.get(synthesis.OPTION) == before


def test_wrong_numbers_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(lowering: str, tensors: Any) -> Any:
        return lambda *arguments: 2 * synthesis.between_neighbours(*arguments)

    monkeypatch.setattr(synthesis, "_compiled", twice)
    line = "synthesis --device cpu --shape 1x2x6x5 --levels 1 --rounds 1"
    assert main(line.split()) == 1
    assert "bench: synthesis, extern: relative error 1.00e+00 to fp64" in capsys.readouterr().err
