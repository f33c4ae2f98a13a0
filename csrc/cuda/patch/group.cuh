// Device code of the kernels for channels_last planes: rows of a group, fill, convolution,
// analysis.
#pragma once

#include "../element.cuh"
#include "../intrinsics.cuh"
#include "group_layout.h"

namespace wtconv::cuda {

// A band, or a window of pixels, as a thread sees it: one channel, kStep elements from column to
// column. Rows outside are zeros.
template <class T, int kStepOfColumn, bool kPixels>
struct Rows {
  static constexpr int kStep = kStepOfColumn;
  const T *first, *zeros;
  int rows, cols, pitch, pair;

  // `start` is the element of position (0, 0), but for the channel.
  __device__ __forceinline__ Rows(const GroupBands& bands, int start, const unsigned char* shared,
                                  int zeros, int channel)
      : first(reinterpret_cast<const T*>(shared + bands.offset) + start + channel),
        zeros(reinterpret_cast<const T*>(shared + zeros) + channel),
        rows(bands.rows),
        cols(bands.cols),
        pitch(bands.pitch),
        pair(bands.pair) {}

  // The row from column x on; `before` columns may be read before it.
  __device__ __forceinline__ const T* row(int y, int x, int before = 0) const {
    const int offset = kPixels ? (y >> 1) * pair + (y & 1) * pitch : y * pitch;
    return unsigned(y) < unsigned(rows) ? first + offset + x * kStep : zeros + before * kStep;
  }
};
template <class T, int kGroup>
using Pixels = Rows<T, kGroup, true>;
template <int kGroup>
using Band = Rows<float, kGroup, false>;

// The threads that share a plane.
struct Team {
  int thread, threads;  // of this thread, and how many there are
};

// Starts to bring a row of a plane to L2, with all its channels, where they are dense and aligned
// to 16 bytes. Blocks that share a plane take a row each.
template <class T>
__device__ __forceinline__ void prefetch_row(const View& view, int bytes, int item, int row,
                                             int height, int width, int channels) {
  if (row >= height || bytes < 16 || view.stride_x != channels) return;
  prefetch_bytes(static_cast<const T*>(view.data) + item * view.stride_b + row * view.stride_y,
                 width * channels * int(sizeof(T)));
}

// Zeros around the bands, and in rows past their ends, stay: only the bands are written afterwards.
__device__ __forceinline__ void clear_group(Team team, unsigned char* shared, int bytes) {
  for (int i = team.thread; i < bytes / 16; i += team.threads)
    reinterpret_cast<Vector<float, 4>*>(shared)[i] = {};
  __syncthreads();
}

// Starts to copy `channels` channels of a plane of height x width, in pieces of kBytes; zeros past
// it. Where pixels are of another type, or an element is too small to be copied, it has copied
// them.
template <int kGroup, int kBytes, class T, class S>
__device__ __forceinline__ void fill_pieces(Team team, const T* plane, const View& view,
                                            int channels, int height, int width,
                                            const GroupBands& to, S* pixels) {
  constexpr int kElements = kBytes / int(sizeof(T)), kPieces = kGroup / kElements;
  constexpr bool kAsync = std::is_same_v<T, S> && kBytes >= 4;
  // Pairs of rows whose loads are under way together.
  constexpr int kBatch = kAsync ? 1 : kBytes == 16 ? 2 : 4, kStored = kElements < 4 ? kElements : 4;
  const int channel = team.thread % kPieces * kElements;
  if (channel >= channels) return;
  // A thread keeps its column, which makes what it adds from pair to pair a constant; threads that
  // no whole pair of rows is left for are idle. Threads fewer than columns take several.
  const int columns = team.threads / kPieces, place = team.thread / kPieces;
  const int together = max(1, to.row_of(columns)), pair = to.row_of(place);
  if (pair >= together) return;
  const int64_t step = 2 * together * view.stride_y;
#pragma unroll 1
  for (int col = place - pair * to.cols; col < to.cols; col += columns) {
    const T* source =
        plane + channel * view.stride_c + 2 * pair * view.stride_y + col * view.stride_x;
    S* target = pixels + pair * to.pair + col * kGroup + channel;
    const int end = col < width ? height : 0;
#pragma unroll 1
    for (int row = 2 * pair; row < to.rows; row += 2 * kBatch * together) {
      Vector<T, kElements> piece[2 * kBatch];
#pragma unroll
      for (int i = 0; i < 2 * kBatch; ++i) {
        const int y = row + i / 2 * 2 * together + i % 2;
        const T* from = source + i / 2 * step + i % 2 * view.stride_y;
        if constexpr (kAsync) {
          if (y < to.rows) copy_async<kBytes>(target + i * to.pitch, from, y < end);
        } else {
          piece[i] = {};
          if (y < end) piece[i] = *reinterpret_cast<const Vector<T, kElements>*>(from);
        }
      }
      if constexpr (!kAsync) {
#pragma unroll
        for (int i = 0; i < 2 * kBatch; ++i) {
          if (row + i / 2 * 2 * together + i % 2 >= to.rows) break;
          S* begin = target + i / 2 * together * to.pair + i % 2 * to.pitch;
#pragma unroll
          for (int e = 0; e < kElements; e += kStored) {
            Vector<S, kStored> values;
#pragma unroll
            for (int j = 0; j < kStored; ++j) values.lane[j] = widen<S>(piece[i].lane[e + j]);
            *reinterpret_cast<Vector<S, kStored>*>(begin + e) = values;
          }
        }
      }
      source += kBatch * step, target += kBatch * together * to.pair;
    }
  }
}

// The same in pieces of `bytes`.
template <int kGroup, class T, class S>
__device__ __forceinline__ void fill_group(Team team, const T* plane, const View& view, int bytes,
                                           int channels, int height, int width,
                                           const GroupBands& to, S* pixels) {
  constexpr int kElement = int(sizeof(T));
  const auto fill = [&](auto constant) {
    fill_pieces<kGroup, constant()>(team, plane, view, channels, height, width, to, pixels);
  };
  if constexpr (kGroup * kElement >= 16) {
    if (bytes == 16) return fill(std::integral_constant<int, 16>());
  }
  if (bytes >= 8) return fill(std::integral_constant<int, 8>());
  if (kElement == 4 || bytes == 4) return fill(std::integral_constant<int, 4>());
  if constexpr (kElement == 2) fill(std::integral_constant<int, 2>());
}

// N values, kStep elements apart: of a row, or the taps of a row of the kernel.
template <int kStep, class T, int N>
__device__ __forceinline__ void load_values(const T* row, float (&value)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) value[j] = widen<float>(row[j * kStep]);
}

// sum[r][u] += sum_ij taps[i][j] * in(y + r + i - R, x + u + j - R). A row is loaded once for all
// outputs, and so is a row of taps.
template <int K, int kTapPitch, int kRows, int kCols, class In>
__device__ __forceinline__ void convolve_strip(const In& in, int y, int x, const float* taps,
                                               float (&sum)[kRows][kCols]) {
  constexpr int R = K / 2;
  float tap[kRows][K];
#pragma unroll
  for (int i = 0; i < kRows + K - 1; ++i) {
    float value[kCols + K - 1];
    load_values<In::kStep>(in.row(y + i - R, x, R) - R * In::kStep, value);
    if (i < K) load_values<kTapPitch>(taps + i * K * kTapPitch, tap[i % kRows]);
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

// The same for one row of outputs of a small plane: a loop over the rows that it has.
template <int K, int kTapPitch, int kCols, class In>
__device__ __forceinline__ void convolve_small(const In& in, int y, int x, const float* taps,
                                               float (&sum)[kCols]) {
  constexpr int R = K / 2;
  const int top = max(0, R - y), bottom = min(K, in.rows + R - y);
  const auto* row = in.first + (y + top - R) * in.pitch + (x - R) * In::kStep;
  const float* row_taps = taps + top * K * kTapPitch;
#pragma unroll 1
  for (int i = top; i < bottom; ++i, row += in.pitch, row_taps += K * kTapPitch) {
    float value[kCols + K - 1], tap[K];
    load_values<In::kStep>(row, value);
    load_values<kTapPitch>(row_taps, tap);
#pragma unroll
    for (int j = 0; j < K; ++j) {
#pragma unroll
      for (int u = 0; u < kCols; ++u) sum[u] += tap[j] * value[u + j];
    }
  }
}

// kCols coefficients from (y, x) on of the four bands at `to`; use(u, LL) of each.
template <int kCols, class In, class Use>
__device__ __forceinline__ void analyse_strip(const In& finer, const GroupBands& to, int y, int x,
                                              float* out, Use use) {
  float top[2 * kCols], bottom[2 * kCols];
  load_values<In::kStep>(finer.row(2 * y, 2 * x), top);
  load_values<In::kStep>(finer.row(2 * y + 1, 2 * x), bottom);
  out += y * to.pitch + x * In::kStep;
#pragma unroll
  for (int u = 0; u < kCols; ++u) {
    float value[kSubbands];
    haar_butterfly<float>(top[2 * u], top[2 * u + 1], bottom[2 * u], bottom[2 * u + 1], value);
    if (x + u < to.cols) {
#pragma unroll
      for (int b = 0; b < kSubbands; ++b) out[b * to.band + u * In::kStep] = value[b];
      use(u, value[0]);
    }
  }
}

}  // namespace wtconv::cuda
