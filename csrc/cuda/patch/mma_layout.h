// Shared memory of the tensor-core kernels, in constant expressions. No CUDA header.
#pragma once

#include <cstdint>

#include "layout.h"

namespace wtconv::cuda {

constexpr int kWarpCols = 16;  // pixels of a warp of the operator along x

// Columns of x behind 8 columns of outputs: groups of 8, and those before the outputs.
constexpr int column_groups(int kernel_size) { return kernel_size <= 5 ? 2 : 3; }
constexpr int column_lead(int kernel_size) { return 4 * (column_groups(kernel_size) - 1); }
// Elements of a row of `cols`, an odd number of pieces of 16 bytes: eight neighbouring rows touch
// different banks.
constexpr int odd_pitch(int cols) { return round_up(cols - 8, 16) + 8; }
// Whether windows and outputs of L levels go in boxes: larger windows are slower (8xCxHxW float16
// on an H200, mean over C = 32 to 128 and H = 128 to 512, K = 5, L = 3: 0.100 ms for 0.096).
constexpr bool takes_boxes(int levels) { return levels < 3; }

// Places in a window W, whose rows of equal position in their cells lie together.
template <class W>
struct CellRows {
  // Where row `row` begins, counted from the window's first.
  template <int kLevel>
  static constexpr int row_at(int row) {
    constexpr int kCell = W::cell(kLevel), kGroup = W::group(kLevel), kPitch = W::pitch(kLevel);
    return row % kCell * kGroup + row / kCell * kPitch;
  }
};
// The same of a tile of one plane: how far a cell, and a column, lie from the tile's first.
template <class W>
struct CellRowsOfPlane : CellRows<W> {
  static constexpr int kGap = 0;  // columns between planes
  template <int kLevel>
  static constexpr int cell_at(int cell) {
    constexpr int kPitch = W::pitch(kLevel);
    return cell * kPitch;
  }
  template <int kLevel>
  static constexpr int col_at(int col) {
    return col;
  }
};

// Where a tile lies in shared memory. Level 0 is the window of x as stored in memory; levels 1 to
// L - 1 are its low-pass bands. Eight rows of pixels (four of level 1, two of level 2) make a cell:
// the rows of equal position in their cells lie together, so that a product reads neighbouring rows
// of each.
template <int K, int L>
struct MmaWindow : CellRowsOfPlane<MmaWindow<K, L>> {
  static constexpr int kRows = 2 * K;  // rows behind two rows of outputs
  static constexpr int kGroups = column_groups(K), kLead = column_lead(K);

  static constexpr int own(int level) { return kPatchTile >> level; }
  static constexpr int cell(int level) { return 8 >> level; }
  static constexpr int halo(int level) { return K / 2 << (L - level); }
  static constexpr int rows(int level) { return own(level) + 2 * halo(level); }
  static constexpr int cells(int level) { return ceil_div(rows(level), cell(level)); }
  // Columns before the tile and after it: at level 0 whole pieces of 16 bytes.
  static constexpr int lead(int level) {
    return round_up(kLead << (L - 1 - level), level == 0 ? 8 : 4);
  }
  static constexpr int cols(int level) { return own(level) + 2 * lead(level); }
  // Stored column of the first: the filter of level 1 reads its inputs in pieces of 16 bytes.
  static constexpr int shift(int level) { return level == 1 ? (lead(1) - kLead) % 8 : 0; }
  static constexpr int pitch(int level) { return odd_pitch(shift(level) + cols(level)); }
  // Row of the window, and stored column, of the tile's first, and of the first input of its first
  // outputs.
  static constexpr int own_row(int level) { return halo(level); }
  static constexpr int own_col(int level) { return shift(level) + lead(level); }
  static constexpr int first_row(int level) { return own_row(level) - K / 2 * 2; }
  static constexpr int first_col(int level) { return own_col(level) - kLead; }
  // Of the taps. With tables, registers spill at three levels (8x32x512x512 float16 K=5 on an H200:
  // 0.160 ms for 0.153).
  static constexpr bool kTables = L < 3;
  // From the rows of one position in their cells to those of the next. A box begins at 128 bytes.
  // Other copies fill pieces of two rows at once, the end of one and the first of the next: they
  // lie in different banks where the groups are 64 bytes past a multiple of that.
  // One expression, without a branch: with one, ptxas takes 168 registers at three levels, spills,
  // and the kernel 17 % more time.
  static constexpr int past(int level) { return level == 0 && !takes_boxes(L) ? 32 : 0; }
  static constexpr int group(int level) {
    return round_up(cells(level) * pitch(level) - past(level), level == 0 ? 64 : 8) + past(level);
  }
  static constexpr int size(int level) { return cell(level) * group(level); }
};

// The products, of 16 rows and 8 columns, that form the low-pass band of level kLevel + 1, and the
// memory for where each thread reads and writes.
template <class W, int kLevel>
struct LowpassProducts {
  static constexpr int kRows = W::cell(kLevel + 1) * W::cells(kLevel + 1);
  // Columns that the window has before the band's first.
  static constexpr int kBefore = W::lead(kLevel) / 2 - W::lead(kLevel + 1);
  static constexpr int kColumns = ceil_div(kBefore + W::cols(kLevel + 1), 8);
  static constexpr int kProducts = ceil_div(kRows, 16) * kColumns;
  static constexpr int kWarps = kPatchThreads / 32, kOfWarp = ceil_div(kProducts, kWarps);
  static constexpr int kWords = W::shift(kLevel) % 8 == 0 ? 1 : 2;  // of a thread and product
  static constexpr int kBytes = kOfWarp * kPatchThreads * kWords * 4;
};
// Bytes of the products of levels 1 to `levels`.
template <class W, int kLevels>
constexpr int lowpass_bytes() {
  if constexpr (kLevels <= 0) {
    return 0;
  } else {
    return lowpass_bytes<W, kLevels - 1>() + LowpassProducts<W, kLevels - 1>::kBytes;
  }
}

// Products that a row of inputs enters at a level: one per row of outputs, but at level 2 both are
// in one.
constexpr int tap_products(int level) { return level < 2 ? 2 : 1; }
// Different fragments of a row of taps, four words each, of two groups of columns (mma_taps.cuh).
constexpr int kTapEntries = 14;
// Whether a level has a table of them: others have the fragments of each lane.
template <class W>
constexpr bool has_tap_table(int level) {
  return W::kGroups == 2 && level < 2 && W::kTables;
}
// Bytes of the taps of a level as the products read them.
template <class W>
constexpr int tap_bytes(int level) {
  if (has_tap_table<W>(level)) return W::kRows * kTapEntries * 16;
  return W::kRows * tap_products(level) * W::kGroups * 32 * 4;
}

// Scaled taps of a channel in float32, as read_scaled() has them: one slot after the other.
template <int K, int L>
struct alignas(16) ChannelTaps {
  float base[K * K];
  // What a coefficient's row and column of the pixel grid add to a pixel of equal (0) or other (1)
  // parity: [2 * rows differ + columns differ].
  float wavelet[L][4][K * K];
  float bias;
  uint32_t largest[L][kPatchThreads / 32];  // magnitude per warp, as the bits of a float32
  float factor[L];                          // that the taps of a level were divided by
};

// Of the levels past 2 of planes, G x G to a tile, in float32: what they are before their filter,
// what after it, and their taps.
template <int K, int G>
struct DeepMemory {
  using P = PlanesMemory<4, K, G>;
  static constexpr int kLevels = P::kLevels, kRaw = P::kSmallFloats * 4, kFiltered = kRaw;
  static constexpr int kTaps = (slot_count(kLevels) - slot_count(2)) * tap_floats(K) * 4;
};

// Shared memory of a block, in bytes: two windows, low-pass bands, outputs, the taps of each level
// as the products read them and before. `kDeeper`: there are levels past the L of a tile, whose
// reconstruction is read.
template <int K, int L, bool kDeeper = false>
struct MmaMemory {
  using W = MmaWindow<K, L>;
  static constexpr int kWindow = W::size(0) * 2;
  static constexpr int band(int level) {
    return level == 1 ? 2 * kWindow : band(level - 1) + W::size(level - 1) * 2;
  }
  static constexpr int kOutputs = round_up(band(L), 1024);
  static constexpr int level_taps(int level) {
    if (level == 0) return kOutputs + kPatchTile * kPatchTile * 2;
    return level_taps(level - 1) + tap_bytes<W>(level - 1);
  }
  static constexpr int kTaps = level_taps(L);
  static constexpr int kBarrier = kTaps + int(sizeof(ChannelTaps<K, L>));
  static constexpr int products(int level) {
    return kBarrier + 16 + (level > 1 ? lowpass_bytes<W, (L > 2 ? L - 2 : 0)>() : 0);
  }
  static constexpr int kBytes = kBarrier + 16 + lowpass_bytes<W, L - 1>();
  // Whether the taps of a level stay in registers, of which a multiprocessor has enough for three
  // blocks then. On an H200, float16, K = 5, in ms, held and read from shared memory, as fragments:
  //
  //   8x64x512x512 L=2   0.207  0.215  (four blocks)
  //   8x64x512x512 L=3   0.298  0.307  (those of level 1)
  //   and not held
  //   8x64x512x512 L=5   0.360  0.337  (four blocks, which hide the wait for what is read)
  static constexpr bool holds(int level) {
    const bool any = K <= 5 && L > 1 && !kDeeper;
    return any && (L == 2 ? level < 2 : level == 1);
  }
  static constexpr int kBlocks =  // memory decides past these
      blocks_of(kBytes, L == 1 || (L == 2 && K <= 5 && !holds(0)) ? 4 : 3);
  // Whether other copies go through the L1 cache, where a tile finds what its window shares with
  // one of another block. Worth 11 % in small windows (8xCxHxW float16 on an H100, mean over C = 32
  // to 128 and H = 128 to 512, K = 5, L = 1: 0.066 ms for 0.074); larger ones on their way leave no
  // room for what is shared (L = 2: 0.100 ms for 0.084, L = 3: 0.121 for 0.100).
  static constexpr bool kCached = W::rows(0) <= 72;
};

// Where a tile of one operand of the weight-gradient kernel lies in shared memory, pixels and, for
// L = 2, LL: x with a halo, or grad_output without. The rows of a cell are four, of LL two: the 16
// rows of a product are those of equal position in 16 cells, and lie together.
template <int K, bool kHalo, int L>
struct MmaGradWindow : CellRowsOfPlane<MmaGradWindow<K, kHalo, L>> {
  static constexpr int kGroups = column_groups(K), kLead = column_lead(K);

  static constexpr int own(int level) { return kPatchTile >> level; }
  static constexpr int cell(int level) { return 4 >> level; }
  static constexpr int halo(int level) { return kHalo ? K / 2 << (L - level) : 0; }
  static constexpr int rows(int level) { return own(level) + 2 * halo(level); }
  static constexpr int cells(int level) { return rows(level) / cell(level); }
  // Columns before the tile: the products' first column is aligned at either level.
  static constexpr int lead(int level) {
    if (!kHalo) return 0;
    return level == L - 1 ? kLead : round_up(2 * lead(level + 1) - kLead, 8) + kLead;
  }
  static constexpr int cols(int level) { return own(level) + 2 * lead(level); }
  static constexpr int shift(int) { return 0; }
  static constexpr int pitch(int level) { return odd_pitch(cols(level)); }
  static constexpr int group(int level) { return cells(level) * pitch(level); }
  static constexpr int size(int level) { return cell(level) * group(level); }
  // One copy. Where x leads by an odd number of four columns, its pieces of 16 bytes in shared
  // memory are not aligned in the plane.
  static constexpr int kPiece = lead(0) % 8 == 0 ? 16 : 8;
};

// What a warp takes of the products of a channel, as its registers hold the sums: rows of
// grad_output of one parity or both, rows of the taps of one or both, and the columns that are left
// to it. `kAllColumns`: all steps of columns are unrolled.
template <int K, int L, int kParitiesOfWarp, int kRowsOfWarp, bool kAllColumns>
struct MmaGradShare {
  using WX = MmaGradWindow<K, true, L>;
  using WG = MmaGradWindow<K, false, L>;
  static constexpr int kKernelSize = K, kLevels = L;
  static constexpr int kParities = kParitiesOfWarp, kRows = kRowsOfWarp;
  static constexpr bool kUnrolls = kAllColumns;
  static constexpr int kShares = kPatchThreads / 32 * kParities * kRows / 4;
  static constexpr int kProducts = kRows * kParities * (WX::kGroups - 1);  // exchanged at once
  static constexpr int kProduct = 4 * 33;                                  // floats
  // Sums between warps: twice those of two rows of taps, a filter per level and parity, the bias.
  static constexpr int kExchange = kPatchThreads / 32 * kProducts * kProduct;
  static constexpr int kFilter = 4 * K * K;  // per parity of both, 2K x 2K
  static constexpr int kScratch = (2 * kExchange + 4 * L * kFilter + kPatchThreads / 32) * 4;
  // The windows of both operands, and LL of both.
  static constexpr int kInput = WX::size(0) * 2, kWindow = kInput + WG::size(0) * 2;
  static constexpr int kLowInput = L > 1 ? WX::size(1) * 2 : 0;
  static constexpr int kLowGrad = L > 1 ? WG::size(1) * 2 : 0;
};

// Shared memory of a block, in bytes: two windows of both operands, LL of both. The exchange of
// sums between warps takes the place of a window.
//
// At two levels all steps at once: a step's loads overlap the products before. On an H200, float16,
// in ms, and step by step: 8x64x512x512 K = 5 0.291 and 0.300, 8x64x256x256 K = 7 0.175 and 0.185;
// at one level, where registers spill, 8x64x512x512 K = 5 0.197 and 0.189.
template <int K, int L>
struct MmaGradMemory : MmaGradShare<K, L, K <= 5 ? 2 : 1, L == 1 ? 2 : 1, (L > 1)> {
  using Share = typename MmaGradMemory::MmaGradShare;
  static constexpr int kFormInput = 2 * Share::kWindow + Share::kLowInput + Share::kLowGrad;
  static constexpr int kBytes = kFormInput + lowpass_bytes<typename Share::WX, L - 1>();
  static constexpr int kBlocks = 3;  // registers decide
  static_assert(Share::kScratch <= Share::kWindow, "fits a window");
};

}  // namespace wtconv::cuda
