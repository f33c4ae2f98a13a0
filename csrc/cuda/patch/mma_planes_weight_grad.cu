// The weight gradients of planes of half types that fit a tile G x G, G x G batch items of a
// channel at once, on tensor cores: the base path and one level or two in one pass over both
// tensors.
//
//   copy the planes of g and of x, the next ones meanwhile -> L = 2: LL of both by MMA -> products,
//   whose sums stay in registers over many tiles -> partial sums, as in mma_weight_grad.cu
//
// The zeros between the planes of x are the convolution's padding; those of g lie without. A
// product is a sum over the planes of a row of cells, which is what the gradient is. Both tensors
// are read once; low-pass bands for further levels leave in their type. Source: mma_grad.cuh.
#include "../launch.cuh"
#include "mma_grad.cuh"
#include "mma_planes.cuh"

namespace wtconv::cuda {
namespace {

// store_lowpass() of the planes of batch items first .. first + G * G - 1.
template <class W, int L, int kLevel, class T>
__device__ __forceinline__ float store_planes_lowpass(const T* fine, const PatchGradLaunch& p,
                                                      int channel, int first, float factor,
                                                      void* low, float* exact) {
  constexpr int kSide = kPatchTile >> L, kStep = kPatchThreads / kSide, kPlane = W::plane(L);
  constexpr int kSize = 1 << (L - kLevel), kCell = W::cell(kLevel);
  static_assert(kCell % kSize == 0, "the rows of a coefficient lie in one cell");
  const int rows = ceil_div(p.height, 1 << L), cols = ceil_div(p.width, 1 << L);
  const int col = threadIdx.x % kSide, x = col % kPlane;
  float sum = 0;
#pragma unroll 2
  for (int r = threadIdx.x / kSide; r < kSide; r += kStep) {
    const T* from = fine + W::template row_at<kLevel>(W::own_row(kLevel) + r * kSize % kCell) +
                    W::template cell_at<kLevel>(r * kSize / kCell) + W::own_col(kLevel) +
                    W::template col_at<kLevel>(col * kSize);
    const float value = lowpass_at<W, L, kLevel>(from);
    const int item = first + r / kPlane * (kSide / kPlane) + col / kPlane, y = r % kPlane;
    if (item < p.batch && y < rows && x < cols) {
      const int64_t to = ((int64_t(item) * p.channels + channel) * rows + y) * cols + x;
      static_cast<T*>(low)[to] = narrow<T>(factor * value);
      if (exact) exact[to] = value;
    }
    sum += value;
  }
  return sum;
}

template <class T, int K, int L, int G>
__global__ void __launch_bounds__(kPatchThreads, MmaPlanesGradMemory<K, L, G>::kBlocks)
    mma_planes_weight_grad_kernel(const __grid_constant__ PatchGradLaunch p) {
  using M = MmaPlanesGradMemory<K, L, G>;
  using WX = typename M::WX;
  using WG = typename M::WG;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto input = [&](int n) { return reinterpret_cast<T*>(shared + n % 2 * M::kWindow); };
  const auto grad = [&](int n) { return input(n) + M::kInput / 2; };
  T* low_input = reinterpret_cast<T*>(shared + 2 * M::kWindow);
  T* low_grad = low_input + M::kLowInput / 2;

  const BlockTiles tiles = BlockTiles::strided(p);
  const T* x = static_cast<const T*>(p.input.data) + tiles.channel * p.input.stride_c;
  const T* g = static_cast<const T*>(p.grad_output.data) + tiles.channel * p.grad_output.stride_c;
  const auto first_item = [&](int n) { return (tiles.first + n * tiles.step) * G * G; };
  const auto start = [&](int n) {
    copy_planes<WX>(p, p.input, p.input_bytes, x, first_item(n), input(n));
    copy_planes<WG>(p, p.grad_output, p.grad_bytes, g, first_item(n), grad(n));
  };
  clear(shared, M::kBytes);
  wait_for_previous_grid();
  if (p.lets_next_start) let_next_grid_start();
  start(0);
  int n = 0;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    GradSums<M> sum[L] = {};
    float bias[4] = {}, low_sum = 0;
#pragma unroll 1
    for (const int end = int(int64_t(tiles.count) * (part + 1) / p.parts); n < end; ++n) {
      wait_for_copies();
      __syncthreads();
      if (n + 1 < tiles.count) start(n + 1);
      if constexpr (L > 1) {
        form_planes_lowpass<WX>(input(n), 0.5f / kLowScale, low_input);
        form_planes_lowpass<WG>(grad(n), 0.5f, low_grad);
      }
      if (p.low_grad) {
        low_sum += store_planes_lowpass<WG, L, 0>(grad(n), p, tiles.channel, first_item(n), 1,
                                                  p.low_grad, p.exact_low_grad);
      }
      // Where the low-pass band is formed, its coefficients give the bias.
      if (p.bias_wanted && !p.low_grad) {
        add_products<M, 0, true>(input(n), grad(n), sum[0], bias);
      } else {
        add_products<M, 0, false>(input(n), grad(n), sum[0], bias);
      }
      if constexpr (L > 1) __syncthreads();
      // Averages, which cannot overflow; sums of gradients shall not underflow.
      if (p.low_input) {
        store_planes_lowpass<WX, L, L - 1>(L > 1 ? low_input : input(n), p, tiles.channel,
                                           first_item(n), 0.5f, p.low_input, nullptr);
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
    if (part + 1 == p.parts) break;
    __syncthreads();
    clear(reinterpret_cast<unsigned char*>(input(n - 1)), M::kInput);
  }
}

template <class T, int K, int L, int G>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  return launch_kernel(&mma_planes_weight_grad_kernel<T, K, L, G>, p,
                       int64_t(p.channels) * p.splits, kPatchThreads,
                       MmaPlanesGradMemory<K, L, G>::kBytes, stream, p.early);
}

}  // namespace

const char* launch_mma_planes_weight_grad(const PatchGradLaunch& p, DType activations,
                                          cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), p.levels, [&](auto l) {
        return with_constant(MmaPlaneGradCells(), p.cells,
                             [&](auto g) { return launch<decltype(t), k(), l(), g()>(p, stream); });
      });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
