// Shared memory of the patch kernels, in constant expressions that kernels and launch choices
// share. No CUDA header.
#pragma once

#include "../box.h"
#include "../rounding.h"
#include "patch.h"

namespace wtconv::cuda {

// Where a tile lies in shared memory. Level 0 is the window of x as stored in memory, in elements
// of kElement bytes; levels 1..L are four bands each, in float32. Band 0 is the low-pass band.
//
// G = 0: a tile of a large plane, with a halo of R coefficients at its coarsest level and in every
// band, of more where a low-pass band makes a coarser level. G > 0: whole planes, G x G to a tile,
// each in a cell that R rows and columns of zeros part from its neighbours.
template <int kElement, int R, int L, int G = 0>
struct Window {
  static constexpr bool kPlanes = G > 0;
  static constexpr int kCells = kPlanes ? G : 1;
  static constexpr int kUnit = 16 / kElement;  // elements of one access of level 0
  using ThreadPatch = Patch<kElement>;

  static constexpr int halo(int level, int band = 0) {
    return kPlanes || band > 0 ? R : R << (L - level);
  }
  static constexpr int own(int level) { return kPatchTile >> level; }
  static constexpr int cell(int level) { return own(level) / kCells; }
  static constexpr int gap_rows() { return kPlanes ? R : 0; }
  static constexpr int gap_cols(int level) { return kPlanes ? round_up(R, unit(level)) : 0; }
  static constexpr int rows(int level, int band = 0) {
    return own(level) + 2 * halo(level, band) + (kCells - 1) * gap_rows();
  }
  // Elements of one access of a level, as many as outputs of a thread along x; but a patch has two
  // columns of level 1 in float32, and reads them two at a time.
  static constexpr int unit(int level) { return level == 0 ? kUnit : 4; }

  // Stored column of the tile's first own column: as far right as the halo needs, such that the
  // inputs of a thread start as close as possible to an aligned address.
  static constexpr int lead(int level, int band = 0) {
    if (level == 0) return round_up(halo(0), kUnit);
    const int even = round_up(R, 2);
    return round_up(halo(level, band) - even, 4) + even;
  }
  // Of a thread with `cols` outputs along x, in accesses of as many: distance of its first input
  // from the aligned address below, and accesses per row.
  static constexpr int shift(int level, int cols) { return (lead(level) - R) % cols; }
  static constexpr int accesses(int level, int cols) {
    return ceil_div(shift(level, cols) + cols + 2 * R, cols);
  }

  // Low-pass coefficients that are formed: from -first to own + first. Level 1 is formed from four
  // pixels at once, of which the leftmost may lie beyond the halo.
  static constexpr int first_row(int level) { return kPlanes ? 0 : halo(level); }
  static constexpr int first_col(int level) {
    if (kPlanes || level > 1) return first_row(level);
    return lead(0) / 2 < lead(1) ? lead(0) / 2 : lead(1) / 2 * 2;
  }
  static constexpr int formed_rows(int level) { return own(level) + 2 * first_row(level); }
  static constexpr int formed_cols(int level) {
    return round_up(first_col(level) + own(level) + first_row(level), level == 1 ? 2 : 1);
  }

  // Whether all bands of a level reach as far, and whether one at (row, col) lies within `band`.
  static constexpr bool uniform(int level) { return halo(level, 0) == halo(level, 1); }
  static constexpr bool holds(int level, int band, int row, int col) {
    return unsigned(row + halo(level, band)) < unsigned(rows(level, band)) &&
           unsigned(col + lead(level, band)) < unsigned(pitch(level, band));
  }

  static constexpr int pitch(int level, int band = 0) {
    const int gaps = (kCells - 1) * gap_cols(level);
    if (level == 0) return round_up(lead(0) + own(0) + gaps + halo(0), 2 * kUnit);
    const int read =
        lead(level, band) - R - shift(level, 4) + own(level) - 4 + accesses(level, 4) * 4;
    const int written = band > 0 ? 0 : lead(level) - first_col(level) + formed_cols(level);
    const int most = round_up(gaps + (read > written ? read : written), 4);
    // Four threads of a row and the four of the row two below touch different banks.
    if (level == 2 && !kPlanes) return round_up(most - 8, 16) + 8;
    return level > 1 && most % 16 == 4 ? most + 4 : most;
  }
  static constexpr int size(int level, int band) { return rows(level, band) * pitch(level, band); }
  // Offset of a band from the end of level 0, in floats.
  static constexpr int offset(int level, int band = 0) {
    int at = band > 0 ? size(level, 0) + (band - 1) * size(level, 1) : 0;
    for (int l = 1; l < level; ++l) at += size(l, 0) + (kSubbands - 1) * size(l, 1);
    return at;
  }
  static constexpr int kPixelBytes = rows(0) * pitch(0) * kElement;
  static constexpr BoxShape box() { return {pitch(0), rows(0), 1, false}; }
  static constexpr int kFloats = offset(L, kSubbands);

  static constexpr int stored_row(int level, int row, int band = 0) {
    return row + halo(level, band) + (kCells > 1 ? row / cell(level) * gap_rows() : 0);
  }
  static constexpr int stored_col(int level, int col, int band = 0) {
    return col + lead(level, band) + (kCells > 1 ? col / cell(level) * gap_cols(level) : 0);
  }
  // Index of a coefficient from the end of level 0, in floats. Rows and columns count from the
  // tile.
  static constexpr int stored(int level, int band, int row, int col) {
    return offset(level, band) + stored_row(level, row, band) * pitch(level, band) +
           stored_col(level, col, band);
  }
  // Index of a pixel.
  static constexpr int stored_pixel(int row, int col) {
    return stored_row(0, row) * pitch(0) + stored_col(0, col);
  }
};

// Shared memory that blocks take of an sm_90 multiprocessor, each 1 KB more than it asks for; how
// many share it, at most as many as the registers of a kernel leave room for.
constexpr int shared_of_blocks(int blocks, int bytes) { return blocks * (bytes + 1024); }
constexpr int blocks_of(int bytes, int most) {
  const int blocks = 228 * 1024 / shared_of_blocks(1, bytes);
  return blocks < most ? blocks : most;
}

// Taps of a slot in shared memory, in accesses of four; those of all slots, and the bias.
constexpr int tap_floats(int kernel_size) { return round_up(kernel_size * kernel_size, 4); }
constexpr int weight_floats(int kernel_size, int levels) {
  return slot_count(levels) * tap_floats(kernel_size) + 4;
}

// Offsets in bytes. Each kernel: window, bands, ..., scaled taps and bias.
template <int K, int L>
struct ForwardMemory {
  using W = Window<4, K / 2, L>;
  static constexpr int kBands = W::kPixelBytes;
  static constexpr int kWeights = kBands + W::kFloats * 4;
  static constexpr int kBarrier = kWeights + weight_floats(K, L) * 4;
  static constexpr int kBytes = kBarrier + 16;
  static constexpr int kBlocks = blocks_of(kBytes, 5);
};

// Levels from kSmall on are dense, [band][row][col] of the tile, raw and filtered, and level 2
// where filtered.
template <int kElement, int K, int G>
struct PlanesMemory {
  // Down to 1 x 1, but for G = 1: a sixth level would leave room for three blocks instead of four.
  static constexpr int kLevels = G <= 2 ? 5 : G == 4 ? 4 : 3;
  static constexpr int kSmall = G < 8 ? 3 : 2;
  using W = Window<kElement, K / 2, kSmall - 1, G>;
  static constexpr int side(int level) { return kPatchTile >> level; }
  static constexpr int area(int level) { return side(level) * side(level); }
  static constexpr int small_floats(int level) {  // of the levels before `level`
    return kSubbands * 4 * (area(kSmall) - area(level)) / 3;
  }
  static constexpr int kSmallFloats = small_floats(kLevels + 1);
  static constexpr int kDenseFloats = 2 * kSmallFloats + (kSmall > 2 ? kSubbands * area(2) : 0);
  static constexpr int kBands = W::kPixelBytes;
  static constexpr int kDense = kBands + W::kFloats * 4;
  static constexpr int kWeights = kDense + kDenseFloats * 4;
  static constexpr int kBytes = kWeights + weight_floats(K, kLevels) * 4;
  static constexpr int kBlocks = blocks_of(kBytes, 4);
};

// Planes of a low-pass band, dense in place of the pixels until level 1 is formed; then the dense
// levels lie there.
template <int K, int G>
struct LowpassPlanesMemory {
  using P = PlanesMemory<4, K, G>;
  static constexpr int kBands = kPatchTile * kPatchTile * 4;
  static_assert(P::kDenseFloats * 4 <= kBands);
  static constexpr int kWeights = kBands + P::W::kFloats * 4;
  static constexpr int kBytes = kWeights + weight_floats(K, P::kLevels) * 4;
  static_assert(kBytes <= 99 * 1024);  // of an sm_86 block
  static constexpr int kBlocks = blocks_of(kBytes, 4);
};

// grad_output with the halo, the input without; the exchange of sums between warps, the byte
// barrier of large planes. Levels past the first are dense, [band][row][col] of the tile, and lie
// in place of the high-pass bands of level 1 of the input, which has no zeros around them.
//
// kInputGrad: with the input gradient, whose bands are those of the operator on whole planes; its
// dense levels come in place of those of the weight gradients, the operator's scaled taps last.
template <int kElement, int K, int G, bool kInputGrad = false>
struct GradMemory {
  using P = PlanesMemory<kElement, K, G == 0 ? 1 : G>;
  using WG = std::conditional_t<kInputGrad && G != 0, typename P::W, Window<kElement, K / 2, 1, G>>;
  using WX = Window<kElement, 0, 1, G>;
  // All levels of whole planes; but 7 x 7 taps are more sums than there are registers.
  static constexpr bool kAllLevels = G > 0 && K <= kMostForAllLevels;
  static constexpr int kLevels = kAllLevels ? PlanesMemory<kElement, K, G>::kLevels : 1;
  static constexpr int area(int level) { return (kPatchTile >> level) * (kPatchTile >> level); }
  // Where a dense level begins among those of an operand, in floats.
  static constexpr int dense(int level) { return kSubbands * 4 * (area(2) - area(level)) / 3; }
  static constexpr int kDenseFloats = dense(kLevels + 1);
  static constexpr int kInput = WG::kPixelBytes;
  static constexpr int kGradBands = kInput + WX::kPixelBytes;
  static constexpr int kInputBands = kGradBands + WG::kFloats * 4;
  static constexpr int kGradDense = kInputBands + WX::offset(1, 1) * 4;
  static constexpr int kInputDense = kGradDense + kDenseFloats * 4;
  static constexpr int kExchange = kInputBands + WX::kFloats * 4;
  static_assert(!kAllLevels || kInputDense + kDenseFloats * 4 <= kExchange);
  static constexpr int kBarrier = kExchange + kPatchThreads / 32 * (K * K + 1) * 4;
  static_assert(!kInputGrad || !kAllLevels || kGradDense + P::kDenseFloats * 4 <= kExchange);
  static constexpr int kWeights = kBarrier + (G > 0 ? 0 : 16);
  static constexpr int kBytes = kWeights + (kInputGrad ? weight_floats(K, kLevels) * 4 : 0);
  // Registers leave room for three blocks, without the input gradient for four.
  static constexpr int kBlocks = blocks_of(kBytes, kInputGrad ? 3 : 4);
};

// Whether the kernel of the weight gradients gives the input gradient, too: where a multiprocessor
// holds as many of its blocks as without. On an H200, NCHW, K = 5, the whole backward in ms, the
// input gradient by that launch and by one of its own:
//
//                                  that    own
//   8x32x128x128 float32 L=1       0.039  0.043
//   8x64x512x512 float32 L=1       0.803  0.802
//   64x768x7x7 float16 L=2         0.100  0.107
//   and with fewer blocks
//   64x96x56x56 float32 L=5        0.315  0.270
//
// Half types have their operator on tensor cores where those take the planes.
template <int kElement, int K, int G>
constexpr bool kInputGradFits =
    !(kElement == 2 && is_among(MmaPlaneCells(), G)) &&
    GradMemory<kElement, K, G, true>::kBlocks == GradMemory<kElement, K, G>::kBlocks;
// The same of a kernel size that whole planes have, and of `cells` of GradCells.
inline bool input_grad_fits(int element_bytes, int kernel_size, int cells) {
  return with_constant(Constants<2, 4>(), element_bytes, [&](auto element) {
    return with_constant(PlaneKernelSizes(), kernel_size, [&](auto k) {
      return with_constant(GradCells(), cells,
                           [&](auto g) { return kInputGradFits<element(), k(), g()>; });
    });
  });
}

}  // namespace wtconv::cuda
