// Device code that the forward patch kernels share: taps, base path, synthesis of a patch, store.
#pragma once

#include "device.cuh"

namespace wtconv::cuda {

// Scaled taps of a channel, [slot][tap_floats], then the bias.
template <int K>
__device__ void load_taps(const RawParameters& p, int channel, int levels, float* weights) {
  constexpr int kTaps = K * K, kStride = tap_floats(K);
  const int slots = slot_count(levels);
  for (int i = threadIdx.x; i < slots * kTaps; i += kPatchThreads) {
    const int slot = i / kTaps, tap = i % kTaps, level = (slot + kSubbands - 1) / kSubbands;
    const int64_t group = level ? kSubbands * int64_t(channel) + (slot - 1) % kSubbands : channel;
    float value = 0;
    if (p.weight[level]) {
      value =
          read<float>(p.scale[level], p.dtype, group) *
          read<float>(p.weight[level], p.dtype, group * kTaps + (p.rotate ? kTaps - 1 - tap : tap));
    }
    weights[slot * kStride + tap] = value / float(1 << level);
  }
  if (threadIdx.x == 0) {
    weights[slots * kStride] =
        p.bias ? read<float>(p.scale[0], p.dtype, channel) * read<float>(p.bias, p.dtype, channel)
               : 0.0f;
  }
}

template <class W, class T, int K>
__device__ __forceinline__ void base_path(const T* pixels, const float* weights,
                                          float (&sum)[kPatchRows][kPatchCols]) {
  const int y = threadIdx.x / kPatchesX * kPatchRows, x = threadIdx.x % kPatchesX * kPatchCols;
  const T* first = pixels + (W::stored_row(0, y) - K / 2) * W::pitch(0);
  const int col = W::stored_col(0, x);
  convolve<K, kPatchRows, kPatchCols>(
      weights,
      [&](int r, float (&row)[kPatchCols + K - 1]) {
        load_pixels<W, -(K / 2)>(first + r * W::pitch(0), col, row);
      },
      sum);
}

template <int kSide>
__device__ __forceinline__ void write_filtered(float* band, int row, int col,
                                               const float (&sum)[2][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    *reinterpret_cast<Vector<float, 4>*>(band + (row + r) * kSide +
                                         col) = {{sum[r][0], sum[r][1], sum[r][2], sum[r][3]}};
  }
}

// The reconstruction at the 2 x 4 coefficients of level 1 of this thread from the filtered bands of
// level 2, [band][row][col] dense; `low2` belongs to its LL.
template <int kSide>
__device__ __forceinline__ void synthesise_level2(const float* filtered, const float (&low2)[2],
                                                  float (&low)[2][4]) {
  const float* from = filtered + threadIdx.x / kPatchesX * kSide + threadIdx.x % kPatchesX * 2;
  Vector<float, 2> f[kSubbands];
#pragma unroll
  for (int b = 0; b < kSubbands; ++b)
    f[b] = *reinterpret_cast<const Vector<float, 2>*>(from + b * kSide * kSide);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float ll = f[0].lane[u] + low2[u], lh = f[1].lane[u], hl = f[2].lane[u],
                hh = f[3].lane[u];
    low[0][2 * u] = (ll + lh) + (hl + hh);
    low[0][2 * u + 1] = (ll + lh) - (hl + hh);
    low[1][2 * u] = (ll - lh) + (hl - hh);
    low[1][2 * u + 1] = (ll - lh) - (hl - hh);
  }
}

// sum += the synthesis of level 1, with `low` added to its low-pass band.
template <class W, int K>
__device__ __forceinline__ void add_level1(const float* bands, const float* weights,
                                           float (&low)[2][4],
                                           float (&sum)[kPatchRows][kPatchCols]) {
  const int row = threadIdx.x / kPatchesX * 2, col = threadIdx.x % kPatchesX * 4;
#pragma unroll 1
  for (int band = 0; band < kSubbands; ++band) {
    filter<W, K, 1>(bands, band, weights + (1 + band) * tap_floats(K), row, col, low);
    const float row_sign = band & 1 ? -1.0f : 1.0f, col_sign = band & 2 ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const float value = low[r][u];
        sum[2 * r][2 * u] += value;
        sum[2 * r][2 * u + 1] += col_sign * value;
        sum[2 * r + 1][2 * u] += row_sign * value;
        sum[2 * r + 1][2 * u + 1] += row_sign * col_sign * value;
        low[r][u] = 0;
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void store_patch(const PatchLaunch& p, T* out, int rows, int cols,
                                            const float (&sum)[kPatchRows][kPatchCols]) {
  constexpr int kUnit = 16 / int(sizeof(T));
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    if (r >= rows) break;
    T* row = out + r * p.output.stride_y;
    if (p.wide_output) {
#pragma unroll
      for (int u = 0; u < kPatchCols; u += kUnit) {
        if (u >= cols) break;
        Vector<T, kUnit> value;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) value.lane[j] = narrow<T>(sum[r][u + j]);
        *reinterpret_cast<Vector<T, kUnit>*>(row + u) = value;
      }
    } else {
#pragma unroll
      for (int u = 0; u < kPatchCols; ++u) {
        if (u < cols) row[u * p.output.stride_x] = narrow<T>(sum[r][u]);
      }
    }
  }
}

}  // namespace wtconv::cuda
