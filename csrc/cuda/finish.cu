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
constexpr int kBlocks = 10;  // of a multiprocessor: more of them wait for memory together

// One warp per (channel, slot): eq. foldgrad on the sum of the partial sums. A lane takes a tap;
// that after the last tap of the base path, the bias.
template <class A>
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_kernel(const __grid_constant__ FinishLaunch p) {
  const int slots = slot_count(p.levels), lane = threadIdx.x % 32;
  const int warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, slot = warp % slots;
  const int64_t c = warp / slots;
  const int level = (slot + kSubbands - 1) / kSubbands, taps = p.kernel_size * p.kernel_size;
  const int band = level ? (slot - 1) % kSubbands : 0;
  const int64_t group = level ? kSubbands * c + band : c;
  const bool with_bias = level == 0 && p.params.bias;
  const LevelSums sums = p.sums[level];
  const LevelGradient out = p.gradients[level];
  const bool any_tap = out.weight || out.scale;
  const bool any = c < p.channels && (any_tap || (with_bias && p.grad_bias));
  const auto parameter = [&](int t) {
    return t < taps ? read<double>(p.params.weight[level], p.params.dtype, group * taps + t)
                    : read<double>(p.params.bias, p.params.dtype, c);
  };
  const int first = any_tap ? lane : taps + lane, last = taps + with_bias;
  double scale = 0, next = 0;
  if (any) scale = read<double>(p.params.scale[level], p.params.dtype, group);
  if (any && first < last) next = parameter(first);
  if (!p.sums_ready) wait_for_previous_grid();
  if (!any) return wait_for_previous_grid();

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
  double product = 0;
  for (int t = first; t < last; t += 32) {
    const double value = t == first ? next : parameter(t);
    const double grad = t < taps ? sums.scale * total(sums.first + (band + 1) * taps - 1 - t)
                                 : total(sums.sums - 1);
    void* to = t < taps ? out.weight : p.grad_bias;
    if (to) write(to, p.params.dtype, t < taps ? group * taps + t : c, scale * grad);
    product += grad * value;
  }
  product = warp_sum(product);
  if (lane == 0 && out.scale) write(out.scale, p.params.dtype, group, product);
  wait_for_previous_grid();
}

}  // namespace

const char* launch_finish(const FinishLaunch& p, DType activations, cudaStream_t stream) {
  constexpr int kWarps = kThreads / 32;
  const int64_t blocks = (int64_t(p.channels) * slot_count(p.levels) + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX / kWarps) return "too many channels for one launch";
  return accumulates_in_double(activations)
             ? launch_kernel(&finish_kernel<double>, p, blocks, kThreads, 0, stream, p.early)
             : launch_kernel(&finish_kernel<float>, p, blocks, kThreads, 0, stream, p.early);
}

}  // namespace wtconv::cuda
