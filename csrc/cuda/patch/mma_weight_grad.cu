// The weight gradients of large planes of half types, on tensor cores: the base path and one level
// or two in one pass over both tensors (mma_grad.cuh).
//
//   copy the windows of g and of x (with halo), the next ones meanwhile -> L = 2: LL of both into
//   shared memory -> products, whose sums stay in registers over many tiles -> diagonals by way of
//   shared memory -> gradients of the taps -> partial sums
//
// Both tensors are read once (halos hit L1 or L2).
#include "../launch.cuh"
#include "mma_grad.cuh"
#include "mma_planes.cuh"

namespace wtconv::cuda {
namespace {

template <class T, int K, int L>
__global__ void __launch_bounds__(kPatchThreads, MmaGradMemory<K, L>::kBlocks)
    mma_weight_grad_kernel(const __grid_constant__ PatchGradLaunch p) {
  using M = MmaGradMemory<K, L>;
  using WX = typename M::WX;
  using WG = typename M::WG;
  using Plane = MmaPlanesWindow<K, 1, 4, false>;  // WG as one plane: no halo
  static_assert(Plane::size(0) == WG::size(0) && Plane::size(1) == WG::size(1));
  extern __shared__ __align__(16) unsigned char shared[];
  const auto input = [&](int n) { return reinterpret_cast<T*>(shared + n % 2 * M::kWindow); };
  const auto grad = [&](int n) { return input(n) + M::kInput / 2; };
  T* low_input = reinterpret_cast<T*>(shared + 2 * M::kWindow);
  T* low_grad = low_input + M::kLowInput / 2;

  const BlockTiles tiles = BlockTiles::contiguous(p);
  const TileIndex step(p, tiles.channel, tiles.step);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const auto start = [&](int n) {
    fill_mma_window<WX, WX::kPiece, true>(p.input, p.input_bytes, p, next, input(n));
    fill_mma_window<WG, WG::kPiece, false>(p.grad_output, p.grad_bytes, p, next, grad(n));
  };
  wait_for_previous_grid();
  if (p.lets_next_start) let_next_grid_start();
  start(0);
  // Settled while the first windows are on their way.
  const FormLowpassIf<(L > 1), WX, 0> form_input(shared + M::kFormInput);
  int n = 0;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    GradSums<M> sum[L] = {};
    float bias[4] = {}, low_sum = 0;
#pragma unroll 1
    for (const int end = int(int64_t(tiles.count) * (part + 1) / p.parts); n < end; ++n) {
      wait_for_copies();
      __syncthreads();
      at = next;
      if (n + 1 < tiles.count) {
        next.advance(p, step);
        start(n + 1);
      }
      if constexpr (L > 1) {
        form_input(input(n), 0.5f / kLowScale, low_input);
        form_planes_lowpass<Plane>(grad(n), 0.5f, low_grad);
      }
      if (p.low_grad)
        low_sum += store_lowpass<WG, L, 0>(grad(n), p, at, 1, p.low_grad, p.exact_low_grad);
      // Where the low-pass band is formed, its coefficients give the bias.
      if (p.bias_wanted && !p.low_grad) {
        add_products<M, 0, true>(input(n), grad(n), sum[0], bias);
      } else {
        add_products<M, 0, false>(input(n), grad(n), sum[0], bias);
      }
      if constexpr (L > 1) __syncthreads();
      // Averages, which cannot overflow; sums of gradients shall not underflow.
      if (p.low_input) {
        store_lowpass<WX, L, L - 1>(L > 1 ? low_input : input(n), p, at, 0.5f, p.low_input,
                                    nullptr);
      }
      if constexpr (L > 1) add_products<M, 1, false>(low_input, low_grad, sum[1], bias);
    }
    // A part has a tile, whose windows are free behind this barrier.
    __syncthreads();
    if (n == tiles.count) let_next_grid_start();
    const int64_t block = int64_t(tiles.channel) * p.splits + blockIdx.x / p.channels;
    write_partials<M>(sum, bias, low_sum, reinterpret_cast<float*>(input(n - 1)),
                      p.partials + (block * p.parts + part) * sum_count(K, L),
                      [] { __syncthreads(); });
  }
}

template <class T, int K, int L>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  return launch_kernel(&mma_weight_grad_kernel<T, K, L>, p, int64_t(p.channels) * p.splits,
                       kPatchThreads, MmaGradMemory<K, L>::kBytes, stream, p.early);
}

}  // namespace

const char* launch_mma_weight_grad(const PatchGradLaunch& p, DType activations,
                                   cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), p.levels,
                           [&](auto l) { return launch<decltype(t), k(), l()>(p, stream); });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
