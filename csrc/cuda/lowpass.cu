// The raw low-pass band `levels` levels down: LL of a 2^l x 2^l block is 2^-l times its sum. It is
// what levels past the tile's work on; 1/16 of the input at two levels.
#include "element.cuh"
#include "launch.cuh"

namespace wtconv::cuda {
namespace {

template <class T, class A>
__global__ void __launch_bounds__(256) lowpass_kernel(const __grid_constant__ LowpassLaunch p) {
  const int64_t total = p.batch * p.channels * p.rows * p.cols;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * blockDim.x) {
    const PixelIndex at(i, p.channels, p.rows, p.cols, p.channels_fast);
    const int size = 1 << p.levels;
    const T* src = static_cast<const T*>(p.input.data) + at.item * p.input.stride_b +
                   at.channel * p.input.stride_c;
    A sum = 0;
    for (int r = at.row * size; r < min((at.row + 1) * size, p.height); ++r) {
      A row = 0;
      for (int s = at.col * size; s < min((at.col + 1) * size, p.width); ++s) {
        row += widen<A>(src[r * p.input.stride_y + s * p.input.stride_x]);
      }
      sum += row;
    }
    A* out = static_cast<A*>(p.output);
    out[((at.item * p.channels + at.channel) * p.rows + at.row) * p.cols + at.col] = sum / A(size);
  }
}

template <class T, class A>
const char* launch(const LowpassLaunch& p, cudaStream_t stream) {
  const int64_t total = p.batch * p.channels * p.rows * p.cols;
  const int64_t blocks = total / 256 + 1;
  return launch_kernel(&lowpass_kernel<T, A>, p, blocks < (1 << 20) ? blocks : 1 << 20, 256, 0,
                       stream);
}

}  // namespace

const char* launch_lowpass(const LowpassLaunch& p, DType activations, cudaStream_t stream) {
  return dispatch(activations,
                  [&](auto t, auto a) { return launch<decltype(t), decltype(a)>(p, stream); });
}

}  // namespace wtconv::cuda
