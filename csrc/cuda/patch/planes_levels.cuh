// Levels past 1 of planes that fit a tile, in its cells: those as wide as a thread's four
// coefficients like the levels of large planes, the few coefficients past them dense.
#pragma once

#include "planes.cuh"
#include "synthesis.cuh"

namespace wtconv::cuda {

constexpr int kTileBits = 6;
static_assert(1 << kTileBits == kPatchTile);

// Offset of a small level when the level is known at run time.
template <class P>
__device__ __forceinline__ int small_offset(int level) {
  const auto area = [](int l) { return 1 << (2 * (kTileBits + 1 - l)); };
  return kSubbands * (area(P::kSmall) - area(level)) / 3;
}

// A dense level; `finer(row, col)` points to the 2 x 2 low-pass coefficients of a pitch.
template <class Finer>
__device__ __forceinline__ void analyse_small(int level, int pitch, Finer finer, float* raw) {
  const int bits = kTileBits - level, side = 1 << bits;
  for (int i = threadIdx.x; i < side * side; i += kPatchThreads) {
    const float* p = finer(i >> bits, i & (side - 1));
    float value[kSubbands];
    haar_butterfly<float>(p[0], p[1], p[pitch], p[pitch + 1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) raw[b * side * side + i] = value[b];
  }
}

// One coefficient of a dense level: over those of its own cell that the taps reach. kCell is the
// side of the cell where the loops shall be unrolled, else 0.
template <int K, int kCell>
__device__ __forceinline__ float filter_one(const float* raw, const float* taps, int side, int cell,
                                            int y, int x) {
  constexpr int R = K / 2;
  const int top = y & ~(cell - 1), left = x & ~(cell - 1);
  const float* in = raw + top * side + left;
  const float* tap = taps + (top - y + R) * K + left - x + R;
  float sum = 0;
  if constexpr (kCell > 0) {
#pragma unroll
    for (int r = 0; r < kCell; ++r) {
#pragma unroll
      for (int c = 0; c < kCell; ++c) sum += tap[r * K + c] * in[r * side + c];
    }
  } else {
    for (int r = max(0, y - R - top); r < min(cell, y + R + 1 - top); ++r) {
      for (int c = max(0, x - R - left); c < min(cell, x + R + 1 - left); ++c)
        sum += tap[r * K + c] * in[r * side + c];
    }
  }
  return sum;
}

// The dense levels, one coefficient at a time.
template <class P, int K>
__device__ __forceinline__ void filter_small(const float* raw, const float* weights, int levels,
                                             float* filtered) {
#pragma unroll 1
  for (int level = P::kSmall; level <= levels; ++level) {
    const int bits = kTileBits - level, side = 1 << bits, area = side * side;
    const int cell = side / P::W::kCells, offset = small_offset<P>(level);
#pragma unroll 1
    for (int i = threadIdx.x; i < kSubbands * area; i += kPatchThreads) {
      const int band = i >> 2 * bits, y = (i >> bits) & (side - 1), x = i & (side - 1);
      const float* taps = weights + slot_of(level, band) * tap_floats(K);
      const float* in = raw + offset + band * area;
      // All of a cell of 2 x 2 is within the taps' reach.
      filtered[offset + i] = cell == 2 ? filter_one<K, 2>(in, taps, side, cell, y, x)
                                       : filter_one<K, 0>(in, taps, side, cell, y, x);
    }
  }
}

// The reconstruction of levels >= 3 at this thread's two coefficients of level 2: the closed form.
template <class P>
__device__ __forceinline__ void synthesise_small(const float* filtered, int levels,
                                                 float (&low)[2]) {
  const int y = threadIdx.x / kPatchesX, x = threadIdx.x % kPatchesX;
  low[0] = low[1] = 0;
#pragma unroll 1
  for (int level = 3; level <= levels; ++level) {
    const int side = kPatchTile >> level, area = side * side, shift = level - 2;
    const float* f = filtered + small_offset<P>(level) + (y >> shift) * side + (x >> (shift - 1));
    const bool odd_y = (y >> (shift - 1)) & 1;
    const float ll = f[0], lh = odd_y ? -f[area] : f[area], hl = f[2 * area],
                hh = odd_y ? -f[3 * area] : f[3 * area];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool odd_x = ((2 * x + u) >> (shift - 1)) & 1;
      low[u] += (ll + lh) + (odd_x ? -(hl + hh) : hl + hh);
    }
  }
}

// The levels past 1: `low` becomes what they add to this thread's coefficients of level 1. `dense`
// has room for P::kDenseFloats.
template <class P, int K>
__device__ __forceinline__ void filter_deep_levels(float* bands, float* dense, const float* weights,
                                                   int levels, float (&low)[2][4]) {
  using W = typename P::W;
  float *raw = dense, *filtered = dense + P::kSmallFloats, *level2 = filtered;
  if constexpr (P::kSmall == 3) {
    level2 += P::kSmallFloats;
    analyse_level<W, 2>(bands);
    __syncthreads();
  }
#pragma unroll 1
  for (int level = P::kSmall; level <= levels; ++level) {
    const int side = kPatchTile >> level;
    float* out = raw + small_offset<P>(level);
    if (level == P::kSmall) {
      analyse_small(
          level, W::pitch(level - 1),
          [&](int r, int c) { return bands + W::stored(P::kSmall - 1, 0, 2 * r, 2 * c); }, out);
    } else {
      const float* finer = raw + small_offset<P>(level - 1);
      analyse_small(
          level, 2 * side, [&](int r, int c) { return finer + 4 * r * side + 2 * c; }, out);
    }
    __syncthreads();
  }
  filter_small<P, K>(raw, weights, levels, filtered);
  if constexpr (P::kSmall == 3) {
    const int band = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / 4 * 2, col = lane % 4 * 4;
    float value[2][4] = {};
    filter<W, K, 2>(bands, band, weights + slot_of(2, band) * tap_floats(K), row, col, value);
    write_filtered<P::side(2)>(level2 + band * P::side(2) * P::side(2), row, col, value);
  }
  __syncthreads();
  float low2[2];
  synthesise_small<P>(filtered, levels, low2);
  synthesise_level2<P::side(2)>(level2, low2, low);
}

}  // namespace wtconv::cuda
