"""The I/O model gives every entry of the paper's traffic table and its quoted figures."""

from __future__ import annotations

from fractions import Fraction

import pytest

from bench import io_model
from bench.__main__ import main
from bench.io_model import MACHINES, fused_stages, reference_stages, single_pass_stages, total

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


@pytest.mark.parametrize("levels", range(1, 8))
def test_plane_on_chip_moves_the_compulsory_2_n(levels: int) -> None:
    assert total(single_pass_stages((levels,))) == io_model.COMPULSORY["forward"]


def test_large_plane_with_five_levels_moves_3_25_n_in_fp32_and_3_5_n_in_half() -> None:
    # x read twice, y written, and four passes over the band of N/16: formed, filtered, added.
    launches = io_model.split_levels(5, 2)
    assert launches == (2, 3)
    assert total(single_pass_stages(launches)) == 3 + 4 * Fraction(1, 16)
    assert total(single_pass_stages(launches, band_ratio=2)) == 3 + 4 * Fraction(2, 16)
    assert total(single_pass_stages((2, 2, 1))) == 3 + Fraction(5, 16) + Fraction(4, 256)


@pytest.mark.parametrize("levels", range(1, 8))
def test_single_pass_moves_less_than_the_fused_form(levels: int) -> None:
    assert total(single_pass_stages(io_model.split_levels(levels, 2))) < total(fused_stages(levels))


@pytest.mark.parametrize("launches", [(), (2, 0), (-1,)])
def test_launch_without_levels_is_refused(launches: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="every launch must take at least one level"):
        single_pass_stages(launches)


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model"]) == 0
    printed = capsys.readouterr().out
    for row in TRAFFIC_TABLE.values():
        for entry in row:
            assert entry in printed
