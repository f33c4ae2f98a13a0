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

// Pieces of `unit` elements in the first rows of all blocks.
__host__ __device__ int64_t wide_pieces(const LowpassLaunch& p, int unit) {
  return p.batch * p.channels * p.rows * (p.width / unit);
}

// Rows in pieces of 16 bytes: a thread sums a piece over its 2^level rows. Pieces are counted in 32
// bits, whose divisions take a third of the instructions.
template <class T, int kLevels>
__global__ void __launch_bounds__(kThreads)
    wide_lowpass_kernel(const __grid_constant__ LowpassLaunch p) {
  constexpr int kUnit = 16 / int(sizeof(T)), kSize = 1 << kLevels, kOut = kUnit / kSize;
  const unsigned pieces = p.width / kUnit;
  const unsigned total = unsigned(wide_pieces(p, kUnit)), step = gridDim.x * blockDim.x;
  let_next_grid_start();
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
    const unsigned rows = i / pieces, plane = rows / p.rows;
    const int col = i % pieces, row_of_band = rows % p.rows;
    const T* src = static_cast<const T*>(p.input.data) +
                   int64_t(plane / p.channels) * p.input.stride_b +
                   int64_t(plane % p.channels) * p.input.stride_c +
                   int64_t(row_of_band) * kSize * p.input.stride_y + col * kUnit;
    Vector<T, kUnit> row[kSize];
#pragma unroll
    for (int r = 0; r < kSize; ++r) {
      row[r] = Vector<T, kUnit>{};
      if (row_of_band * kSize + r < p.height)
        row[r] = *reinterpret_cast<const Vector<T, kUnit>*>(src + r * p.input.stride_y);
    }
    Vector<float, kOut> out;
#pragma unroll
    for (int u = 0; u < kOut; ++u) {
      out.lane[u] = lowpass_of<kLevels, float>(
          [&](int r, int s) { return widen<float>(row[r].lane[u * kSize + s]); });
    }
    float* to = static_cast<float*>(p.output) + int64_t(rows) * p.cols + col * kOut;
    *reinterpret_cast<Vector<float, kOut>*>(to) = out;
  }
}

int blocks_for(int64_t threads) {
  return int(std::min<int64_t>(threads / kThreads + 1, kMostBlocks));
}

template <class T, class A>
const char* launch(const LowpassLaunch& p, cudaStream_t stream) {
  return with_constant(LowpassLevels(), p.levels, [&](auto levels) {
    if constexpr (sizeof(A) == 4 && (sizeof(T) << levels()) <= 16) {
      const int64_t pieces = wide_pieces(p, 16 / int(sizeof(T)));
      if (p.wide && pieces <= INT32_MAX) {
        return launch_kernel(&wide_lowpass_kernel<T, levels()>, p, blocks_for(pieces), kThreads, 0,
                             stream);
      }
    }
    return launch_kernel(&lowpass_kernel<T, A, levels()>, p,
                         blocks_for(p.batch * p.channels * p.rows * p.cols), kThreads, 0, stream);
  });
}

}  // namespace

const char* launch_lowpass(const LowpassLaunch& p, DType activations, cudaStream_t stream) {
  return dispatch(activations,
                  [&](auto t, auto a) { return launch<decltype(t), decltype(a)>(p, stream); });
}

}  // namespace wtconv::cuda
