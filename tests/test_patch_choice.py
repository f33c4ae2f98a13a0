"""Launch choices of the patch kernels, compiled for the host."""

from __future__ import annotations

import itertools
import math
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from launch_choice import CUDA, DEVICES, Problem, build
from readme import README
from rounding import gradients_on_tensor_cores, operator_on_tensor_cores

TILE = 64

# One line in, one line out: levels of the input gradient's first launch; forward and weight
# gradient, each levels, cells, group, tensor cores or not, bytes, tiles; blocks of the latter in a
# multiprocessor, splits among them, partial sums of a block; cells of a low-pass band one, two and
# three levels below.
CHOICES = r"""
#include <cstdio>
#include "patch/choose.h"
using namespace wtconv::cuda;

int main() {
  Problem p{};
  Device d;
  long batch;
  int channels_last;
  while (scanf("%ld %d %d %d %d %d %d %d %d %d %d %d", &batch, &p.channels, &p.height, &p.width,
               &p.kernel_size, &p.levels, &p.accumulator_bytes, &p.element_bytes, &channels_last,
               &d.multiprocessors, &d.shared_per_block, &d.shared_per_multiprocessor) == 12) {
    p.batch = batch;
    p.channels_last = channels_last;
    const PatchChoice f = choose_patch(p, d), g = choose_patch_grad(p, d, true);
    Problem adjoint = p;
    adjoint.adjoint = adjoint.of_grad_output = true;
    printf("%d ", choose_patch(adjoint, d).levels);
    printf("%d %d %d %d %d %d ", f.levels, f.cells, f.group, f.tensor_cores,
           f.levels ? patch_bytes(p, f) : 0, f.levels ? patch_tiles(p, f) : 0);
    const int tiles = g.levels ? patch_tiles(p, g) : 0;
    const int blocks = tiles ? patch_grad_blocks(p, g) : 0;
    const int splits = tiles ? split_tiles(p.channels, tiles, blocks * d.multiprocessors) : 0;
    printf("%d %d %d %d %d %d %d %d %d %d ", g.levels, g.cells, g.group, g.tensor_cores,
           g.levels ? patch_grad_bytes(p, g) : 0, tiles, g.input_grad, blocks, splits,
           splits ? grad_parts(tiles, splits) : 0);
    printf("%d %d %d\n", choose_lowpass_cells(p, 1, d), choose_lowpass_cells(p, 2, d),
           choose_lowpass_cells(p, 3, d));
  }
}
"""


class Launch(NamedTuple):
    levels: int
    cells: int
    group: int
    tensor_cores: int
    shared_bytes: int
    tiles: int


@dataclass(frozen=True)
class Choice:
    input_levels: int
    forward: Launch
    grad: Launch
    input_grad: int
    grad_blocks: int
    splits: int
    parts: int
    lowpass_cells_one_level_down: int
    lowpass_cells: int
    lowpass_cells_three_levels_down: int


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patch_choice")
    return build(folder, CHOICES, CUDA / "patch" / "choose.cpp")


def choose(driver: Path, device: str, problems: list[Problem]) -> list[Choice]:
    device_line = " ".join(map(str, DEVICES[device]))
    lines = [f"{' '.join(map(str, astuple(p)))} {device_line}" for p in problems]
    done = subprocess.run(
        [driver], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    assert done.stderr == ""  # undefined behaviour
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return [Choice(row[0], Launch(*row[1:7]), Launch(*row[7:13]), *row[13:]) for row in rows]


def tiles_of(problem: Problem, cells: int) -> int:
    """Tiles of a channel."""
    if cells:
        return math.ceil(problem.batch / cells**2)
    return problem.batch * math.ceil(problem.height / TILE) * math.ceil(problem.width / TILE)


def group_cells(problem: Problem, device: str) -> int:
    """Planes of a tile on each side, in groups of channels that tensor cores take, or 0."""
    shortest, longest = sorted((problem.height, problem.width))
    cells = 4 if longest <= 16 else 2 if longest <= 32 else 1
    side = TILE // cells
    taken = device == "sm_90" and problem.channels_last and problem.element_bytes == 2
    taken = taken and problem.kernel_size in (3, 5) and longest <= side < 2 * shortest
    taken = taken and problem.levels <= {1: 5, 2: 5, 4: 4}[cells]
    taken = taken and math.ceil(problem.channels / 8) * 8 <= 2 * problem.channels
    return cells if taken else 0


def assert_legal(problem: Problem, device: str, launch: Launch, most: int) -> None:
    """A launch of at most `most` levels."""
    longest, cells = max(problem.height, problem.width), launch.cells
    assert problem.kernel_size in (3, 5, 7, 9), problem
    assert problem.accumulator_bytes == 4, problem
    assert launch.shared_bytes <= DEVICES[device][1], problem
    assert 1 <= launch.levels <= most, problem
    assert launch.tiles == tiles_of(problem, 1 if launch.group else cells), problem
    if launch.tensor_cores:
        assert problem.element_bytes == 2, problem
        assert cells in (0, 1, 2, 4), problem
        if not cells:
            assert min(problem.height, problem.width) > TILE // 2, problem
    if launch.group:
        channels = math.ceil(problem.channels / launch.group) * launch.group
        assert problem.channels_last, problem
        assert cells == (group_cells(problem, device) if launch.tensor_cores else 1), problem
        assert channels <= 2 * problem.channels, problem
    if cells:
        assert cells * longest <= TILE, problem
        assert launch.levels == most, problem
        assert cells << launch.levels <= TILE, problem  # the coarsest cell is not empty
        return
    deepest = 3 if problem.kernel_size <= 5 else 2
    assert longest > TILE or problem.element_bytes == 2, problem
    assert launch.levels <= deepest, problem
    if device == "sm_90" and problem.element_bytes == 2 and most > 1:
        assert launch.levels == (min(most, deepest) if most == 3 else 2), problem


def assert_legal_gradient(problem: Problem, device: str, choice: Choice) -> None:
    launch = choice.grad
    longest = max(problem.height, problem.width)
    of_group = launch.group == 8 and min(problem.height, problem.width) > TILE // 2
    of_planes = launch.cells in (2, 4) and launch.group == 0 and launch.tensor_cores == 1
    tensor_cores = problem.element_bytes == 2 and (launch.cells == 0 or of_group or of_planes)
    most = min(problem.levels, 2) if tensor_cores else 1
    whole = launch.cells > 0 and launch.group == 0 and problem.kernel_size <= 5 and not of_planes
    if whole and problem.levels <= {1: 5, 2: 5, 4: 4, 8: 3}[launch.cells]:
        most = problem.levels
    if launch.group == 32 and longest <= 8 and problem.levels == 2:
        large = longest >= 7 and problem.kernel_size == 7 and problem.element_bytes == 4
        most = 1 if large and device == "sm_86" else 2
    assert_legal(problem, device, launch, most)
    assert launch.levels == most, problem
    held = DEVICES["sm_90"][2] // (launch.shared_bytes + 1024)
    assert launch.tensor_cores == tensor_cores, problem
    if launch.group:
        assert 1 <= choice.grad_blocks <= max(held, 1), problem
    if tensor_cores:
        assert choice.grad_blocks == (1 if of_group else 3), problem
        assert held >= choice.grad_blocks, problem
    if choice.input_grad:
        own = choice.forward
        assert launch.levels == own.levels == problem.levels, problem
        assert (own.cells, own.group, own.tensor_cores) == (launch.cells, 0, 0), problem
        assert not launch.group, problem
        assert not tensor_cores, problem
    assert 1 <= choice.splits <= launch.tiles, problem
    assert 0 < math.ceil(launch.tiles / choice.splits) / choice.parts <= 16, problem


def assert_legal_lowpass(problem: Problem, device: str, choice: Choice) -> None:
    assert choice.lowpass_cells_one_level_down == 0, problem
    assert choice.lowpass_cells_three_levels_down == 0, problem
    cells, most = choice.lowpass_cells, min(choice.forward.cells, 4)
    assert (cells > 0) == (choice.forward.cells > 0 and choice.forward.group == 0), problem
    assert cells <= most, problem
    if 0 < cells < most:  # fewer planes to a tile, so that none waits
        assert problem.channels * tiles_of(problem, cells) <= 4 * DEVICES[device][0], problem


SIZES = [(1, 1), (7, 7), (14, 14), (20, 20), (28, 30), (40, 40), (56, 56), (64, 65)]
SIZES += [(33, 200), (131, 257), (512, 512)]


@pytest.mark.parametrize("device", DEVICES)
def test_every_choice_is_a_legal_launch(driver: Path, device: str) -> None:
    axes = itertools.product(
        (1, 64, 4096), (1, 96, 768), SIZES, (2, 3, 5, 7, 9, 11), (1, 2, 3, 6), (4, 2), (0, 1)
    )
    problems = [
        Problem(b, c, h, w, k, levels, 4, element, last)
        for b, c, (h, w), k, levels, element, last in axes
    ]
    problems.append(Problem(2, 3, 256, 256, 5, 2, 8, 8, 0))  # float64
    choices = choose(driver, device, problems)
    for problem, choice in zip(problems, choices, strict=True):
        of_group = choice.forward.group == 8 and choice.forward.tensor_cores
        assert (choice.forward.cells if of_group else 0) == group_cells(problem, device), problem
        if choice.forward.levels:
            assert_legal(problem, device, choice.forward, problem.levels)
            whole = choice.forward.group == 0 and choice.forward.cells in (1, 2, 4)
            assert not whole or choice.forward.tensor_cores == (problem.element_bytes == 2), problem
        if choice.grad.levels:
            assert_legal_gradient(problem, device, choice)
        assert_legal_lowpass(problem, device, choice)
    assert sum(choice.forward.levels > 0 for choice in choices) > len(problems) / 8
    assert {choice.forward.group for choice in choices} == {0, 4, 8, 16, 32}


def test_tensor_cores_take_planes_of_a_tile_with_all_their_levels(driver: Path) -> None:
    sides = [(56, 56), (33, 64), (59, 59), (59, 60), (55, 64), (64, 64), (32, 56), (65, 56)]
    cases = [(side, k, levels) for side in sides for k in (3, 5, 7, 9) for levels in (1, 3, 5, 6)]
    for last in (0, 1):
        problems = [Problem(64, 96, h, w, k, n, 4, 2, last) for (h, w), k, n in cases]
        for problem, choice in zip(problems, choose(driver, "sm_90", problems), strict=True):
            side = min(problem.height, problem.width), max(problem.height, problem.width)
            fits = side[1] <= TILE and problem.levels <= 5
            if last:
                fits = fits and problem.kernel_size in (3, 5) and side[0] > TILE // 2
            else:
                fits = fits and problem.kernel_size in (3, 5, 7)
            launch = choice.forward
            assert (launch.tensor_cores == 1 and launch.cells == 1) == fits, problem
            if fits:
                assert launch.levels == problem.levels, problem
                assert launch.group == (8 if last else 0), problem
            if last and problem.kernel_size in (3, 5):
                # Of the weight gradients both operands, at one level of every plane of a tile.
                most = TILE**2 if problem.levels == 1 else {3: 3728, 5: 3512}[problem.kernel_size]
                fits = side[0] > TILE // 2 and side[1] <= TILE and problem.levels <= 5
                fits = fits and problem.height * problem.width <= most
                assert (choice.grad.tensor_cores == 1) == fits, problem


def test_tensor_cores_take_several_planes_of_a_tile_in_groups(driver: Path) -> None:
    """Of 3x3 and 5x5 taps, with sides of more than half a cell."""

    def cells(
        *shape: int, levels: int, kernel: int = 5, size: int = 2, last: int = 1, on: str = "sm_90"
    ) -> int:
        (choice,) = choose(driver, on, [Problem(*shape, kernel, levels, 4, size, last)])
        launch = choice.forward
        if not launch.tensor_cores or not launch.group:
            return 0
        assert (launch.levels, launch.group, launch.tiles) == (levels, 8, shape[0])
        return launch.cells

    assert [cells(64, 192, 28, 28, levels=n) for n in (1, 2, 4, 5, 6)] == [2, 2, 2, 2, 0]
    assert [cells(64, 384, 14, 14, levels=n) for n in (1, 2, 4, 5)] == [4, 4, 4, 0]
    assert [cells(b, 96, 32, 32, levels=3) for b in (1, 2, 3)] == [2, 2, 2]
    assert [cells(b, 96, 16, 16, levels=3) for b in (1, 3, 4, 5)] == [4, 4, 4, 4]
    sides = {(17, 17): 2, (17, 32): 2, (32, 32): 2, (31, 17): 2, (16, 32): 0, (32, 16): 0}
    sides |= {(32, 33): 0, (33, 33): 1, (33, 32): 0}
    sides |= {(9, 9): 4, (9, 14): 4, (16, 9): 4, (16, 16): 4, (16, 8): 0, (8, 8): 0}
    assert {(h, w): cells(64, 96, h, w, levels=2) for h, w in sides} == sides
    # Half of eight channels.
    assert [cells(64, c, 28, 28, levels=2) for c in (3, 4, 7, 9, 12)] == [0, 2, 2, 2, 2]
    for shape in ((64, 96, 28, 28), (64, 96, 14, 14)):
        assert [bool(cells(*shape, levels=3, kernel=k)) for k in (3, 5, 7, 9)] == [1, 1, 0, 0]
        assert cells(*shape, levels=3, size=4) == cells(*shape, levels=3, last=0) == 0
        assert cells(*shape, levels=3, on="sm_80") == cells(*shape, levels=3, on="sm_86") == 0


def test_readme_says_which_channels_last_planes_tensor_cores_take(driver: Path) -> None:
    axes = itertools.product(range(2, 17), (16, 24, 56), range(1, 9))
    problems = [Problem(64, c, side, side, 5, levels, 4, 2, 1) for c, side, levels in axes]
    launches = [choice.forward for choice in choose(driver, "sm_90", problems)]
    pairs = list(zip(problems, launches, strict=True))
    taken = [p for p, launch in pairs if launch.tensor_cores and launch.group]
    assert min(p.channels for p in taken) == 4
    deepest = [max(p.levels for p in taken if p.height == side) for side in (16, 24, 56)]
    assert deepest == [4, 5, 5]
    assert any(p.channels < 4 for p, launch in pairs if launch.tensor_cores and not launch.group)
    text = " ".join(README.read_text().split())
    assert "Of channels_last planes they take those of C ≥ 4 and L ≤ 5 (up to 16×16: L ≤ 4)" in text
    assert "the operator on other planes of few channels can run as in NCHW" in text


def test_the_law_of_roundings_knows_what_tensor_cores_take(driver: Path) -> None:
    """What the tests on a GPU allow for follows the choice of the kernels."""
    sides = [(9, 9), (14, 13), (16, 8), (17, 17), (20, 31), (28, 28), (32, 33), (56, 55), (64, 200)]
    axes = itertools.product(
        (1, 64, 2048), (3, 4, 7, 96), sides, (3, 5, 7, 9), (1, 2, 4, 5), (4,), (2,), (0, 1)
    )
    problems = [Problem(batch, c, *side, *rest) for batch, c, side, *rest in axes]
    taken = set()
    for problem, choice in zip(problems, choose(driver, "sm_90", problems), strict=True):
        shape = problem.batch, problem.channels, problem.height, problem.width
        call = shape, problem.kernel_size, problem.levels, not problem.channels_last
        may = (operator_on_tensor_cores(*call), gradients_on_tensor_cores(*call, 132))
        for expected, launch in zip(may, (choice.forward, choice.grad), strict=True):
            assert expected or not launch.tensor_cores, problem
            taken.add((problem.channels_last, launch.tensor_cores))
    assert taken == set(itertools.product((0, 1), (0, 1)))


def test_tensor_cores_take_the_gradients_of_many_planes(driver: Path) -> None:
    """Of even width, three tiles a multiprocessor, eight where further levels take a launch."""

    def taken(*shape: int, levels: int, kernel: int = 5, element: int = 2, last: int = 0) -> bool:
        problem = Problem(*shape, kernel, levels, 4, element, last)
        (choice,) = choose(driver, "sm_90", [problem])
        launch = choice.grad
        assert not launch.tensor_cores or launch.levels == min(levels, 2)
        return launch.tensor_cores == 1 and launch.cells in (2, 4)

    assert DEVICES["sm_90"][0] == 132
    assert taken(64, 192, 28, 28, levels=4)
    assert taken(64, 384, 14, 14, levels=3, kernel=7)
    assert not taken(64, 192, 28, 27, levels=4)
    assert not taken(64, 192, 28, 28, levels=4, element=4)
    assert not taken(64, 192, 28, 28, levels=4, kernel=9)
    assert not taken(64, 192, 8, 8, levels=2)
    assert not taken(64, 192, 56, 56, levels=2)
    # Of too few channels for a group in channels_last, too.
    assert [taken(2048, 3, 28, 28, levels=2, last=n) for n in (0, 1)] == [True, False]
    assert [taken(64, c, 16, 16, levels=2) for c in (98, 99)] == [False, True]  # 4 tiles each
    assert [taken(64, c, 28, 28, levels=3) for c in (65, 66)] == [False, True]  # 16
    # A patch kernel takes no third level of so few planes.
    assert not taken(16, 512, 20, 20, levels=3)
    assert taken(16, 512, 20, 20, levels=2)


def test_input_gradient_of_three_levels_leaves_the_third_to_a_band(driver: Path) -> None:
    """Of large planes, 5x5, with 12 tiles or more a multiprocessor; else as the operator."""
    multiprocessors = DEVICES["sm_90"][0]
    tiles = 8 * 3 * 2  # of a channel of 8x130x128
    channels = 12 * multiprocessors // tiles
    assert channels * tiles == 12 * multiprocessors

    def taken(channels: int, kernel: int, levels: int, element: int) -> tuple[int, int]:
        problem = Problem(8, channels, 130, 128, kernel, levels, 4, element, 0)
        (choice,) = choose(driver, "sm_90", [problem])
        return choice.forward.levels, choice.input_levels

    for element in (2, 4):
        assert taken(channels, 5, 3, element) == (3, 2)
        assert taken(channels - 1, 5, 3, element) == (3, 3)
        assert taken(channels, 3, 3, element) == (3, 3)
        assert [taken(channels, 5, n, element) for n in (1, 2, 4)] == [(1, 1), (2, 2), (2, 2)]


# Channels, tiles of each, slots and most tiles of a block in; splits without and with that limit.
SPLITS = r"""
#include <cstdio>
#include "patch/choose.h"

int main() {
  int channels, tiles, slots, most;
  while (scanf("%d %d %d %d", &channels, &tiles, &slots, &most) == 4) {
    using wtconv::cuda::split_tiles;
    printf("%d %d\n", split_tiles(channels, tiles, slots),
           split_tiles(channels, tiles, slots, most));
  }
}
"""


def test_blocks_have_no_more_tiles_than_they_may(tmp_path: Path) -> None:
    driver = build(tmp_path, SPLITS, CUDA / "patch" / "choose.cpp")
    cases = list(
        itertools.product(
            (1, 3, 64, 96, 1000, 65536), (1, 2, 9, 52, 512, 70000), (132, 396), (1, 4, 10)
        )
    )
    lines = "".join(f"{' '.join(map(str, case))}\n" for case in cases)
    done = subprocess.run([driver], input=lines, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""  # undefined behaviour
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    for (channels, tiles, slots, most), (free, limited) in zip(cases, rows, strict=True):
        case = (channels, tiles, slots, most)
        assert 1 <= free <= tiles, case
        assert free <= limited <= tiles, case
        assert math.ceil(tiles / limited) <= most, case
        if math.ceil(tiles / free) <= most:
            assert limited == free, case


def test_one_round_of_nearly_empty_tiles_takes_weight_gradients(driver: Path) -> None:
    multiprocessors = DEVICES["sm_90"][0]
    problems = [Problem(8, c, 8, 8, 5, 1, 4, 4, 0) for c in (multiprocessors, multiprocessors + 1)]
    choices = choose(driver, "sm_90", problems)
    assert [(choice.forward.levels, choice.grad.cells) for choice in choices] == [(0, 8), (0, 0)]
