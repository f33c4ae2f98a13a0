"""The benchmark checks numbers before it times, and its summary follows the mean's laws."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench.__main__ import main
from bench.cuda_check import NumbersDifferError as GpuNumbersDifferError
from bench.cuda_check import check, exact_results
from bench.cuda_providers import (
    LAYOUTS,
    UPSTREAM,
    build_candidates,
    copy_parameters,
    load_upstream_fused,
    ordered_parameters,
)
from bench.cuda_report import csv_sink, print_means, print_tables, speed_up
from bench.cuda_run import DTYPES, CudaSettings, Row
from bench.cuda_run import run as run_on_gpu
from bench.cuda_timing import Call, copy_speed, tf32, with_tf32
from bench.providers import DEPTHWISE, OURS, REFERENCE, build_providers
from bench.run import Measurement, NumbersDifferError, check_numbers, speed_ups
from bench.shapes import QUICK_SHAPES, QUICK_SWEEPS, SHAPES, SWEEPS, Group
from bench.timing import geometric_mean, training_call
from wtconv_ops.functional import wtconv2d

positive = st.floats(min_value=1e-3, max_value=1e3)


@given(st.lists(positive, min_size=1, max_size=8), positive)
@settings(max_examples=50, deadline=None)
def test_geometric_mean_is_homogeneous_and_between_extremes(
    values: list[float], factor: float
) -> None:
    mean = geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert geometric_mean(factor * value for value in values) == pytest.approx(factor * mean)
    assert geometric_mean(1 / value for value in values) == pytest.approx(1 / mean)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_geometric_mean_refuses_what_has_no_logarithm(values: list[float]) -> None:
    with pytest.raises(ValueError, match="geometric_mean: values must be positive"):
        geometric_mean(values)


def test_shapes_are_the_wtconvnext_stages_and_one_larger_map() -> None:
    assert [shape.label for shape in SHAPES] == [
        "8x96x56x56 L5",
        "8x192x28x28 L4",
        "8x384x14x14 L3",
        "8x768x7x7 L2",
        "2x64x128x128 L3",
    ]


@pytest.fixture(scope="module")
def quick_rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = tmp_path_factory.mktemp("bench") / "quick.csv"
    threads = torch.get_num_threads()
    try:
        assert main(["run", "--quick", "--layout", "both", "--csv", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_line_for_each_shape_layout_mode_and_provider(
    quick_rows: list[dict[str, str]],
) -> None:
    assert list(quick_rows[0]) == [field.name for field in fields(Measurement)]
    keys = {(row["shape"], row["layout"], row["mode"], row["provider"]) for row in quick_rows}
    assert len(keys) == len(quick_rows) == len(QUICK_SHAPES) * 2 * 2 * 4
    assert {OURS, REFERENCE, DEPTHWISE} <= {row["provider"] for row in quick_rows}
    for row in quick_rows:
        assert 0 < float(row["fastest_ms"]) <= float(row["median_ms"]) <= float(row["slowest_ms"])


def test_csv_states_errors_of_wtconv_providers_only(quick_rows: list[dict[str, str]]) -> None:
    for row in quick_rows:
        if "depthwise" in row["provider"]:
            assert row["relative_error"] == ""
        else:
            assert 0 < float(row["relative_error"]) < 5e-6


def test_speed_up_is_the_ratio_of_medians() -> None:
    def measurement(provider: str, milliseconds: float, shape: str) -> Measurement:
        return Measurement(
            shape=shape, batch=1, channels=1, height=1, width=1, levels=1, kernel_size=5,
            dtype="float32", layout="nchw", device="cpu", mode="forward", provider=provider,
            median_ms=milliseconds, fastest_ms=milliseconds, slowest_ms=milliseconds,
            relative_error=None, rounds=1, threads=1, torch="", machine="",
        )  # fmt: skip

    rows = [
        measurement(OURS, 1.0, "a"),
        measurement(REFERENCE, 2.0, "a"),
        measurement(OURS, 1.0, "b"),
        measurement(REFERENCE, 8.0, "b"),
    ]
    assert speed_ups(rows, "forward", REFERENCE, "nchw") == pytest.approx(4.0)


def test_wrong_numbers_are_refused_before_timing() -> None:
    shape = QUICK_SHAPES[0]
    providers = build_providers(shape, 5, torch.device("cpu"), upstream=None)
    image, grad_output = torch.randn(2, shape.batch, shape.channels, shape.side, shape.side)
    check_numbers(providers, image, grad_output, shape.label)
    ours = next(p.layer for p in providers if p.name == OURS)
    with torch.no_grad():
        ours.get_parameter("base_scale.weight").mul_(1.001)
    with pytest.raises(NumbersDifferError, match=r"wtconv_ops on .*: output has relative error"):
        check_numbers(providers, image, grad_output, shape.label)


def test_training_step_covers_the_input_and_every_parameter() -> None:
    providers = build_providers(QUICK_SHAPES[0], 5, torch.device("cpu"), upstream=None)
    image = torch.randn(1, 4, 13, 13)
    for provider in providers:
        trained = [p for p in provider.layer.parameters() if p.requires_grad]
        gradients = training_call(provider.layer, image, torch.randn_like(image))()
        assert [g.shape for g in gradients] == [image.shape, *(p.shape for p in trained)]


def test_missing_checkout_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--quick", "--upstream", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().endswith("wtconv/__init__.py not found")


class CountingTimer:
    """Runs the call and says 1 ms for the first sample, 2 ms for the next, and so on."""

    def __init__(self) -> None:
        self.samples = 0
        self.captured = 0

    def sample(self, call: Call) -> float:
        call()
        self.samples += 1
        return float(self.samples)

    def capture(self, call: Call) -> Call:
        self.captured += 1
        return call


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
def gpu_rows() -> list[Row]:
    """The GPU run on the CPU, with a clock that counts."""
    settings = CudaSettings(
        groups=GROUPS, dtypes=tuple(DTYPES), layouts=tuple(LAYOUTS), device="cpu", rounds=2,
        upstream=FusedLayer,
    )  # fmt: skip
    problems: list[str] = []
    progress: list[str] = []
    measured = run_on_gpu(settings, CountingTimer(), 100.0, problems.append, progress.append)
    rows = [row for rows in measured for row in rows]
    assert problems == []
    assert len(progress) == len(GROUPS) * len(DTYPES)
    return rows


def test_gpu_run_times_every_provider_in_every_mode(gpu_rows: list[Row]) -> None:
    keys = {(r.shape, r.levels, r.dtype, r.layout, r.mode, r.provider, r.method) for r in gpu_rows}
    assert len(keys) == len(gpu_rows)
    convolutions = 2 * len(LAYOUTS)
    inputs = sum(len(group.levels) for group in GROUPS) * len(LAYOUTS)
    graphs = len(QUICK_SWEEPS["stages"]) * (convolutions + 2 * len(LAYOUTS))
    each = (len(GROUPS) * convolutions + 3 * inputs + graphs) * len(DTYPES)
    assert len(keys) == 2 * (each + inputs)  # and the reference under TF32, in float32


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
    assert {row.provider for row in graphs} == {OURS, UPSTREAM, DEPTHWISE, "depthwise 5x5"}


def test_gpu_csv_and_tables_hold_every_row(gpu_rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with csv_sink(path, "card") as sink:
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
            copy_percent=1.0, error=None,
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


def test_gpu_provider_with_wrong_numbers_is_named_and_not_timed() -> None:
    class Wrong(FusedLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.001 * super().forward(x)

    settings = CudaSettings(groups=GROUPS[:1], device="cpu", rounds=1, upstream=Wrong)
    problems: list[str] = []
    (rows,) = run_on_gpu(settings, CountingTimer(), 1.0, problems.append, lambda _: None)
    assert len(problems) == len(GROUPS[0].levels)
    assert (
        "upstream on 2x4x13x13 float32 L1 nchw: output has relative error 1.00e-03" in problems[0]
    )
    assert UPSTREAM not in {row.provider for row in rows}
    assert OURS in {row.provider for row in rows}


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
        with pytest.raises(GpuNumbersDifferError, match=f"gradient {index} has relative error"):
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


def test_copy_speed_counts_bytes_read_and_written() -> None:
    # 11 samples of 1 to 11 ms: a median of 6 ms.
    speed = copy_speed(CountingTimer(), torch.device("cpu"), elements=1000)
    assert speed == pytest.approx(2 * 4 * 1000 / 6e-3 / 1e9)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_set_within_and_restored_after(
    before: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    with tf32(allowed):
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert with_tf32(lambda: torch.backends.cudnn.allow_tf32)() is True
        assert torch.backends.cudnn.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is before


def test_missing_fused_checkout_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"wtconv_cuda\.py not found"):
        load_upstream_fused(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "bench: --device cuda needs an NVIDIA GPU, torch sees none\n"
