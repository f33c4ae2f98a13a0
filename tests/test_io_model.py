"""The I/O model gives the paper's traffic table and quoted figures, and follows our launches."""

from __future__ import annotations

import itertools
import re
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
from launch_choice import CUDA, DEVICES, build
from readme import README

from bench import io_model
from bench.__main__ import main
from bench.io_model import (
    MACHINES,
    Plane,
    Stage,
    backward_stages,
    forward_stages,
    fused_stages,
    reference_stages,
    tiles_of,
    total,
    training_stages,
    weight_gradient_stages,
)

#: L: reference, fused, reduction factor, as tab:traffic prints them.
TRAFFIC_TABLE = {
    1: ("17.75", "7.00", "2.54"),
    2: ("20.44", "8.00", "2.55"),
    3: ("21.11", "8.25", "2.56"),
    4: ("21.28", "8.31", "2.56"),
    5: ("21.32", "8.33", "2.56"),
}
FAR = 40  # levels that stand for L -> infinity
A6000 = MACHINES[0]


@pytest.mark.parametrize("levels", TRAFFIC_TABLE)
def test_traffic_table_to_the_printed_digits(levels: int) -> None:
    reference, fused = total(reference_stages(levels)), total(fused_stages(levels))
    printed = tuple(f"{float(value):.2f}" for value in (reference, fused, reference / fused))
    assert printed == TRAFFIC_TABLE[levels]


@pytest.mark.parametrize("levels", range(1, 12))
def test_stages_sum_to_the_closed_forms(levels: int) -> None:
    rest = 1 - Fraction(1, 4**levels)
    assert total(reference_stages(levels)) == 7 + Fraction(43, 3) * rest
    assert total(fused_stages(levels)) == 4 + Fraction(13, 3) * rest - Fraction(1, 4**levels)
    assert io_model.macs(5, levels) == 25 + (25 + 8) * Fraction(4, 3) * rest


@pytest.mark.parametrize("level", [1, 2, 3])
def test_reference_spends_6_on_analysis_and_19_quarters_on_synthesis(level: int) -> None:
    stages = [stage for stage in reference_stages(3) if stage.level == level]
    size = io_model.level_size(level)
    analysis = total(s for s in stages if s.name in {"analysis", "depthwise convolution", "scale"})
    assert analysis == 6 * size
    assert total(stages) - analysis == Fraction(19, 4) * size
    assert total(s for s in reference_stages(3) if s.level == 0) == 7


@pytest.mark.parametrize("level", [1, 2, 3])
def test_fused_form_spends_9_quarters_a_level_less_the_deepest_low_pass(level: int) -> None:
    (stage,) = (stage for stage in fused_stages(3) if stage.level == level)
    size = io_model.level_size(level)
    assert stage.traffic == (2 * size if level == 3 else Fraction(9, 4) * size)


def test_limits_for_many_levels() -> None:
    reference, fused = total(reference_stages(FAR)), total(fused_stages(FAR))
    assert f"{float(reference):.2f}" == "21.33"
    assert f"{float(fused):.2f}" == "8.33"
    assert float(reference / fused) == pytest.approx(64 / 25, abs=1e-12)


def test_multiply_adds_as_quoted() -> None:
    assert io_model.macs(5, 1) == 58
    assert f"{float(io_model.macs(5, 5)):.1f}" == "69.0"
    assert f"{float(2 * io_model.macs(5, 5)):.1f}" == "137.9"
    assert f"{float(4 * total(reference_stages(5))):.1f}" == "85.3"


def test_gigabytes_of_the_representative_input() -> None:
    size = 8 * 64 * 256 * 256
    assert f"{size / 1e6:.1f}" == "33.6"
    assert f"{4 * size * float(total(reference_stages(5))) / 1e9:.1f}" == "2.9"


def test_intensity_is_1_62_at_five_levels_where_the_paper_prints_that_of_one() -> None:
    assert f"{io_model.intensity(5, 5, total(reference_stages(5)), 4):.2f}" == "1.62"
    assert f"{io_model.intensity(5, 1, total(reference_stages(1)), 4):.2f}" == "1.63"


def test_ridge_point_and_distance_from_it_as_quoted() -> None:
    intensity = io_model.intensity(5, 5, total(reference_stages(5)), 4)
    assert f"{A6000.ridge:.0f}" == "50"
    assert f"{A6000.ridge / intensity:.0f}" == "31"
    assert f"{100 * intensity / A6000.ridge:.1f}" == "3.2"


def test_roofline_bound_meets_at_the_ridge_and_agrees_with_the_time() -> None:
    for machine in MACHINES:
        assert machine.bound(machine.ridge) == pytest.approx(machine.peak_tflops)
        assert machine.bound(2 * machine.ridge) == machine.peak_tflops
        assert machine.bound(machine.ridge / 2) == pytest.approx(machine.peak_tflops / 2)
        flops, moved = 3e9, 5e9
        rate = machine.bound(flops / moved) * 1e9  # FLOP per ms
        assert machine.shortest_ms(flops, moved) == pytest.approx(flops / rate)


# One line in, one line out: levels of a launch of the operator, as the input gradient, and of the
# weight gradients; whether one launch takes all levels past the first and forms their band; whether
# the last is the tile kernel's, leaves bands in channels_last, gives the input gradient.
CHOICES = r"""
#include <cstdio>
#include "patch/choose.h"
#include "patch/group_layout.h"
#include "tile/choose.h"
using namespace wtconv::cuda;

int main() {
  Problem p{};
  Device d;
  int side, channels_last;
  while (scanf("%d %d %d %d %d %d %d %d %d", &p.channels, &side, &p.element_bytes, &channels_last,
               &p.levels, &p.kernel_size, &d.multiprocessors, &d.shared_per_block,
               &d.shared_per_multiprocessor) == 9) {
    p.batch = 64, p.height = p.width = side, p.accumulator_bytes = 4;
    p.channels_last = channels_last;
    const PatchChoice grad = choose_patch_grad(p, d, true);
    const bool stays = grad.group > 0 && !hands_on_planes(p.kernel_size, grad.group);
    int levels = choose_patch(p, d).levels, grad_levels = grad.levels;
    const bool tile_kernel = grad_levels == 0;
    if (levels == 0) levels = choose_tile(p, d).levels;
    if (grad_levels == 0) grad_levels = choose_grad_tile(p, d).grad_output.levels;
    Problem band = p;
    band.height = band.width = (side + (1 << levels) - 1) >> levels;
    band.levels = p.levels - levels, band.element_bytes = 4, band.channels_last = false;
    const bool whole_pieces = side * p.element_bytes % 16 == 0;
    const bool fused = band.levels > 0 && !channels_last && whole_pieces &&
                       choose_lowpass_cells(band, levels, d) > 0;
    Problem adjoint = p;
    adjoint.adjoint = adjoint.of_grad_output = true;
    int adjoint_levels = choose_patch(adjoint, d).levels;
    if (adjoint_levels == 0) adjoint_levels = choose_tile(adjoint, d).levels;
    printf("%d %d %d %d ", levels, adjoint_levels, grad_levels, fused);
    printf("%d %d %d\n", tile_kernel, stays, grad.input_grad);
  }
}
"""


def test_levels_of_a_launch_are_those_that_the_kernels_choose(tmp_path: Path) -> None:
    driver = build(tmp_path, CHOICES, CUDA / "patch" / "choose.cpp", CUDA / "tile" / "choose.cpp")
    sides = (4, 7, 8, 9, 14, 15, 16, 17, 28, 32, 33, 48, 56, 58, 59, 64, 65)
    sides += (88, 100, 128, 130, 224, 256, 264, 512, 1024)
    cases = list(itertools.product(sides, (4, 2), (False, True), range(1, 6), (3, 5)))
    cases = [(channels, *case) for channels in (32, 80, 300, 512) for case in cases]
    cases += [(1, 130, 2, False, n, 5) for n in range(1, 6)]
    device = " ".join(map(str, DEVICES["sm_90"]))
    lines = [f"{' '.join(str(int(value)) for value in case)} {device}\n" for case in cases]
    done = subprocess.run(
        [driver], input="".join(lines), capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""  # undefined behaviour
    chosen = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    for case, choice in zip(cases, chosen, strict=True):
        taken, adjoint_taken, grad_taken, fused, tile_kernel, stays, input_grad = choice
        channels, side, element_bytes, channels_last, levels, kernel_size = case
        plane = Plane(side, element_bytes, channels_last, tiles=tiles_of(64, channels, side))
        assert plane.operator_levels(levels) == taken, case
        assert plane.gradient_levels(levels) == grad_taken, case
        if grad_taken < levels:
            assert plane.tile_kernel == bool(tile_kernel), case
        assert plane.hands_on_channels_last == bool(stays), case
        if kernel_size == 5:
            assert plane.operator_levels(levels, input_gradient=True) == adjoint_taken, case
            assert plane.gives_input_gradient(levels) == bool(input_grad), case
        deeper = taken < levels
        assert (deeper and plane.has_lowpass_on_chip(taken)) == bool(fused), case


@pytest.mark.parametrize("levels", range(6))
@pytest.mark.parametrize(
    "plane", [Plane(64, 4), Plane(64, 2), Plane(64, 4, channels_last=True), Plane(64, 2, True)]
)
def test_plane_on_chip_moves_the_compulsory_2_n(plane: Plane, levels: int) -> None:
    assert total(forward_stages(plane, levels)) == io_model.COMPULSORY["forward"]


@pytest.mark.parametrize("element_bytes", [4, 2])
@pytest.mark.parametrize("side", [65, 128, 256, 512, 1024])
def test_large_plane_with_up_to_three_levels_moves_the_compulsory_2_n(
    side: int, element_bytes: int
) -> None:
    for levels in range(4):
        assert total(forward_stages(Plane(side, element_bytes), levels)) == 2
    assert total(forward_stages(Plane(side, element_bytes), 4)) > 3


def test_large_plane_whose_band_fits_a_tile_is_read_twice_and_only_its_deep_levels_written() -> (
    None
):
    # A float32 band of N/16 elements is written and read; in half types it counts twice.
    assert forward_stages(Plane(256, 4), 5) == [
        Stage("low-pass and its levels", 0, 1 + Fraction(1, 16)),
        Stage("tiles", 0, 2 + Fraction(1, 16)),
    ]
    assert total(forward_stages(Plane(256, 4), 5)) == Fraction("3.125")
    assert total(forward_stages(Plane(256, 2), 5)) == Fraction("3.25")


def test_larger_band_is_written_and_passes_through_the_operator() -> None:
    assert forward_stages(Plane(512, 4), 5) == [
        Stage("low-pass", 0, 1 + Fraction(1, 16)),
        Stage("tiles", 2, Fraction(2, 16)),
        Stage("tiles", 0, 2 + Fraction(1, 16)),
    ]
    # Two levels of N/16, past which a launch reads N/16 and writes N/256.
    assert total(forward_stages(Plane(1024, 4), 6)) == 3 + Fraction(5, 16) + Fraction(2, 256)
    # Half types; rows that are no whole pieces of 16 bytes; channels_last.
    for plane in (Plane(512, 2), Plane(130, 2), Plane(256, 2, channels_last=True)):
        assert total(forward_stages(plane, 5)) == 3 + 4 * Fraction(2, 16)


def test_weight_gradients_of_large_float32_planes_hand_on_float32_bands_level_by_level() -> None:
    bands = [Fraction(1, 4**level) for level in range(3)]
    stages = weight_gradient_stages(Plane(256, 4), 5)
    assert [stage.level for stage in stages] == [0, 1, 2]  # the last one whole planes
    assert total(stages) == 2 * (sum(bands) + sum(bands[1:]))


@pytest.mark.parametrize("element_bytes", [4, 2])
def test_weight_gradients_of_whole_planes_take_all_levels(element_bytes: int) -> None:
    assert total(weight_gradient_stages(Plane(32, element_bytes, tiles=1), 5)) == 2
    # channels_last: one level, then all others of its bands in float32.
    stages = weight_gradient_stages(Plane(32, element_bytes, channels_last=True), 5)
    band = Fraction(4, element_bytes) / 4
    assert [(s.level, s.traffic) for s in stages] == [(0, 2 + 2 * band), (1, 2 * band)]


def test_weight_gradients_of_half_types_take_two_levels_and_hand_on_half_bands() -> None:
    stages = weight_gradient_stages(Plane(256, 2), 5, low_levels=2)
    exact = Fraction(2, 16)  # the band of grad_output in float32
    assert [(stage.level, stage.traffic) for stage in stages] == [
        (0, 2 * (1 + Fraction(1, 16)) + exact),
        (2, 2 * (Fraction(1, 16) + Fraction(1, 256))),
        (4, 2 * Fraction(1, 256)),
    ]


def test_weight_gradients_of_many_planes_of_half_types_take_two_levels() -> None:
    for side in (10, 14, 28, 32):
        stages = weight_gradient_stages(Plane(side, 2), 4)
        band = Fraction(1, 16)
        assert [(s.level, s.traffic) for s in stages] == [(0, 2 * (1 + band)), (2, 2 * band)]
    for plane in (Plane(28, 2, tiles=1), Plane(17, 2), Plane(8, 2), Plane(28, 4)):
        assert total(weight_gradient_stages(plane, 3)) == 2
    assert not Plane(28, 2).gives_input_gradient(2)


def test_whole_planes_leave_the_operator_the_band_of_their_first_level() -> None:
    stages = [s for s in backward_stages(Plane(128, 4), 5) if s.name == "weight gradients"]
    assert [(s.level, s.traffic) for s in stages] == [
        (0, 2 * (1 + Fraction(1, 4))),
        (1, 2 * Fraction(1, 4) + Fraction(1, 16)),
    ]


def test_input_gradient_takes_the_low_pass_band_of_the_weight_gradients() -> None:
    def input_gradient(plane: Plane, levels: int = 5) -> list[tuple[int, Fraction]]:
        stages = backward_stages(plane, levels)
        return [(s.level, s.traffic) for s in stages if s.name.startswith("input gradient")]

    # The band two levels down, in float32: of float32 that of the second launch.
    assert input_gradient(Plane(256, 4)) == [(2, 2 * Fraction(1, 16)), (0, 2 + Fraction(1, 16))]
    assert input_gradient(Plane(256, 2)) == [(2, 2 * Fraction(2, 16)), (0, 2 + Fraction(2, 16))]
    assert input_gradient(Plane(256, 2), 3) == input_gradient(Plane(256, 2))
    # Planes on chip have no level past their launch.
    assert input_gradient(Plane(64, 4)) == [(0, Fraction(2))]


@pytest.mark.parametrize(
    ("element_bytes", "levels", "moved"),
    [(4, 1, 5), (4, 3, 7.4375), (4, 5, 8.5625), (2, 1, 6), (2, 3, 6.75), (2, 5, 8.015625)],
)
def test_training_step_of_a_large_plane(element_bytes: int, levels: int, moved: float) -> None:
    # Compulsory in float32 with one level; else grad_output is read twice: 6 N and the bands.
    assert float(total(training_stages(Plane(256, element_bytes), levels))) == moved


@pytest.mark.parametrize("levels", range(1, 6))
def test_forward_pass_moves_less_than_the_fused_form(levels: int) -> None:
    fused = total(fused_stages(levels))
    for side, element_bytes, channels_last in itertools.product(
        (32, 64, 130, 256, 512, 1024), (4, 2), (False, True)
    ):
        assert total(forward_stages(Plane(side, element_bytes, channels_last), levels)) < fused / 2


def test_readme_says_what_the_model_counts() -> None:
    rows = re.findall(r"\| \d+×\d+×(\d+)×\d+, (fp32|fp16) \| (.*) \|", README.read_text())
    assert {(side, dtype) for side, dtype, _ in rows} >= {("256", "fp32"), ("256", "fp16")}
    for side, dtype, cells in rows:
        plane = Plane(int(side), 4 if dtype == "fp32" else 2)
        assert cells.split(" | ") == [
            f"{float(total(forward_stages(plane, levels))):.4g} / "
            f"{float(total(training_stages(plane, levels))):.4g}"
            for levels in (1, 3, 5)
        ]


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 0
    printed = capsys.readouterr().out
    for row in TRAFFIC_TABLE.values():
        for entry in row:
            assert entry in printed
