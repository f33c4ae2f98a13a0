// The weight gradients of whole planes, all levels of them in one pass over both tensors, and of
// large planes in float32, the base path and one level; where it pays, the input gradient of the
// same levels from the same bands. (Large planes of half types: mma_weight_grad.cu; channels_last:
// group_weight_grad.cu.)
//
//   copy the windows of grad_output (with halo) and of input (without), the next ones while the
//   bands are summed, of large planes by bulk copies where there are any -> every thread sums the
//   base path's taps over its patch, level 1 of both into shared memory -> a warp sums the taps of
//   a band -> of whole planes the same for the levels past it, which take the place of level 1 ->
//   where wanted the input gradient, as forward.cu and planes.cu form y -> after some tiles,
//   partial sums to memory
//
// The low-pass bands, which the kernel has on chip, are written in float32 for levels past its own,
// that of grad_output for those of the input gradient, too. Sums come out rotated by 180
// degrees because grad_output is the operand with the halo; the kernel of finish.cu adds the
// partial sums in a fixed order. Source: the adjoint law.
#include "../launch.cuh"
#include "planes_levels.cuh"
#include "weight_grad_levels.cuh"

namespace wtconv::cuda {
namespace {

// The base path: the patch of a thread.
template <class WG, class WX, class T, int K>
__device__ __forceinline__ void correlate_pixels(const T* grad, const T* input,
                                                 float (&sum)[K * K + 1]) {
  using P = typename WG::ThreadPatch;
  const int y = patch_row<P>(), x = patch_col<P>();
  const T* g = grad + WG::stored_pixel(y, x) - K / 2 * WG::pitch(0);
  const T* in = input + WX::stored_pixel(y, x);
  correlate<K, P::kRows, P::kCols>(
      [&](int r, float (&row)[P::kCols]) { load_pixels<WX, 0>(in + r * WX::pitch(0), row); },
      [&](int r, float (&row)[P::kCols + K - 1]) {
        load_pixels<WG, -(K / 2)>(g + r * WG::pitch(0), row);
      },
      sum);
}

// Level 1: a warp takes a band, a lane 8 x 4 coefficients in two halves.
template <class WG, class WX, int K>
__device__ __forceinline__ void correlate_band(const float* grad, const float* input,
                                               float (&sum)[K * K]) {
  constexpr int kShift = WG::shift(1, 4);
  const int band = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int y = lane / 8 * 8, x = lane % 8 * 4;
#pragma unroll 1
  for (int row = y; row < y + 8; row += 4) {
    const float* in = input + WX::stored(1, band, row, x);
    const float* g = grad + WG::stored(1, band, row, x) - K / 2 * (WG::pitch(1) + 1) - kShift;
    correlate<K, 4, 4>(
        [&](int r, float (&values)[4]) { load_inputs<4, 1, 0>(in + r * WX::pitch(1), values); },
        [&](int r, float (&values)[4 + K - 1]) {
          load_inputs<4, WG::accesses(1, 4), kShift>(g + r * WG::pitch(1), values);
        },
        sum);
  }
}

// The sums of a thread; those of a level past the second are its tap's.
template <class M, int K>
struct ThreadSums {
  static constexpr int kTaps = K * K, kDeep = M::kLevels > 2 ? M::kLevels - 2 : 0;
  // The base path's, and the bias.
  float base[kTaps + 1] = {};
  float level1[kTaps] = {}, level2[M::kAllLevels ? kTaps : 1] = {}, deep[kDeep + 1] = {};

  // Adds level `kLevel` and those past it.
  template <int kLevel = 3>
  __device__ __forceinline__ void add_deep_levels(const float* grad, const float* input,
                                                  int levels) {
    if constexpr (kLevel <= M::kLevels) {
      if (kLevel > levels) return;
      deep[kLevel - 3] += correlate_tap<M, K, kLevel>(grad, input);
      add_deep_levels<kLevel + 1>(grad, input, levels);
    }
  }
};

// Where the coefficients of a tile lie among the low-pass bands of a channel.
struct LowpassPlanes {
  float* channel;  // of batch item `first`, or null
  int64_t stride_b;
  int rows, cols, y, x, items;  // first coefficient of the tile; batch items from `first` on
};

// The tile's own low-pass coefficients to dense planes; returns the sum of those of this thread.
template <class W>
__device__ __forceinline__ float store_lowpass(const float* bands, const LowpassPlanes& p) {
  constexpr int kCell = W::cell(1);
  float sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < W::own(1) * W::own(1) / 4; i += kPatchThreads) {
    const int row = i / (W::own(1) / 4), col = i % (W::own(1) / 4) * 4;
    const int item = row / kCell * W::kCells + col / kCell;
    const int y = p.y + row % kCell, x = p.x + col % kCell;
    const float* from = bands + W::stored(1, 0, row, col);
    float* to = p.channel + item * p.stride_b + int64_t(y) * p.cols + x;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      sum += from[u];
      if (p.channel && item < p.items && y < p.rows && x + u < p.cols) to[u] = from[u];
    }
  }
  return sum;
}

// The steps of write_warp_sums() from kStep down: in each a lane hands on half of its values and
// takes another lane's of the other half.
template <int kStep>
__device__ __forceinline__ void halve(float* sum) {
  const bool upper = threadIdx.x & kStep;
#pragma unroll
  for (int t = 0; t < kStep; ++t) {
    const float mine = upper ? sum[t + kStep] : sum[t];
    sum[t] = mine + __shfl_xor_sync(~0u, upper ? sum[t] : sum[t + kStep], kStep);
  }
  if constexpr (kStep > 1) halve<kStep / 2>(sum);
}

// The sums over a warp of each value, written to `out`: 31 shuffles for up to 32 of them, after
// which lane n holds the sum of the n-th.
template <int N>
__device__ __forceinline__ void write_warp_sums(const float* values, float* out) {
  constexpr int kLanes = 32;
  const int lane = threadIdx.x % kLanes;
  float sum[kLanes];
#pragma unroll
  for (int t = 0; t < kLanes; ++t) sum[t] = t < N ? values[t] : 0;
  halve<kLanes / 2>(sum);
  if (lane < N) out[lane] = sum[0];
  if constexpr (N > kLanes) write_warp_sums<N - kLanes>(values + kLanes, out + kLanes);
}

// The same of a thread's sums, which start again from zero.
template <int N>
__device__ __forceinline__ void write_warp_sums(float (&sum)[N], float* out) {
  write_warp_sums<N>(static_cast<const float*>(sum), out);
#pragma unroll
  for (float& value : sum) value = 0;
}

// Partial sums of the block, [slot][tap] and the bias.
template <class M, int K>
__device__ void write_partials(ThreadSums<M, K>& sums, int levels, float* exchange, float* out) {
  constexpr int kTaps = K * K, kWarps = kPatchThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  write_warp_sums(sums.base, exchange + warp * (kTaps + 1));
  write_warp_sums(sums.level1, out + slot_of(1, warp) * kTaps);
  if constexpr (M::kAllLevels) {
    if (levels > 1) write_warp_sums(sums.level2, out + slot_of(2, warp) * kTaps);
#pragma unroll
    for (int i = 0; i < ThreadSums<M, K>::kDeep; ++i) {
      if (lane < kTaps && i + 3 <= levels) out[slot_of(i + 3, warp) * kTaps + lane] = sums.deep[i];
      sums.deep[i] = 0;
    }
  }
  __syncthreads();
  for (int t = threadIdx.x; t <= kTaps; t += kPatchThreads) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += exchange[w * (kTaps + 1) + t];
    // The sum of grad_output is twice that of its low-pass band.
    out[t < kTaps ? t : sum_count(K, levels) - 1] = t < kTaps ? total : 2 * total;
  }
}

struct GradLaunch {
  PatchGradLaunch gradients;
  bool loads_boxes;  // of large planes
  BoxMap grad_output, input;
};

// Stores the input gradient of a tile at this thread's pixels.
template <class WG, int G, class T>
__device__ __forceinline__ void store_input_grad(const PatchGradLaunch& p, const TileIndex& at,
                                                 const PatchPixels<typename WG::ThreadPatch>& sum) {
  using Own = typename WG::ThreadPatch;
  const View& to = p.input_grad.output;
  int item = at.item, y = patch_row<Own>(), x = patch_col<Own>();
  if constexpr (G > 0) {
    item = item * G * G + y / WG::cell(0) * G + x / WG::cell(0);
    y %= WG::cell(0), x %= WG::cell(0);
    if (item >= p.batch || y >= p.height) return;
  } else {
    y += at.y, x += at.x;
  }
  T* out = static_cast<T*>(to.data) + item * to.stride_b + at.channel * to.stride_c +
           y * to.stride_y + x * to.stride_x;
  store_patch<T>(p.input_grad, out, p.height - y, p.width - x, sum);
}

// G = 0: tiles of large planes; else G x G planes a tile. kInputGrad: with the input gradient.
template <class T, int K, int G, bool kInputGrad>
__global__ void __launch_bounds__(kPatchThreads, GradMemory<sizeof(T), K, G, kInputGrad>::kBlocks)
    patch_weight_grad_kernel(const __grid_constant__ GradLaunch launch) {
  using M = GradMemory<sizeof(T), K, G, kInputGrad>;
  using WG = typename M::WG;
  using WX = typename M::WX;
  using Own = typename WG::ThreadPatch;
  const PatchGradLaunch& p = launch.gradients;
  extern __shared__ __align__(128) unsigned char shared[];
  T* grad = reinterpret_cast<T*>(shared);
  T* input = reinterpret_cast<T*>(shared + M::kInput);
  float* grad_bands = reinterpret_cast<float*>(shared + M::kGradBands);
  float* input_bands = reinterpret_cast<float*>(shared + M::kInputBands);
  float* grad_dense = reinterpret_cast<float*>(shared + M::kGradDense);
  float* input_dense = reinterpret_cast<float*>(shared + M::kInputDense);
  float* exchange = reinterpret_cast<float*>(shared + M::kExchange);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + M::kBarrier);
  float* weights = reinterpret_cast<float*>(shared + M::kWeights);
  if constexpr (G > 0) {
    clear(shared, M::kBytes);
  } else {
    if (threadIdx.x == 0) init_byte_barrier(barrier);
    __syncthreads();
  }

  const BlockTiles tiles = BlockTiles::strided(p);
  const TileIndex step(p, tiles.channel, tiles.step);  // planes: as many items
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const auto first_item = [](const TileIndex& tile) {
    return G > 0 ? tile.item * G * G : tile.item;
  };
  const auto start = [&] {
    if constexpr (G > 0) {
      const auto copy = [&](auto window, const View& v, int bytes, T* pixels) {
        const T* origin = static_cast<const T*>(v.data) + tiles.channel * v.stride_c;
        fill_planes<decltype(window)>(origin, v, bytes, p.height, p.width, first_item(next),
                                      p.batch, pixels);
      };
      copy(WG(), p.grad_output, p.grad_bytes, grad);
      copy(WX(), p.input, p.input_bytes, input);
    } else if (!launch.loads_boxes) {
      fill_window<WG>(p.grad_output, p.grad_bytes == 16, p, next, grad);
      fill_window<WX>(p.input, p.input_bytes == 16, p, next, input);
    } else if (threadIdx.x == 0) {
      expect_bytes(barrier, WG::kPixelBytes + WX::kPixelBytes);
      load_window_box<WG>(launch.grad_output, next, grad, barrier);
      load_window_box<WX>(launch.input, next, input, barrier);
    }
  };
  const auto go_on = [&] {
    if constexpr (G > 0) {
      next.item += tiles.step;  // a tile's planes are whole
    } else {
      next.advance(p, step);
    }
  };
  const auto lowpass_planes = [&](void* low) {
    const int rows = (p.height + 1) / 2, cols = (p.width + 1) / 2, item = first_item(at);
    LowpassPlanes planes{
        static_cast<float*>(low), int64_t(p.channels) * rows * cols, rows, cols, 0, 0, 1};
    if constexpr (G > 0) {
      planes.items = p.batch - item;
    } else {
      planes.y = at.y / 2, planes.x = at.x / 2;
    }
    if (low) planes.channel += (int64_t(item) * p.channels + tiles.channel) * rows * cols;
    return planes;
  };

  ThreadSums<M, K> sums;
  // The levels past the first, once level 1 is summed: they take its place.
  const auto sum_deep_levels = [&] {
    if constexpr (M::kAllLevels) {
      __syncthreads();
      analyse_level2<WG>(grad_bands, grad_dense);
      analyse_level2<WX>(input_bands, input_dense);
      __syncthreads();
      if (threadIdx.x / 32 == 0) analyse_deep_levels<M>(grad_dense, p.levels);
      if (threadIdx.x / 32 == 1) analyse_deep_levels<M>(input_dense, p.levels);
      correlate_level2<M, K>(grad_dense, input_dense, sums.level2);
      if (p.levels == 2) return;
      __syncthreads();
      sums.add_deep_levels(grad_dense, input_dense, p.levels);
    }
  };

  // Adds the wavelet path to `sum`, the base path at this thread's pixels, and stores the input
  // gradient.
  const auto finish_input = [&](PatchPixels<Own>& sum) {
    PatchLevel1<Own> low = {};
    if constexpr (M::kAllLevels) {
      if (p.levels > 1) {
        __syncthreads();  // the weight gradients' dense levels have been read
        filter_deep_levels<typename M::P, K>(grad_bands, grad_dense, weights, p.levels, low);
      }
    }
    add_level1<WG, K>(grad_bands, weights, low, sum);
    store_input_grad<WG, G, T>(p, at, sum);
  };

  wait_for_previous_grid();
  if (p.lets_next_start) let_next_grid_start();
  PatchPixels<Own> sum;  // of the input gradient
  const auto end_of = [&](int part) { return int(int64_t(tiles.count) * (part + 1) / p.parts); };
  // Tile n is copied while the bands of the one before are summed. One copy of the code of each:
  // what lies past the first 64 KB of a kernel is slow the first time (8x32x32x32 float16 L=3 on an
  // H200: 0.008 ms, with twice as much code 0.018 ms).
#pragma unroll 1
  for (int n = 0, part = 0;; ++n) {
    if (n < tiles.count) {
      if (n > 0) go_on();
      start();
    }
    if (n > 0) {
      if (p.level_wanted) correlate_band<WG, WX, K>(grad_bands, input_bands, sums.level1);
      if (p.bias_wanted || p.low_grad)
        sums.base[K * K] += store_lowpass<WG>(grad_bands, lowpass_planes(p.low_grad));
      if (p.low_input) store_lowpass<WX>(input_bands, lowpass_planes(p.low_input));
      if (p.levels > 1) sum_deep_levels();
      if constexpr (kInputGrad) finish_input(sum);
      if (n == tiles.count) let_next_grid_start();
      // Where parts are more than tiles, some have none.
      for (; part < p.parts && end_of(part) <= n; ++part) {
        const int64_t index =
            (int64_t(tiles.channel) * p.splits + blockIdx.x / p.channels) * p.parts + part;
        write_partials(sums, p.levels, exchange, p.partials + index * sum_count(K, p.levels));
        __syncthreads();
      }
    } else if constexpr (kInputGrad) {
      load_taps<K, M::kLevels>(p.input_grad.params, tiles.channel, p.levels, weights);
    }
    if (n == tiles.count) return;
    at = next;
    if (G == 0 && launch.loads_boxes) {
      wait_for_bytes(barrier, n);
    } else {
      wait_for_copies();
    }
    __syncthreads();
    analyse_pixels<WG>(grad, grad_bands);
    analyse_pixels<WX>(input, input_bands);
    if (p.base_wanted) correlate_pixels<WG, WX, T, K>(grad, input, sums.base);
    if constexpr (kInputGrad) {
      set_all(sum, 0);
      base_path<WG, T, K>(grad, weights, sum);
    }
    __syncthreads();
  }
}

template <class T, int K, int G, bool kInputGrad>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  using M = GradMemory<sizeof(T), K, G, kInputGrad>;
  const auto kernel = &patch_weight_grad_kernel<T, K, G, kInputGrad>;
  GradLaunch launch{};
  launch.gradients = p;
  if constexpr (G == 0) {
    const auto describe = [&](BoxMap& map, const View& v, const BoxShape& box) {
      return describe_boxes(map, v, sizeof(T), p.batch, p.channels, p.height, p.width, box);
    };
    launch.loads_boxes = has_bulk_copies(kernel, kAllShared) &&
                         describe(launch.grad_output, p.grad_output, M::WG::box()) &&
                         describe(launch.input, p.input, M::WX::box());
  }
  return launch_kernel(kernel, launch, int64_t(p.channels) * p.splits, kPatchThreads, M::kBytes,
                       stream, p.early, kAllShared);
}

}  // namespace

const char* launch_patch_weight_grad(const PatchGradLaunch& p, DType activations,
                                     cudaStream_t stream) {
  return dispatch_float(activations, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      const auto run = [&](auto g) {
        if constexpr (kInputGradFits<sizeof(t), k(), g()>) {
          if (p.input_wanted) return launch<decltype(t), k(), g(), true>(p, stream);
        }
        if (p.input_wanted) return "no kernel gives this input gradient with those of the weights";
        return launch<decltype(t), k(), g(), false>(p, stream);
      };
      if constexpr (sizeof(t) == 2) {
        return with_constant(PlaneCells(), p.cells, run);
      } else {
        return with_constant(GradCells(), p.cells, run);
      }
    });
  });
}

}  // namespace wtconv::cuda
