// The operator on large planes of half types in one pass over memory, on tensor cores.
//
// Analysis, filters and synthesis of one level, and the base path, are together one filter that
// depends on the parity of the output pixel, of 2K x 2K taps for kernels of K x K:
//
//   y[2r+p][2c+q] = sum_ij H_pq[i][j] x[2r-2R+i][2c-2R+j],                      R = K/2, i, j < 2K
//   H_pq[i][j] = w_0[i-R-p][j-R-q] + 1/4 sum_s (+-) w_s[i/2][j/2]
//
// (sec. 3 of the paper, with the signs of the Haar basis; w_0 is zero past its ends.) Eight pixels
// of a row see the coefficients of 4 + 2R columns, at K = 5 exactly the 16 columns of an MMA
// without a structural zero: as many products as the base path and the bands need apart, and
// neither coefficients nor their rounding. Level 2 is the same filter without w_0 on the low-pass
// band LL1, level 3 on its low-pass band LL2:
//
//   copy the window (asynchronous; the next one meanwhile) -> LL1, LL2 into shared memory by MMA
//   -> outputs of levels 2 and 3, and y, into registers by MMA -> sum -> shared memory -> store
//
// On sm_90 the copy and the store are bulk copies of boxes: a thread starts each, and the rows of
// equal position in their cells are one box.
//
// A warp computes 64 x 16 pixels, in products whose 16 rows are one row of each of the eight 8-row
// cells of the tile, at 8 columns and at the 8 further: three groups of 8 columns of a row of x
// serve up to 8 products. A lane's pixels lie below coefficients that the same lane computes, so no
// level meets the next in memory. Level 3 enlarges the window from 80 x 80 to 96 x 96 pixels at
// K = 5 and adds a tenth of the products.
//
// x is read once with the halo (re-reads hit L1 or L2), y written once, and of levels past L their
// reconstruction is read, in float32. The taps are divided by a power of two per channel and
// level, so that float16 holds them whatever their size; sums are float32. A value of x that is not
// finite reaches every output whose products read it: 16 L columns and 2 K L rows, of columns 24 L
// for K > 5.
#include "../launch.cuh"
#include "mma_filter.cuh"

namespace wtconv::cuda {
namespace {

// What the levels past L add to LL of level L, at the coefficients of this lane's pixels;
// add_coarse() is the first to use it.
template <int L>
__device__ __forceinline__ void load_coarse(const PatchLaunch& p, const TileIndex& at,
                                            float (&coarse)[8 >> L][2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int y = (at.y + lane / 4 * 8) >> L;
  const float* plane = static_cast<const float*>(p.coarse) +
                       (int64_t(at.item) * p.channels + at.channel) * p.coarse_rows * p.coarse_cols;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int x = (at.x + warp * kWarpCols + h * 8 + lane % 4 * 2) >> L;
#pragma unroll
    for (int r = 0; r < 8 >> L; ++r) {
      const bool inside = y + r < p.coarse_rows && x < p.coarse_cols;
      coarse[r][h] = inside ? plane[(y + r) * p.coarse_cols + x] : 0.0f;
    }
  }
}

template <class T>
__device__ __forceinline__ void store_tile(const PatchLaunch& p, const TileIndex& at,
                                           const T* staged) {
  T* plane =
      static_cast<T*>(p.output.data) + at.item * p.output.stride_b + at.channel * p.output.stride_c;
  if (p.output_bytes == 16) {
    const int piece = threadIdx.x % 8, first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8;
    const int x = at.x + piece * 8, rows = p.height - at.y - first;
    T* out = plane + (at.y + first) * p.output.stride_y + x;
    if (x >= p.width) return;
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      if (r < rows) {
        *reinterpret_cast<Vector<T, 8>*>(out) =
            *reinterpret_cast<const Vector<T, 8>*>(staged + staged_at(first + r, piece));
      }
      out += 4 * p.output.stride_y;
    }
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kPatchTile * kPatchTile; i += kPatchThreads) {
      const int row = i / kPatchTile, col = i % kPatchTile, y = at.y + row, x = at.x + col;
      if (y < p.height && x < p.width) {
        plane[y * p.output.stride_y + x * p.output.stride_x] =
            staged[staged_at(row, col / 8) + col % 8];
      }
    }
  }
}

// The staged outputs as boxes: rows f of all cells.
constexpr BoxShape kOutputBox{kPatchTile, 8, 8, true};

struct MmaForwardLaunch {
  PatchLaunch patches;
  bool loads_boxes, stores_boxes;
  BoxMap input, output;
};

// Windows and outputs of a block's tiles on their way. Two windows: that of tile n is the (n %
// 2)th.
template <class T, class M, int L>
class TileCopies {
  using W = typename M::W;
  const MmaForwardLaunch& launch_;
  unsigned char* shared_;
  __device__ __forceinline__ uint64_t* barrier() const {
    return reinterpret_cast<uint64_t*>(shared_ + M::kBarrier);
  }
  __device__ __forceinline__ bool loads_boxes() const {
    return takes_boxes(L) && launch_.loads_boxes;
  }
  __device__ __forceinline__ bool stores_boxes() const {
    return takes_boxes(L) && launch_.stores_boxes;
  }

 public:
  __device__ __forceinline__ TileCopies(const MmaForwardLaunch& launch, unsigned char* shared)
      : launch_(launch), shared_(shared) {
    if (threadIdx.x == 0) init_byte_barrier(barrier());
    __syncthreads();
  }
  __device__ __forceinline__ T* window(int n) const {
    return reinterpret_cast<T*>(shared_ + n % 2 * M::kWindow);
  }
  __device__ __forceinline__ T* outputs() const {
    return reinterpret_cast<T*>(shared_ + M::kOutputs);
  }

  __device__ __forceinline__ void start_window(int n, const TileIndex& at) const {
    const PatchLaunch& p = launch_.patches;
    if (loads_boxes()) {
      if (threadIdx.x == 0) expect_bytes(barrier(), window_bytes<W>());
      load_window<W>(launch_.input, at, window(n), barrier());
    } else {
      fill_mma_window<W, 16, M::kCached>(p.input, p.input_bytes, p, at, window(n));
    }
  }
  // Others see the window behind a barrier.
  __device__ __forceinline__ void wait_for_window(int n) const {
    if (loads_boxes()) {
      wait_for_bytes(barrier(), n);
    } else {
      wait_for_copies();
    }
  }

  // Behind a barrier after the outputs were staged, and committed by every thread.
  __device__ __forceinline__ void start_store(const TileIndex& at) const {
    if (!stores_boxes()) return store_tile(launch_.patches, at, outputs());
    const int f = box_of_thread<kOutputBox.row_step>();
    if (f < kOutputBox.row_step) {
      store_box(outputs() + f * kOutputBox.rows * kOutputBox.cols, launch_.output, at.item,
                at.channel, at.y + f, at.x);
    }
  }
  __device__ __forceinline__ void commit_outputs() const {
    if (stores_boxes()) fence_for_boxes();
  }
  // Outputs may be staged again behind the next barrier.
  __device__ __forceinline__ void wait_for_store() const { wait_for_box_reads(); }
};

template <class T, int K, int L, bool kDeeper>
__global__ void __launch_bounds__(kPatchThreads, MmaMemory<K, L, kDeeper>::kBlocks)
    mma_forward_kernel(const __grid_constant__ MmaForwardLaunch launch) {
  using W = MmaWindow<K, L>;
  using M = MmaMemory<K, L, kDeeper>;
  static_assert(!kDeeper || L == 2);  // as PatchLaunch::coarse says
  const PatchLaunch& p = launch.patches;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& taps = *reinterpret_cast<ChannelTaps<K, L>*>(shared + M::kTaps);
  const auto band = [&](int level) { return reinterpret_cast<T*>(shared + M::band(level)); };
  const auto level_taps = [&](int level) {
    return reinterpret_cast<uint32_t*>(shared + M::level_taps(level));
  };

  // Blocks that run together share the rims of their windows.
  const BlockTiles tiles = BlockTiles::strided(p);
  const TapLoads<K, TapLoads<K, 1>::rounds(L)> loads(p.params, tiles.channel, L, threadIdx.x);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const TileCopies<T, M, L> copies(launch, shared);
  copies.start_window(0, at);
  const TileIndex step(p, tiles.channel, tiles.step);
  const FormLowpassIf<(L > 1), W, 0> form_level1(shared + M::products(1));
  const FormLowpassIf<(L > 2), W, 1> form_level2(shared + M::products(2));
  finish_taps(loads, p.params, taps);
  __syncthreads();
  form_level_taps<0, W, T>(taps, level_taps(0));
  if constexpr (L > 1) form_level_taps<1, W, T>(taps, level_taps(1));
  if constexpr (L > 2) form_level_taps<2, W, T>(taps, level_taps(2));
  if constexpr (M::holds(1)) __syncthreads();
  const TapsOf<W, 0, M::holds(0)> pixel_taps(level_taps(0));
  const TapsOf<W, 1, M::holds(1)> level1_taps(level_taps(L > 1));
  // Nothing is written before: the previous kernel may read what lies there.
  const auto follow_previous_grid = [] {
    wait_for_previous_grid();
    let_next_grid_start();
  };
  if constexpr (!kDeeper) follow_previous_grid();
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n < tiles.count) copies.wait_for_window(n);
    __syncthreads();
    if (n > 0) copies.start_store(at);
    if (n == tiles.count) break;
    at = next;
    T* pixels = copies.window(n);
    if (n + 1 < tiles.count) {
      next.advance(p, step);
      copies.start_window(n + 1, next);
    }
    float sum[8][4] = {}, low1[2][4] = {}, low2[2][2] = {}, coarse[8 >> L][2] = {};
    // Averages cannot overflow; sums of gradients, where rotated, shall not underflow.
    const float average = p.params.rotate ? 0.5f : 0.25f, raise = 0.25f / average;
    if constexpr (L > 1) form_level1(pixels, average, band(1));
    copies.wait_for_store();
    __syncthreads();
    if constexpr (L > 2) form_level2(band(1), average, band(2));
    if constexpr (L > 1) filter_level1<W>(band(1), level1_taps, low1);
    if constexpr (L > 2) {
      __syncthreads();
      filter_level2<W>(band(2), level_taps(2), low2);
    }
    if constexpr (kDeeper) {
      follow_previous_grid();
      load_coarse<L>(p, at, coarse);
    }
    filter_pixels<W>(pixels, pixel_taps, sum);
    const OutputFactors factors{taps.bias, taps.factor[0],
                                L > 1 ? raise * taps.factor[L > 1 ? 1 : 0] : 0,
                                L > 2 ? raise * raise * taps.factor[L > 2 ? 2 : 0] : 0};
    combine<L>(factors, low1, low2, sum);
    if constexpr (kDeeper) add_coarse<L>(kLowpassFactor<L>, coarse, sum);
    stage_outputs(sum, copies.outputs());
    copies.commit_outputs();
  }
  copies.wait_for_store();
}

template <class T, int K, int L, bool kDeeper = false>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using M = MmaMemory<K, L, kDeeper>;
  // No more shared memory than that: what copies of the other kind share stays in the L1 cache. But
  // the kernel that computes the deeper levels, beside which this one starts, has all.
  constexpr int kOfMultiprocessor = kDeeper ? kAllShared : shared_of_blocks(M::kBlocks, M::kBytes);
  const auto kernel = &mma_forward_kernel<T, K, L, kDeeper>;
  MmaForwardLaunch launch{};
  launch.patches = p;
  share_tiles(launch.patches, M::kBlocks * multiprocessors);
  if (takes_boxes(L) && has_bulk_copies(kernel, kOfMultiprocessor)) {
    const auto describe = [&](BoxMap& map, const View& v, const BoxShape& box) {
      return describe_boxes(map, v, 2, p.batch, p.channels, p.height, p.width, box);
    };
    launch.loads_boxes = describe(launch.input, p.input, window_box<MmaWindow<K, L>>());
    // The fence before their stores waits for copies of the other kind, too.
    launch.stores_boxes = launch.loads_boxes && describe(launch.output, p.output, kOutputBox);
  }
  return launch_kernel(kernel, launch, int64_t(p.channels) * launch.patches.splits, kPatchThreads,
                       M::kBytes, stream, p.early, kOfMultiprocessor);
}

}  // namespace

const char* launch_mma_forward(const PatchLaunch& p, DType activations, int multiprocessors,
                               cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(PatchKernelSizes(), p.kernel_size, [&](auto k) {
      if (p.coarse) {
        return p.levels == 2 ? launch<decltype(t), k(), 2, true>(p, multiprocessors, stream)
                             : "no such patch kernel";
      }
      return with_constant(TileLevels(), p.levels, [&](auto l) -> const char* {
        if constexpr (k() > kMostForThreeLevels && l() == 3) {
          return "no such patch kernel";
        } else {
          return launch<decltype(t), k(), l()>(p, multiprocessors, stream);
        }
      });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
