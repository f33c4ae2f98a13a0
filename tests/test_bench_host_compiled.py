"""Host time of compiled calls: checked numbers, a row for each call, times of one layer."""

from __future__ import annotations

import copy
import csv
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import host, host_compiled
from bench.__main__ import main
from bench.cuda_check import NumbersDifferError

pytestmark = pytest.mark.usefixtures("fresh_compiler")
KEYS = [
    f"{mode}, {subject}, {variant}"
    for mode, subject, variant in itertools.product(
        host_compiled.MODES,
        host_compiled.SUBJECTS,
        host_compiled.VARIANTS,
    )
]


@pytest.mark.slow
def test_command_adds_compiled_calls(
    ops: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host.csv"
    line = f"host --device cpu --levels 2 --rounds 2 --threads 1 --compiled --csv {path}"
    assert main(line.split()) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    calls = [host.FORWARD, host.EMPTY_OP, host.TRAINING, host.EMPTY, *KEYS]
    assert [row["call"] for row in rows] == calls
    assert all(0 < float(row["fastest_ms"]) <= float(row["median_ms"]) for row in rows)
    printed = capsys.readouterr().out
    assert all(subject in printed for subject in host_compiled.SUBJECTS)


@pytest.mark.parametrize(("layers", "calls"), [(1, 20), (3, 6), (30, 4)])
def test_time_of_a_network_is_that_of_one_of_its_layers(
    layers: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def timeit(call: Any, number: int) -> float:
        timed.append(number)
        return 0.010 * layers * number

    monkeypatch.setattr(host, "timeit", timeit)
    warmed: list[None] = []
    call = {"network": lambda: warmed.append(None)}
    samples = host.samples_of(call, 3, torch.device("cpu"), layers)
    assert samples["network"] == pytest.approx([10.0] * 3)
    assert timed == [calls] * 3
    assert len(warmed) == calls


@pytest.mark.parametrize("wrong", [host_compiled.COMPILED, host_compiled.UNCHECKED])
def test_a_compiled_layer_that_is_wrong_is_not_timed(
    wrong: str, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(model: Any, variant: str) -> Any:
        if variant == wrong:
            model = copy.deepcopy(model)
            model.forward = lambda x: 2 * type(model).forward(model, x)
        return model

    monkeypatch.setattr(host_compiled, "_compile", twice)
    settings = host.HostSettings(devices=("cpu",), levels=(1,), rounds=1)
    with pytest.raises(NumbersDifferError, match=rf"wtconv_ops {wrong} on cpu float32 L1:"):
        host_compiled.run(settings, lambda _: None)


def test_difference_is_that_of_the_medians(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        host.HostRow(
            device="cpu", machine="m", torch="2", threads=1, shape="s", kernel_size=5, levels=3,
            dtype="float32", call=call, median_ms=0.25 + place / 8, fastest_ms=0.1, rounds=1,
        )
        for place, call in enumerate(KEYS)
    ]  # fmt: skip
    host_compiled.print_compiled_host(rows, Console(width=120))
    lines = [line for line in capsys.readouterr().out.splitlines() if "float32" in line]
    found = [", ".join(cell.strip() for cell in line.split("│")[4:10]) for line in lines]
    assert found == [
        f"{host.FORWARD}, layer, 0.2500, 0.3750, 0.1250, 0.5000",
        f"{host.FORWARD}, layer of 4, 0.6250, 0.7500, 0.1250, 0.8750",
        f"{host.FORWARD}, layer of 18, 1.0000, 1.1250, 0.1250, 1.2500",
        f"{host.FORWARD}, convolution, 1.3750, 1.5000, 0.1250, 1.6250",
        f"{host.TRAINING}, layer, 1.7500, 1.8750, 0.1250, 2.0000",
        f"{host.TRAINING}, layer of 4, 2.1250, 2.2500, 0.1250, 2.3750",
        f"{host.TRAINING}, layer of 18, 2.5000, 2.6250, 0.1250, 2.7500",
        f"{host.TRAINING}, convolution, 2.8750, 3.0000, 0.1250, 3.1250",
    ]
