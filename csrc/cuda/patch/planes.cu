// The operator on planes that fit a tile, all levels on chip, G x G batch items of a channel at
// once.
//
// The cells of a tile are parted by zeros, which are the convolution's padding. A level whose cells
// are as wide as a thread's four coefficients is filtered like those of large planes; the few
// coefficients past it are dense, and each is summed on its own. x is read once and y written once.
#include "../launch.cuh"
#include "planes.cuh"
#include "synthesis.cuh"

namespace wtconv::cuda {
namespace {

constexpr int kTileBits = 6;
static_assert(1 << kTileBits == kPatchTile);

// Offset of a small level when the level is known at run time.
template <class P>
__device__ __forceinline__ int small_offset(int level) {
  const auto area = [](int l) { return 1 << (2 * (7 - l)); };
  return kSubbands * (area(P::kSmall) - area(level)) / 3;
}

// A dense level; `finer(row, col)` points to the 2 x 2 low-pass coefficients of a pitch.
template <class Finer>
__device__ __forceinline__ void analyse_small(int level, int pitch, Finer finer, float* raw) {
  const int bits = kTileBits - level, side = 1 << bits;
  for (int i = threadIdx.x; i < side * side; i += kPatchThreads) {
    const float* p = finer(i >> bits, i & (side - 1));
    float value[kSubbands];
    haar_butterfly<float>(p[0], p[1], p[pitch], p[pitch + 1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) raw[b * side * side + i] = value[b];
  }
}

// One coefficient of a dense level: over those of its own cell that the taps reach. kCell is the
// side of the cell where the loops shall be unrolled, else 0.
template <int K, int kCell>
__device__ __forceinline__ float filter_one(const float* raw, const float* taps, int side, int cell,
                                            int y, int x) {
  constexpr int R = K / 2;
  const int top = y & ~(cell - 1), left = x & ~(cell - 1);
  const float* in = raw + top * side + left;
  const float* tap = taps + (top - y + R) * K + left - x + R;
  float sum = 0;
  if constexpr (kCell > 0) {
#pragma unroll
    for (int r = 0; r < kCell; ++r) {
#pragma unroll
      for (int c = 0; c < kCell; ++c) sum += tap[r * K + c] * in[r * side + c];
    }
  } else {
    for (int r = max(0, y - R - top); r < min(cell, y + R + 1 - top); ++r) {
      for (int c = max(0, x - R - left); c < min(cell, x + R + 1 - left); ++c)
        sum += tap[r * K + c] * in[r * side + c];
    }
  }
  return sum;
}

// The dense levels, one coefficient at a time.
template <class P, int K>
__device__ __forceinline__ void filter_small(const float* raw, const float* weights, int levels,
                                             float* filtered) {
#pragma unroll 1
  for (int level = P::kSmall; level <= levels; ++level) {
    const int bits = kTileBits - level, side = 1 << bits, area = side * side;
    const int cell = side / P::W::kCells, offset = small_offset<P>(level);
#pragma unroll 1
    for (int i = threadIdx.x; i < kSubbands * area; i += kPatchThreads) {
      const int band = i >> 2 * bits, y = (i >> bits) & (side - 1), x = i & (side - 1);
      const float* taps = weights + (4 * level - 3 + band) * round_up(K * K, 4);
      const float* in = raw + offset + band * area;
      // All of a cell of 2 x 2 is within the taps' reach.
      filtered[offset + i] = cell == 2 ? filter_one<K, 2>(in, taps, side, cell, y, x)
                                       : filter_one<K, 0>(in, taps, side, cell, y, x);
    }
  }
}

// The reconstruction of levels >= 3 at this thread's two coefficients of level 2: the closed form.
template <class P>
__device__ __forceinline__ void synthesise_small(const float* filtered, int levels,
                                                 float (&low)[2]) {
  const int y = threadIdx.x / kPatchesX, x = threadIdx.x % kPatchesX;
  low[0] = low[1] = 0;
#pragma unroll 1
  for (int level = 3; level <= levels; ++level) {
    const int side = kPatchTile >> level, area = side * side, shift = level - 2;
    const float* f = filtered + small_offset<P>(level) + (y >> shift) * side + (x >> (shift - 1));
    const bool odd_y = (y >> (shift - 1)) & 1;
    const float ll = f[0], lh = odd_y ? -f[area] : f[area], hl = f[2 * area],
                hh = odd_y ? -f[3 * area] : f[3 * area];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const bool odd_x = ((2 * x + u) >> (shift - 1)) & 1;
      low[u] += (ll + lh) + (odd_x ? -(hl + hh) : hl + hh);
    }
  }
}

template <class T, int K, int G>
__global__ void __launch_bounds__(kPatchThreads, PlanesMemory<sizeof(T), K, G>::kBlocks)
    patch_planes_kernel(const __grid_constant__ PatchLaunch p) {
  using P = PlanesMemory<sizeof(T), K, G>;
  using W = typename P::W;
  extern __shared__ __align__(16) unsigned char shared[];
  T* pixels = reinterpret_cast<T*>(shared);
  float* bands = reinterpret_cast<float*>(shared + P::kBands);
  float* raw = reinterpret_cast<float*>(shared + P::kRaw);
  float* filtered = reinterpret_cast<float*>(shared + P::kFiltered);
  float* weights = reinterpret_cast<float*>(shared + P::kWeights);

  clear(shared, P::kBytes);
  const BlockTiles tiles = BlockTiles::strided(p);
  const T* input = static_cast<const T*>(p.input.data) + tiles.channel * p.input.stride_c;
  T* output = static_cast<T*>(p.output.data) + tiles.channel * p.output.stride_c;
  const auto first_item = [&](int n) { return (tiles.first + n * tiles.step) * G * G; };
  const auto start = [&](int n) {
    if (n >= tiles.count) return;
    fill_planes<W>(input, p.input, p.input_bytes, p.height, p.width, first_item(n), p.batch,
                   pixels);
  };

  const int py = threadIdx.x / kPatchesX * kPatchRows, px = threadIdx.x % kPatchesX * kPatchCols;
  const int y = py % W::cell(0), x = px % W::cell(0);
  const int cell = py / W::cell(0) * G + px / W::cell(0);
  load_taps<K>(p.params, tiles.channel, p.levels, weights);
  start(0);
#pragma unroll 1
  for (int n = 0; n < tiles.count; ++n) {
    wait_for_copies();
    __syncthreads();
    float sum[kPatchRows][kPatchCols];
    const float bias = weights[(1 + kSubbands * p.levels) * round_up(K * K, 4)];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
      for (int u = 0; u < kPatchCols; ++u) sum[r][u] = bias;
    }
    base_path<W, T, K>(pixels, weights, sum);
    analyse_pixels<W>(pixels, bands);
    __syncthreads();
    start(n + 1);
    float low[2][4] = {};
    if (p.levels > 1) {
      if constexpr (P::kSmall == 3) {
        analyse_level<W, 2>(bands);
        __syncthreads();
      }
#pragma unroll 1
      for (int level = P::kSmall; level <= p.levels; ++level) {
        const int side = kPatchTile >> level;
        float* out = raw + small_offset<P>(level);
        if (level == P::kSmall) {
          analyse_small(
              level, W::pitch(level - 1),
              [&](int r, int c) { return bands + W::stored(P::kSmall - 1, 0, 2 * r, 2 * c); }, out);
        } else {
          const float* finer = raw + small_offset<P>(level - 1);
          analyse_small(
              level, 2 * side, [&](int r, int c) { return finer + 4 * r * side + 2 * c; }, out);
        }
        __syncthreads();
      }
      filter_small<P, K>(raw, weights, p.levels, filtered);
      float* level2 = filtered;
      if constexpr (P::kSmall == 3) {
        const int band = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int row = lane / 4 * 2, col = lane % 4 * 4;
        float value[2][4] = {};
        filter<W, K, 2>(bands, band, weights + (5 + band) * round_up(K * K, 4), row, col, value);
        level2 = reinterpret_cast<float*>(shared + P::kLevel2);
        write_filtered<P::side(2)>(level2 + band * P::side(2) * P::side(2), row, col, value);
      }
      __syncthreads();
      float low2[2];
      synthesise_small<P>(filtered, p.levels, low2);
      synthesise_level2<P::side(2)>(level2, low2, low);
    }
    add_level1<W, K>(bands, weights, low, sum);
    const int item = first_item(n) + cell;
    if (item < p.batch && y < p.height && x < p.width) {
      T* out = output + item * p.output.stride_b + y * p.output.stride_y + x * p.output.stride_x;
      store_patch<T>(p, out, p.height - y, p.width - x, sum);
    }
  }
}

template <class T, int K, int G>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using P = PlanesMemory<sizeof(T), K, G>;
  return launch_patches(&patch_planes_kernel<T, K, G>, p, P::kBlocks * multiprocessors, P::kBytes,
                        stream);
}

}  // namespace

const char* launch_patch_planes(const PatchLaunch& p, DType activations, int multiprocessors,
                                cudaStream_t stream) {
  return dispatch_float(activations, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(PlaneCells(), p.cells, [&](auto g) {
        return launch<decltype(t), k(), g()>(p, multiprocessors, stream);
      });
    });
  });
}

}  // namespace wtconv::cuda
