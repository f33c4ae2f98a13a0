// Device code of weight_grad.cu: the products of a thread, and the levels past the first of whole
// planes, which are dense in shared memory: no zeros part the cells.
#pragma once

#include "device.cuh"

namespace wtconv::cuda {

// sum[i * K + j] += in[r][u] * g(r + i)[u + j].
template <int K, int kRows, int kCols, class LoadInput, class LoadGrad, int N>
__device__ __forceinline__ void correlate(LoadInput load_input, LoadGrad load_grad,
                                          float (&sum)[N]) {
  static_assert(N >= K * K);
  float in[kRows][kCols];
#pragma unroll
  for (int r = 0; r < kRows; ++r) load_input(r, in[r]);
#pragma unroll
  for (int y = 0; y < kRows + K - 1; ++y) {
    float g[kCols + K - 1];
    load_grad(y, g);
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const int r = y - i;
        if (r < 0 || r >= kRows) continue;
#pragma unroll
        for (int j = 0; j < K; ++j) sum[i * K + j] += in[r][u] * g[u + j];
      }
    }
  }
}

// Level 2, dense: a warp takes a band, a lane 4 x 2 coefficients in pieces that lie in one cell.
template <class M, int K>
__device__ __forceinline__ void correlate_level2(const float* grad, const float* input,
                                                 float (&sum)[K * K]) {
  constexpr int kSide = kPatchTile >> 2, kCell = M::WG::cell(2), kRows = kCell < 4 ? kCell : 4;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * M::area(2);
  const int y = lane / 8 * 4, x = lane % 8 * 2;
#pragma unroll 1
  for (int row = y; row < y + 4; row += kRows) {
    const float* in = input + first + row * kSide + x;
    const float* g = grad + first + (row - K / 2) * kSide + x - K / 2;
    correlate<K, kRows, 2>(
        [&](int r, float (&values)[2]) { load_inputs<2, 1, 0>(in + r * kSide, values); },
        [&](int r, float (&values)[2 + K - 1]) {
          const bool inside = unsigned(row % kCell + r - K / 2) < unsigned(kCell);
#pragma unroll
          for (int u = 0; u < 2 + K - 1; ++u) {
            values[u] = 0;
            if (inside && unsigned(x % kCell + u - K / 2) < unsigned(kCell))
              values[u] = g[r * kSide + u];
          }
        },
        sum);
  }
}

// A dense level of kSide x kSide from the low-pass band of the finer one, of which from(y, x) is a
// coefficient, by the threads first, first + kStep, ...
template <int kSide, int kPitch, int kStep, class From>
__device__ __forceinline__ void analyse_dense(From from, float* out, int first) {
#pragma unroll
  for (int i = first; i < kSide * kSide; i += kStep) {
    const float* p = from(i / kSide * 2, i % kSide * 2);
    float value[kSubbands];
    haar_butterfly<float>(p[0], p[1], p[kPitch], p[kPitch + 1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) out[b * kSide * kSide + i] = value[b];
  }
}

// Level 2 of an operand, by all threads.
template <class W>
__device__ __forceinline__ void analyse_level2(const float* bands, float* dense) {
  analyse_dense<(kPatchTile >> 2), W::pitch(1), kPatchThreads>(
      [&](int y, int x) { return bands + W::stored(1, 0, y, x); }, dense, threadIdx.x);
}

// Level `kLevel` and those past it, by a warp.
template <class M, int kLevel = 3>
__device__ __forceinline__ void analyse_deep_levels(float* dense, int levels) {
  if constexpr (kLevel <= M::kLevels) {
    if (kLevel > levels) return;
    constexpr int kSide = kPatchTile >> kLevel;
    const float* finer = dense + M::dense(kLevel - 1);
    analyse_dense<kSide, 2 * kSide, 32>([&](int y, int x) { return finer + y * 2 * kSide + x; },
                                        dense + M::dense(kLevel), threadIdx.x % 32);
    __syncwarp();
    analyse_deep_levels<M, kLevel + 1>(dense, levels);
  }
}

// Of a level past the second a warp takes a band, a lane a tap of it: there are more taps than
// coefficients of a thread. Those of a tile are added up first, which keeps the rounding small.
template <class M, int K, int kLevel>
__device__ __forceinline__ float correlate_tap(const float* grad, const float* input) {
  constexpr int kSide = kPatchTile >> kLevel, kCell = M::WG::cell(kLevel);
  const int lane = threadIdx.x % 32, first = M::dense(kLevel) + threadIdx.x / 32 * kSide * kSide;
  const int i = lane / K - K / 2, j = lane % K - K / 2;
  // Four, which need not wait for one another.
  float sum[4] = {};
  if (lane >= K * K) return 0;
#pragma unroll 2
  for (int y = 0; y < kSide; ++y) {
    const bool inside = unsigned(y % kCell + i) < unsigned(kCell);
    const float* in = input + first + y * kSide;
    const float* g = grad + first + (y + i) * kSide + j;
#pragma unroll
    for (int x = 0; x < kSide; ++x)
      if (inside && unsigned(x % kCell + j) < unsigned(kCell)) sum[x % 4] += in[x] * g[x];
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace wtconv::cuda
