// The raw low-pass band `levels` levels down: LL of a 2^l x 2^l block is 2^-l times its sum. It is
// what levels past those on chip work on, 1/16 of the input's elements at two levels, where neither
// patch/lowpass_planes.cu forms it on chip nor the weight gradients leave it.
#include <algorithm>

#include "element.cuh"
#include "launch.cuh"

namespace wtconv::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 1 << 20;

template <class T, class A, int kLevels>
__global__ void __launch_bounds__(kThreads)
    lowpass_kernel(const __grid_constant__ LowpassLaunch p) {
  const int64_t total = p.batch * p.channels * p.rows * p.cols;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * blockDim.x) {
    const PixelIndex at(i, p.channels, p.rows, p.cols, p.channels_fast);
    const int y = at.row << kLevels, x = at.col << kLevels;
    const T* src = static_cast<const T*>(p.input.data) + at.item * p.input.stride_b +
                   at.channel * p.input.stride_c + y * p.input.stride_y + x * p.input.stride_x;
    A* out = static_cast<A*>(p.output);
    out[((at.item * p.channels + at.channel) * p.rows + at.row) * p.cols + at.col] =
        lowpass_of<kLevels, A>([&](int r, int s) {
          return y + r < p.height && x + s < p.width
                     ? widen<A>(src[r * p.input.stride_y + s * p.input.stride_x])
                     : A(0);
        });
  }
}

// Rows in pieces of 16 bytes: a thread sums a piece over its 2^level rows.
template <class T, int kLevels>
__global__ void __launch_bounds__(kThreads)
    wide_lowpass_kernel(const __grid_constant__ LowpassLaunch p) {
  constexpr int kUnit = 16 / int(sizeof(T)), kSize = 1 << kLevels, kOut = kUnit / kSize;
  const int pieces = p.width / kUnit;
  const int64_t total = p.batch * p.channels * p.rows * pieces;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * blockDim.x) {
    const PixelIndex at(i, p.channels, p.rows, pieces, false);
    const T* src = static_cast<const T*>(p.input.data) + at.item * p.input.stride_b +
                   at.channel * p.input.stride_c + at.row * kSize * p.input.stride_y +
                   at.col * kUnit;
    Vector<T, kUnit> row[kSize];
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      row[r] = Vector<T, kUnit>{};
      if (at.row * kSize + r < p.height)
        row[r] = *reinterpret_cast<const Vector<T, kUnit>*>(src + r * p.input.stride_y);
    }
    Vector<float, kOut> out;
#pragma unroll
    for (int u = 0; u < kOut; ++u) {
      out.lane[u] = lowpass_of<kLevels, float>(
          [&](int r, int s) { return widen<float>(row[r].lane[u * kSize + s]); });
    }
    float* to = static_cast<float*>(p.output) +
                ((at.item * p.channels + at.channel) * p.rows + at.row) * p.cols + at.col * kOut;
    *reinterpret_cast<Vector<float, kOut>*>(to) = out;
  }
}

int blocks_for(int64_t threads) {
  return int(std::min<int64_t>(threads / kThreads + 1, kMostBlocks));
}

template <class T, class A>
const char* launch(const LowpassLaunch& p, cudaStream_t stream) {
  return with_constant(LowpassLevels(), p.levels, [&](auto levels) {
    const int64_t rows = p.batch * p.channels * p.rows;
    if constexpr (sizeof(A) == 4 && (sizeof(T) << levels()) <= 16) {
      if (p.wide) {
        return launch_kernel(&wide_lowpass_kernel<T, levels()>, p,
                             blocks_for(rows * (p.width * int(sizeof(T)) / 16)), kThreads, 0,
                             stream);
      }
    }
    return launch_kernel(&lowpass_kernel<T, A, levels()>, p, blocks_for(rows * p.cols), kThreads, 0,
                         stream);
  });
}

}  // namespace

const char* launch_lowpass(const LowpassLaunch& p, DType activations, cudaStream_t stream) {
  return dispatch(activations,
                  [&](auto t, auto a) { return launch<decltype(t), decltype(a)>(p, stream); });
}

}  // namespace wtconv::cuda
