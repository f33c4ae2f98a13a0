// The operator on planes that fit a tile, all levels on chip, G x G batch items of a channel at
// once.
//
// The cells of a tile are parted by zeros, which are the convolution's padding. A level whose cells
// are as wide as a thread's four coefficients is filtered like those of large planes; the few
// coefficients past it are dense, and each is summed on its own. x is read once and y written once.
#include "../launch.cuh"
#include "planes_levels.cuh"

namespace wtconv::cuda {
namespace {

template <class T, int K, int G>
__global__ void __launch_bounds__(kPatchThreads, PlanesMemory<sizeof(T), K, G>::kBlocks)
    patch_planes_kernel(const __grid_constant__ PatchLaunch p) {
  using P = PlanesMemory<sizeof(T), K, G>;
  using W = typename P::W;
  using Own = typename W::ThreadPatch;
  extern __shared__ __align__(16) unsigned char shared[];
  T* pixels = reinterpret_cast<T*>(shared);
  float* bands = reinterpret_cast<float*>(shared + P::kBands);
  float* dense = reinterpret_cast<float*>(shared + P::kDense);
  float* weights = reinterpret_cast<float*>(shared + P::kWeights);

  clear(shared, P::kBytes);
  const BlockTiles tiles = BlockTiles::strided(p);
  const T* input = static_cast<const T*>(p.input.data) + tiles.channel * p.input.stride_c;
  T* output = static_cast<T*>(p.output.data) + tiles.channel * p.output.stride_c;
  const auto first_item = [&](int n) { return (tiles.first + n * tiles.step) * G * G; };

  const int py = patch_row<Own>(), px = patch_col<Own>();
  const int y = py % W::cell(0), x = px % W::cell(0);
  const int cell = py / W::cell(0) * G + px / W::cell(0);
  if (!p.reads_at_once) {
    wait_for_previous_grid();
    let_next_grid_start();
  }
  PatchPixels<Own> sum;
  // Tile n is copied while the levels of the one before are filtered; one copy of the code of each
  // (weight_grad.cu).
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n < tiles.count) {
      fill_planes<W>(input, p.input, p.input_bytes, p.height, p.width, first_item(n), p.batch,
                     pixels);
    }
    if (n > 0) {
      PatchLevel1<Own> low = {};
      if (p.levels > 1) filter_deep_levels<P, K>(bands, dense, weights, p.levels, low);
      add_level1<W, K>(bands, weights, low, sum);
      const int item = first_item(n - 1) + cell;
      wait_for_previous_grid();  // it may read what lies there
      let_next_grid_start();
      if (item < p.batch && y < p.height && x < p.width) {
        T* out = output + item * p.output.stride_b + y * p.output.stride_y + x * p.output.stride_x;
        store_patch<T>(p, out, p.height - y, p.width - x, sum);
      }
    } else {
      load_taps<K, P::kLevels>(p.params, tiles.channel, p.levels, weights);
    }
    if (n == tiles.count) return;
    wait_for_copies();
    __syncthreads();
    set_all(sum, weights[slot_count(p.levels) * tap_floats(K)]);
    if (p.params.weight[0]) base_path<W, T, K>(pixels, weights, sum);
    analyse_pixels<W>(pixels, bands);
    __syncthreads();
  }
}

template <class T, int K, int G>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using P = PlanesMemory<sizeof(T), K, G>;
  return launch_patches(&patch_planes_kernel<T, K, G>, p, P::kBlocks * multiprocessors, P::kBytes,
                        stream, p.early);
}

}  // namespace

const char* launch_patch_planes(const PatchLaunch& p, DType activations, int multiprocessors,
                                cudaStream_t stream) {
  return dispatch_float(activations, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(PlaneCells(), p.cells, [&](auto g) -> const char* {
        if constexpr (sizeof(t) == 2 && is_among(MmaPlaneCells(), g())) {
          return "no such patch kernel";
        } else {
          return launch<decltype(t), k(), g()>(p, multiprocessors, stream);
        }
      });
    });
  });
}

}  // namespace wtconv::cuda
