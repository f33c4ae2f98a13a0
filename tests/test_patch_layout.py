"""Layout of the patch kernels in shared memory (layout.h, mma_layout.h), compiled for the host."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launch_choice import build

# Every window that a kernel is compiled for: what its threads read and write, in stored positions.
LAYOUTS = r"""
#include <algorithm>
#include <cstdio>
#include <vector>
#include "patch/group_layout.h"
#include "patch/mma_layout.h"
using wtconv::kSubbands;
using namespace wtconv::cuda;

static int windows, faults;
static void expect(bool law, const char* what, int element, int radius, int levels, int cells,
                   int level) {
  if (law) return;
  ++faults;
  printf("%s: element %d radius %d levels %d cells %d level %d\n", what, element, radius, levels,
         cells, level);
}

// What a thread with rows x cols outputs reads of a level, in accesses of `cols`.
template <class W, int R, class Law>
void check_inputs(int l, int band, int rows, int cols, const std::vector<int>& owner, Law law) {
  constexpr int G = W::kPlanes ? W::kCells : 0;
  const int pitch = W::pitch(l, band), size = W::rows(l, band) * pitch, own = W::own(l);
  const int cell = own / (G > 1 ? G : 1);
  if (cell < (rows > cols ? rows : cols)) return;  // filtered one at a time, or not at all
  for (int y = 0; y < own; y += rows) {
    for (int x = 0; x < own; x += cols) {
      for (int r = -R; r < rows + R; ++r) {
        const int start = (W::stored_row(l, y, band) + r) * pitch;
        const int first = W::stored_col(l, x, band) - R - W::shift(l, cols);
        law(first >= 0 && first % cols == 0, "a row of inputs starts unaligned", l);
        law(first + W::accesses(l, cols) * cols <= pitch, "a row of inputs ends past its row", l);
        law(start >= 0 && start + pitch <= size, "a row of inputs lies outside the level", l);
        if (start < 0 || start + pitch > size) continue;
        for (int c = -R; c < cols + R; ++c) {
          const int cell_read = owner[start + W::stored_col(l, x, band) + c];
          law(G == 0 || cell_read < 0 || cell_read == y / cell * 8 + x / cell,
              "a thread reads another plane", l);
        }
      }
    }
  }
}

// The positions of one level, or of one of its bands.
template <class W, int R, class Law>
void check_band(int l, int band, Law law) {
  constexpr int G = W::kPlanes ? W::kCells : 0;
  const int pitch = W::pitch(l, band), size = W::rows(l, band) * pitch, own = W::own(l);
  std::vector<int> owner(size, -1);  // cell of an own position
  const int cell = own / (G > 1 ? G : 1);
  for (int y = 0; y < own; ++y) {
    for (int x = 0; x < own; ++x) {
      const int at =
          l == 0 ? W::stored_pixel(y, x) : W::stored(l, band, y, x) - W::offset(l, band);
      law(at >= 0 && at < size, "an own position lies outside the level", l);
      if (at < 0 || at >= size) return;
      law(owner[at] < 0, "two positions share an element", l);
      owner[at] = y / cell * 8 + x / cell;
    }
  }
  using P = typename W::ThreadPatch;
  if (l <= 1) check_inputs<W, R>(l, band, P::kRows >> l, P::kCols >> l, owner, law);
  if (l == 1) check_inputs<W, R>(l, band, 4, 4, owner, law);  // sums of weight gradients
  if (l >= 2) check_inputs<W, R>(l, band, 2, 4, owner, law);
}

// The patches of a tile: each pixel is one thread's, 16 bytes of a row.
template <int kElement>
void check_patch() {
  using P = Patch<kElement>;
  const auto law = [](bool holds, const char* what) { expect(holds, what, kElement, 0, 0, 0, 0); };
  law(P::kCols * kElement == 16 && P::kAcross * P::kCols == kPatchTile, "a row is no access");
  law(kPatchThreads % P::kAcross == 0 && kPatchThreads / P::kAcross * P::kRows == kPatchTile,
      "the patches are no tile");
  law(P::kRows % 4 == 0 && P::kCols % 4 == 0, "a thread has no whole coefficients of level 2");
}

template <int kElement, int R, int L, int G>
void check() {
  using W = Window<kElement, R, L, G>;
  ++windows;
  const auto law = [](bool holds, const char* what, int level) {
    expect(holds, what, kElement, R, L, G, level);
  };
  for (int l = 0; l <= L; ++l) {
    for (int band = 0; band < (l == 0 ? 1 : 2); ++band) check_band<W, R>(l, band, law);
    if (l == 0) continue;
    // What the analysis writes, and reads of the finer level.
    for (int r = 0; r < W::formed_rows(l); ++r) {
      for (int c = 0; c < W::formed_cols(l); ++c) {
        const int y = r - W::first_row(l), x = c - W::first_col(l);
        for (int band = 0; band < kSubbands; ++band) {
          if (band > 0 && !W::uniform(l) && !W::holds(l, 1, y, x)) continue;
          const int at = W::stored(l, band, y, x) - W::offset(l, band);
          law(W::stored_col(l, x, band) >= 0 && W::stored_col(l, x, band) < W::pitch(l, band) &&
                  at >= 0 && at < W::size(l, band > 0),
              "a formed coefficient lies outside its band", l);
        }
        const int from = W::stored(l - 1, 0, 2 * y + 1, 2 * x + 1),
                  first = W::stored(l - 1, 0, 2 * y, 2 * x),
                  begin = l == 1 ? 0 : W::offset(l - 1), size = W::rows(l - 1) * W::pitch(l - 1);
        const int left = W::stored_col(l - 1, 2 * x), right = W::stored_col(l - 1, 2 * x + 1);
        const bool within = l == 1 || (first >= begin && from < begin + size);
        law(left >= 0 && right < W::pitch(l - 1) && within,
            "a coefficient is formed from outside the finer level", l);
        if (l == 1) {
          law(W::stored_pixel(2 * y, 2 * x) >= 0 && W::stored_pixel(2 * y + 1, 2 * x) < size,
              "a coefficient is formed from outside the window", l);
        }
      }
    }
    // Everything within the halo is formed.
    for (int band = 0; band < 2; ++band) {
      const int halo = G > 0 ? 0 : W::halo(l, band);
      law(W::first_row(l) >= halo && W::first_col(l) >= halo, "the halo is not formed", l);
      law(W::holds(l, band, -halo, -halo) &&
              W::holds(l, band, W::own(l) + halo - 1, W::own(l) + halo - 1),
          "the halo is not stored", l);
    }
    law(W::offset(l, kSubbands) - W::offset(l, 1) == 3 * W::size(l, 1), "bands overlap", l);
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

// A window that one bulk copy fills, and its place in shared memory.
template <class W>
void check_box(int offset) {
  const auto law = [](bool holds, const char* what) {
    expect(holds, what, 4, W::halo(1, 1), 0, 0, 0);
  };
  const auto box = W::box();
  law(offset % 128 == 0, "a box is not aligned");
  law(W::lead(0) * 4 % 16 == 0 && box.cols * 4 % 16 == 0, "a box does not consist of pieces");
  law(box.cols <= 256 && box.rows <= 256, "a box is too large");
  law(box.rows * box.cols * 4 == W::kPixelBytes, "a box is not the window");
}

template <int K, int L>
void check_forward() {
  using M = ForwardMemory<K, L>;
  const auto law = [](bool holds, const char* what) { expect(holds, what, 4, K / 2, L, 0, 0); };
  check_box<typename M::W>(0);
  law(M::kBarrier % 8 == 0 && M::kBarrier + 8 <= M::kBytes, "the barrier is misplaced");
  law(M::kBlocks * (M::kBytes + 1024) <= 228 * 1024 && M::kBlocks > 1, "the blocks do not fit");
}

template <int K>
void check_gradient() {
  using M = GradMemory<4, K, 0>;
  const auto law = [](bool holds, const char* what) { expect(holds, what, 4, K / 2, 1, 0, 0); };
  check_box<typename M::WG>(0), check_box<typename M::WX>(M::kInput);
  law(M::kBarrier % 8 == 0 && M::kBarrier + 8 <= M::kBytes, "the barrier is misplaced");
  law(M::kBlocks * (M::kBytes + 1024) <= 228 * 1024 && M::kBlocks > 1, "the blocks do not fit");
}

// Blocks of the forward kernel on groups of channels: no more threads than it is compiled for.
static void check_groups() {
  for (int size = 0; size < 64 * 64; ++size) {
    const int height = size / 64 + 1, width = size % 64 + 1, longest = std::max(height, width);
    for (const int group : {group_of(longest), largest_group_of(longest)}) {
      for (const int kernel_size : {3, 5, 7}) {
        for (int levels = 1; levels < kMaxLaunchLevels; ++levels) {
          const GroupForwardMemory m(height, width, kernel_size, levels, group);
          const auto law = [&](bool holds, const char* what) {
            expect(holds, what, height, width, levels, kernel_size, group);
          };
          law(m.planes * m.threads <= group_threads(group), "a block has too many threads");
          law(m.threads % 32 == 0, "a team has part of a warp");
          law(m.bytes > 227 * 1024 || m.blocks() * (m.bytes + 1024) <= 228 * 1024,
              "the blocks do not fit");
        }
      }
    }
  }
}

template <int kElement>
void check_element() {
  check_size<kElement, 3>(), check_size<kElement, 5>(), check_size<kElement, 7>();
  check_size<kElement, 9>();
  check<kElement, 0, 1, 0>(), check<kElement, 0, 1, 1>(), check<kElement, 0, 1, 2>();
  check<kElement, 0, 1, 4>(), check<kElement, 0, 1, 8>();
}

// Where the rows of a level on tensor cores lie.
template <class W, int kLevel, class Law>
void check_rows(Law law) {
  constexpr int kPitch = W::pitch(kLevel), kCells = W::cells(kLevel), kCell = W::cell(kLevel);
  std::vector<bool> taken(W::size(kLevel));
  for (int row = 0; row < W::rows(kLevel); ++row) {
    const int at = W::template row_at<kLevel>(row);
    law(at >= 0 && at + kPitch <= W::size(kLevel), "a row lies outside the level");
    if (at < 0 || at + kPitch > W::size(kLevel)) return;
    for (int i = at; i < at + kPitch; ++i) {
      law(!taken[i], "two rows share an element");
      taken[i] = true;
    }
    law(row % 2 == 1 || W::template row_at<kLevel>(row + 1) == at + W::group(kLevel),
        "an odd row is misplaced");
    if constexpr (kLevel > 0) {
      const int slot = row % kCell * kCells + row / kCell;
      const int finer =
          slot / kCells * 2 * W::group(kLevel - 1) + slot % kCells * W::pitch(kLevel - 1);
      law(at == slot * kPitch, "a coefficient goes to another row");
      law(W::template row_at<kLevel - 1>(2 * row) == finer,
          "a coefficient is formed of other rows");
    }
  }
  law(W::shift(kLevel) + W::cols(kLevel) <= kPitch, "a row ends past its pitch");
  law(kPitch % 16 == 8, "eight rows share banks");
}

// The rows of a product, one of each cell from row `first` on.
template <class W, int kLevel, class Law>
void check_product(int first, int rows, Law law) {
  const int start = W::template row_at<kLevel>(first);
  for (int m = 0; m < rows; ++m) {
    law(first + W::cell(kLevel) * m < W::rows(kLevel), "a product reads past the rows");
    law(W::template row_at<kLevel>(first + W::cell(kLevel) * m) == start + m * W::pitch(kLevel),
        "the rows of a product lie apart");
  }
}

// The products that form the band of level kLevel + 1: 16 rows and 8 columns each.
template <class W, int kLevel, class Law>
void check_band_products(Law law) {
  using P = LowpassProducts<W, kLevel>;
  constexpr int kNext = kLevel + 1, kCols = W::cols(kNext), kFiner = W::cols(kLevel) / 2;
  law(W::cells(kNext) == W::cells(kLevel), "a cell of the band is not one of the finer level");
  law(P::kBefore >= 0 && P::kBefore + kCols <= kFiner, "the band needs columns that are not there");
  law(P::kOfWarp * P::kWarps >= P::kProducts && P::kOfWarp * P::kWarps - P::kWarps < P::kProducts,
      "the warps have other products");
  law(P::kBytes == P::kOfWarp * kPatchThreads * P::kWords * 4, "the products need other memory");
  // Half a word each, of which one bit and one value have a meaning of their own.
  law(W::size(kLevel) + 16 <= 1 << 16 && W::size(kNext) < (1 << 15) - 1, "a place is too large");
  std::vector<int> formed(P::kRows * kCols);
  for (int product = 0; product < P::kProducts; ++product) {
    const int row = product / P::kColumns * 16, first = product % P::kColumns * 8;
    const int col = first < kFiner - 8 ? first : kFiner - 8, left = W::shift(kLevel) + 2 * col;
    law(left % (P::kWords == 1 ? 8 : 2) == 0, "the inputs of a product are not aligned");
    law(left + 16 <= W::pitch(kLevel), "a product reads past its row");
    law((W::shift(kNext) + col - P::kBefore) % 2 == 0, "two columns are no word");
    for (int r = row; r < row + 16 && r < P::kRows; ++r) {
      for (int c = col - P::kBefore; c < col - P::kBefore + 8; ++c)
        if (c >= first - P::kBefore && c >= 0 && c < kCols) ++formed[r * kCols + c];
    }
  }
  for (const int times : formed) law(times == 1, "a coefficient is not formed once");
}

// A level of a tile on tensor cores, and what its products read.
template <int K, int L, int l>
void check_tile_level() {
  using W = MmaWindow<K, L>;
  using M = MmaMemory<K, L>;
  ++windows;
  const auto law = [&](bool holds, const char* what) { expect(holds, what, 2, K / 2, L, 0, l); };
  check_rows<W, l>(law);
  law(l == 0 || W::cells(l) * W::cell(l) == W::rows(l), "not every stored row is formed");
  // Rows of taps above and below two rows of outputs, of which a product has one of each cell.
  const int own = W::own(l);
  law(W::first_row(l) >= 0 && W::first_row(l) + own + W::kRows - 2 <= W::rows(l),
      "a product reads outside of the rows");
  for (int i = 0; i < W::kRows + W::cell(l) - 2; ++i)
    check_product<W, l>(W::first_row(l) + i, 8, law);
  // Columns: 8 outputs and kLead on both sides, at level 2 four outputs.
  const int last = own + W::kLead, first = W::first_col(l) - W::shift(l);
  law(first >= 0 && first + W::kLead + last <= W::cols(l), "a product reads past the columns");
  law(W::first_col(l) % (l == 1 || W::kGroups > 2 ? 8 : 2) == 0, "a row of a product unaligned");
  law(M::band(l + 1) % 16 == 0 && M::level_taps(l) % 16 == 0, "a part of the memory is unaligned");
  if constexpr (l + 1 < L) {
    const int bytes = LowpassProducts<W, l>::kBytes;
    check_band_products<W, l>(law);
    law(M::products(l + 1) % 4 == 0 && M::products(l + 1) + bytes <= M::kBytes &&
            (l + 2 == L || M::products(l + 1) + bytes <= M::products(l + 2)),
        "the places of products overlap");
    check_tile_level<K, L, l + 1>();
  }
}

template <int K, int L>
void check_tile() {
  using W = MmaWindow<K, L>;
  using M = MmaMemory<K, L>;
  const auto law = [&](bool holds, const char* what) { expect(holds, what, 2, K / 2, L, 0, 0); };
  check_tile_level<K, L, 0>();
  // Boxes, whose extents the hardware limits; else pieces, of which eight threads write 128 bytes.
  if (takes_boxes(L)) {
    law(W::group(0) % 64 == 0 && M::kWindow % 128 == 0, "a box of a window is not aligned");
  } else {
    constexpr int kColumns = W::cols(0) / 8, kStep = kPatchThreads / kColumns / 8 * 8;
    for (int first = 0; first < kStep * kColumns; first += 8) {
      unsigned banks = 0;
      for (int t = first; t < first + 8; ++t)
        banks |= 1u << (W::template row_at<0>(t / kColumns) / 8 + t % kColumns) % 8;
      law(banks == 0xff, "pieces of a copy meet in a bank");
    }
  }
  law(M::kOutputs % 1024 == 0 && M::kOutputs >= M::band(L), "a box of outputs is not aligned");
  law(W::lead(0) % 8 == 0 && W::pitch(0) % 8 == 0, "a box does not consist of pieces");
  law(W::pitch(0) <= 256 && W::cells(0) * W::cell(0) <= 256, "a box is too large");
  law(M::kBarrier % 8 == 0, "the barrier is not aligned");
  law(M::kBlocks * (M::kBytes + 1024) <= 228 * 1024 && M::kBlocks > 1, "the blocks do not fit");
}

// An operand of the weight-gradient kernel on tensor cores: a product reads 16 rows of a level, one
// of each cell.
template <int K, bool kHalo, int L, int kLevel>
void check_operand() {
  using W = MmaGradWindow<K, kHalo, L>;
  constexpr int kCell = W::cell(kLevel);
  ++windows;
  const auto law = [&](bool holds, const char* what) {
    expect(holds, what, 2, K / 2, L, 0, kLevel);
  };
  check_rows<W, kLevel>(law);
  const int first = kHalo ? W::halo(kLevel) - K / 2 * 2 : 0;
  const int sets = kHalo ? 2 * K + kCell - 2 : kCell;
  law(first % 2 == 0, "the first row of a product is odd");
  for (int set = first; set < first + sets; ++set) check_product<W, kLevel>(set, 16, law);
  const int left = kHalo ? W::lead(kLevel) - W::kLead : 0;
  law(left >= 0 && left % 8 == 0, "a product is not aligned");
  law(!kHalo || left + W::own(kLevel) - 8 + 8 * W::kGroups <= W::cols(kLevel),
      "a product reads past its row");
  law(W::cols(0) % (W::kPiece / 2) == 0 && (kPatchTile - W::lead(0)) * 2 % W::kPiece == 0,
      "a piece is not aligned");
  if constexpr (kLevel > 0) {
    law(2 * W::halo(1) == W::halo(0), "LL needs rows that the window lacks");
    check_band_products<W, 0>(law);
  }
}

// Every tap of every pixel of 8 columns is an element of a product.
template <int K, int L>
void check_products() {
  using M = MmaGradMemory<K, L>;
  const auto law = [&](bool holds, const char* what) { expect(holds, what, 2, K / 2, L, 0, 0); };
  check_operand<K, true, L, 0>(), check_operand<K, false, L, 0>();
  if constexpr (L > 1) check_operand<K, true, L, 1>(), check_operand<K, false, L, 1>();
  for (int pixel = 0; pixel < 8; ++pixel) {
    for (int j = 0; j < 2 * K; ++j) {
      const int column = pixel / 2 * 2 + j - K / 2 * 2 + M::WX::kLead;
      law(column >= 0 && column < 8 * M::WX::kGroups, "a tap lies outside the product");
    }
  }
  law(M::kBlocks * (M::kBytes + 1024) <= 228 * 1024, "the blocks do not fit");
}

int main() {
  check_groups();
  check_patch<4>(), check_patch<2>();
  check_element<4>();
  check_element<2>();
  check_forward<3, 1>(), check_forward<3, 2>(), check_forward<3, 3>();
  check_forward<5, 1>(), check_forward<5, 2>(), check_forward<5, 3>();
  check_gradient<3>(), check_gradient<5>(), check_gradient<7>();
  check_forward<7, 1>(), check_forward<7, 2>(), check_forward<9, 1>(), check_forward<9, 2>();
  check_tile<3, 1>(), check_tile<3, 2>(), check_tile<3, 3>();
  check_tile<5, 1>(), check_tile<5, 2>(), check_tile<5, 3>();
  check_tile<7, 1>(), check_tile<7, 2>(), check_tile<9, 1>(), check_tile<9, 2>();
  check_products<3, 1>(), check_products<5, 1>(), check_products<7, 1>();
  check_products<3, 2>(), check_products<5, 2>(), check_products<7, 2>();
  printf("%d windows, %d faults\n", windows, faults);
}
"""


def test_threads_read_and_write_where_the_layout_says(tmp_path: Path) -> None:
    program = build(tmp_path, LAYOUTS)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].endswith(" windows, 0 faults"), done.stdout[:2000]
