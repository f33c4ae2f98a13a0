"""The demonstration end to end on a small photograph, and its parts one by one."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import TestCase
from PIL import Image
from rich.console import Console
from torch import nn

import wtconv_ops
from wtconv_ops.__main__ import main
from wtconv_ops.demo import pipeline
from wtconv_ops.demo.budget import Verdict, judge
from wtconv_ops.demo.choice import choose_network
from wtconv_ops.demo.figure import pyramid_mosaic
from wtconv_ops.demo.network import NetworkConfig, WTConvNetwork, randomise
from wtconv_ops.demo.photograph import UnreadableImageError, another_size, load_photograph, scaled
from wtconv_ops.demo.pipeline import Options, run_demo
from wtconv_ops.demo.progress import watched_steps
from wtconv_ops.demo.receptive_field import receptive_field
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d
from wtconv_ops.demo.report import Report, Row, print_report

SMALL = NetworkConfig(widths=(8, 12), depths=(1, 1), levels=(2, 1))


def _write_image(path: Path, height: int, width: int, mode: str = "RGB") -> Path:
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    folder = tmp_path_factory.mktemp("demo")
    image = _write_image(folder / "small.png", 93, 121)
    return run_demo(Options(image=image, out=folder / "new" / "out", rounds=1, config=SMALL))


@pytest.mark.slow
def test_demo_finds_every_way_of_running_equal(small_run: tuple[Report, Path]) -> None:
    report, _ = small_run
    assert [(row.name, row.size) for row in report.rows] == [
        ("reference, eager", (93, 121)),
        ("reference, compiled", (93, 121)),
        ("wtconv_ops, eager", (93, 121)),
        ("wtconv_ops, compiled", (93, 121)),
        ("wtconv_ops, exported", (103, 81)),
        ("AOTInductor package", (93, 121)),
        ("AOTInductor package", (103, 81)),
    ]
    assert [row.failure for row in report.rows] == [None] * 7
    assert report.passed


@pytest.mark.slow
def test_demo_compiles_one_graph_without_breaks(small_run: tuple[Report, Path]) -> None:
    compiled = [row for row in small_run[0].rows if "compiled" in row.name]
    assert [(row.graphs, row.graph_breaks) for row in compiled] == [(1, 0), (1, 0)]
    timed = [row for row in small_run[0].rows if row.milliseconds is not None]
    assert len(timed) == 4


@pytest.mark.slow
def test_demo_writes_a_picture_that_is_not_blank(small_run: tuple[Report, Path]) -> None:
    _, picture = small_run
    assert picture.name == "wtconv_demo.png"
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[0] >= 600
    assert pixels.shape[1] >= 1000
    height = pixels.shape[0]
    for part in (pixels[: height // 2], pixels[height // 2 :]):
        assert part.std() > 20


def _fake_run(passed: bool) -> Callable[[Options], tuple[Report, Path]]:
    verdict = Verdict(1.0, 2.0 if passed else 0.5, 1.0, 2.0)
    report = Report(("header",), (Row("wtconv_ops, eager", (9, 9), verdict=verdict),))
    return lambda options: (report, options.out / "wtconv_demo.png")


@pytest.mark.parametrize(("passed", "status"), [(True, 0), (False, 1)])
def test_exit_status_says_whether_anything_differs(
    passed: bool,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pipeline, "run_demo", _fake_run(passed))
    assert main(["demo", "--out", str(tmp_path)]) == status
    assert ("differs" in capsys.readouterr().out) is not passed


def _no_file(folder: Path) -> Path:
    return folder / "absent.jpg"


def _text_file(folder: Path) -> Path:
    (folder / "text.jpg").write_text("not an image")
    return folder / "text.jpg"


def _cut_file(folder: Path) -> Path:
    whole = _write_image(folder / "whole.png", 200, 200).read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    return folder / "cut.png"


def _tiny_image(folder: Path) -> Path:
    return _write_image(folder / "tiny.png", 5, 200)


@pytest.mark.parametrize("make", [_no_file, _text_file, _cut_file, _tiny_image, lambda f: f])
def test_unreadable_image_is_one_sentence_with_its_path(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    assert main(["demo", "--image", str(path), "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(path) in captured.err


def test_missing_extra_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_rich(name: str, package: str | None = None) -> Any:
        return None if name == "rich" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_rich)
    assert main(["demo"]) == 2
    expected = 'wtconv_ops demo: rich missing: pip install "wtconv_ops[demo]"\n'
    assert capsys.readouterr().err == expected


def test_output_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["demo", "--threads", "0"], ["unknown"]])
def test_wrong_usage_ends_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_photograph_keeps_its_own_size(mode: str, tmp_path: Path) -> None:
    image = load_photograph(_write_image(tmp_path / "image.png", 71, 90, mode))
    assert image.shape == (1, 3, 71, 90)
    assert image.dtype == torch.float32
    assert 0.0 <= float(image.min()) < float(image.max()) <= 1.0


def test_default_photograph_has_an_odd_height() -> None:
    assert load_photograph(None).shape == (1, 3, 427, 640)


def test_image_with_too_many_pixels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wtconv_ops.demo.photograph.LARGEST_PIXELS", 1_000_000)
    path = _write_image(tmp_path / "large.png", 1001, 1000, "L")
    with pytest.raises(UnreadableImageError, match="at most 1 million pixels, got 1001 x 1000"):
        load_photograph(path)


@pytest.mark.parametrize(
    ("size", "expected"), [((427, 640), (65, 97)), ((640, 427), (97, 65)), ((64, 64), (65, 65))]
)
def test_scaled_photograph_keeps_its_proportions(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert scaled(torch.zeros(1, 3, *size), 65).shape == (1, 3, *expected)


@pytest.mark.parametrize("size", [(64, 64), (65, 67), (95, 96), (97, 98), (427, 640)])
def test_another_size_is_odd_usable_and_different(size: tuple[int, int]) -> None:
    height, width = another_size(torch.zeros(1, 3, *size)).shape[-2:]
    assert height % 2 == width % 2 == 1
    assert min(height, width) >= 64
    assert height != size[0]
    assert width != size[1]


@pytest.mark.parametrize("levels", [1, 2, 4])
@pytest.mark.parametrize("size", [(12, 16), (13, 10), (1, 7)])
def test_reference_layer_follows_the_oracle(levels: int, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = ReferenceWTConv2d(3, 3, kernel_size=4, wt_levels=levels)
    randomise(layer, seed=1)
    layer.double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = wtconv_ops.reference.wtconv2d(
        x,
        layer.base_conv.weight,
        layer.base_conv.bias,
        layer.base_scale.weight,
        [conv.weight for conv in layer.wavelet_convs],  # type: ignore[misc]
        [scale.weight for scale in layer.wavelet_scale],  # type: ignore[misc]
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_small_network_runs_when_asked_for_and_without_timm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    asked, without = choose_network(SMALL), choose_network(None)
    assert asked.name == "small WTConv network"
    assert without.name.startswith("small WTConv network; WTConvNeXt-T needs timm: ")
    for choice in (asked, without):
        assert choice.shorter_side is None
        assert type(choice.build(wtconv_ops.WTConv2d)) is WTConvNetwork


def test_weights_of_either_network_fit_the_other() -> None:
    ours = WTConvNetwork(wtconv_ops.WTConv2d, SMALL)
    reference = WTConvNetwork(ReferenceWTConv2d, SMALL)
    reference.load_state_dict(ours.state_dict())
    ours.load_state_dict(reference.state_dict())


def test_randomise_moves_every_trained_parameter_repeatably() -> None:
    fresh, first, second = (WTConvNetwork(ReferenceWTConv2d, SMALL) for _ in range(3))
    randomise(first, seed=3)
    randomise(second, seed=3)
    again = dict(second.named_parameters())
    before = dict(fresh.named_parameters())
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, before[name]) is not parameter.requires_grad


def test_budget_admits_the_reference_and_refuses_nan_and_offsets() -> None:
    exact = torch.randn(50, dtype=torch.float64)
    reference = exact.float()
    assert judge(reference, reference, exact).within
    assert not judge(reference + 1e-3, reference, exact).within
    broken = reference.clone()
    broken[7] = float("nan")
    assert not judge(broken, reference, exact).within


def test_budget_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match="shapes must be equal"):
        judge(torch.zeros(1), torch.zeros(3), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_reach_of_wtconv_is_kernel_size_times_two_to_the_levels(levels: int) -> None:
    torch.manual_seed(0)
    layer = wtconv_ops.WTConv2d(2, 2, kernel_size=3, wt_levels=levels)
    field = receptive_field(layer, channels=2, size=49, seed=0)
    assert field.reach == 3 * 2**levels
    assert float(field.magnitude.max()) == 1.0


def test_reach_of_a_convolution_is_its_kernel_around_the_centre() -> None:
    torch.manual_seed(0)
    field = receptive_field(nn.Conv2d(2, 2, 7, padding=3, groups=2), 2, size=21, seed=0)
    assert field.reach == 7
    inside = torch.zeros(21, 21, dtype=torch.bool)
    inside[7:14, 7:14] = True
    assert torch.equal(field.magnitude > 0, inside)


def test_mosaic_of_a_flat_image_is_the_image_and_black_details() -> None:
    lowpass, details = wtconv_ops.dwt2d(torch.full((1, 3, 32, 48), 0.25), levels=2)
    canvas, corners = pyramid_mosaic(lowpass, details)
    assert canvas.shape == (32, 48, 3)
    assert corners == [(16, 24), (8, 12)]
    np.testing.assert_allclose(canvas[:8, :12], 0.25, atol=1e-6)
    assert canvas[16:, 24:].max() < 0.05


def test_progress_is_silent_unless_a_person_is_watching(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watched_steps(total=2) as begin:
        begin("first")
        begin("second")
    assert capsys.readouterr() == ("", "")


class TestPrintedReport(TestCase):
    def test_table(self) -> None:
        verdict = Verdict(2.5e-6, 6e-6, 1e-3, 2e-3)
        worse = Verdict(7e-6, 6e-6, 3e-3, 2e-3)
        report = Report(
            ("photograph 427 x 640",),
            (
                Row("reference, compiled", (427, 640), 1, 0, verdict, 48.25),
                Row("wtconv_ops, exported", (285, 427), verdict=worse),
                Row("AOTInductor package", (427, 640), failure="RuntimeError: no [schema]"),
            ),
        )
        console = Console(width=96, record=True, file=io.StringIO())
        print_report(report, console)
        lines = [line.rstrip() for line in console.export_text().splitlines()]
        text = "\n".join(line for line in lines if line).replace("─", "-")
        self.assertExpectedInline(
            text,
            """\
photograph 427 x 640
                                            graph
 network                   size   graphs   breaks   max error     budget     ms   result
 ----------------------------------------------------------------------------------------
 reference, compiled    427x640        1        0    2.50e-06   6.00e-06   48.2   equal
 wtconv_ops, exported   285x427                      7.00e-06   6.00e-06          differs
 AOTInductor package    427x640                                                   differs
max error: max |y - y64| against the reference in fp64
budget: twice the max error of the reference in fp32, plus eps * max |y64|
wtconv_ops, exported: max error 7.00e-06 (budget 6.00e-06), 2-norm error 3.00e-03 (budget 2.00e-03)
AOTInductor package: RuntimeError: no [schema]""",
        )
