"""Host time of compiled calls: checked numbers, a row for each call, times of one layer."""

from __future__ import annotations

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
        (host_compiled.EAGER, host_compiled.COMPILED),
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
    assert "layer of 4" in capsys.readouterr().out


def test_time_of_a_network_is_that_of_one_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"layer": 0.010, "network": 0.040}
    counts: dict[str, int] = dict.fromkeys(seconds, 0)

    def timeit(call: Any, number: int) -> float:
        return seconds[call()] * number

    def call(name: str) -> Any:
        def count() -> str:
            counts[name] += 1
            return name

        return count

    monkeypatch.setattr(host, "timeit", timeit)
    layer, network = (
        (host.FORWARD, subject, host_compiled.EAGER)
        for subject in (host_compiled.LAYER, host_compiled.NETWORK)
    )
    calls = {layer: call("layer"), network: call("network")}
    samples = host.samples_of(calls, 3, torch.device("cpu"), {layer: 1, network: 4})
    assert samples[layer] == pytest.approx([10.0] * 3)
    assert samples[network] == pytest.approx([10.0] * 3)
    assert counts == {"layer": 20 + 3, "network": 5 + 3}


def test_a_compiled_layer_that_is_wrong_is_not_timed(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(model: Any) -> Any:
        model.forward = lambda x: 2 * type(model).forward(model, x)
        return model

    monkeypatch.setattr(host_compiled, "_compile", twice)
    settings = host.HostSettings(devices=("cpu",), levels=(1,), rounds=1)
    with pytest.raises(NumbersDifferError, match=r"compiled on cpu torch\.float32 L1:"):
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
    found = [", ".join(cell.strip() for cell in line.split("│")[4:9]) for line in lines]
    assert found == [
        f"{host.FORWARD}, layer, 0.2500, 0.3750, 0.1250",
        f"{host.FORWARD}, layer of 4, 0.5000, 0.6250, 0.1250",
        f"{host.FORWARD}, convolution, 0.7500, 0.8750, 0.1250",
        f"{host.TRAINING}, layer, 1.0000, 1.1250, 0.1250",
        f"{host.TRAINING}, layer of 4, 1.2500, 1.3750, 0.1250",
        f"{host.TRAINING}, convolution, 1.5000, 1.6250, 0.1250",
    ]
