// Levels past 2 of planes, G x G to a tile, beside the tensor cores: their few coefficients in
// float32, dense, a warp for each band.
#pragma once

#include "mma_filter.cuh"
#include "planes_levels.cuh"

namespace wtconv::cuda {

// Their layout.
template <int K, int G>
using DeepPlanes = typename DeepMemory<K, G>::P;

// The scaled taps of a channel, and those of the levels past 2, times 2^-level, from `deep` on: by
// kThreads threads, of which this one is `thread`.
template <int K, int G, int kThreads = kPatchThreads>
__device__ void read_all_scaled(const RawParameters& p, int channel, int levels,
                                ChannelTaps<K, 2>& taps, float* deep, int thread = threadIdx.x) {
  constexpr int kTaps = K * K, kFirst = slot_count(2);
  read_scaled<K, DeepPlanes<K, G>::kLevels, kThreads>(
      p, channel, levels,
      [&](int slot, int tap, float value) {
        if (slot == slot_count(levels)) {
          taps.bias = value;
        } else if (slot < kFirst) {
          taps.base[slot * kTaps + tap] = value;
        } else {
          const int level = (slot + kSubbands - 1) / kSubbands;
          const float factor = __uint_as_float(unsigned(127 - level) << 23);
          deep[(slot - kFirst) * tap_floats(K) + tap] = value * factor;
        }
      },
      thread);
}
// The same, crossed as finish_taps() has them.
template <int K, int G>
__device__ void read_all_taps(const RawParameters& p, int channel, int levels,
                              ChannelTaps<K, 2>& taps, float* deep) {
  read_all_scaled<K, G>(p, channel, levels, taps, deep);
  __syncthreads();
  cross_bands(taps);
}

// Filters the levels from 3 on, from LL1 in the window's layout. `raise` times the sum of four of
// its values is LL2. Each warp has its own part of `raw` and of `filtered`. From the taps of a
// column of planes to those of the next are `step` floats.
template <class W, int K, int G, class T>
__device__ __forceinline__ void filter_deep(const T* lowpass, float raise, int levels,
                                            const float* deep_taps, float* raw, float* filtered,
                                            int step = 0) {
  using P = DeepPlanes<K, G>;
  constexpr int kSide = P::side(3);
  static_assert(W::cell(1) == 4 && W::own_col(1) % 4 == 0,
                "a coefficient of level 3 is a cell high");
  const int band = threadIdx.x / 32, first = small_band<P>(3);
  for_each_small<kSide, 1>([&](int row, int col) {
    float low[2][2] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const T* from =
          lowpass + W::template row_at<1>(W::own_row(1) + r) + W::template cell_at<1>(row);
      const auto q = *reinterpret_cast<const Vector<T, 4>*>(from + W::own_col(1) +
                                                            W::template col_at<1>(4 * col));
#pragma unroll
      for (int c = 0; c < 4; ++c) low[r / 2][c / 2] += raise * widen<float>(q.lane[c]);
    }
    float value[kSubbands];
    haar_butterfly<float>(low[0][0], low[0][1], low[1][0], low[1][1], value);
    filtered[first + row * kSide + col] = value[0];
    raw[first + row * kSide + col] =
        band < 2 ? (band == 0 ? value[0] : value[1]) : (band == 2 ? value[2] : value[3]);
  });
  __syncwarp();
  const float* low3 = filtered + first;
  analyse_small<P, 4>(
      levels, kSide, [&](int r, int c) { return low3 + 2 * r * kSide + 2 * c; }, raw, filtered);
  filter_small<P, K, 3>(raw, deep_taps - slot_count(2) * tap_floats(K), levels, filtered, step);
}

// What they add to the pixels below each of this lane's coefficients of level 2, two rows of two
// (mma_filter.cuh): the closed form.
template <int K, int G>
__device__ __forceinline__ void synthesise_deep(const float* filtered, int levels,
                                                float (&coarse)[2][2]) {
  using P = DeepPlanes<K, G>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int y = lane / 4 * 2, first = warp * kWarpCols / 4 + lane % 4 / 2;
#pragma unroll
  for (int level = 3; level <= P::kLevels; ++level) {
    if (level > levels) break;
    const int side = P::side(level), area = P::area(level), shift = level - 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int x = first + 2 * h;
      const float* f = filtered + P::small_floats(level) + (y >> shift) * side + (x >> shift);
      const float ll = f[0], lh = f[area], hl = f[2 * area], hh = f[3 * area];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        coarse[r][h] +=
            synthesise(ll, lh, hl, hh, ((y + r) >> (shift - 1)) % 2, (x >> (shift - 1)) % 2);
      }
    }
  }
}

}  // namespace wtconv::cuda
