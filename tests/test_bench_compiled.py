"""``python -m bench compile`` on the CPU."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from rich.console import Console
from torch import nn
from torch.profiler import ProfilerActivity

from bench import compiled, compiled_report
from bench.__main__ import main
from bench.compiled_figure import draw
from bench.shapes import Size
from bench.timing import WallClock

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


def test_only_the_modes_asked_for_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(self: Any, mode: str, clock: Any, rounds: int) -> list[compiled.CompileRow]:
        asked.append((self.precision, mode))
        return [row(mode=mode)]

    monkeypatch.setattr(compiled._Case, "measure", measure)
    line = "compile --device cpu --quick --subject layer --dtype float32 bfloat16 --mode"
    assert main([*line.split(), "training"]) == 0
    assert asked == [("float32", "training"), ("bfloat16", "training")]


def test_what_was_measured_outlives_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Any, mode: str, clock: Any, rounds: int) -> list[compiled.CompileRow]:
        if mode == "training":
            raise KeyboardInterrupt
        return [row(mode=mode)]

    monkeypatch.setattr(compiled._Case, "measure", measure)
    file = tmp_path / "compile.csv"
    line = "compile --device cpu --quick --subject layer --dtype float32 --csv"
    with pytest.raises(KeyboardInterrupt):
        main([*line.split(), str(file)])
    rows = csv.DictReader(line for line in file.read_text().splitlines() if line[0] != "#")
    assert [r["mode"] for r in rows] == ["inference"]


def test_only_the_variants_asked_for_are_run(
    tmp_path: Path, fresh_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compile.csv"
    line = "compile --device cpu --quick --subject layer --dtype float32 --mode inference"
    options = [*line.split(), "--batch", "1", "--rounds", "1", "--csv", str(file), "--variant"]
    assert main([*options, "reference eager", "ours compiled", "ours CUDA graph"]) == 0
    rows = csv.DictReader(line for line in file.read_text().splitlines() if line[0] != "#")
    assert [r["variant"] for r in rows] == ["reference eager", "ours compiled"]
    before = file.read_text()
    assert main([*options, "ours CUDA graph"]) != 0
    assert file.read_text() == before
    assert "no model has one of the variants" in capsys.readouterr().err


class Picky(nn.Module):
    """Takes even widths only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2:
            raise ValueError("an odd width")
        return x.cos()


@pytest.mark.parametrize("name", ["layer", compiled.NETWORK])
def test_the_network_is_not_compiled_for_another_size(
    name: str, fresh_compiler: None, tmp_path: Path
) -> None:
    subject = compiled.Subject(name, Size(1, 4, 14, 14), lambda _: Picky())
    case = compiled._Case(subject, "float32", "nchw", torch.device("cpu"))
    if name == compiled.NETWORK:
        _, found = case._compile(case.models["ours"], "inference", tmp_path)
        assert found["recompiles"] is None
    else:
        with pytest.raises(ValueError, match="an odd width"):
            case._compile(case.models["ours"], "inference", tmp_path)


def test_the_network_alone_without_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--device", "cpu", "--quick", "--subject", compiled.NETWORK]) == 2
    assert "alone was asked for, which needs timm" in capsys.readouterr().err


@pytest.mark.parametrize("mode", compiled.MODES)
def test_wrong_numbers_are_not_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        case._error(model, mode, case._output(case.models["reference"], mode))


class Cosine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class SameCosine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


def test_code_that_a_later_compilation_forgot_comes_back_from_the_caches(
    fresh_compiler: None,
) -> None:
    counters = torch._dynamo.utils.counters
    models = {compiled.WTConv2d: Cosine, compiled.ReferenceWTConv2d: SameCosine}
    subject = compiled.Subject("layer", Size(1, 4, 5, 5), lambda layer: models[layer]())
    case = compiled._Case(subject, "float32", "nchw", torch.device("cpu"))
    compile_one = case._compile

    def compile_and_count_anew(*arguments: Any) -> Any:
        found = compile_one(*arguments)
        counters.clear()
        return found

    case._compile = compile_and_count_anew  # type: ignore[method-assign]
    rows = case.measure("inference", WallClock(), 1)
    assert [r.variant for r in rows] == VARIANTS
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1  # of the reference
    assert counters["aot_autograd"]["autograd_cache_miss"] == 0


@pytest.mark.parametrize("name", ["layer", compiled.BLOCK])
def test_a_block_on_a_gpu_has_a_row_under_reduce_overhead(
    name: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, which takes the part of the GPU."""
    models = {compiled.WTConv2d: Cosine, compiled.ReferenceWTConv2d: SameCosine}
    subject = compiled.Subject(name, Size(1, 4, 5, 5), lambda layer: models[layer]())
    case = compiled._Case(subject, "float32", "nchw", torch.device("cpu"))
    case.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    monkeypatch.setattr(case, "_wait", lambda: None)
    monkeypatch.setattr(compiled, "_activities", lambda cuda: [ProfilerActivity.CPU])
    monkeypatch.setattr(compiled, "peak_mib", lambda call, given, device: 7.0)
    monkeypatch.setattr(compiled, "replay_gap_us", lambda call, device: 1.25)
    methods, order = [], []
    count = case._counts

    class Clock(WallClock):
        def prepare(self, call: Any, method: str) -> Any:
            methods.append(method)
            sample = super().prepare(call, method)
            return lambda: order.append("time") or sample()

    def count_last(*arguments: Any) -> Any:
        order.append("count")
        return count(*arguments)

    monkeypatch.setattr(case, "_counts", count_last)
    rows = {r.variant: r for r in case.measure("training", Clock(), 1)}
    others = [compiled.REPLAYED] if name == compiled.BLOCK else []
    assert list(rows) == [*VARIANTS, *others, compiled.GRAPH]
    assert methods == ["eager"] * (len(rows) - 1) + ["graph"]
    # The profiler can slow what comes after it.
    assert order == ["time"] * len(rows) + ["count"] * len(rows)
    gaps = {variant: (r.gap_us, r.peak_mib) for variant, r in rows.items()}
    assert gaps == {
        variant: (1.25, None) if variant == compiled.REPLAYED else (None, 7.0) for variant in rows
    }
    assert all(r.error is not None and r.error < 1e-6 for r in rows.values())


def test_ratios_are_those_of_ours_compiled() -> None:
    rows = [
        row(variant="reference eager", ms=6.0, peak_mib=30.0),
        row(variant="reference compiled", ms=4.0, peak_mib=25.0, cold_compile_s=10.0),
        row(variant="ours eager", ms=3.0, peak_mib=20.0),
        row(variant=compiled.OURS, ms=2.0, peak_mib=16.0, cold_compile_s=4.0),
        row(variant=compiled.PEER, ms=1.0, peak_mib=10.0, cold_compile_s=1.0),
        row(variant=compiled.REPLAYED, ms=1.6),
        row(variant=compiled.PEER_REPLAYED, ms=0.4),
    ]
    found = compiled_report.ratios(rows)
    assert found == pytest.approx(
        {
            "reference eager": 3.0,
            "reference compiled": 2.0,
            "ours eager": 1.5,
            compiled.PEER: 0.5,
            compiled.PEER_REPLAYED: 0.25,
            "peak memory": 0.8,
            "cold compilation": 0.4,
        }
    )
    without = compiled_report.ratios([row(variant=compiled.OURS, ms=2.0)])
    assert set(without.values()) == {None}


def test_report_has_a_line_of_ratios_for_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(mode=mode, variant=v, ms=i + 1) for mode in compiled.MODES
            for i, v in enumerate(VARIANTS)]  # fmt: skip
    compiled_report.print_compiled(rows, "a machine", Console(width=200))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "layer 1x4x14x14" in line and "│" in line]
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines]
    assert [c[3:] for c in cells] == [
        [mode, "0.250", "0.500", "0.750", "-", "-", "-", "-"] for mode in compiled.MODES
    ]


def test_figure_has_a_panel_for_each_model_and_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(mode=mode, variant=variant) for mode in compiled.MODES for variant in VARIANTS]
    draw(rows, "a machine", tmp_path / "times.svg")
    text = (tmp_path / "times.svg").read_text()
    assert text.startswith("<?xml")
    assert len(text) > 1000
