"""Every launch chosen for the tile kernels is one they can run, over a sweep of problems."""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch_choice import CUDA, DEVICES, Problem, build

MAX_TILE_LEVELS = 7

# One line in, one line out: the forward shape, then the two of the weight gradient.
DRIVER = r"""
#include <cstdio>
#include "tile/choose.h"
using namespace wtconv::cuda;

static void print(const TileShape& s) {
  printf("%d %d %d %d %d %d %d %d %d", s.kernel_size, s.levels, s.tile_rows, s.tile_cols, s.group,
         s.threads, int(s.plane), s.channel_stride, s.shared_bytes);
  for (int l = 0; l <= kMaxLaunchLevels; ++l) {
    const TileLevel& v = s.level[l];
    const int last = l <= s.levels;
    printf(" %d %d %d %d %d %d", last * v.own_rows, last * v.own_cols, last * v.strip_rows,
           last * v.offset, last * v.stored_rows, last * v.pitch);
  }
}

int main() {
  Problem p{};
  Device d;
  long batch;
  int channels_last, adjoint;
  while (scanf("%ld %d %d %d %d %d %d %d %d %d %d %d %d", &batch, &p.channels, &p.height, &p.width,
               &p.kernel_size, &p.levels, &p.accumulator_bytes, &p.element_bytes, &channels_last,
               &adjoint, &d.multiprocessors, &d.shared_per_block,
               &d.shared_per_multiprocessor) == 13) {
    p.batch = batch;
    p.channels_last = channels_last;
    p.adjoint = adjoint;
    print(choose_tile(p, d));
    p.adjoint = true;
    const GradShapes g = choose_grad_tile(p, d);
    printf(" %d %d ", g.threads, g.shared_bytes);
    print(g.grad_output);
    printf("\n");
  }
}
"""


@dataclass(frozen=True)
class TileProblem(Problem):
    adjoint: int
    device: str

    @property
    def line(self) -> str:
        values = [v for v in self.__dict__.values() if not isinstance(v, str)]
        return " ".join(map(str, [*values, *DEVICES[self.device]]))

    @property
    def limit(self) -> int:
        return DEVICES[self.device][1]


@dataclass(frozen=True)
class Level:
    own_rows: int
    own_cols: int
    strip_rows: int
    offset: int
    stored_rows: int
    pitch: int


@dataclass(frozen=True)
class Shape:
    kernel_size: int
    levels: int
    tile_rows: int
    tile_cols: int
    group: int
    threads: int
    plane: int
    channel_stride: int
    shared_bytes: int
    level: tuple[Level, ...]


@dataclass(frozen=True)
class Choice:
    forward: Shape
    grad_threads: int
    grad_shared_bytes: int
    grad_output: Shape


def _shape(numbers: Iterator[int]) -> Shape:
    head = list(itertools.islice(numbers, 9))
    levels = [Level(*itertools.islice(numbers, 6)) for _ in range(MAX_TILE_LEVELS + 1)]
    return Shape(*head, level=tuple(levels[: head[1] + 1]))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tile_choice")
    return build(folder, DRIVER, CUDA / "tile" / "choose.cpp")


def choose(driver: Path, problems: list[TileProblem]) -> list[Choice]:
    """The choice for each problem; fails on anything undefined, such as an overflow."""
    lines = "\n".join(problem.line for problem in problems) + "\n"
    done = subprocess.run([driver], input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr == ""
    choices = []
    for line in done.stdout.splitlines():
        numbers = iter([int(word) for word in line.split()])
        choices.append(Choice(_shape(numbers), next(numbers), next(numbers), _shape(numbers)))
    assert len(choices) == len(problems)
    return choices


SIZES = [(1, 1), (7, 7), (1, 300), (14, 14), (28, 30), (56, 56), (131, 257), (512, 512), (5000, 3)]
DTYPES = {"float32": (4, 4), "float16": (4, 2), "float64": (8, 8)}  # accumulator, element bytes

#: The smallest kernel sizes whose least tile, 2 x 2 outputs of one channel, is larger than the
#: shared memory of a block, by device and dtype: forward and input gradient, weight gradient.
#: There is no shape to fall back on: `shared_bytes` is above the limit, and the op has to refuse.
TOO_LARGE = {("sm_86", "float64"): (30, 27)}


def grid(device: str, dtype: str) -> list[TileProblem]:
    axes = itertools.product(SIZES, range(1, 32), (1, 2, 5, 32), (1, 3, 96), (0, 1))
    return [
        TileProblem(8, c, h, w, k, levels, *DTYPES[dtype], layout, (k + c) % 2, device)
        for (h, w), k, levels, c, layout in axes
    ]


def random_problems(device: str, dtype: str) -> list[TileProblem]:
    rng = random.Random(f"{device} {dtype}")
    return [
        TileProblem(
            batch=rng.choice([1, 3, 64, 70000]),
            channels=rng.choice([1, 2, 5, 8, 17, 24, 768, 4096]),
            height=int(2 ** rng.uniform(0, 11)),
            width=int(2 ** rng.uniform(0, 11)),
            kernel_size=rng.randint(1, 31),
            levels=rng.randint(1, 32),
            accumulator_bytes=DTYPES[dtype][0],
            element_bytes=DTYPES[dtype][1],
            channels_last=rng.randint(0, 1),
            adjoint=rng.randint(0, 1),
            device=device,
        )
        for _ in range(1000)
    ]


def check_form(shape: Shape, problem: TileProblem) -> None:
    """Laws of any shape, whatever it is used for."""
    assert shape.kernel_size == problem.kernel_size
    assert 1 <= shape.levels <= min(problem.levels, MAX_TILE_LEVELS), problem
    assert shape.group >= 1
    assert shape.group & (shape.group - 1) == 0, problem
    assert shape.threads % 32 == 0, problem
    assert 0 < shape.threads <= 256, problem
    if shape.plane:
        assert (shape.tile_rows, shape.tile_cols) == (problem.height, problem.width), problem
        assert shape.levels == min(problem.levels, MAX_TILE_LEVELS)
    else:
        assert shape.tile_rows % (1 << shape.levels) == 0, problem
        assert shape.tile_cols % (1 << shape.levels) == 0, problem
    end = 0
    for level, v in enumerate(shape.level):
        assert v.own_rows == -(-shape.tile_rows // (1 << level)), problem
        assert v.own_cols == -(-shape.tile_cols // (1 << level)), problem
        assert v.strip_rows in (1, 2, 4, 8)
        assert v.offset >= end, problem  # levels do not overlap
        assert v.offset % 4 == v.pitch % 4 == 0  # rows of four elements stay aligned
        assert v.stored_rows >= v.own_rows
        assert v.pitch >= v.own_cols
        end = v.offset + (4 if level else 1) * v.stored_rows * v.pitch
    assert shape.channel_stride >= end, problem
    taps = shape.kernel_size**2
    parameters = shape.group * ((1 + 4 * shape.levels) * taps + 1)
    needed = (shape.group * shape.channel_stride + parameters) * problem.accumulator_bytes
    assert shape.shared_bytes >= needed, problem


def check_strips(shape: Shape, problem: TileProblem) -> None:
    """A round of filtering keeps whole bands in the registers of the block."""
    for v in shape.level[1:]:
        strips = -(-v.own_rows // v.strip_rows) * -(-v.own_cols // 4)
        assert strips * (shape.group if problem.channels_last else 1) <= shape.threads, problem


@pytest.mark.parametrize("problems", [grid, random_problems], ids=["grid", "random"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_every_choice_is_a_legal_launch(
    driver: Path, device: str, dtype: str, problems: Callable[[str, str], list[TileProblem]]
) -> None:
    first_forward, first_grad = TOO_LARGE.get((device, dtype), (32, 32))
    sweep = problems(device, dtype)
    for problem, choice in zip(sweep, choose(driver, sweep), strict=True):
        check_form(choice.forward, problem)
        check_strips(choice.forward, problem)
        fits = problem.kernel_size < first_forward
        assert (choice.forward.shared_bytes <= problem.limit) == fits, problem

        check_form(choice.grad_output, problem)
        assert choice.grad_threads % 32 == 0
        assert 0 < choice.grad_threads <= 256
        assert choice.grad_shared_bytes >= (
            choice.grad_output.group * choice.grad_output.channel_stride * problem.accumulator_bytes
        )
        fits = problem.kernel_size < first_grad
        assert (choice.grad_shared_bytes <= problem.limit) == fits, problem


@pytest.mark.parametrize(
    ("side", "dtype"),
    [(56, "float32"), (28, "float32"), (14, "float16"), (7, "float16"), (128, "float32")],
)
def test_planes_of_the_network_stages_stay_on_chip(driver: Path, side: int, dtype: str) -> None:
    problem = TileProblem(64, 96, side, side, 5, 5, *DTYPES[dtype], 0, 0, "sm_90")
    (choice,) = choose(driver, [problem])
    assert choice.forward.plane
    assert choice.forward.levels == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("height", "width", "channels_last"),
    [(13000, 13000, 0), (5000, 5000, 1), (2**24, 128, 0), (2**31 - 1, 1, 0), (1, 2**31 - 1, 0)],
)
def test_huge_planes_are_tiled(
    driver: Path, height: int, width: int, channels_last: int, dtype: str
) -> None:
    problem = TileProblem(1, 96, height, width, 5, 2, *DTYPES[dtype], channels_last, 0, "sm_90")
    (choice,) = choose(driver, [problem])
    for shape in (choice.forward, choice.grad_output):
        check_form(shape, problem)
        assert not shape.plane
    assert 0 < choice.forward.shared_bytes <= problem.limit
    assert 0 < choice.grad_shared_bytes <= problem.limit
