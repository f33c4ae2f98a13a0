// Stored element types and their conversion to the accumulator type; sums over a warp, low-pass
// coefficients of pixels, and positions in dense tensors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/limits.h"
#include "intrinsics.cuh"

namespace wtconv::cuda {

// Neighbouring elements of one access.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T lane[N];
};

template <class A, class T>
__device__ __forceinline__ A widen(T v) {
  return A(v);
}
template <>
__device__ __forceinline__ float widen<float, __half>(__half v) {
  return __half2float(v);
}
template <>
__device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <class T, class A>
__device__ __forceinline__ T narrow(A v) {
  return T(v);
}
template <>
__device__ __forceinline__ __half narrow<__half, float>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float v) {
  return __float2bfloat16_rn(v);
}

// f(T()) for the stored type of a dtype that is known at run time.
template <class F>
__device__ __forceinline__ auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double());
    case DType::kFloat16:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
    default:
      return f(float());
  }
}

// The sum over the block of 2^kLevels x 2^kLevels pixels that begins at(row, col), level by level.
template <int kLevels, class A, class At>
__device__ __forceinline__ A block_sum(At at, int row, int col) {
  if constexpr (kLevels == 0) {
    return at(row, col);
  } else {
    constexpr int kHalf = 1 << (kLevels - 1);
    const auto finer = [&](int r, int c) { return block_sum<kLevels - 1, A>(at, r, c); };
    return (finer(row, col) + finer(row, col + kHalf)) +
           (finer(row + kHalf, col) + finer(row + kHalf, col + kHalf));
  }
}

// The low-pass coefficient `kLevels` levels down of a block of pixels: the bits of the butterfly's
// LL, whose halves are exact, whichever kernel forms it and from whichever finer band.
template <int kLevels, class A, class At>
__device__ __forceinline__ A lowpass_of(At at) {
  return block_sum<kLevels, A>(at, 0, 0) * (A(1) / (1 << kLevels));
}

// The sum over a warp, in its first lane.
template <class A>
__device__ __forceinline__ A warp_sum(A value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// Element i of a tensor whose dtype is known at run time.
template <class A>
__device__ __forceinline__ A read(const void* data, DType dtype, int64_t i) {
  return with_type(dtype,
                   [&](auto t) { return widen<A>(static_cast<const decltype(t)*>(data)[i]); });
}

// The same in two steps, of which the first waits for memory only where it converts: the bits of
// the element, of a float64 those of its float32, and what they say.
__device__ __forceinline__ uint32_t read_bits(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kFloat64) return __float_as_uint(float(static_cast<const double*>(data)[i]));
  if (dtype == DType::kFloat32) return static_cast<const uint32_t*>(data)[i];
  return static_cast<const uint16_t*>(data)[i];
}
__device__ __forceinline__ float float_of_bits(uint32_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) return __uint_as_float(bits << 16);
  if (dtype != DType::kFloat16) return __uint_as_float(bits);
  __half_raw half;
  half.x = static_cast<unsigned short>(bits);
  return __half2float(half);
}

// Element `linear` of a dense [B, C, rows, cols], counted with the channels fastest or the columns.
struct PixelIndex {
  int64_t item;
  int channel, row, col;

  __device__ __forceinline__ PixelIndex(int64_t linear, int channels, int rows, int cols,
                                        bool channels_fast) {
    if (channels_fast) {
      channel = int(linear % channels);
      linear /= channels;
    }
    col = int(linear % cols);
    linear /= cols;
    row = int(linear % rows);
    linear /= rows;
    if (!channels_fast) {
      channel = int(linear % channels);
      linear /= channels;
    }
    item = linear;
  }
};

}  // namespace wtconv::cuda
