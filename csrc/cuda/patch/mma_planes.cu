// The operator on planes of half types that fit a tile G x G, all levels on chip, G x G batch items
// of a channel at once, on tensor cores.
//
//   copy the planes (asynchronous; the next ones meanwhile) -> LL1 by MMA -> the levels past 2,
//   outputs of level 2 by MMA -> y by MMA, in place of the window -> store
//
// The products are those of mma_forward.cu, whose rows are one of each eight-row cell of the tile:
// a cell belongs to one plane, and a warp's 16 columns do, so that planes of up to 64, 32 or 16
// pixels fill a tile. The zeros between the planes, one cell of pixels, are the convolution's
// padding and all that taps reach (64x192x28x28 float16 L=4 on an H200: 0.039 ms, without tensor
// cores 0.069).
//
// x is read once and y written once. Sums are float32, of taps and of LL1 rounded to the half type.
// Of one level, the taps of the second are what shared memory held: their factor is finite, what it
// multiplies zero. Source: sec. 3 of the paper.
#include "../launch.cuh"
#include "mma_deep.cuh"
#include "mma_planes.cuh"

namespace wtconv::cuda {
namespace {

// Stores the outputs of a window, of batch items first .. first + G * G - 1.
template <class W, class T>
__device__ __forceinline__ void store_planes(const PatchLaunch& p, const T* pixels, int first,
                                             T* channel) {
  with_piece<8>(p.output_bytes, [&](auto piece) {
    using Piece = Vector<T, piece()>;
    for_each_piece<W, piece()>(p, p.output, first, [&](int at, int64_t to, bool inside) {
      if (inside)
        *reinterpret_cast<Piece*>(channel + to) = *reinterpret_cast<const Piece*>(pixels + at);
    });
  });
}

// The outputs of this lane in place of the window's pixels, those past the planes' ends, too: the
// next copy makes them zeros again.
template <class W, class T>
__device__ __forceinline__ void write_outputs(const float (&value)[8][4], T* window) {
  for_each_output<W>(window, [&](int f, int h, T* to) {
    *reinterpret_cast<uint32_t*>(to) = pack<T>(value[f][2 * h], value[f][2 * h + 1]);
  });
}

template <class T, int K, int G>
__global__ void __launch_bounds__(kPatchThreads, MmaPlanesMemory<K, G>::kBlocks)
    mma_planes_kernel(const __grid_constant__ PatchLaunch p) {
  using M = MmaPlanesMemory<K, G>;
  using W = typename M::W;
  extern __shared__ __align__(16) unsigned char shared[];
  auto& taps = *reinterpret_cast<ChannelTaps<K, 2>*>(shared + M::kTaps);
  const auto window = [&](int n) { return reinterpret_cast<T*>(shared + n % 2 * M::kWindow); };
  const auto level_taps = [&](int level) {
    return reinterpret_cast<uint32_t*>(shared + M::level_taps(level));
  };
  T* lowpass = reinterpret_cast<T*>(shared + M::kLowpass);
  float *raw = reinterpret_cast<float*>(shared + M::kRaw),
        *filtered = reinterpret_cast<float*>(shared + M::kFiltered),
        *deep_taps = reinterpret_cast<float*>(shared + M::kDeepTaps);

  const BlockTiles tiles = BlockTiles::strided(p);
  const T* input = static_cast<const T*>(p.input.data) + tiles.channel * p.input.stride_c;
  T* output = static_cast<T*>(p.output.data) + tiles.channel * p.output.stride_c;
  const auto first_item = [&](int n) { return (tiles.first + n * tiles.step) * G * G; };

  clear(shared, M::kRaw);
  copy_planes<W>(p, p.input, p.input_bytes, input, first_item(0), window(0));
  read_all_taps<K, G>(p.params, tiles.channel, p.levels, taps, deep_taps);
  __syncthreads();
  form_level_taps<0, W, T>(taps, level_taps(0));
  form_level_taps<1, W, T>(taps, level_taps(1));
  // Averages cannot overflow; sums of gradients, where rotated, shall not underflow.
  const float average = p.params.rotate ? 0.5f : 0.25f, raise = 0.25f / average;
#pragma unroll 1
  for (int n = 0;; ++n) {
    wait_for_copies();
    __syncthreads();
    if (n > 0) {
      wait_for_previous_grid();  // it may read what lies there
      let_next_grid_start();
      store_planes<W>(p, window(n - 1), first_item(n - 1), output);
    }
    if (n == tiles.count) break;
    T* pixels = window(n);
    if (p.levels > 1) form_planes_lowpass<W>(pixels, average, lowpass);
    __syncthreads();
    if (n + 1 < tiles.count)
      copy_planes<W>(p, p.input, p.input_bytes, input, first_item(n + 1), window(n + 1));
    float sum[8][4] = {}, low1[2][4] = {}, coarse[2][2] = {};
    if (p.levels > 2) {
      filter_deep<W, K, G>(lowpass, raise, p.levels, deep_taps, raw, filtered);
      __syncthreads();
      synthesise_deep<K, G>(filtered, p.levels, coarse);
    }
    if (p.levels > 1) filter_level1<W>(lowpass, SharedTaps<W, 1>(level_taps(1)), low1);
    filter_pixels<W>(pixels, SharedTaps<W, 0>(level_taps(0)), sum);
    combine<2>({taps.bias, taps.factor[0], raise * taps.factor[1], 0}, low1, {}, sum);
    add_coarse<2>(1, coarse, sum);
    __syncthreads();
    write_outputs<W>(sum, pixels);
  }
}

template <class T, int K, int G>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using M = MmaPlanesMemory<K, G>;
  return launch_patches(&mma_planes_kernel<T, K, G>, p, M::kBlocks * multiprocessors, M::kBytes,
                        stream, p.early);
}

}  // namespace

const char* launch_mma_planes(const PatchLaunch& p, DType activations, int multiprocessors,
                              cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaPlaneCells(), p.cells, [&](auto g) {
        return launch<decltype(t), k(), g()>(p, multiprocessors, stream);
      });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
