// Device code of the kernels for channels_last planes: rows of a group, fill, convolution,
// analysis.
#pragma once

#include "../element.cuh"
#include "../intrinsics.cuh"
#include "group_layout.h"

namespace wtconv::cuda {

// A band as a thread sees it: one channel, kGroup elements from column to column. Rows outside are
// zeros.
template <class T, int kGroup>
struct Band {
  const T *first, *zeros;
  int rows, cols, pitch;

  __device__ __forceinline__ Band(const GroupBands& bands, int band, const unsigned char* shared,
                                  int zeros, int channel)
      : first(reinterpret_cast<const T*>(shared + bands.offset) + band * bands.band() + channel),
        zeros(reinterpret_cast<const T*>(shared + zeros) + channel),
        rows(bands.rows),
        cols(bands.cols),
        pitch(bands.pitch) {}

  // The row from column x on; `before` columns may be read before it.
  __device__ __forceinline__ const T* row(int y, int x, int before = 0) const {
    return unsigned(y) < unsigned(rows) ? first + y * pitch + x * kGroup : zeros + before * kGroup;
  }
};

__device__ __forceinline__ void clear_group(unsigned char* shared, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    reinterpret_cast<Vector<float, 4>*>(shared)[i] = {};
  __syncthreads();
}

// Starts to copy `channels` channels of a plane, in pieces of kBytes.
template <int kGroup, int kBytes, class T>
__device__ __forceinline__ void fill_pieces(const T* plane, const View& view, int channels,
                                            const GroupBands& to, T* pixels) {
  constexpr int kElements = kBytes / int(sizeof(T)), kPieces = kGroup / kElements;
  const int channel = threadIdx.x % kPieces * kElements;
  if (channel >= channels) return;
  const int step = int(blockDim.x) / kPieces, first = int(threadIdx.x) / kPieces;
  const int step_rows = step / to.cols, step_cols = step % to.cols;
  int row = first / to.cols, col = first % to.cols;
  const T* from = plane + channel * view.stride_c;
  pixels += channel;
  while (row < to.rows) {
    const T* source = from + row * view.stride_y + col * view.stride_x;
    T* target = pixels + row * to.pitch + col * kGroup;
    if constexpr (kBytes >= 4) {
      copy_async<kBytes>(target, source, true);
    } else {
      *target = *source;
    }
    col += step_cols, row += step_rows;
    if (col >= to.cols) col -= to.cols, ++row;
  }
}

template <int kGroup, class T>
__device__ __forceinline__ void fill_group(const T* plane, const View& view, int bytes,
                                           int channels, const GroupBands& to, T* pixels) {
  constexpr int kElement = int(sizeof(T));
  if constexpr (kGroup * kElement >= 16) {
    if (bytes == 16) return fill_pieces<kGroup, 16>(plane, view, channels, to, pixels);
  }
  if (bytes >= 8) return fill_pieces<kGroup, 8>(plane, view, channels, to, pixels);
  if (kElement == 4 || bytes == 4)
    return fill_pieces<kGroup, 4>(plane, view, channels, to, pixels);
  if constexpr (kElement == 2) fill_pieces<kGroup, 2>(plane, view, channels, to, pixels);
}

// sum[r][u] += sum_ij taps[i][j] * in(y + r + i - R, x + u + j - R), taps kTapPitch apart. A row is
// loaded once for all outputs, and so is a row of taps.
template <int K, int kTapPitch, int kRows, int kCols, class T, int kGroup>
__device__ __forceinline__ void convolve_strip(const Band<T, kGroup>& in, int y, int x,
                                               const float* taps, float (&sum)[kRows][kCols]) {
  constexpr int R = K / 2;
  float tap[kRows][K];
#pragma unroll
  for (int i = 0; i < kRows + K - 1; ++i) {
    const T* row = in.row(y + i - R, x, R) - R * kGroup;
    float value[kCols + K - 1];
#pragma unroll
    for (int j = 0; j < kCols + K - 1; ++j) value[j] = widen<float>(row[j * kGroup]);
    if (i < K) {
#pragma unroll
      for (int j = 0; j < K; ++j) tap[i % kRows][j] = taps[(i * K + j) * kTapPitch];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (i < r || i >= r + K) continue;
#pragma unroll
      for (int j = 0; j < K; ++j) {
#pragma unroll
        for (int u = 0; u < kCols; ++u) sum[r][u] += tap[(i - r) % kRows][j] * value[u + j];
      }
    }
  }
}

// kCols coefficients from (y, x) on of the four bands at `to`; use(u, LL) of each.
template <int kCols, class T, int kGroup, class Use>
__device__ __forceinline__ void analyse_strip(const Band<T, kGroup>& finer, const GroupBands& to,
                                              int y, int x, float* out, Use use) {
  const T *top = finer.row(2 * y, 2 * x), *bottom = finer.row(2 * y + 1, 2 * x);
  out += y * to.pitch + x * kGroup;
#pragma unroll
  for (int u = 0; u < kCols; ++u) {
    float value[kSubbands];
    const auto at = [&](const T* row, int n) { return widen<float>(row[(2 * u + n) * kGroup]); };
    haar_butterfly<float>(at(top, 0), at(top, 1), at(bottom, 0), at(bottom, 1), value);
    if (x + u < to.cols) {
#pragma unroll
      for (int b = 0; b < kSubbands; ++b) out[b * to.band() + u * kGroup] = value[b];
      use(u, value[0]);
    }
  }
}

}  // namespace wtconv::cuda
