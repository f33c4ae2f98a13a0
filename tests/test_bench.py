"""The benchmark checks numbers before it times, and its summary follows the mean's laws."""

from __future__ import annotations

import csv
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.__main__ import main
from bench.providers import DEPTHWISE, OURS, REFERENCE, build_providers
from bench.run import Measurement, NumbersDifferError, check_numbers, speed_ups
from bench.shapes import QUICK_SHAPES, SHAPES, Size
from bench.timing import geometric_mean, training_call

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


@given(st.tuples(*[st.integers(1, 9999)] * 4))
@settings(max_examples=20, deadline=None)
def test_size_reads_what_it_prints(sides: tuple[int, int, int, int]) -> None:
    size = Size(*sides)
    assert Size.parse(str(size)) == size
    assert size.elements == math.prod(sides)


@pytest.mark.parametrize("text", ["", "8x3x4", "8x3x4x0", "8x3x4x-1", "8x3x4x5x6", "axbxcxd"])
def test_size_refuses_what_is_not_four_positive_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="a shape must be BxCxHxW"):
        Size.parse(text)


def test_help_states_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for command, shown in {
        "run": ["(default: 11)", "(default: float32)", "(default: paper stages)"],
        "traffic": ["(default: 8x64x256x256)", "(default: 5)"],
        "host": ["(default: 1 3 5)", "(default: 101)"],
    }.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        printed = " ".join(capsys.readouterr().out.split())
        for default in shown:
            assert default in printed, (command, default)


def test_options_that_make_no_sense_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for line, sentence in {
        "run --rounds 0": "--rounds: must be a whole number >= 1, got '0'",
        "traffic --shape 8x64": "--shape: a shape must be BxCxHxW, such as 8x64x256x256, got",
        "traffic --levels 0": "--levels: must be a whole number >= 1, got '0'",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            main(line.split())
        assert stopped.value.code == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("path", [".", "missing/rows.csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--quick", "--csv", path])
    assert f"must be a file in a folder that exists, got {path}" in capsys.readouterr().err
