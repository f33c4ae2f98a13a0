"""The GPU run checks numbers before it times, says what failed, and reports every row."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import CountingTimer
from rich.console import Console

from bench import __main__ as command
from bench import cuda_run
from bench.__main__ import main
from bench.csv_file import csv_sink
from bench.cuda_check import NumbersDifferError, check, exact_results
from bench.cuda_providers import (
    LAYOUTS,
    REFERENCE_TF32,
    STAGED,
    UPSTREAM,
    build_candidates,
    copy_parameters,
    load_upstream_fused,
    ordered_parameters,
)
from bench.cuda_report import cells_of, print_means, print_memory, print_tables, speed_up
from bench.cuda_run import DTYPES, CudaSettings, Messages, Row, run
from bench.cuda_timing import Call, Sampler
from bench.providers import DEPTHWISE, OURS, REFERENCE
from bench.shapes import QUICK_SWEEPS, SWEEPS, Group, NoSuchShapeError, Size, only, only_levels
from wtconv_ops.functional import wtconv2d


class Said:
    """Keeps the sentences of a run."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.progress: list[str] = []

    @property
    def messages(self) -> Messages:
        return Messages(self.problems.append, self.notes.append, self.progress.append)


class FusedLayer(torch.nn.Module):
    """Stands for upstream's fused layer: its parameter names, our numbers."""

    def __init__(self, channels: int, _: int, kernel_size: int, wt_levels: int) -> None:
        super().__init__()
        shapes = [(4 * channels, 1, kernel_size, kernel_size)] * wt_levels
        self.base_weight = torch.nn.Parameter(torch.empty(channels, 1, kernel_size, kernel_size))
        self.base_bias = torch.nn.Parameter(torch.empty(channels))
        self.base_scale = torch.nn.Parameter(torch.empty(1, channels, 1, 1))
        self.wt_weights = torch.nn.ParameterList(torch.empty(shape) for shape in shapes)
        self.wt_scales = torch.nn.ParameterList(
            torch.empty(1, 4 * channels, 1, 1) for _ in range(wt_levels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base_weight, base_bias, base_scale, *levels = ordered_parameters(self)
        half = len(levels) // 2
        return wtconv2d(x, base_weight, base_bias, base_scale, levels[:half], levels[half:])


GROUPS = tuple(group for sweep in QUICK_SWEEPS.values() for group in sweep)


@pytest.fixture(scope="module")
def gpu_rows(ops: Any) -> list[Row]:
    """The GPU run on the CPU, with a clock that counts."""
    settings = CudaSettings(
        groups=GROUPS, dtypes=tuple(DTYPES), layouts=tuple(LAYOUTS), device="cpu", rounds=2,
        upstream=FusedLayer,
    )  # fmt: skip
    said = Said()
    measured = run(settings, CountingTimer(), 100.0, said.messages)
    rows = [row for rows in measured for row in rows]
    assert said.problems == said.notes == []
    assert len(said.progress) == len(GROUPS) * len(DTYPES)
    return rows


def test_gpu_run_times_every_provider_in_every_mode(gpu_rows: list[Row]) -> None:
    keys = {(r.shape, r.levels, r.dtype, r.layout, r.mode, r.provider, r.method) for r in gpu_rows}
    assert len(keys) == len(gpu_rows)
    convolutions = 2 * len(LAYOUTS)
    inputs = sum(len(group.levels) for group in GROUPS) * len(LAYOUTS)
    graphs = len(QUICK_SWEEPS["stages"]) * (convolutions + 2 * len(LAYOUTS))
    each = (len(GROUPS) * convolutions + 3 * inputs + graphs) * len(DTYPES)
    staged = (inputs + len(QUICK_SWEEPS["stages"]) * len(LAYOUTS)) * len(DTYPES)
    # In both modes, with the reference under TF32 in float32; the staged form in one.
    assert len(keys) == 2 * (each + inputs) + staged


def test_gpu_run_times_the_staged_form_forward_only(gpu_rows: list[Row]) -> None:
    staged = [row for row in gpu_rows if row.provider == STAGED]
    assert {row.mode for row in staged} == {"forward"}
    assert {row.dtype for row in staged} == set(DTYPES)
    assert all(row.error is not None for row in staged)


def test_gpu_rows_state_the_bytes_model_and_the_share_of_the_copy_speed(
    gpu_rows: list[Row],
) -> None:
    elements = {group.label: group.elements for group in GROUPS}
    for row in gpu_rows:
        passes = {"forward": 2, "training": 5}[row.mode]
        moved = passes * elements[row.shape] * DTYPES[row.dtype].itemsize
        assert row.gb_per_s == pytest.approx(moved / (row.ms * 1e-3) / 1e9)
        assert row.copy_percent == pytest.approx(row.gb_per_s)  # of 100 GB/s
        assert (row.error is None) == (row.levels is None)


def test_gpu_run_replays_graphs_on_the_stages_only(gpu_rows: list[Row]) -> None:
    graphs = [row for row in gpu_rows if row.method == "graph"]
    assert {row.sweep for row in graphs} == {"stages"}
    assert {row.provider for row in graphs} == {
        OURS, UPSTREAM, STAGED, DEPTHWISE, "depthwise 5x5",
    }  # fmt: skip


def test_gpu_csv_and_tables_hold_every_row(gpu_rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with csv_sink(path, "card", cells_of) as sink:
        sink(gpu_rows)
    lines = path.read_text().splitlines()
    assert lines[0] == "# card"
    read = list(csv.DictReader(lines[1:]))
    assert len(read) == len(gpu_rows)
    for text, row in zip(read, gpu_rows, strict=True):
        assert float(text["ms"]) == pytest.approx(row.ms, rel=1e-3)
        assert text["levels"] == str(row.levels or "")
    printed = io.StringIO()
    console = Console(file=printed, width=300)
    print_tables(gpu_rows, console)
    print_means(gpu_rows, 5, console)
    for group in GROUPS:
        assert f"{group.label} L{group.levels[0]}" in printed.getvalue()
    assert "stages float16 NHWC training graph" in printed.getvalue()


def test_gpu_speed_up_takes_the_faster_layout_shape_by_shape() -> None:
    def row(provider: str, layout: str, shape: str, ms: float, levels: int | None) -> Row:
        return Row(
            sweep="paper", shape=shape, levels=levels, dtype="float32", layout=layout,
            mode="forward", provider=provider, method="events", ms=ms, gb_per_s=1.0,
            copy_percent=1.0, error=None, peak_mib=None,
        )  # fmt: skip

    ours = [row(OURS, "nchw", "a", 1.0, 1), row(OURS, "nchw", "b", 1.0, 1)]
    others = [
        row(DEPTHWISE, "nchw", "a", 2.0, None),
        row(DEPTHWISE, "nchw", "b", 32.0, None),
        row(DEPTHWISE, "channels_last", "a", 4.0, None),
        row(DEPTHWISE, "channels_last", "b", 8.0, None),
    ]
    assert speed_up(ours, ours + others, DEPTHWISE, "same") == pytest.approx(8.0)
    assert speed_up(ours, ours + others, DEPTHWISE, "faster") == pytest.approx(4.0)
    assert speed_up(ours, ours + others, REFERENCE, "same") is None


def test_gpu_memory_is_compared_with_the_tensors_and_the_rivals_of_the_same_layout() -> None:
    def row(provider: str, layout: str, mode: str, peak: float, levels: int | None = 1) -> Row:
        return Row(
            sweep="paper", shape="2x16x128x128", levels=levels, dtype="float32", layout=layout,
            mode=mode, provider=provider, method="events", ms=1.0, gb_per_s=1.0,
            copy_percent=1.0, error=None, peak_mib=peak,
        )  # fmt: skip

    rows = [
        row(OURS, "nchw", "forward", 4.4),  # of tensors of 2 MiB
        row(OURS, "nchw", "training", 10.0),
        row(DEPTHWISE, "nchw", "training", 8.0, None),
        row(DEPTHWISE, "channels_last", "training", 1.0, None),
        row(REFERENCE, "nchw", "training", 20.0),
        row(REFERENCE, "nchw", "training", 1.0, 2),
    ]
    printed = io.StringIO()
    print_memory(rows, Console(file=printed, width=200))
    lines = [line.split() for line in printed.getvalue().splitlines() if "NCHW" in line]
    assert [line[-6::2] for line in lines] == [["1.10", "-", "-"], ["1.25", "1.25", "0.50"]]


def test_gpu_provider_with_wrong_numbers_is_named_and_not_timed() -> None:
    class Wrong(FusedLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.001 * super().forward(x)

    settings = CudaSettings(groups=GROUPS[:1], device="cpu", rounds=1, upstream=Wrong)
    said = Said()
    (rows,) = run(settings, CountingTimer(), 1.0, said.messages)
    assert len(said.problems) == len(GROUPS[0].levels)
    assert (
        "upstream on 2x4x13x13 float32 L1 nchw: output has relative error 1.00e-03"
        in said.problems[0]
    )
    assert UPSTREAM not in {row.provider for row in rows}
    assert OURS in {row.provider for row in rows}


def test_gpu_rival_without_a_dtype_is_a_note_and_a_dash() -> None:
    class NoBfloat16(FusedLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype != torch.bfloat16, "no kernels for bfloat16"
            return super().forward(x)

    settings = CudaSettings(
        groups=GROUPS[-1:], dtypes=("float32", "bfloat16"), device="cpu", rounds=1,
        upstream=NoBfloat16, methods=("events",),
    )  # fmt: skip
    said = Said()
    rows = [row for rows in run(settings, CountingTimer(), 1.0, said.messages) for row in rows]
    assert said.problems == []
    assert said.notes == ["upstream on 3x8x7x7 bfloat16 L2 nchw: no kernels for bfloat16"]
    printed = io.StringIO()
    print_tables(rows, Console(file=printed, width=300))
    lines = printed.getvalue().splitlines()
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "3x8x7x7" in line]
    dashes = [row.count("-") for row in cells]
    assert dashes == [0, 0, 1, 1]  # forward and training in float32, then in bfloat16


def test_gpu_call_that_cannot_be_captured_is_a_note_and_timed_by_events() -> None:
    class NoGraphs(CountingTimer):
        def prepare(self, call: Call, method: str) -> Sampler:
            if method == "graph":
                raise RuntimeError("operation not permitted when stream is capturing\nmore")
            return super().prepare(call, method)

    said = Said()
    settings = CudaSettings(
        groups=GROUPS[:1], device="cpu", rounds=1, methods=("events", "graph"), upstream=FusedLayer
    )
    (rows,) = run(settings, NoGraphs(), 1.0, said.messages)
    assert {row.method for row in rows} == {"events"}
    sentence = "no CUDA graph: operation not permitted when stream is capturing"
    assert f"upstream on 2x4x13x13 float32 forward L1 nchw: {sentence}" in "\n".join(said.notes)
    assert f"depthwise 7x7 on 2x4x13x13 float32 forward nchw: {sentence}" in said.notes
    assert all(line.startswith("wtconv_ops on ") for line in said.problems)


def test_gpu_methods_are_those_asked_for() -> None:
    settings = CudaSettings(
        groups=GROUPS[:1], device="cpu", rounds=1, methods=("events", "graph", "eager")
    )
    (rows,) = run(settings, CountingTimer(), 1.0, Said().messages)
    methods = {name: {r.method for r in rows if r.provider == name} for name in (OURS, REFERENCE)}
    assert methods == {OURS: {"events", "graph", "eager"}, REFERENCE: {"events", "eager"}}


def test_gpu_check_looks_at_the_pass_without_gradients_too() -> None:
    group = Group("paper", 1, 4, 9, (1,))
    candidates = build_candidates(group, 3, torch.device("cpu"), torch.float32, ("nchw",))
    reference = next(c.layer for c in candidates if c.name == REFERENCE)

    class WrongInInference(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = reference(x)
            return y if torch.is_grad_enabled() else 1.01 * y

    image, grad_output = torch.randn(2, 1, 4, 9, 9)
    exact = exact_results(reference, image, grad_output)
    wrong = WrongInInference()
    for name, module in reference.named_children():
        wrong.add_module(name, module)
    with pytest.raises(NumbersDifferError, match=r"rival: output has relative error 1\.00e-02"):
        check("rival", wrong, image, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_staged_form_is_the_layer_with_gradients_and_without(ops: Any, dtype: str) -> None:
    group = Group("paper", 2, 4, 13, (3,))
    candidates = build_candidates(group, 5, torch.device("cpu"), DTYPES[dtype], ("channels_last",))
    layers = {c.name: c.layer for c in candidates}
    generator = torch.Generator().manual_seed(3)
    image, grad_output = (
        torch.randn(2, 4, 13, 13, generator=generator)
        .to(DTYPES[dtype])
        .to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    exact = exact_results(layers[REFERENCE], image, grad_output)
    assert check(STAGED, layers[STAGED], image, exact) > 0
    assert (REFERENCE_TF32 in layers) == (dtype == "float32")


@pytest.mark.parametrize("batch", [1, 3])
def test_gpu_check_sees_a_wrong_gradient_of_any_parameter(batch: int) -> None:
    group = Group("paper", batch, 4, 9, (2,))
    candidates = build_candidates(group, 3, torch.device("cpu"), torch.float32, ("nchw",))
    layers = {c.name: c.layer for c in candidates}
    generator = torch.Generator().manual_seed(3)
    image, grad_output = torch.randn(2, batch, 4, 9, 9, generator=generator)
    exact = exact_results(layers[REFERENCE], image, grad_output)
    assert 0 < check("ours", layers[OURS], image, exact) < 1e-6
    for index, parameter in enumerate(ordered_parameters(layers[OURS])):
        handle = parameter.register_hook(lambda grad: 1.01 * grad)
        with pytest.raises(NumbersDifferError, match=f"gradient {index} has relative error"):
            check("ours", layers[OURS], image, exact)
        handle.remove()


def test_parameters_are_copied_whatever_they_are_called() -> None:
    group = Group("paper", 1, 4, 9, (2,))
    candidates = build_candidates(
        group, 3, torch.device("cpu"), torch.float32, ("nchw",), upstream=FusedLayer
    )
    layers = {c.name: c.layer for c in candidates}
    x = torch.randn(1, 4, 9, 9)
    torch.testing.assert_close(layers[UPSTREAM](x), layers[OURS](x))
    copy = FusedLayer(4, 4, kernel_size=3, wt_levels=2)
    copy_parameters(layers[UPSTREAM], copy)
    torch.testing.assert_close(copy(x), layers[OURS](x))


def test_sweeps_are_the_papers_and_the_stages_at_batch_64() -> None:
    paper = {(g.batch, g.channels, g.side) for g in SWEEPS["paper"]}
    assert paper == {(8, c, s) for c in (32, 64, 128) for s in (128, 256, 512)}
    assert {g.levels for g in SWEEPS["paper"]} == {(1, 3, 5)}
    stages = [(g.label, g.levels) for g in SWEEPS["stages"]]
    assert stages == [
        ("64x96x56x56", (5,)),
        ("64x192x28x28", (4,)),
        ("64x384x14x14", (3,)),
        ("64x768x7x7", (2,)),
    ]


def test_missing_fused_checkout_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"wtconv_cuda\.py not found"):
        load_upstream_fused(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "bench: --device cuda needs an NVIDIA GPU, torch sees none\n"


def test_gpu_command_writes_tables_csv_and_the_commit_of_upstream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpu(**settings: Any) -> CudaSettings:
        return CudaSettings(**settings, device="cpu")

    monkeypatch.setattr(command, "CudaSettings", on_cpu)
    monkeypatch.setattr(command, "ColdTimer", lambda device: CountingTimer())
    monkeypatch.setattr(command, "copy_speed", lambda timer, device: 100.0)
    monkeypatch.setattr(command, "load_upstream_fused", lambda folder: FusedLayer)
    monkeypatch.setattr(command, "checkout_commit", lambda folder: "4a84da2")
    monkeypatch.setattr(command, "_require_kernels", lambda *names: None)
    monkeypatch.setattr(cuda_run, "gpu_line", lambda device: "card")
    path = tmp_path / "rows.csv"
    line = f"run --device cuda --quick --sweep stages --method events eager --csv {path}"
    assert main([*line.split(), "--upstream", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "stages float32 NCHW training eager" in printed.out
    first = path.read_text().splitlines()[0]
    assert first.startswith("# card, cuDNN ")
    assert "; upstream at commit 4a84da2; k = 5; " in first


def test_levels_chosen_of_a_sweep() -> None:
    groups = only_levels(SWEEPS["paper"], [5, 3])
    assert [g.label for g in groups] == [g.label for g in SWEEPS["paper"]]
    assert {g.levels for g in groups} == {(3, 5)}
    assert [g.label for g in only_levels(SWEEPS["stages"], [4])] == ["64x192x28x28"]
    with pytest.raises(NoSuchShapeError, match="no shape has 7"):
        only_levels(SWEEPS["paper"], [7])


def test_shape_picks_groups_of_the_sweeps() -> None:
    groups = only(SWEEPS["paper"], [Size(8, 64, 512, 512), Size(8, 32, 128, 128)])
    assert [group.label for group in groups] == ["8x32x128x128", "8x64x512x512"]
    with pytest.raises(NoSuchShapeError, match="8x64x512x513 is not one of 8x32x128x128, "):
        only(SWEEPS["paper"], [Size(8, 64, 512, 513)])
