// Shared memory of the tensor-core kernels for planes G x G to a tile. No CUDA header.
#pragma once

#include <algorithm>

#include "mma_layout.h"

namespace wtconv::cuda {

// Where whole planes and their low-pass band lie in shared memory, in cells of kCellRows rows of
// pixels as in MmaWindow (8) or MmaGradWindow (4). Where `kZeros`, zeros part them, the padding of
// the convolution: cells above each plane, which end the one before it, and columns before each.
// The zeros before a row end the row before it.
template <int K, int G, int kCellRows, bool kZeros = true>
struct MmaPlanesWindow : CellRows<MmaPlanesWindow<K, G, kCellRows, kZeros>> {
  static constexpr int kRows = 2 * K, kGroups = column_groups(K), kLead = column_lead(K);
  static constexpr bool kTables = true;
  static constexpr int kCells = kPatchTile / kCellRows;

  static constexpr int own(int level) { return kPatchTile >> level; }
  static constexpr int plane(int level) { return own(level) / G; }
  static constexpr int cell(int level) { return kCellRows >> level; }
  // Zeros: what taps reach, in whole cells; columns before the tile, of pixels such that either its
  // first or that of the products is aligned; columns between planes.
  static constexpr int zero_cells(int level) {
    return kZeros ? ceil_div(K / 2 * 2, cell(level)) : 0;
  }
  static constexpr int lead(int level) {
    return !kZeros ? 0 : kCellRows == 8 && level == 0 ? 8 : kLead;
  }
  static constexpr int kGap = kZeros ? 8 : 0;
  static constexpr int pitch(int level) {
    return odd_pitch(lead(level) + own(level) + (G - 1) * kGap);
  }
  // Between the cells of two planes: a multiple of all banks, so that the cells of a product lie as
  // far apart in them as without.
  static constexpr int gap(int level) {
    return kZeros && G > 1 ? round_up(zero_cells(level) * pitch(level), 64) : 0;
  }
  // From the rows of one position in their cells to those of the next.
  static constexpr int group(int level) {
    return (zero_cells(level) + kCells) * pitch(level) + (G - 1) * gap(level);
  }
  // Behind the last rows, cells of zeros and what their last product reads past them.
  static constexpr int size(int level) {
    return cell(level) * group(level) + (kZeros ? zero_cells(level) * pitch(level) + 8 : 0);
  }

  // Row of the window, and stored column, of the tile's first, and of the first input of its first
  // outputs.
  static constexpr int halo(int level) { return zero_cells(level) * cell(level); }
  static constexpr int own_row(int level) { return halo(level); }
  static constexpr int own_col(int level) { return lead(level); }
  static constexpr int first_row(int level) { return own_row(level) - K / 2 * 2; }
  static constexpr int first_col(int level) { return own_col(level) - kLead; }
  template <int kLevel>
  static constexpr int cell_at(int cell) {
    constexpr int kPitch = pitch(kLevel), kBetween = gap(kLevel);
    return cell * kPitch + cell / (kCells / G) * kBetween;
  }
  template <int kLevel>
  static constexpr int col_at(int col) {
    constexpr int kPlane = plane(kLevel);
    return col + col / kPlane * kGap;
  }
  static constexpr int pixel_at(int row, int col) {
    return MmaPlanesWindow::template row_at<0>(own_row(0) + row % kCellRows) +
           cell_at<0>(row / kCellRows) + own_col(0) + col_at<0>(col);
  }
};

// Shared memory of a block, in bytes: two windows, which outputs take the place of; LL1; the levels
// past 2 before their filter and after it; the taps of the levels as the products read them and
// before.
template <int K, int G>
struct MmaPlanesMemory {
  using W = MmaPlanesWindow<K, G, 8>;
  using Deep = DeepMemory<K, G>;
  static constexpr int kWindow = round_up(W::size(0) * 2, 16);
  static constexpr int kLowpass = 2 * kWindow;
  static constexpr int kRaw = kLowpass + round_up(W::size(1) * 2, 16);
  static constexpr int kFiltered = kRaw + Deep::kRaw;
  static constexpr int level_taps(int level) {
    return kFiltered + Deep::kFiltered + level * tap_bytes<W>(0);
  }
  static constexpr int kTaps = level_taps(2);
  static constexpr int kDeepTaps = kTaps + int(sizeof(ChannelTaps<K, 2>));
  static constexpr int kBytes = kDeepTaps + Deep::kTaps;
  static_assert(kBytes <= 99 * 1024, "fits a block of sm_86, for no other kernel takes the planes");
  static constexpr int kBlocks = blocks_of(kBytes, 4);
};

// The same of the weight-gradient kernel: two windows of both operands, LL of both. The exchange of
// sums between warps takes the place of a window.
template <int K, int L, int G>
struct MmaPlanesGradMemory : MmaGradMemory<K, L>::Share {
  using Share = typename MmaGradMemory<K, L>::Share;
  using WX = MmaPlanesWindow<K, G, 4>;
  using WG = MmaPlanesWindow<K, G, 4, false>;
  static constexpr int kInput = round_up(WX::size(0) * 2, 16);
  static constexpr int kWindow = std::max(kInput + WG::size(0) * 2, round_up(Share::kScratch, 16));
  static constexpr int kLowInput = L > 1 ? round_up(WX::size(1) * 2, 16) : 0;
  static constexpr int kLowGrad = L > 1 ? WG::size(1) * 2 : 0;
  static constexpr int kBytes = 2 * kWindow + kLowInput + kLowGrad;
  static constexpr int kBlocks = MmaGradMemory<K, L>::kBlocks;
};

}  // namespace wtconv::cuda
