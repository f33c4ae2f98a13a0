// The weight gradients of channels_last planes of half types of one tile, on tensor cores: the base
// path and one level or two in one pass over both tensors (mma_grad.cuh).
//
// A block takes eight neighbouring channels of a plane, 16 bytes of each pixel, four of them at a
// time, a team of four warps for each:
//
//   copy the pixels of x and g, as they lie in memory -> windows of four channels -> L = 2: LL of
//   both -> products -> windows of the other four; the next plane's copies start -> their products
//   -> after some planes, diagonals by way of shared memory -> partial sums
//
// The sums of both channels of a team stay in registers over many planes. Low-pass bands are dense
// planes. Pixels come by bulk copies where they can; else threads copy them, a plane after they
// prefetched them to L2.
#include "../launch.cuh"
#include "mma_grad.cuh"
#include "mma_group.cuh"

namespace wtconv::cuda {
namespace {

// Beside what it has: the pixels of both tensors as boxes, where `loads_boxes`.
struct GroupGradLaunch : MmaGroupLaunch<PatchGradLaunch> {
  BoxMap input{}, grad_output{};
  bool loads_boxes = false;

  explicit GroupGradLaunch(const PatchGradLaunch& p) : MmaGroupLaunch(p) {}
};

template <class T, int K, int L>
__global__ void __launch_bounds__(kPatchThreads* MmaGroupGradMemory<K, L>::kTeams, 1)
    mma_group_weight_grad_kernel(const __grid_constant__ GroupGradLaunch launch) {
  using M = MmaGroupGradMemory<K, L>;
  using WX = typename M::WX;
  using WG = typename M::WG;
  constexpr int kThreads = kPatchThreads * M::kTeams, kGroup = M::kGroup, kTeams = M::kTeams;
  const PatchGradLaunch& p = launch.patch;
  extern __shared__ __align__(16) unsigned char shared[];
  const int team = threadIdx.y, thread = team * kPatchThreads + int(threadIdx.x);
  const Team all{thread, kThreads};
  T* windows = reinterpret_cast<T*>(shared);
  T *input = windows + team * (M::kTeam / 2), *grad = input + M::kInput / 2;
  T *low_input = input + M::kLow / 2, *low_grad = low_input + M::kLowInput / 2;
  T* input_pixels = reinterpret_cast<T*>(shared + M::kPixels);
  T* grad_pixels = input_pixels + M::pixel_bytes(p.height, p.width) / 2;
  const auto sync = [&] { sync_team<kPatchThreads>(team); };

  // Blocks that run at the same time are neighbours in memory.
  const int groups = ceil_div(p.channels, kGroup), split = blockIdx.x / groups;
  const int first = blockIdx.x % groups * kGroup, channels = min(kGroup, p.channels - first);
  const auto channel_at = [&](int round) { return first + round * kTeams + team; };
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + M::kBarrier);
  const auto start = [&](int item) {
    if (item >= p.batch) return;
    if (launch.loads_boxes) {
      if (thread > 0) return;
      expect_bytes(barrier, 2 * p.height * p.width * kGroup * 2);
      load_pixels(input_pixels, launch.input, item, first, barrier);
      load_pixels(grad_pixels, launch.grad_output, item, first, barrier);
      return;
    }
    const auto copy = [&](const View& v, int bytes, T* to) {
      const T* plane = static_cast<const T*>(v.data) + first * v.stride_c + item * v.stride_b;
      fill_group<kGroup>(all, plane, v, bytes, channels, p.height, p.width, launch.pixels, to);
    };
    copy(p.input, p.input_bytes, input_pixels);
    copy(p.grad_output, p.grad_bytes, grad_pixels);
  };

  if (launch.loads_boxes && thread == 0) init_byte_barrier(barrier);
  clear_group(all, shared, M::kBarrier);
  start(split);
  const FormLowpassIf<(L > 1), WX, 0> form_input(shared + M::kFormInput, team == 0);
  const FormLowpassIf<(L > 1), WG, 0> form_grad(shared + M::kFormGrad, team == 0);

  const auto spread = [&](int round) {
    for_each_pixel<kThreads>(launch.pixels, thread, [&](int i, int row, int col) {
      const int from = i * kGroup + round * kTeams;
      const auto x = *reinterpret_cast<const Vector<T, kTeams>*>(input_pixels + from);
      const auto g = *reinterpret_cast<const Vector<T, kTeams>*>(grad_pixels + from);
      T *to_x = windows + window_at<WX>(row, col),
        *to_g = windows + M::kInput / 2 + window_at<WG>(row, col);
#pragma unroll
      for (int c = 0; c < kTeams; ++c) {
        to_x[c * (M::kTeam / 2)] = x.lane[c];
        to_g[c * (M::kTeam / 2)] = g.lane[c];
      }
    });
    __syncthreads();
  };
  const auto compute = [&](int item, int round, GradSums<M>(&sum)[L], float& low_sum) {
    if (channel_at(round) >= p.channels) return;
    const TileIndex at(p, channel_at(round), item);
    float none[4];
    if constexpr (L > 1) {
      form_input(input, 0.5f / kLowScale, low_input);
      form_grad(grad, 0.5f, low_grad);
    }
    if (p.low_grad || p.bias_wanted)
      low_sum += store_lowpass<WG, L, 0>(grad, p, at, 1, p.low_grad, p.exact_low_grad);
    add_products<M, 0, false>(input, grad, sum[0], none);
    if constexpr (L > 1) sync();
    // Averages, which cannot overflow; sums of gradients shall not underflow.
    if (p.low_input) {
      store_lowpass<WX, L, L - 1>(L > 1 ? low_input : input, p, at, 0.5f, p.low_input, nullptr);
    }
    if constexpr (L > 1) add_products<M, 1, false>(low_input, low_grad, sum[1], none);
  };

  const int count = ceil_div(p.batch - split, p.splits);
#pragma unroll 1
  for (int part = 0, n = 0; part < p.parts; ++part) {
    GradSums<M> sum[M::kRounds][L] = {};
    float low_sum[M::kRounds] = {};
#pragma unroll 1
    for (const int end = int(int64_t(count) * (part + 1) / p.parts); n < end; ++n) {
      const int item = split + n * p.splits, next = item + p.splits;
      if (launch.loads_boxes) {
        wait_for_bytes(barrier, n);
      } else {
        wait_for_copies();
      }
      __syncthreads();
      if (next < p.batch && !launch.loads_boxes) {
        const int row = int(blockIdx.x) % groups + thread * groups;
        prefetch_row<T>(p.input, p.input_bytes, next, row, p.height, p.width, p.channels);
        prefetch_row<T>(p.grad_output, p.grad_bytes, next, row, p.height, p.width, p.channels);
      }
      spread(0);
      compute(item, 0, sum[0], low_sum[0]);
      __syncthreads();
      spread(1);
      start(next);
      compute(item, 1, sum[1], low_sum[1]);
    }
    if (part + 1 == p.parts) let_next_grid_start();
    // Both channels of a team, one after the other; then zeros around the planes again.
    const float no_bias[4] = {};
#pragma unroll
    for (int round = 0; round < M::kRounds; ++round) {
      if (channel_at(round) >= p.channels) continue;
      sync();
      const int64_t index = (int64_t(channel_at(round)) * p.splits + split) * p.parts + part;
      write_partials<M>(sum[round], no_bias, low_sum[round], reinterpret_cast<float*>(input),
                        p.partials + index * sum_count(K, L), sync);
    }
    __syncthreads();
    if (part + 1 < p.parts) clear_group(all, shared, M::kFormInput);
  }
}

}  // namespace

const char* launch_mma_group_weight_grad(const PatchGradLaunch& p, DType activations,
                                         cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(MmaGroupKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), p.levels, [&](auto l) {
        using M = MmaGroupGradMemory<k(), l()>;
        const auto kernel = &mma_group_weight_grad_kernel<decltype(t), k(), l()>;
        GroupGradLaunch launch(p);
        const auto describe = [&](BoxMap& map, const View& v) {
          return describe_pixels(map, v, p.batch, p.channels, p.height, p.width, 1);
        };
        launch.loads_boxes = has_bulk_copies(kernel) && describe(launch.input, p.input) &&
                             describe(launch.grad_output, p.grad_output);
        return launch_kernel(kernel, launch, int64_t(ceil_div(p.channels, M::kGroup)) * p.splits,
                             dim3(kPatchThreads, M::kTeams), M::bytes(p.height, p.width), stream);
      });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
