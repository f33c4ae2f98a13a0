"""Launch choices and shared-memory layout of the patch kernels, compiled for the host."""

from __future__ import annotations

import itertools
import math
import subprocess
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
from launch_choice import CUDA, DEVICES, build

TILE = 64

# One line in, one line out: forward and weight gradient, each levels, cells, group, bytes, tiles;
# blocks of the latter in a multiprocessor, splits among them, partial sums of a block.
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
    const PatchChoice f = choose_patch(p, d), g = choose_patch_grad(p, d);
    printf("%d %d %d %d %d ", f.levels, f.cells, f.group, f.levels ? patch_bytes(p, f) : 0,
           f.levels ? patch_tiles(p, f) : 0);
    const int tiles = g.levels ? patch_tiles(p, g) : 0;
    const int blocks = tiles ? patch_grad_blocks(p, g) : 0;
    const int splits = tiles ? split_tiles(p.channels, tiles, blocks * d.multiprocessors) : 0;
    printf("%d %d %d %d %d %d %d %d\n", g.levels, g.cells, g.group,
           g.levels ? patch_grad_bytes(p, g) : 0, tiles, blocks, splits,
           splits ? grad_parts(tiles, splits) : 0);
  }
}
"""

# Every window that a kernel is compiled for: what its threads read and write, in stored positions.
LAYOUTS = r"""
#include <cstdio>
#include <vector>
#include "patch/mma_layout.h"
using namespace wtconv::cuda;

static int windows, faults;
static void expect(bool law, const char* what, int element, int radius, int levels, int cells,
                   int level) {
  if (law) return;
  ++faults;
  printf("%s: element %d radius %d levels %d cells %d level %d\n", what, element, radius, levels,
         cells, level);
}

template <int kElement, int R, int L, int G>
void check() {
  using W = Window<kElement, R, L, G>;
  ++windows;
  for (int l = 0; l <= L; ++l) {
    const auto law = [&](bool holds, const char* what) {
      expect(holds, what, kElement, R, L, G, l);
    };
    const int pitch = W::pitch(l), size = W::rows(l) * pitch, own = W::own(l);
    std::vector<int> owner(size, -1);  // cell of an own position
    const int cell = own / (G > 1 ? G : 1);
    for (int y = 0; y < own; ++y) {
      for (int x = 0; x < own; ++x) {
        const int at = l == 0 ? W::stored_pixel(y, x) : W::stored(l, y, x);
        law(at >= 0 && at < size, "an own position lies outside the level");
        if (at < 0 || at >= size) return;
        law(owner[at] < 0, "two positions share an element");
        owner[at] = y / cell * 8 + x / cell;
      }
    }
    // Rows of a thread: 4 x 8 pixels, 2 x 4 coefficients.
    const int rows = l == 0 ? kPatchRows : 2, cols = W::outputs(l), unit = W::unit(l);
    if (cell < (rows > cols ? rows : cols)) continue;  // filtered one at a time, or not at all
    for (int y = 0; y < own; y += rows) {
      for (int x = 0; x < own; x += cols) {
        for (int r = -R; r < rows + R; ++r) {
          const int start = (W::stored_row(l, y) + r) * pitch;
          const int first = W::stored_col(l, x) - R - W::shift(l);
          law(first >= 0 && first % unit == 0, "a row of inputs starts unaligned");
          law(first + W::accesses(l) * unit <= pitch, "a row of inputs ends past its row");
          law(start >= 0 && start + pitch <= size, "a row of inputs lies outside the level");
          if (start < 0 || start + pitch > size) continue;
          for (int c = -R; c < cols + R; ++c) {
            int col = W::stored_col(l, x) + c;
            if (l == 0) col = W::piece(col / unit) * unit + col % unit;
            const int cell_read = owner[start + col];
            law(G == 0 || cell_read < 0 || cell_read == y / cell * 8 + x / cell,
                "a thread reads another plane");
          }
        }
      }
    }
    if (l == 0) continue;
    // What the analysis writes, and reads of the finer level.
    for (int r = 0; r < W::formed_rows(l); ++r) {
      for (int c = 0; c < W::formed_cols(l); ++c) {
        const int y = r - W::first_row(l), x = c - W::first_col(l);
        const int at = W::stored(l, y, x);
        law(W::stored_col(l, x) >= 0 && W::stored_col(l, x) < pitch && at >= 0 && at < size,
            "a formed coefficient lies outside the level");
        const int from = W::stored(l - 1, 2 * y + 1, 2 * x + 1);
        law(W::stored_col(l - 1, 2 * x) >= 0 && W::stored_col(l - 1, 2 * x + 1) < W::pitch(l - 1) &&
                from < W::rows(l - 1) * W::pitch(l - 1) && W::stored(l - 1, 2 * y, 2 * x) >= 0,
            "a coefficient is formed from outside the finer level");
      }
    }
    // Everything within the halo is formed.
    law(W::first_row(l) >= (G > 0 ? 0 : W::halo(l)) && W::first_col(l) >= (G > 0 ? 0 : W::halo(l)),
        "the halo is not formed");
  }
}

template <int kElement, int K>
void check_size() {
  constexpr int R = K / 2;
  check<kElement, R, 1, 0>(), check<kElement, R, 2, 0>();
  if constexpr (K <= kMostForThreeLevels) check<kElement, R, 3, 0>();
  check<kElement, R, 2, 1>(), check<kElement, R, 2, 2>(), check<kElement, R, 2, 4>();
  check<kElement, R, 1, 1>(), check<kElement, R, 1, 2>(), check<kElement, R, 1, 4>();
  check<kElement, R, 1, 8>();
}

template <int kElement>
void check_element() {
  check_size<kElement, 3>(), check_size<kElement, 5>(), check_size<kElement, 7>();
  check_size<kElement, 9>();
  check<kElement, 0, 1, 0>(), check<kElement, 0, 1, 1>(), check<kElement, 0, 1, 2>();
  check<kElement, 0, 1, 4>(), check<kElement, 0, 1, 8>();
}

// An operand of the weight-gradient kernel on tensor cores: a product reads 16 rows four apart.
template <int K, bool kHalo>
void check_operand() {
  using W = MmaGradWindow<K, kHalo>;
  ++windows;
  const auto law = [&](bool holds, const char* what) { expect(holds, what, 2, K / 2, 1, 0, 0); };
  std::vector<bool> taken(W::rows());
  for (int row = 0; row < W::rows(); ++row) {
    const int slot = W::slot(0, row);
    law(slot >= 0 && slot < W::rows() && !taken[slot], "two rows share a slot");
    if (slot < 0 || slot >= W::rows()) return;
    taken[slot] = true;
    law(row % 2 == 1 || W::slot(0, row + 1) == slot + W::cells(), "an odd row is misplaced");
  }
  for (int set = 0; set < (kHalo ? 2 * K + 2 : 4); ++set) {
    for (int m = 0; m < 16; ++m)
      law(W::slot(0, set + 4 * m) == W::slot(0, set) + m, "the rows of a product lie apart");
  }
  law(!kHalo || 2 * K + 1 + 4 * 15 < W::rows(), "a product reads past the window");
  law(W::pitch() % 16 == 8 && W::pitch() >= W::cols(), "eight rows share banks");
  law(!kHalo || kPatchTile - 8 + 8 * W::kGroups <= W::cols(), "a product reads past its row");
  law(W::cols() % (W::kPiece / 2) == 0 && (kPatchTile - W::lead()) * 2 % W::kPiece == 0,
      "a piece is not aligned");
}

// Every tap of every pixel of 8 columns is an element of a product.
template <int K>
void check_products() {
  using S = MmaGradShared<K>;
  check_operand<K, true>(), check_operand<K, false>();
  for (int pixel = 0; pixel < 8; ++pixel) {
    for (int j = 0; j < 2 * K; ++j) {
      const int column = pixel / 2 * 2 + j - S::WX::halo() + S::WX::lead();
      expect(column >= 0 && column < 8 * S::WX::kGroups, "a tap lies outside the product", 2, K / 2,
             1, 0, 0);
    }
  }
  expect(S::kBlocks * (S::kTotal + 1024) <= 228 * 1024, "the blocks do not fit", 2, K / 2, 1, 0, 0);
}

int main() {
  check_element<4>();
  check_element<2>();
  check_products<3>(), check_products<5>(), check_products<7>();
  printf("%d windows, %d faults\n", windows, faults);
}
"""


@dataclass(frozen=True)
class Problem:
    batch: int
    channels: int
    height: int
    width: int
    kernel_size: int
    levels: int
    accumulator_bytes: int
    element_bytes: int
    channels_last: int


@dataclass(frozen=True)
class Choice:
    levels: int
    cells: int
    group: int
    shared_bytes: int
    tiles: int
    grad_levels: int
    grad_cells: int
    grad_group: int
    grad_bytes: int
    grad_tiles: int
    grad_blocks: int
    splits: int
    parts: int


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patch_choice")
    return build(folder, CHOICES, CUDA / "patch" / "choose.cpp")


SIZES = [(1, 1), (7, 7), (14, 14), (28, 30), (56, 56), (64, 65), (33, 200), (131, 257), (512, 512)]


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
    device_line = " ".join(map(str, DEVICES[device]))
    lines = [f"{' '.join(map(str, astuple(p)))} {device_line}" for p in problems]
    done = subprocess.run(
        [driver], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0
    assert done.stderr == ""  # undefined behaviour
    choices = [Choice(*map(int, line.split())) for line in done.stdout.splitlines()]
    _, limit, _ = DEVICES[device]
    taken = 0
    for problem, choice in zip(problems, choices, strict=True):
        taken += choice.levels > 0
        longest = max(problem.height, problem.width)
        unrolled = problem.kernel_size in (3, 5, 7, 9) and problem.accumulator_bytes == 4
        c = choice
        for levels, cells, group, shared_bytes, tiles, most in (
            (c.levels, c.cells, c.group, c.shared_bytes, c.tiles, problem.levels),
            (c.grad_levels, c.grad_cells, c.grad_group, c.grad_bytes, c.grad_tiles, 1),
        ):
            if levels == 0:
                continue
            if group:
                assert problem.channels_last, problem
                assert cells == 1, problem
                assert math.ceil(problem.channels / group) * group <= 2 * problem.channels, problem
            assert unrolled, problem
            assert shared_bytes <= limit, problem
            assert 1 <= levels <= most, problem
            if cells == 0:
                assert longest > TILE or problem.element_bytes == 2, problem
                assert levels <= 3, problem
                assert tiles == problem.batch * math.ceil(problem.height / TILE) * math.ceil(
                    problem.width / TILE
                ), problem
            else:
                assert cells * longest <= TILE, problem
                assert levels == most, problem  # a plane keeps all its levels
                assert cells << levels <= TILE, problem  # the coarsest cell is not empty
                assert tiles == math.ceil(problem.batch / cells**2), problem
        if choice.grad_levels:
            if choice.grad_group:
                held = DEVICES["sm_90"][2] // (choice.grad_bytes + 1024)
                assert 1 <= choice.grad_blocks <= max(held, 1), problem
            assert 1 <= choice.splits <= choice.grad_tiles, problem
            if problem.element_bytes == 2 and choice.grad_cells == 0:
                assert 3 * (choice.grad_bytes + 1024) <= DEVICES["sm_90"][2], problem
            tiles_of_part = math.ceil(choice.grad_tiles / choice.splits) / choice.parts
            assert 0 < tiles_of_part <= 16, problem
    assert taken > len(problems) / 8
    assert {choice.group for choice in choices} == {0, 4, 8, 16, 32}


def test_threads_read_and_write_where_the_layout_says(tmp_path: Path) -> None:
    program = build(tmp_path, LAYOUTS)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].endswith(" windows, 0 faults"), done.stdout[:2000]
