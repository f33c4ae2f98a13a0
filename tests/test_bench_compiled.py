"""``python -m bench compile`` on the CPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import compiled
from bench.__main__ import main
from bench.compiled_figure import draw
from bench.shapes import Size

pytestmark = pytest.mark.usefixtures("ops")
VARIANTS = ["reference eager", "reference compiled", "ours eager", "ours compiled"]


def row(**changes: Any) -> compiled.CompileRow:
    values: dict[str, Any] = dict.fromkeys(compiled.CompileRow.__dataclass_fields__)
    values |= {"subject": "layer", "shape": "1x4x14x14", "precision": "float32", "layout": "nchw"}
    values |= {"mode": "inference", "variant": "ours eager", "ms": 1.0, "copies": 0, "error": 0.0}
    return compiled.CompileRow(**{**values, **changes})


@pytest.mark.slow
def test_command_measures_every_variant(tmp_path: Path, fresh_compiler: None) -> None:
    file = tmp_path / "compile.csv"
    options = ["--device", "cpu", "--quick", "--batch", "1", "--rounds", "1"]
    assert main(["compile", *options, "--dtype", "float32", "--csv", str(file)]) == 0
    lines = file.read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [r["variant"] for r in rows[:4]] == VARIANTS
    assert {(r["subject"], r["mode"]) for r in rows} == {
        (subject, mode) for subject in ("layer", "block") for mode in compiled.MODES
    }
    for r in rows:
        assert float(r["ms"]) > 0
        if r["variant"] == "ours compiled":
            assert (r["graphs"], r["graph_breaks"]) == ("1", "0")
            assert int(r["recompiles"]) <= 1  # the first other size may make sizes dynamic
            assert float(r["cold_compile_s"]) > 0
            assert int(r["kernels"]) >= 1
            if (r["subject"], r["mode"]) == ("layer", "inference"):
                assert (r["kernels"], r["copies"]) == ("1", "0")
        assert bool(r["kernels"]) == ("compiled" in r["variant"])


class Picky(nn.Module):
    """Takes even widths only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2:
            raise ValueError("an odd width")
        return x.cos()


@pytest.mark.parametrize("name", ["layer", compiled.NETWORK])
def test_the_network_is_not_compiled_for_another_size(name: str, fresh_compiler: None) -> None:
    subject = compiled.Subject(name, Size(1, 4, 14, 14), lambda _: Picky())
    case = compiled._Case(subject, "float32", "nchw", torch.device("cpu"))
    if name == compiled.NETWORK:
        _, found = case._compile(case.models["ours"], "inference")
        assert found["recompiles"] is None
    else:
        with pytest.raises(ValueError, match="an odd width"):
            case._compile(case.models["ours"], "inference")


def test_the_network_alone_without_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--device", "cpu", "--quick", "--subject", compiled.NETWORK]) == 2
    assert "alone was asked for, which needs timm" in capsys.readouterr().err


def test_wrong_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(compiled.WTConv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    layers = {**compiled.LAYERS, "ours": Shifted}
    monkeypatch.setattr(compiled, "LAYERS", layers)
    case = compiled._Case(
        compiled.subjects(("layer",), 1, quick=True)[0], "float32", "nchw", torch.device("cpu")
    )
    model: nn.Module = case.models["ours"]
    with pytest.raises(compiled.WrongNumbersError, match=r"layer float32 nchw: relative error"):
        case._error(model, case._output(case.models["reference"]))


def test_figure_has_a_panel_for_each_model_and_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(mode=mode, variant=variant) for mode in compiled.MODES for variant in VARIANTS]
    draw(rows, "a machine", tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 1000
