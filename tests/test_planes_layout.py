"""Layout of whole planes on tensor cores (mma_planes_layout.h), compiled for the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launch_choice import build

# Every window that a kernel is compiled for: what its products read belongs to the plane whose
# outputs they give, or to no plane.
LAYOUTS = r"""
#include <cstdio>
#include <vector>
#include "patch/mma_group_layout.h"
#include "patch/mma_planes_layout.h"
using namespace wtconv::cuda;

static int windows, faults;

template <int K, int G, int kCellRows, bool kZeros, int l>
void check_level() {
  using W = MmaPlanesWindow<K, G, kCellRows, kZeros>;
  ++windows;
  const auto law = [](bool holds, const char* what) {
    if (holds) return;
    ++faults;
    printf("%s: K %d planes %d cells of %d level %d\n", what, K, G, kCellRows, l);
  };
  constexpr int kOwn = W::own(l), kPlane = W::plane(l), kCell = W::cell(l), kSize = W::size(l);
  const auto plane_of = [](int row, int col) { return row / kPlane * G + col / kPlane; };
  std::vector<int> owner(kSize, -1);
  for (int y = 0; y < kOwn; ++y) {
    for (int x = 0; x < kOwn; ++x) {
      const int at = W::template row_at<l>(W::own_row(l) + y % kCell) +
                     W::template cell_at<l>(y / kCell) + W::own_col(l) + W::template col_at<l>(x);
      law(at >= 0 && at < kSize, "a position lies outside the window");
      if (at < 0 || at >= kSize) return;
      law(owner[at] < 0, "two positions share an element");
      if (l == 0) law(at == W::pixel_at(y, x), "a pixel lies elsewhere");
      owner[at] = plane_of(y, x);
    }
  }
  law(W::group(l) % 8 == 0 && W::pitch(l) % 8 == 0, "a row is not aligned");
  // Rows of taps above and below those of the outputs, one of each cell at a time.
  const int first = kZeros ? W::first_row(l) : 0, rows = kZeros ? 2 * K + kCell - 2 : kCell;
  law(first >= 0 && first % 2 == 0, "the first row of a product is odd");
  // The operator: what the columns of a warp see. Gradients: what 8 columns meet.
  const int outputs = kCellRows == 8 ? kWarpCols >> l : 8;
  const int columns = kZeros ? outputs - 8 + 8 * W::kGroups : 8;
  for (int i = first; i < first + rows; ++i) {
    for (int eight = 0; eight < W::kCells; eight += 8) {
      unsigned banks = 0;
      for (int cell = eight; cell < eight + 8; ++cell) {
        const int row = W::template row_at<l>(i) + W::template cell_at<l>(cell);
        banks |= 1u << row / 8 % 8;
        for (int col = 0; col < kOwn; col += outputs) {
          const int lead = kZeros ? W::kLead : 0;
          const int left = row + W::own_col(l) - lead + W::template col_at<l>(col);
          law(left % (l == 1 || kCellRows == 4 || W::kGroups > 2 ? 8 : 2) == 0,
              "a row of a product is not aligned");
          law(left >= 0 && left + columns <= kSize, "a product reads past the window");
          if (left < 0 || left + columns > kSize) return;
          const int plane = plane_of(cell * kCell, col);
          for (int c = left; c < left + columns; ++c)
            law(owner[c] < 0 || owner[c] == plane, "a product meets two planes");
        }
      }
      law(banks == 0xff, "rows of a product meet in a bank");
    }
  }
}

template <int K, int G, int kCellRows, bool kZeros>
void check_window() {
  check_level<K, G, kCellRows, kZeros, 0>();
  check_level<K, G, kCellRows, kZeros, 1>();
}

template <int K, int G>
void check_planes() {
  check_window<K, G, 8, true>();
  using M = MmaPlanesMemory<K, G>;
  const bool parts = M::kLowpass % 16 == 0 && M::kRaw % 16 == 0 && M::level_taps(0) % 16 == 0 &&
                     M::kTaps % 16 == 0 && M::kDeepTaps % 16 == 0;
  const bool fits = M::kBlocks > 1 && M::kBlocks * (M::kBytes + 1024) <= 228 * 1024;
  if (!parts || !fits) ++faults, printf("memory of the operator: K %d planes %d\n", K, G);
}
template <int K, int G>
void check_gradients() {
  check_window<K, G, 4, true>(), check_window<K, G, 4, false>();
  using M = MmaPlanesGradMemory<K, 2, G>;
  const bool parts = M::kInput % 16 == 0 && M::kWindow % 16 == 0 && M::kLowInput % 16 == 0;
  const bool fits = M::kScratch <= M::kWindow && M::kBlocks * (M::kBytes + 1024) <= 228 * 1024;
  if (!parts || !fits) ++faults, printf("memory of the gradients: K %d planes %d\n", K, G);
}
// Channels_last planes: where the pixels of each item and channel lie in the windows, as
// mma_group.cu spreads them.
template <int K, int G>
void check_group() {
  using M = MmaGroupMemory<K, G>;
  using W = typename M::W;
  constexpr int kSide = W::plane(0), kWindow = M::kWindow / 2;  // elements
  bool parts = true, fits = M::bytes(kSide, kSide) <= 227 * 1024;
  for (const int part :
       {M::kWindow, M::kOwn, M::kRaw, M::kFiltered, M::kTeam, M::kChannels, M::table(1),
        M::kDeepTaps, M::kFactors, M::kChannel, M::kPlaces, M::kPixels})
    parts &= part % 16 == 0;
  fits &= M::kItems * kSide * kSide == 2 * M::kPairs && M::kWindows % M::kTeams == 0;
  std::vector<bool> taken(M::kWindows * kWindow);
  bool places = true;
  for (int item = 0; item < M::kItems; ++item) {
    for (int c = 0; c < M::kGroup; ++c) {
      const int window = item / G * M::kOfItems + c / G, y = item % G * kSide, x = c % G * kSide;
      for (int row = 0; row < kSide; ++row) {
        for (int col = 0; col < kSide; ++col) {
          const int pixel = window * kWindow + W::pixel_at(row, col);
          const int at =
              pixel + W::template cell_at<0>(item % G * (W::kCells / G)) + W::template col_at<0>(x);
          places &= at < int(taken.size()) && !taken[at] && at % 2 == col % 2;
          places &= at == window * kWindow + W::pixel_at(y + row, x + col);
          if (places) taken[at] = true;
        }
      }
    }
  }
  if (!parts || !fits || !places) ++faults, printf("memory of a group: K %d planes %d\n", K, G);
}
template <int K>
void check_kernel_size() {
  check_planes<K, 1>(), check_planes<K, 2>(), check_planes<K, 4>();
  check_gradients<K, 2>(), check_gradients<K, 4>();
}

int main() {
  check_kernel_size<3>(), check_kernel_size<5>(), check_kernel_size<7>();
  check_group<3, 1>(), check_group<3, 2>(), check_group<3, 4>();
  check_group<5, 1>(), check_group<5, 2>(), check_group<5, 4>();
  printf("%d windows, %d faults\n", windows, faults);
}
"""


def test_products_read_their_own_plane_and_the_zeros_around_it(tmp_path: Path) -> None:
    program = build(tmp_path, LAYOUTS)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "42 windows, 0 faults", done.stdout[:2000]
