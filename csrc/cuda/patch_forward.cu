// The operator on large planes in one pass over memory.
//
//   copy the window (asynchronous; the next one while the bands are filtered)
//   -> base path into registers, level 1 into shared memory
//   -> level 2: analysis, a warp filters a band
//   -> each thread filters its coefficients of level 1 and adds the synthesis -> store
//
// x is read once with the halo (re-reads hit L2), y written once. The loop over bands is not
// unrolled: the code of a tile stays below the 32 KB that the instruction cache of an H100 holds,
// past which it issues at half the rate. Sources: sec. 3 and eq. synthesis_closed_form of the
// paper, whose factors 2^-level are folded into the taps.
#include "launch.cuh"
#include "patch_device.cuh"

namespace wtconv::cuda {
namespace {

// Scaled taps of a channel, [slot][round_up(taps, 4)], then the bias.
template <int K, int L>
__device__ void load_taps(const TileParameters& p, int channel, float* weights) {
  constexpr int kTaps = K * K, kStride = round_up(kTaps, 4), kSlots = 1 + kSubbands * L;
  for (int i = threadIdx.x; i < kSlots * kTaps; i += kPatchThreads) {
    const int slot = i / kTaps, tap = i % kTaps, level = (slot + 3) / 4;
    const int64_t group = level ? 4 * int64_t(channel) + (slot - 1) % 4 : channel;
    float value = 0;
    if (p.weight[level]) {
      value =
          read<float>(p.scale[level], p.dtype, group) *
          read<float>(p.weight[level], p.dtype, group * kTaps + (p.rotate ? kTaps - 1 - tap : tap));
    }
    weights[slot * kStride + tap] = level == 0 ? value : level == 1 ? value * 0.5f : value * 0.25f;
  }
  if (threadIdx.x == 0) {
    weights[kSlots * kStride] =
        p.bias ? read<float>(p.scale[0], p.dtype, channel) * read<float>(p.bias, p.dtype, channel)
               : 0.0f;
  }
}

// A warp filters a band of level 2.
template <class W, int K>
__device__ __forceinline__ void filter_level2(const float* bands, const float* weights,
                                              float* filtered) {
  constexpr int kSide = W::own(2);
  const int band = threadIdx.x / 32, row = threadIdx.x % 32 / 4 * 2, col = threadIdx.x % 4 * 4;
  float sum[2][4] = {};
  filter<W, K, 2>(bands, band, weights + (5 + band) * round_up(K * K, 4), row, col, sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    *reinterpret_cast<Vector<float, 4>*>(filtered + (band * kSide + row + r) * kSide +
                                         col) = {{sum[r][0], sum[r][1], sum[r][2], sum[r][3]}};
  }
}

// The reconstruction of levels >= 2 at the 2 x 4 coefficients of level 1 of this thread; `coarse`,
// that of the levels past the tile's, belongs to LL.
template <class W>
__device__ __forceinline__ void synthesise_level2(const float* filtered, const float (&coarse)[2],
                                                  float (&low)[2][4]) {
  constexpr int kSide = W::own(2);
  const float* from = filtered + threadIdx.x / kPatchesX * kSide + threadIdx.x % kPatchesX * 2;
  Vector<float, 2> f[kSubbands];
#pragma unroll
  for (int b = 0; b < kSubbands; ++b)
    f[b] = *reinterpret_cast<const Vector<float, 2>*>(from + b * kSide * kSide);
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const float ll = f[0].lane[u] + coarse[u], lh = f[1].lane[u], hl = f[2].lane[u],
                hh = f[3].lane[u];
    low[0][2 * u] = (ll + lh) + (hl + hh);
    low[0][2 * u + 1] = (ll + lh) - (hl + hh);
    low[1][2 * u] = (ll - lh) + (hl - hh);
    low[1][2 * u + 1] = (ll - lh) - (hl - hh);
  }
}

// sum += the synthesis of level 1, with `low` added to its low-pass band.
template <class W, int K>
__device__ __forceinline__ void add_level1(const float* bands, const float* weights,
                                           float (&low)[2][4],
                                           float (&sum)[kPatchRows][kPatchCols]) {
  const int row = threadIdx.x / kPatchesX * 2, col = threadIdx.x % kPatchesX * 4;
#pragma unroll 1
  for (int band = 0; band < kSubbands; ++band) {
    filter<W, K, 1>(bands, band, weights + (1 + band) * round_up(K * K, 4), row, col, low);
    const float row_sign = band & 1 ? -1.0f : 1.0f, col_sign = band & 2 ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        const float value = low[r][u];
        sum[2 * r][2 * u] += value;
        sum[2 * r][2 * u + 1] += col_sign * value;
        sum[2 * r + 1][2 * u] += row_sign * value;
        sum[2 * r + 1][2 * u + 1] += row_sign * col_sign * value;
        low[r][u] = 0;
      }
    }
  }
}

template <class W, class T, int K>
__device__ __forceinline__ void base_path(const T* pixels, const float* weights,
                                          float (&sum)[kPatchRows][kPatchCols]) {
  const int py = threadIdx.x / kPatchesX * kPatchRows, px = threadIdx.x % kPatchesX * kPatchCols;
  const T* row0 = pixels + (py + W::halo(0) - K / 2) * W::pitch(0);
  int piece[W::accesses(0)];
#pragma unroll
  for (int a = 0; a < W::accesses(0); ++a)
    piece[a] = W::piece((px + W::lead(0) - K / 2 - W::shift(0)) / W::kUnit + a) * W::kUnit;
  convolve<K, kPatchRows, kPatchCols>(
      weights,
      [&](int y, float (&row)[kPatchCols + K - 1]) {
        load_inputs<W::kUnit, W::accesses(0), W::shift(0)>(
            row0 + y * W::pitch(0), [&](int a) { return piece[a]; }, row);
      },
      sum);
}

template <class T>
__device__ __forceinline__ void store_patch(const PatchLaunch& p, T* out, int rows, int cols,
                                            const float (&sum)[kPatchRows][kPatchCols]) {
  constexpr int kUnit = 16 / int(sizeof(T));
#pragma unroll
  for (int r = 0; r < kPatchRows; ++r) {
    if (r >= rows) break;
    T* row = out + r * p.output.stride_y;
    if (p.wide_output) {
#pragma unroll
      for (int u = 0; u < kPatchCols; u += kUnit) {
        if (u >= cols) break;
        Vector<T, kUnit> value;
#pragma unroll
        for (int j = 0; j < kUnit; ++j) value.lane[j] = narrow<T>(sum[r][u + j]);
        *reinterpret_cast<Vector<T, kUnit>*>(row + u) = value;
      }
    } else {
#pragma unroll
      for (int u = 0; u < kPatchCols; ++u) {
        if (u < cols) row[u * p.output.stride_x] = narrow<T>(sum[r][u]);
      }
    }
  }
}

// What the levels past L add at kRows x kCols coefficients of level L, the first of this thread.
template <int L, int kRows, int kCols>
__device__ __forceinline__ void load_coarse(const PatchLaunch& p, const TileIndex& at,
                                            float (&low)[kRows][kCols]) {
  const int y = (at.y >> L) + threadIdx.x / kPatchesX * kRows,
            x = (at.x >> L) + threadIdx.x % kPatchesX * kCols;
  const float* coarse =
      static_cast<const float*>(p.coarse) +
      ((int64_t(at.item) * p.channels + at.channel) * p.coarse_rows + y) * p.coarse_cols + x;
  constexpr float kFactor = 1.0f / (1 << L);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
      const bool inside = p.coarse && y + r < p.coarse_rows && x + u < p.coarse_cols;
      low[r][u] = inside ? kFactor * coarse[r * p.coarse_cols + u] : 0.0f;
    }
  }
}

// Shared memory of a block, and how many blocks share the 228 KB of an sm_90 multiprocessor.
template <class T, int K, int L>
constexpr int kSharedBytes =
    Window<T, K / 2, L>::kPixelBytes +
    (Window<T, K / 2, L>::kFloats + (L > 1 ? kPatchTile * kPatchTile / 4 : 0) +
     (1 + kSubbands * L) * round_up(K * K, 4) + 4) *
        int(sizeof(float));
template <class T, int K, int L>
constexpr int kBlocks =
    kSharedBytes<T, K, L> < 44 * 1024 ? 5 : 228 * 1024 / (kSharedBytes<T, K, L> + 1024);

template <class T, int K, int L>
__global__ void __launch_bounds__(kPatchThreads, kBlocks<T, K, L>)
    patch_forward_kernel(const __grid_constant__ PatchLaunch p) {
  using W = Window<T, K / 2, L>;
  constexpr int kSlots = 1 + kSubbands * L;
  extern __shared__ __align__(16) unsigned char shared[];
  T* pixels = reinterpret_cast<T*>(shared);
  float* bands = reinterpret_cast<float*>(shared + W::kPixelBytes);
  float* filtered = bands + W::kFloats;
  float* weights = filtered + (L > 1 ? W::own(2) * W::own(2) * kSubbands : 0);

  const auto start = [&](int tile) {
    const TileIndex at(p, tile);
    const T* plane = static_cast<const T*>(p.input.data) + at.item * p.input.stride_b +
                     at.channel * p.input.stride_c;
    fill<W, T>(plane, p.input, p.height, p.width, at.y, at.x, p.wide_input, pixels);
  };

  const TileRange range(p.tiles);
  int channel = -1;
  start(range.first);
  for (int tile = range.first; tile < range.last; ++tile) {
    const TileIndex at(p, tile);
    if (at.channel != channel) {
      channel = at.channel;
      __syncthreads();
      load_taps<K, L>(p.params, channel, weights);
    }
    wait_for_copies();
    __syncthreads();
    float sum[kPatchRows][kPatchCols];
    const float bias = weights[kSlots * round_up(K * K, 4)];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
#pragma unroll
      for (int u = 0; u < kPatchCols; ++u) sum[r][u] = bias;
    }
    analyse_pixels<W, T>(pixels, bands);
    base_path<W, T, K>(pixels, weights, sum);
    __syncthreads();
    if (tile + 1 < range.last) start(tile + 1);
    float low[2][4];
    if constexpr (L == 2) {
      analyse_level<W, 2>(bands);
      float coarse[1][2];
      load_coarse<2>(p, at, coarse);
      __syncthreads();
      filter_level2<W, K>(bands, weights, filtered);
      __syncthreads();
      synthesise_level2<W>(filtered, coarse[0], low);
    } else {
      load_coarse<1>(p, at, low);
    }
    add_level1<W, K>(bands, weights, low, sum);
    const int y = at.y + threadIdx.x / kPatchesX * kPatchRows,
              x = at.x + threadIdx.x % kPatchesX * kPatchCols;
    T* out = static_cast<T*>(p.output.data) + at.item * p.output.stride_b +
             at.channel * p.output.stride_c + y * p.output.stride_y + x * p.output.stride_x;
    store_patch<T>(p, out, p.height - y, p.width - x, sum);
  }
}

template <class T, int K, int L>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  const int most = kBlocks<T, K, L> * multiprocessors;
  return launch_kernel(&patch_forward_kernel<T, K, L>, p, p.tiles < most ? p.tiles : most,
                       kPatchThreads, kSharedBytes<T, K, L>, stream);
}

template <class T, int K>
const char* launch_levels(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  return p.levels == 1 ? launch<T, K, 1>(p, multiprocessors, stream)
                       : launch<T, K, 2>(p, multiprocessors, stream);
}

template <class T>
const char* launch_size(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  switch (p.kernel_size) {
    case 3:
      return launch_levels<T, 3>(p, multiprocessors, stream);
    case 5:
      return launch_levels<T, 5>(p, multiprocessors, stream);
    case 7:
      return launch_levels<T, 7>(p, multiprocessors, stream);
    default:
      return launch_levels<T, 9>(p, multiprocessors, stream);
  }
}

}  // namespace

const char* launch_patch_forward(const PatchLaunch& p, DType activations, int multiprocessors,
                                 cudaStream_t stream) {
  switch (activations) {
    case DType::kFloat16:
      return launch_size<__half>(p, multiprocessors, stream);
    case DType::kBFloat16:
      return launch_size<__nv_bfloat16>(p, multiprocessors, stream);
    default:
      return launch_size<float>(p, multiprocessors, stream);
  }
}

}  // namespace wtconv::cuda
