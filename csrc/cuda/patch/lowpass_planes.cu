// The levels past those of a tile, where their planes fit one: the operator without base path on
// the low-pass band of x two or three levels down, which the kernel forms itself.
//
//   x in pieces of 16 bytes -> LL, dense -> level 1 in its cells -> as in planes.cu -> store
//
// A block reads 4^down times its planes, so x sets the pace: four blocks of a multiprocessor, with
// kPieces of each thread under way. A block has one tile: while those that are done reading filter,
// the others have the bandwidth. LL never reaches memory, and what is written, a float32 for 4^down
// pixels, mostly stays in L2 for the kernel that adds it. 8x64x256x256, L=5, on an H100: 68 us in
// float32 and 46 us in float16, where a pass that forms LL takes 55 and 32 us, and a launch on it
// 28 us.
#include "../launch.cuh"
#include "planes_levels.cuh"

namespace wtconv::cuda {
namespace {

constexpr int kPieces = 8;

// LL of batch items `first` on, [row][col] of the tile: 2^-kDown times the sum of 2^kDown x 2^kDown
// pixels, zero outside the planes. A thread sums the coefficients below one piece; the threads
// share the pieces that there are, so that small planes keep as many under way.
template <int G, int kDown, class T>
__device__ __forceinline__ void form_band(const LowpassPlanesLaunch& p, int channel, int first,
                                          float* band) {
  constexpr int kSize = 1 << kDown, kUnit = 16 / int(sizeof(T)), kOut = kUnit / kSize;
  constexpr int kAtOnce = kPieces / kSize, kCell = kPatchTile / G;
  const View& view = p.planes.input;
  const T* plane = static_cast<const T*>(view.data) + channel * view.stride_c;
  const int across = p.input_width / kUnit, rows = p.planes.height;
  const int total = min(G * G, p.planes.batch - first) * rows * across;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < total; begin += kAtOnce * kPatchThreads) {
    Vector<T, kUnit> piece[kAtOnce][kSize];
    int to[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int at = begin + r * kPatchThreads, col = at % across, row = at / across % rows;
      const int item = at / across / rows;
      const int left = at < total ? p.input_height - row * kSize : 0;
      const T* from =
          plane + (first + item) * view.stride_b + row * kSize * view.stride_y + col * kUnit;
      to[r] = (item / G * kCell + row) * kPatchTile + item % G * kCell + col * kOut;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        piece[r][i] = Vector<T, kUnit>{};
        if (i < left)
          piece[r][i] = *reinterpret_cast<const Vector<T, kUnit>*>(from + i * view.stride_y);
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (begin + r * kPatchThreads >= total) break;
      Vector<float, kOut> out;
#pragma unroll
      for (int u = 0; u < kOut; ++u) {
        out.lane[u] = lowpass_of<kDown, float>(
            [&](int i, int s) { return widen<float>(piece[r][i].lane[u * kSize + s]); });
      }
      *reinterpret_cast<Vector<float, kOut>*>(band + to[r]) = out;
    }
  }
}

template <int G, class T>
__device__ __forceinline__ void form_band(const LowpassPlanesLaunch& p, int channel, int first,
                                          float* band) {
  if constexpr (sizeof(T) == 2) {
    if (p.down == 3) return form_band<G, 3, T>(p, channel, first, band);
  }
  form_band<G, 2, T>(p, channel, first, band);
}

// Level 1 of the band; the zeros between its cells stay.
template <class W>
__device__ __forceinline__ void analyse_band(const float* band, float* bands) {
  constexpr int kSide = W::own(1);
  for_each_position<kSide, kSide>([&](int row, int col) {
    const float* p = band + 2 * row * kPatchTile + 2 * col;
    const auto top = *reinterpret_cast<const Vector<float, 2>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<float, 2>*>(p + kPatchTile);
    float value[kSubbands];
    haar_butterfly<float>(top.lane[0], top.lane[1], bottom.lane[0], bottom.lane[1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) bands[W::stored(1, b, row, col)] = value[b];
  });
}

template <int K, int G>
__global__ void __launch_bounds__(kPatchThreads, LowpassPlanesMemory<K, G>::kBlocks)
    lowpass_planes_kernel(const __grid_constant__ LowpassPlanesLaunch launch) {
  using M = LowpassPlanesMemory<K, G>;
  using P = typename M::P;
  using W = typename P::W;
  const PatchLaunch& p = launch.planes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* dense = reinterpret_cast<float*>(shared);
  float* bands = reinterpret_cast<float*>(shared + M::kBands);
  float* weights = reinterpret_cast<float*>(shared + M::kWeights);

  // Blocks of the float32 kernel that adds the result copy and filter their first windows
  // meanwhile. That of half types is not launched to start early: its windows share the L1 cache,
  // of which a multiprocessor keeps for it what this kernel leaves (8x64x256x256, L=5: 0.167
  // against 0.147 ms).
  let_next_grid_start();
  clear(shared, M::kWeights);
  const int channel = blockIdx.x % p.channels, first = blockIdx.x / p.channels * G * G;
  switch (launch.dtype) {
    case DType::kFloat16:
      form_band<G, __half>(launch, channel, first, dense);
      break;
    case DType::kBFloat16:
      form_band<G, __nv_bfloat16>(launch, channel, first, dense);
      break;
    default:
      form_band<G, float>(launch, channel, first, dense);
  }
  load_taps<K>(p.params, channel, p.levels, weights);
  __syncthreads();
  analyse_band<W>(dense, bands);
  __syncthreads();
  float low[2][4] = {}, sum[kPatchRows][kPatchCols] = {};
  if (p.levels > 1) filter_deep_levels<P, K>(bands, dense, weights, p.levels, low);

  const int py = threadIdx.x / kPatchesX * kPatchRows, px = threadIdx.x % kPatchesX * kPatchCols;
  const int y = py % W::cell(0), x = px % W::cell(0);
  const int item = first + py / W::cell(0) * G + px / W::cell(0);
  if (item < p.batch && y < p.height && x < p.width) {
    add_level1<W, K>(bands, weights, low, sum);
    float* out = static_cast<float*>(p.output.data) + item * p.output.stride_b +
                 channel * p.output.stride_c + y * p.output.stride_y + x;
    store_patch<float>(p, out, p.height - y, p.width - x, sum);
  }
}

template <int K, int G>
const char* launch(const LowpassPlanesLaunch& p, cudaStream_t stream) {
  return launch_kernel(&lowpass_planes_kernel<K, G>, p, int64_t(p.planes.channels) * p.planes.tiles,
                       kPatchThreads, LowpassPlanesMemory<K, G>::kBytes, stream, false, 228 * 1024);
}

}  // namespace

const char* launch_lowpass_planes(const LowpassPlanesLaunch& p, cudaStream_t stream) {
  return with_constant(PlaneKernelSizes(), p.planes.kernel_size, [&](auto k) {
    return with_constant(LowpassCells(), p.planes.cells,
                         [&](auto g) { return launch<k(), g()>(p, stream); });
  });
}

}  // namespace wtconv::cuda
