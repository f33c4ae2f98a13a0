// The operator on channels_last planes of half types of one tile, all levels on chip, on tensor
// cores.
//
// A block takes eight neighbouring channels of a plane, 16 bytes of each pixel, and computes four
// of them at a time as mma_forward.cu does, a team of four warps for each:
//
//   copy the pixels, as they lie in memory -> windows of four channels -> LL1 by MMA -> the levels
//   past 2, outputs of level 2 by MMA -> y by MMA, in place of the window -> back among the pixels,
//   the windows of the other four -> ... -> store
//
// A pixel is always the same thread's, from the window of x to the store. x is read once and y
// written once, by 16 bytes a thread and pixel: stores of four channels, which would let the next
// plane come earlier, take longer (64x96x56x56 float16 L=5 on an H200: 0.164 ms for 0.130), and so
// do bulk copies of rows of such pieces (0.169 ms).
#include "../launch.cuh"
#include "mma_deep.cuh"
#include "mma_group.cuh"
#include "mma_planes.cuh"

namespace wtconv::cuda {
namespace {

// The outputs of this lane, those within the plane, in place of the window's pixels: what lies
// around them stays zero.
template <class W, class T>
__device__ __forceinline__ void write_outputs(const float (&value)[8][4], int height, int width,
                                              T* window) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = lane / 4 * W::cell(0), col = warp * kWarpCols + lane % 4 * 2;
  T* corner = window + W::own_col(0) + col + W::template cell_at<0>(lane / 4);
#pragma unroll
  for (int f = 0; f < 8; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int left = width - col - 8 * h;
      if (row + f >= height || left <= 0) continue;
      T* to = corner + W::template row_at<0>(W::own_row(0) + f) + 8 * h;
      *reinterpret_cast<uint32_t*>(to) =
          pack<T>(value[f][2 * h], left > 1 ? value[f][2 * h + 1] : 0.0f);
    }
  }
}

// Stores the channels of a pixel in pieces that the output is aligned to.
template <class T>
__device__ __forceinline__ void store_pixel(const PatchLaunch& p, int channels,
                                            const Vector<T, 4> (&value)[2], T* out) {
  if (p.output_bytes == 16) {
    Vector<T, 8> all;
#pragma unroll
    for (int c = 0; c < 8; ++c) all.lane[c] = value[c / 4].lane[c % 4];
    store_whole(out, all);
  } else if (p.output_bytes == 8) {
    store_whole(out, value[0]);
    if (channels > 4) store_whole(out + 4, value[1]);
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (c < channels) out[c * p.output.stride_c] = value[c / 4].lane[c % 4];
    }
  }
}

template <class T, int K>
__global__ void __launch_bounds__(kPatchThreads* MmaGroupMemory<K>::kTeams, 1)
    mma_group_kernel(const __grid_constant__ MmaGroupLaunch<PatchLaunch> launch) {
  using M = MmaGroupMemory<K>;
  using W = typename M::W;
  constexpr int kThreads = kPatchThreads * M::kTeams, kGroup = M::kGroup, kTeams = M::kTeams;
  const PatchLaunch& p = launch.patch;
  extern __shared__ __align__(16) unsigned char shared[];
  const int team = threadIdx.y, thread = team * kPatchThreads + int(threadIdx.x);
  const Team all{thread, kThreads};
  unsigned char* own = shared + team * M::kTeam;
  T *window = reinterpret_cast<T*>(own), *lowpass = reinterpret_cast<T*>(own + M::kLowpass);
  float *raw = reinterpret_cast<float*>(own + M::kRaw),
        *filtered = reinterpret_cast<float*>(own + M::kFiltered);
  T* pixels = reinterpret_cast<T*>(shared + M::kPixels);
  // What is kept of the channel that the team has in a round.
  const auto channel_at = [&](int round) {
    return shared + M::kChannels + (round * kTeams + team) * M::kChannel;
  };

  // Blocks that run at the same time are neighbours in memory.
  const int groups = ceil_div(p.channels, kGroup), split = blockIdx.x / groups;
  const int first = blockIdx.x % groups * kGroup, channels = min(kGroup, p.channels - first);
  const auto start = [&](int item) {
    if (item >= p.batch) return;
    const T* plane =
        static_cast<const T*>(p.input.data) + first * p.input.stride_c + item * p.input.stride_b;
    fill_group<kGroup>(all, plane, p.input, p.input_bytes, channels, p.height, p.width,
                       launch.pixels, pixels);
  };

  clear_group(all, shared, M::bytes(p.height, p.width));
  start(split);
#pragma unroll 1
  for (int round = 0; round < M::kRounds; ++round) {
    auto& taps = *reinterpret_cast<ChannelTaps<K, 2>*>(window);
    unsigned char* channel = channel_at(round);
    const auto fragments = [&](int level) {
      return reinterpret_cast<uint32_t*>(channel + M::fragments(level));
    };
    read_all_taps<K>(p.params, min(first + round * kTeams + team, p.channels - 1), p.levels, taps,
                     reinterpret_cast<float*>(channel + M::kDeepTaps));
    __syncthreads();
    form_fragments<W, T, K, 2, 0>(taps, fragments(0));
    form_fragments<W, T, K, 2, 1>(taps, fragments(1));
    if (threadIdx.x == 0) {  // which wrote the factors
      *reinterpret_cast<Vector<float, 4>*>(channel + M::kFactors) = {
          {taps.bias, taps.factor[0], taps.factor[1], 0}};
    }
    __syncthreads();
  }
  clear_group(all, shared, M::kChannels);

  const auto spread = [&](int round, int i, int row, int col) {
    const auto value = *reinterpret_cast<const Vector<T, 4>*>(pixels + i * kGroup + 4 * round);
    T* to = reinterpret_cast<T*>(shared) + W::pixel_at(row, col);
#pragma unroll
    for (int c = 0; c < kTeams; ++c) to[c * (M::kTeam / 2)] = value.lane[c];
  };
  const auto gather = [&](int row, int col) {
    const T* from = reinterpret_cast<const T*>(shared) + W::pixel_at(row, col);
    Vector<T, 4> value;
#pragma unroll
    for (int c = 0; c < kTeams; ++c) value.lane[c] = from[c * (M::kTeam / 2)];
    return value;
  };
  // Averages cannot overflow; sums of gradients, where rotated, shall not underflow.
  const float average = p.params.rotate ? 0.5f : 0.25f, raise = 0.25f / average;
  // The window becomes the outputs. Until then, teams do not wait for each other (64x96x56x56
  // float16 L=5 on an H200: 0.128 ms, where they do 0.130 ms).
  const auto compute = [&](int round) {
    const unsigned char* channel = channel_at(round);
    const auto fragments = [&](int level) {
      return reinterpret_cast<const uint32_t*>(channel + M::fragments(level));
    };
    float sum[8][4] = {}, low1[2][4] = {}, coarse[2][2] = {};
    if (p.levels > 1) form_planes_lowpass<W>(window, average, lowpass);
    sync_team<kPatchThreads>(team);
    if (p.levels > 2) {
      filter_deep<W, K>(lowpass, raise, p.levels,
                        reinterpret_cast<const float*>(channel + M::kDeepTaps), raw, filtered);
    }
    if (p.levels > 1) filter_level1<W>(lowpass, SharedTaps<W>(fragments(1)), low1);
    sync_team<kPatchThreads>(team);
    synthesise_deep<K>(filtered, p.levels, coarse);
    filter_pixels<W>(window, SharedTaps<W>(fragments(0)), sum);
    const auto factors = *reinterpret_cast<const Vector<float, 4>*>(channel + M::kFactors);
    combine<2>({factors.lane[0], factors.lane[1], raise * factors.lane[2], 0}, low1, {}, sum);
    if (p.levels > 2) add_coarse<2>(1, coarse, sum);
    sync_team<kPatchThreads>(team);
    write_outputs<W>(sum, p.height, p.width, window);
    __syncthreads();
  };

#pragma unroll 1
  for (int item = split; item < p.batch; item += p.splits) {
    wait_for_copies();
    __syncthreads();
    if (const int next = item + p.splits; next < p.batch) {
      prefetch_row<T>(p.input, p.input_bytes, next, int(blockIdx.x) % groups + thread * groups,
                      p.height, p.width, p.channels);
    }
    for_each_pixel<kThreads>(launch.pixels, thread,
                             [&](int i, int row, int col) { spread(0, i, row, col); });
    __syncthreads();
    compute(0);
    for_each_pixel<kThreads>(launch.pixels, thread, [&](int i, int row, int col) {
      *reinterpret_cast<Vector<T, 4>*>(pixels + i * kGroup) = gather(row, col);
      spread(1, i, row, col);
    });
    __syncthreads();
    compute(1);
    wait_for_previous_grid();  // it may still read the memory of the output
    let_next_grid_start();
    T* output =
        static_cast<T*>(p.output.data) + first * p.output.stride_c + item * p.output.stride_b;
    for_each_pixel<kThreads>(launch.pixels, thread, [&](int i, int row, int col) {
      const Vector<T, 4> value[2] = {*reinterpret_cast<const Vector<T, 4>*>(pixels + i * kGroup),
                                     gather(row, col)};
      store_pixel(p, channels, value, output + row * p.output.stride_y + col * p.output.stride_x);
    });
    __syncthreads();
    start(item + p.splits);
  }
}

}  // namespace

const char* launch_mma_group(const PatchLaunch& p, DType activations, int multiprocessors,
                             cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(MmaGroupKernelSizes(), p.kernel_size, [&](auto k) {
      using M = MmaGroupMemory<k()>;
      MmaGroupLaunch launch(p);
      const int groups = ceil_div(p.channels, M::kGroup);
      launch.patch.splits = split_tiles(groups, p.batch, multiprocessors);
      return launch_kernel(&mma_group_kernel<decltype(t), k()>, launch,
                           int64_t(groups) * launch.patch.splits, dim3(kPatchThreads, M::kTeams),
                           M::bytes(p.height, p.width), stream, p.early);
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
