// The gradients of weights, scales and bias of all levels from the partial sums of the
// weight-gradient kernels: a weight's partial sums are added in a fixed order in float64, then eq.
// foldgrad of the paper. Bitwise repeatable, no atomics.
#include "element.cuh"
#include "intrinsics.cuh"
#include "launch.cuh"

namespace wtconv::cuda {
namespace {

__device__ __forceinline__ void write(void* data, DType dtype, int64_t i, double value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[i] = value;
      break;
    case DType::kFloat16:
      static_cast<__half*>(data)[i] = __float2half_rn(float(value));
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(float(value));
      break;
    default:
      static_cast<float*>(data)[i] = float(value);
  }
}

constexpr int kThreads = 128;

// One warp per (channel, slot): eq. foldgrad on the sum of the partial sums.
template <class A>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ FinishLaunch p) {
  const int slots = slot_count(p.levels), lane = threadIdx.x % 32;
  const int64_t warp = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) / 32;
  wait_for_previous_grid();
  let_next_grid_start();
  if (warp >= int64_t(p.channels) * slots) return;
  const int64_t c = warp / slots;
  const int slot = int(warp % slots), level = (slot + kSubbands - 1) / kSubbands,
            taps = p.kernel_size * p.kernel_size;
  const int band = level ? (slot - 1) % kSubbands : 0;
  const int64_t group = level ? kSubbands * c + band : c;
  const LevelSums sums = p.sums[level];
  const A* partials = static_cast<const A*>(sums.partials) + c * sums.count * sums.sums;
  // Loads in groups, which wait together; added one by one.
  const auto total = [&](int n) {
    constexpr int kLoads = 16;
    double value = 0;
    for (int64_t i = 0; i < sums.count; i += kLoads) {
      A part[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        part[u] = i + u < sums.count ? partials[(i + u) * sums.sums + n] : A(0);
#pragma unroll
      for (int u = 0; u < kLoads; ++u) value += double(part[u]);
    }
    return value;
  };
  const LevelGradient& out = p.gradients[level];
  if (!out.weight && !out.scale && !(level == 0 && p.grad_bias)) return;
  double product = 0;
  const double scale = read<double>(p.params.scale[level], p.params.dtype, group);
  if (out.weight || out.scale) {
    for (int t = lane; t < taps; t += 32) {
      const double grad = sums.scale * total(sums.first + (band + 1) * taps - 1 - t);
      if (out.weight) write(out.weight, p.params.dtype, group * taps + t, scale * grad);
      product += grad * read<double>(p.params.weight[level], p.params.dtype, group * taps + t);
    }
  }
  product = warp_sum(product);
  if (lane > 0) return;
  if (level == 0 && p.params.bias) {
    const double bias = total(sums.sums - 1);
    if (p.grad_bias) write(p.grad_bias, p.params.dtype, c, scale * bias);
    product += bias * read<double>(p.params.bias, p.params.dtype, c);
  }
  if (out.scale) write(out.scale, p.params.dtype, group, product);
}

}  // namespace

const char* launch_finish(const FinishLaunch& p, DType activations, cudaStream_t stream) {
  constexpr int kWarps = kThreads / 32;
  const int64_t blocks = (int64_t(p.channels) * slot_count(p.levels) + kWarps - 1) / kWarps;
  return accumulates_in_double(activations)
             ? launch_kernel(&finish_kernel<double>, p, blocks, kThreads, 0, stream, true)
             : launch_kernel(&finish_kernel<float>, p, blocks, kThreads, 0, stream, true);
}

}  // namespace wtconv::cuda
