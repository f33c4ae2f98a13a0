// Stores of the kernels for channels_last planes: lanes, each with its own channel, exchange
// pixels, so that each stores four channels of a pixel at once.
#pragma once

#include "../element.cuh"
#include "../intrinsics.cuh"
#include "../parameters.h"

namespace wtconv::cuda {

// Of two values of 4 bytes, the lanes without `bit` keep `low` and get that of their partner as
// `high`; the others keep `high` and get that of their partner as `low`.
template <class V>
__device__ __forceinline__ void trade(V& low, V& high, int bit) {
  static_assert(sizeof(V) == 4);
  const bool upper = threadIdx.x & bit;
  uint32_t first, second;
  memcpy(&first, &low, 4), memcpy(&second, &high, 4);
  const uint32_t other = __shfl_xor_sync(~0u, upper ? first : second, bit);
  first = upper ? other : first, second = upper ? second : other;
  memcpy(&low, &first, 4), memcpy(&high, &second, 4);
}

// Of four pixels, each lane's own channel of them, to four channels of a pixel: lane 4 n + q gets
// those of pixel q.
template <class T>
__device__ __forceinline__ Vector<T, 4> four_channels(const float (&pixel)[4]) {
  if constexpr (sizeof(T) == 4) {
    float v[4] = {pixel[0], pixel[1], pixel[2], pixel[3]};
    trade(v[0], v[1], 1), trade(v[2], v[3], 1);
    trade(v[0], v[2], 2), trade(v[1], v[3], 2);
    return {{v[0], v[1], v[2], v[3]}};
  } else {
    using Pair = Vector<T, 2>;
    Pair even{{narrow<T>(pixel[0]), narrow<T>(pixel[2])}};
    Pair odd{{narrow<T>(pixel[1]), narrow<T>(pixel[3])}};
    trade(even, odd, 1);
    Pair first{{even.lane[0], odd.lane[0]}}, second{{even.lane[1], odd.lane[1]}};
    trade(first, second, 2);
    return {{first.lane[0], first.lane[1], second.lane[0], second.lane[1]}};
  }
}

// The pixels of a strip that lie within `rows` x `cols`: four channels of each at once, in pieces
// that lanes exchange; `out` is the first pixel of the first of them, `wanted` whether they exist.
template <class T, int kCols>
__device__ __forceinline__ void store_channels(const View& view, T* out, bool wanted, int rows,
                                               int cols, const float (&sum)[2][kCols]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 2 * kCols; n += 4) {
    float pixel[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pixel[i] = sum[(n + i) / kCols][(n + i) % kCols];
    const Vector<T, 4> channels = four_channels<T>(pixel);
    const int row = n + lane < kCols ? 0 : 1, col = n + lane - row * kCols;
    if (wanted && row < rows && col < cols)
      store_whole(out + row * view.stride_y + col * view.stride_x, channels);
  }
}

// The same, element by element, of one channel.
template <class T, int kCols>
__device__ __forceinline__ void store_strip(const View& view, T* out, int rows, int cols,
                                            const float (&sum)[2][kCols]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= rows) break;
    T* at = out + r * view.stride_y;
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
      if (u < cols) *at = narrow<T>(sum[r][u]);
      at += view.stride_x;
    }
  }
}

}  // namespace wtconv::cuda
