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
// reconstruction is read, in float32. The taps are divided by a power of two per channel and level,
// so that float16 holds them whatever their size; sums are float32. A value of x that is not finite
// reaches every output whose products read it: 16 L columns and 2 K L rows, of columns 24 L for
// K > 5.
#include "../launch.cuh"
#include "mma.cuh"

namespace wtconv::cuda {
namespace {

constexpr int kWarpCols = 16;  // pixels of a warp along x

// sum[f] += rows f of the cells of this warp's columns: elements 0, 1 of the lane's pixels 2t and
// 2t + 1, elements 2, 3 of the pixels 8 further.
template <class W, class T>
__device__ __forceinline__ void filter_pixels(const T* pixels, const uint32_t* fragments,
                                              float (&sum)[8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* corner = pixels + W::first_col(0) + warp * kWarpCols;
  InputRow<W::kGroups> in[W::kRows + 6];
  // Matrices (g, g + 8) x (first, second group) of a product are groups 0, 1, 1, 2 of a row of x.
  const auto load = [&](int i) {
    const T* row = corner + W::template row_at<0>(W::first_row(0) + i);
    if constexpr (W::kGroups == 2) {  // not aligned to 16 bytes
#pragma unroll
      for (int m = 0; m < 4; ++m)
        in[i].first[m] = load_pair(row + lane / 4 * W::pitch(0) + lane % 4 * 2 + (m + 1) / 2 * 8);
    } else {
      row += lane % 8 * W::pitch(0);
      load_matrices(row + (lane / 8 + 1) / 2 * 8, in[i].first);
      load_matrices(row + (2 + lane / 8 % 2) * 8, in[i].rest);
    }
  };
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    load(parity), load(parity + 2), load(parity + 4);
#pragma unroll
    for (int i = parity; i < W::kRows; i += 2) {
      load(i + 6);
      TapRow<W::kGroups> taps;
      taps.template load<W::kRows>(fragments, i);
#pragma unroll
      for (int f = 0; f < 8; ++f) taps.template apply<T>(sum[f], in[i + f / 2 * 2], f % 2);
    }
  }
}

// sum[p][2 b + h] += row 4 g + 2 b + p of level 1 of this lane, column t + 4 h of this warp.
template <class W, class T>
__device__ __forceinline__ void filter_level1(const T* lowpass, const uint32_t* fragments,
                                              float (&sum)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* cell = lowpass + lane % 8 * W::pitch(1) + W::first_col(1) + warp * kWarpCols / 2;
  // Rows g + 8 of a product are two rows below rows g: in the same cell, or in the next one.
  const int below = lane / 8 % 2;
  const T* from[2] = {cell + below * 2 * W::group(1),
                      cell + below * (W::pitch(1) - 2 * W::group(1))};
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const int r = W::first_row(1) + i;
    const T* row = from[r % 4 / 2] + W::template row_at<1>(r);
    InputRow<W::kGroups> in;
    load_matrices(row + lane / 16 * 8, in.first);
    if constexpr (W::kGroups > 2) load_matrices(row + 16, in.rest);
    TapRow<W::kGroups> taps;
    taps.template load<W::kRows>(fragments, i);
#pragma unroll
    for (int p = 0; p < 2; ++p) taps.template apply<T>(sum[p], in, p);
  }
}

// sum[p][h] += row 2 g + p of level 2 of this lane, column t / 2 + 2 h of this warp. A warp has
// four columns, which see no more than twelve: rows of both parities are one product. Its other
// eight rows stay empty, which costs less than an exchange between warps.
template <class W, class T>
__device__ __forceinline__ void filter_level2(const T* lowpass, const uint32_t* fragments,
                                              float (&sum)[2][2]) {
  static_assert(W::kGroups == 2, "the inputs of four columns are twelve");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const T* cell = lowpass + lane / 4 * W::pitch(2) + W::first_col(2) + warp * kWarpCols / 4 + 2 * t;
  const int further = 8 - t / 2 * 4;  // no column past the twelfth
  float product[2][4] = {};
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const T* row = cell + W::template row_at<2>(W::first_row(2) + i);
    const uint32_t in[4] = {load_pair(row), 0, load_pair(row + further), 0};
    const auto taps = reinterpret_cast<const Vector<uint32_t, 2>*>(fragments)[i * 32 + lane];
    multiply<T>(product[i % 2], in, taps.lane[0], taps.lane[1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mine = product[0][h] + product[1][h], other = __shfl_xor_sync(~0u, mine, 1);
    sum[0][h] = t % 2 == 0 ? mine : other;
    sum[1][h] = t % 2 == 0 ? other : mine;
  }
}

// What the levels past L add to LL of level L, at the coefficients of this lane's pixels. Nothing
// is computed from it before the products of the tile have covered the wait for memory (mean over
// the shapes of read_scaled(), float16, K = 5, L = 5: 0.110 ms for 0.116).
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

// Outputs pass through shared memory, to be stored in whole lines. There row f of cell g is row
// 8 f + g, and its pieces of 16 bytes change places with g so that the writes of a warp touch
// different banks.
__device__ __forceinline__ int staged_at(int row, int piece) {
  return (row % 8 * 8 + row / 8) * kPatchTile + (piece ^ (row / 8)) * 8;
}

template <class T>
__device__ __forceinline__ void stage_outputs(const float (&value)[8][4], T* staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int f = 0; f < 8; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* to = staged + staged_at(lane / 4 * 8 + f, 2 * warp + h) + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(to) = pack<T>(value[f][2 * h], value[f][2 * h + 1]);
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
template <class T, int K, int L>
class TileCopies {
  using W = MmaWindow<K, L>;
  using M = MmaMemory<K, L>;
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
    __syncwarp();
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
      fill_mma_window<W, 16, M::kCached>(p.input, p.input_bytes == 16, p, at, window(n));
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
    const int f = threadIdx.x;
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

template <class T, int K, int L>
__global__ void __launch_bounds__(kPatchThreads, MmaMemory<K, L>::kBlocks)
    mma_forward_kernel(const __grid_constant__ MmaForwardLaunch launch) {
  using W = MmaWindow<K, L>;
  using M = MmaMemory<K, L>;
  const PatchLaunch& p = launch.patches;
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& taps = *reinterpret_cast<ChannelTaps<K, L>*>(shared + M::kTaps);
  const auto band = [&](int level) { return reinterpret_cast<T*>(shared + M::band(level)); };
  const auto fragments = [&](int level) {
    return reinterpret_cast<uint32_t*>(shared + M::fragments(level));
  };

  // Blocks that run together share the rims of their windows.
  const BlockTiles tiles = BlockTiles::strided(p);
  const TileIndex step(p, tiles.channel, tiles.step);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const TileCopies<T, K, L> copies(launch, shared);
  copies.start_window(0, at);
  const FormLowpassIf<(L > 1), W, 0> form_level1(shared + M::products(1));
  const FormLowpassIf<(L > 2), W, 1> form_level2(shared + M::products(2));
  read_taps(p.params, tiles.channel, taps);
  __syncthreads();
  form_fragments<W, T, K, L, 0>(taps, fragments(0));
  if constexpr (L > 1) form_fragments<W, T, K, L, 1>(taps, fragments(1));
  if constexpr (L > 2) form_fragments<W, T, K, L, 2>(taps, fragments(2));
#pragma unroll 1
  for (int n = 0;; ++n) {
    if (n < tiles.count) copies.wait_for_window(n);
    __syncthreads();
    if (n > 0) {
      wait_for_previous_grid();  // it may read what lies there
      copies.start_store(at);
    }
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
    if constexpr (L > 1) filter_level1<W>(band(1), fragments(1), low1);
    if constexpr (L > 2) {
      __syncthreads();
      filter_level2<W>(band(2), fragments(2), low2);
    }
    if constexpr (L > 1) {
      if (p.coarse) {
        wait_for_previous_grid();
        load_coarse<L>(p, at, coarse);
      }
    }
    filter_pixels<W>(pixels, fragments(0), sum);
    const float bias = taps.bias, factor = taps.factor[0],
                factor1 = L > 1 ? raise * taps.factor[L > 1 ? 1 : 0] : 0,
                factor2 = L > 2 ? raise * raise * taps.factor[L > 2 ? 2 : 0] : 0;
#pragma unroll
    for (int f = 0; f < 8; ++f) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float rest = bias;
        if (L > 1) {
          rest += factor1 * low1[f / 2 % 2][f / 4 * 2 + c / 2] +
                  kLowpassFactor<L> * coarse[f >> L][c / 2];
        }
        if (L > 2) rest += factor2 * low2[f / 4][c / 2];
        sum[f][c] = factor * sum[f][c] + rest;
      }
    }
    stage_outputs(sum, copies.outputs());
    copies.commit_outputs();
  }
  copies.wait_for_store();
}

template <class T, int K, int L>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using M = MmaMemory<K, L>;
  // No more shared memory than that: what copies of the other kind share stays in the L1 cache.
  constexpr int kOfMultiprocessor = shared_of_blocks(M::kBlocks, M::kBytes);
  const auto kernel = &mma_forward_kernel<T, K, L>;
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
