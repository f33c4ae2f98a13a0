// The operator on large float32 planes in one pass over memory.
//
//   copy the window -> base path into registers, level 1 into shared memory
//   -> deeper levels: analysis, filter, the filtered bands over the raw ones
//   -> each thread filters its coefficients of level 1 and adds the synthesis -> store
//
// x is read once with the halo (re-reads hit L2), y written once, and of levels past L their
// reconstruction is read, 4^-L of x. The next window is copied while the bands are filtered, by one
// bulk copy where the tensor and the hardware have it. The loop over bands is not unrolled: the
// code of a tile stays below the 32 KB that the instruction cache of an H100 holds, past which it
// issues at half the rate. Sources: sec. 3 and eq. synthesis_closed_form of the paper, whose
// factors 2^-level the taps carry.
#include "../launch.cuh"
#include "synthesis.cuh"

namespace wtconv::cuda {
namespace {

using Own = Patch<4>;

// What levels 2 and 3 filtered, four bands of each, in place of the raw ones from the second level
// on: rows two apart touch different banks, and so do neighbours of level 3.
template <class W, int L>
struct Filtered {
  static constexpr int kSide2 = W::own(2), kPitch2 = 24, kBand2 = kSide2 * kPitch2;
  static constexpr int kSide3 = kSide2 / 2, kPitch3 = 20, kBand3 = kSide3 * kPitch3;
  static constexpr int kLevel3 = kSubbands * kBand2;
  static constexpr int kFloats = kLevel3 + (L > 2 ? kSubbands * kBand3 : 0);
  static_assert(L == 1 || W::offset(2) + kFloats <= W::kFloats, "fits the raw bands");
};

// Levels 2 .. L, formed and filtered. A warp filters a band of level 2, and one warp all of level
// 3: a band of each by every warp is slower (8xCxHxW on an H200, mean over C = 32 to 128 and H =
// 128 to 512, K = 5, L = 3: 0.173 ms for 0.164).
template <class W, int K, int L>
__device__ __forceinline__ void filter_deep_levels(float* bands, const float* weights) {
  using F = Filtered<W, L>;
  constexpr int kStride = tap_floats(K);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  analyse_level<W, 2>(bands);
  __syncthreads();
  if constexpr (L > 2) {
    analyse_level<W, 3>(bands);
    __syncthreads();
  }
  const int row = lane / 4 * 2, col = lane % 4 * 4;
  float level2[2][4] = {}, level3[2][4] = {};
  filter<W, K, 2>(bands, warp, weights + slot_of(2, warp) * kStride, row, col, level2);
  const int band3 = lane / 8, row3 = lane % 8 / 2 * 2, col3 = lane % 2 * 4;
  const bool has3 = L > 2 && warp == kSubbands - 1;
  if (has3) {
    filter<W, K, (L > 2 ? 3 : 2)>(bands, band3, weights + slot_of(3, band3) * kStride, row3, col3,
                                  level3);
  }
  __syncthreads();
  float* filtered = bands + W::offset(2);
  write_filtered<F::kPitch2>(filtered + warp * F::kBand2, row, col, level2);
  if (has3)
    write_filtered<F::kPitch3>(filtered + F::kLevel3 + band3 * F::kBand3, row3, col3, level3);
  __syncthreads();
}

// The reconstruction of levels 2 .. L at this thread's coefficients of level 1; `coarse`, that of
// the levels past L at its coefficients of level L, belongs to LL.
template <class W, int L, int kRows, int kCols>
__device__ __forceinline__ void synthesise_deep_levels(const float* bands,
                                                       const float (&coarse)[kRows][kCols],
                                                       PatchLevel1<Own>& low) {
  using F = Filtered<W, L>;
  const float* filtered = bands + W::offset(2);
  PatchLevel2<Own> low2;
  if constexpr (L > 2) {
    constexpr int kBand = F::kBand3;
    const int x = patch_col<Own>() / 4;
    const float* from = filtered + F::kLevel3 + patch_row<Own>() / 8 * F::kPitch3 + x / 2;
    const float ll = from[0] + kLowpassFactor<L> * coarse[0][0], lh = from[kBand],
                hl = from[2 * kBand], hh = from[3 * kBand];
#pragma unroll
    for (int r = 0; r < 2; ++r) low2[r][0] = synthesise(ll, lh, hl, hh, r == 1, x % 2);
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) low2[r][0] = kLowpassFactor<L> * coarse[r][0];
  }
  synthesise_level2<Own, F::kPitch2>(filtered, low2, low);
}

// What the levels past L add to LL of level L, at the coefficients of this thread.
template <int L, int kRows, int kCols>
__device__ __forceinline__ void load_coarse(const PatchLaunch& p, const TileIndex& at,
                                            float (&low)[kRows][kCols]) {
  const int y = (at.y + patch_row<Own>()) >> L, x = (at.x + patch_col<Own>()) >> L;
  const float* coarse =
      static_cast<const float*>(p.coarse) +
      ((int64_t(at.item) * p.channels + at.channel) * p.coarse_rows + y) * p.coarse_cols + x;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
      const bool inside = y + r < p.coarse_rows && x + u < p.coarse_cols;
      low[r][u] = inside ? coarse[r * p.coarse_cols + u] : 0.0f;
    }
  }
}

struct ForwardLaunch {
  PatchLaunch patches;
  bool loads_boxes;
  BoxMap input;
};

// kBase: whether there is a base path; a low-pass band has none.
template <int K, int L, bool kBase>
__global__ void __launch_bounds__(kPatchThreads, ForwardMemory<K, L>::kBlocks)
    patch_forward_kernel(const __grid_constant__ ForwardLaunch launch) {
  using M = ForwardMemory<K, L>;
  using W = typename M::W;
  const PatchLaunch& p = launch.patches;
  extern __shared__ __align__(128) unsigned char shared[];
  float* pixels = reinterpret_cast<float*>(shared);
  float* bands = reinterpret_cast<float*>(shared + M::kBands);
  float* weights = reinterpret_cast<float*>(shared + M::kWeights);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + M::kBarrier);

  const BlockTiles tiles = BlockTiles::strided(p);
  const TileIndex step(p, tiles.channel, tiles.step);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const auto start = [&] {
    if (!launch.loads_boxes) {
      fill_window<W>(p.input, p.input_bytes == 16, p, next, pixels);
    } else if (threadIdx.x == 0) {
      expect_bytes(barrier, W::kPixelBytes);
      load_window_box<W>(launch.input, next, pixels, barrier);
    }
  };

  if (threadIdx.x == 0) init_byte_barrier(barrier);
  if (p.reads_at_once) start();
  load_taps<K, L>(p.params, tiles.channel, L, weights);
  if (!p.reads_at_once) {
    wait_for_previous_grid();
    let_next_grid_start();
    start();
  }
  __syncthreads();  // the byte barrier is ready to be waited for
#pragma unroll 1
  for (int n = 0;; ++n) {
    at = next;
    if (launch.loads_boxes) {
      wait_for_bytes(barrier, n);
    } else {
      wait_for_copies();
    }
    __syncthreads();
    PatchPixels<Own> sum;
    set_all(sum, weights[slot_count(L) * tap_floats(K)]);
    PatchLevel1<Own> low = {};
    if (kBase) base_path<W, float, K>(pixels, weights, sum);
    analyse_pixels<W>(pixels, bands);
    __syncthreads();
    if (n + 1 < tiles.count) {
      next.advance(p, step);
      start();
    }
    if (p.coarse) wait_for_previous_grid();
    if constexpr (L == 1) {
      if (p.coarse) load_coarse<1>(p, at, low);
#pragma unroll
      for (auto& row : low) {
#pragma unroll
        for (float& value : row) value *= kLowpassFactor<1>;
      }
    } else {
      float coarse[Own::kRows >> L][1] = {};
      if (p.coarse) load_coarse<L>(p, at, coarse);
      filter_deep_levels<W, K, L>(bands, weights);
      synthesise_deep_levels<W, L>(bands, coarse, low);
    }
    add_level1<W, K>(bands, weights, low, sum);
    const int y = at.y + patch_row<Own>(), x = at.x + patch_col<Own>();
    float* out = static_cast<float*>(p.output.data) + at.item * p.output.stride_b +
                 at.channel * p.output.stride_c + y * p.output.stride_y + x * p.output.stride_x;
    wait_for_previous_grid();  // it may read what lies there
    let_next_grid_start();
    store_patch<float>(p, out, p.height - y, p.width - x, sum);
    if (n + 1 >= tiles.count) return;
  }
}

// Of a block: the multiprocessors do not keep pace, and what is left at the end goes to those that
// are free (8x128x512x512 on an H200, K = 5, L = 1: 0.92 against 0.98 ms in one round of 52 tiles;
// mean over C = 32 to 128 and H = 128 to 512, L = 3: 0.161 ms with 20, 0.162 with 10).
template <int L>
constexpr int kMostTiles = L < 3 ? 10 : 20;

template <int K, int L, bool kBase>
const char* launch(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  using M = ForwardMemory<K, L>;
  const auto kernel = &patch_forward_kernel<K, L, kBase>;
  ForwardLaunch launch{};
  launch.patches = p;
  share_tiles(launch.patches, M::kBlocks * multiprocessors, kMostTiles<L>);
  launch.loads_boxes =
      has_bulk_copies(kernel, kAllShared) &&
      describe_boxes(launch.input, p.input, 4, p.batch, p.channels, p.height, p.width, M::W::box());
  return launch_kernel(kernel, launch, int64_t(p.channels) * launch.patches.splits, kPatchThreads,
                       M::kBytes, stream, p.early, kAllShared);
}

}  // namespace

const char* launch_patch_forward(const PatchLaunch& p, int multiprocessors, cudaStream_t stream) {
  return with_constant(PatchKernelSizes(), p.kernel_size, [&](auto k) {
    return with_constant(TileLevels(), p.levels, [&](auto l) -> const char* {
      if constexpr (k() > kMostForThreeLevels && l() == 3) {
        return "no such patch kernel";
      } else {
        return p.params.weight[0] ? launch<k(), l(), true>(p, multiprocessors, stream)
                                  : launch<k(), l(), false>(p, multiprocessors, stream);
      }
    });
  });
}

}  // namespace wtconv::cuda
