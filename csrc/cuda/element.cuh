// Stored element types and their conversion to the accumulator type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/limits.h"

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

// The low-pass coefficient `kLevels` levels down of the pixels at(row, column) of its block. The
// same bits in every kernel that forms it so.
template <int kLevels, class At>
__device__ __forceinline__ float lowpass_of(At at) {
  constexpr int kSize = 1 << kLevels;
  float sum = 0;
#pragma unroll
  for (int r = 0; r < kSize; ++r) {
#pragma unroll
    for (int s = 0; s < kSize; ++s) sum += at(r, s);
  }
  return sum / kSize;
}

// Element i of a tensor whose dtype is known at run time.
template <class A>
__device__ __forceinline__ A read(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return A(static_cast<const double*>(data)[i]);
    case DType::kFloat16:
      return A(__half2float(static_cast<const __half*>(data)[i]));
    case DType::kBFloat16:
      return A(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    default:
      return A(static_cast<const float*>(data)[i]);
  }
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
