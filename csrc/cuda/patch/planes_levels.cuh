// Levels past 1 of planes that fit a tile, in its cells: those as wide as a thread's four
// coefficients like the levels of large planes, the few coefficients past them dense.
#pragma once

#include "planes.cuh"
#include "synthesis.cuh"

namespace wtconv::cuda {

// Warp b filters band b of the dense levels, which wait for no other warp: it forms their low-pass
// bands for itself, in `low`, where it writes the filtered band afterwards.
static_assert(kPatchThreads == 32 * kSubbands);

// Index of the warp's first coefficient of a dense level.
template <class P>
__device__ __forceinline__ int small_band(int level) {
  return P::small_floats(level) + threadIdx.x / 32 * P::area(level);
}

// f(row, col) for each coefficient of a dense level, by the lanes of a warp; kWide of a row at
// once.
template <int kSide, int kWide, class F>
__device__ __forceinline__ void for_each_small(F f) {
  constexpr int kAcross = kSide / kWide, kAll = kSide * kAcross;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kAll; i += 32) {
    if (kAll % 32 == 0 || i + lane < kAll) f((i + lane) / kAcross, (i + lane) % kAcross * kWide);
  }
}

// The dense levels from kLevel on: the warp's band of them. `finer(row, col)` points to the 2 x 2
// low-pass coefficients of a pitch.
template <class P, int kLevel, class Finer>
__device__ __forceinline__ void analyse_small(int levels, int pitch, Finer finer, float* raw,
                                              float* low) {
  if constexpr (kLevel <= P::kLevels) {
    if (kLevel > levels) return;
    constexpr int kSide = P::side(kLevel);
    const int band = threadIdx.x / 32, first = small_band<P>(kLevel);
    for_each_small<kSide, 1>([&](int row, int col) {
      const float* p = finer(row, col);
      float value[kSubbands];
      haar_butterfly<float>(p[0], p[1], p[pitch], p[pitch + 1], value);
      low[first + row * kSide + col] = value[0];
      raw[first + row * kSide + col] =
          band < 2 ? (band == 0 ? value[0] : value[1]) : (band == 2 ? value[2] : value[3]);
    });
    __syncwarp();
    const float* next = low + first;
    analyse_small<P, kLevel + 1>(
        levels, kSide, [&](int r, int c) { return next + 2 * r * kSide + 2 * c; }, raw, low);
  }
}

// kWide neighbours of a dense level, the first at (y, x) of a cell, which `in` points to: over the
// coefficients of the cell that the taps reach.
template <int K, int kSide, int kCell, int kWide>
__device__ __forceinline__ void filter_small_cell(const float* in, const float* taps, int y, int x,
                                                  float (&sum)[1][kWide]) {
  constexpr int R = K / 2;
  if constexpr (kCell <= R + 1) {  // all of the cell
    const float* cell = in - y * kSide - x;
    const float* tap = taps + (R - y) * K + R - x;
#pragma unroll
    for (int r = 0; r < kCell; ++r) {
#pragma unroll
      for (int c = 0; c < kCell; ++c) {
#pragma unroll
        for (int u = 0; u < kWide; ++u) sum[0][u] += tap[r * K + c - u] * cell[r * kSide + c];
      }
    }
  } else {
    static_assert(kWide == 2 && kCell % 2 == 0);
    constexpr int kLead = round_up(R, 2), kRow = 2 * kLead + 2;  // whole pairs
    convolve<K, 1, 2>(
        taps,
        [&](int i, float (&values)[2 + K - 1]) {
          const bool row_inside = unsigned(y + i - R) < unsigned(kCell);
#pragma unroll
          for (int c = 0; c < kRow; c += 2) {
            Vector<float, 2> pair{};
            if (row_inside && unsigned(x + c - kLead) < unsigned(kCell))
              pair = *reinterpret_cast<const Vector<float, 2>*>(in + (i - R) * kSide + c - kLead);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int n = c + j - (kLead - R);
              if (n >= 0 && n < 2 + K - 1) values[n] = pair.lane[j];
            }
          }
        },
        sum);
  }
}

// The warp's band of the dense levels from kLevel on. From the weights of a column of planes to
// those of the next are `step` floats.
template <class P, int K, int kLevel>
__device__ __forceinline__ void filter_small(const float* raw, const float* weights, int levels,
                                             float* filtered, int step = 0) {
  if constexpr (kLevel <= P::kLevels) {
    if (kLevel > levels) return;
    constexpr int kSide = P::side(kLevel), kCell = kSide / P::W::kCells;
    constexpr int kWide = kCell > 1 ? 2 : 1;
    const int first = small_band<P>(kLevel);
    const float* taps = weights + slot_of(kLevel, threadIdx.x / 32) * tap_floats(K);
    for_each_small<kSide, kWide>([&](int row, int col) {
      const int at = first + row * kSide + col;
      float sum[1][kWide] = {};
      filter_small_cell<K, kSide, kCell>(raw + at, taps + col / kCell * step, row % kCell,
                                         col % kCell, sum);
#pragma unroll
      for (int u = 0; u < kWide; ++u) filtered[at + u] = sum[0][u];
    });
    filter_small<P, K, kLevel + 1>(raw, weights, levels, filtered, step);
  }
}

// The reconstruction of levels >= 3 at this thread's coefficients of level 2, two that one of level
// 3 covers: the closed form.
template <class P>
__device__ __forceinline__ void synthesise_small(const float* filtered, int levels,
                                                 PatchLevel2<typename P::W::ThreadPatch>& low) {
  using Own = typename P::W::ThreadPatch;
  constexpr int kRows = Own::kRows / 4, kCols = Own::kCols / 4;
  static_assert(kRows <= 2 && kCols <= 2);
  const int y = patch_row<Own>() / 4, x = patch_col<Own>() / 4;
  set_all(low, 0);
#pragma unroll
  for (int level = 3; level <= P::kLevels; ++level) {
    if (level > levels) break;
    const int side = P::side(level), area = P::area(level), shift = level - 2;
    const float* f = filtered + P::small_floats(level) + (y >> shift) * side + (x >> shift);
    const float ll = f[0], lh = f[area], hl = f[2 * area], hh = f[3 * area];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int u = 0; u < kCols; ++u) {
        low[r][u] +=
            synthesise(ll, lh, hl, hh, ((y + r) >> (shift - 1)) % 2, ((x + u) >> (shift - 1)) % 2);
      }
    }
  }
}

// The levels past 1: `low` becomes what they add to this thread's coefficients of level 1. `dense`
// has room for P::kDenseFloats.
template <class P, int K>
__device__ __forceinline__ void filter_deep_levels(float* bands, float* dense, const float* weights,
                                                   int levels,
                                                   PatchLevel1<typename P::W::ThreadPatch>& low) {
  using W = typename P::W;
  using Own = typename W::ThreadPatch;
  float *raw = dense, *filtered = dense + P::kSmallFloats, *level2 = filtered;
  if constexpr (P::kSmall == 3) {
    level2 += P::kSmallFloats;
    analyse_level<W, 2>(bands);
    __syncthreads();
  }
  analyse_small<P, P::kSmall>(
      levels, W::pitch(P::kSmall - 1),
      [&](int r, int c) { return bands + W::stored(P::kSmall - 1, 0, 2 * r, 2 * c); }, raw,
      filtered);
  filter_small<P, K, P::kSmall>(raw, weights, levels, filtered);
  if constexpr (P::kSmall == 3) {
    const int band = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4 * 2, col = lane % 4 * 4;
    float value[2][4] = {};
    filter<W, K, 2>(bands, band, weights + slot_of(2, band) * tap_floats(K), row, col, value);
    write_filtered<P::side(2)>(level2 + band * P::area(2), row, col, value);
  }
  __syncthreads();
  PatchLevel2<Own> low2;
  synthesise_small<P>(filtered, levels, low2);
  synthesise_level2<Own, P::side(2)>(level2, low2, low);
}

}  // namespace wtconv::cuda
