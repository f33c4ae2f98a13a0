// The operator on channels_last planes of half types that fit a tile, all levels on chip, on tensor
// cores.
//
// A block takes eight neighbouring channels, 16 bytes of each pixel, of one plane, or of several
// where they are small, and computes windows as mma_planes.cu does, a team of four warps for each.
// The planes of a window are G channels, side by side, of G batch items, one below the other:
//
//   copy the pixels, as they lie in memory -> windows; the next pixels' copy starts -> LL1 by MMA
//   -> the levels past 2, outputs of level 2 by MMA -> y by MMA, in place of the window -> store
//
// x is read once and y written once, by 16 bytes of a pixel. Loads are bulk copies where they can
// be: each piece that threads load or store lies in another line of memory, and an instruction
// takes the time of 32 lines (64x96x56x56 float16 L=5 on an H200: 0.103 ms, without bulk copies
// 0.116).
#include "../launch.cuh"
#include "mma_deep.cuh"
#include "mma_group.cuh"
#include "mma_planes.cuh"

namespace wtconv::cuda {
namespace {

// Beside what it has: the pairs of columns of a plane; the number of columns of groups; the pixels
// of a unit as a box, where `loads_boxes`.
struct GroupOperatorLaunch : MmaGroupLaunch<PatchLaunch> {
  GroupBands pairs;
  int columns = 1;
  BoxMap input{};
  bool loads_boxes = false;

  explicit GroupOperatorLaunch(const PatchLaunch& p)
      : MmaGroupLaunch(p),
        pairs(GroupAllocator{2 * kMmaGroup, 0}.dense(p.height, ceil_div(p.width, 2))) {}
};

// The outputs of this lane, those within their plane, in place of the window's pixels: what lies
// around them stays zero.
template <class W, class T>
__device__ __forceinline__ void write_outputs(const float (&value)[8][4], int height, int width,
                                              T* window) {
  constexpr int kPlane = W::plane(0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = lane / 4 * W::cell(0) % kPlane, col = warp * kWarpCols % kPlane + lane % 4 * 2;
  for_each_output<W>(window, [&](int f, int h, T* to) {
    const int left = width - col - 8 * h;
    if (row + f >= height || left <= 0) return;
    *reinterpret_cast<uint32_t*>(to) =
        pack<T>(value[f][2 * h], left > 1 ? value[f][2 * h + 1] : 0.0f);
  });
}

// The channels of a pixel.
using Words = Vector<uint32_t, kMmaGroup / 2>;

// The first halves, or the second ones, of two words.
template <int kHalf>
__device__ __forceinline__ uint32_t halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, kHalf == 0 ? 0x5410 : 0x7632);
}

// Stores the channels of a pixel in pieces that the output is aligned to.
template <class T>
__device__ __forceinline__ void store_pixel(const PatchLaunch& p, int channels, const Words& value,
                                            T* out) {
  if (p.output_bytes == 16) {
    store_whole(out, value);
  } else if (p.output_bytes == 8) {
    store_whole(out, Vector<uint32_t, 2>{{value.lane[0], value.lane[1]}});
    if (channels > 4) store_whole(out + 4, Vector<uint32_t, 2>{{value.lane[2], value.lane[3]}});
  } else {
    const auto& elements = reinterpret_cast<const Vector<T, kMmaGroup>&>(value);
#pragma unroll
    for (int c = 0; c < kMmaGroup; ++c) {
      if (c < channels) out[c * p.output.stride_c] = elements.lane[c];
    }
  }
}

// Columns of groups, and blocks of each, one a multiprocessor, such that the fewest units come one
// after the other. Further groups of a column cost a block about half a unit, for their taps.
struct GroupShares {
  int columns, splits;

  GroupShares(int groups, int units, int multiprocessors) {
    constexpr int kMostOfColumn = 8;
    int64_t least = INT64_MAX;
    for (int n = 1; n <= kMostOfColumn; ++n) {
      const int across = ceil_div(groups, n), blocks = std::max(multiprocessors / across, 1);
      const int64_t of_column = int64_t(ceil_div(groups, across)) * units;
      const int64_t rounds = (int64_t(n) * units - 1) / blocks + 1;
      const int64_t cost = (2 * rounds + (n > 1)) * ceil_div(across, multiprocessors);
      if (cost >= least) continue;
      columns = across, splits = int(std::min<int64_t>(blocks, of_column)), least = cost;
    }
  }
};

// Pairs of columns of a unit's planes, one below the other: thread + n * kThreads are this
// thread's. The place of a pair is where its first channel lies in the windows, an even number of
// elements; its lowest bit says whether the second column lies past the plane.
template <class M, class T>
class PixelPairs {
  using W = typename M::W;
  static constexpr int kGroup = M::kGroup, kThreads = M::kThreads, kPlane = W::plane(0),
                       kOfThread = M::kPairs / kThreads;
  static constexpr int kOfPlane = W::kCells / M::kAcross;  // cells
  const GroupBands& pairs_;
  const int height_, width_, thread_, count_;
  unsigned short* places_;

  static __device__ __forceinline__ uint32_t* channel_at(T* windows, unsigned place, int c) {
    return reinterpret_cast<uint32_t*>(windows + (place & ~1u) + c / M::kAcross * (M::kWindow / 2) +
                                       W::template col_at<0>(c % M::kAcross * kPlane));
  }

 public:
  __device__ __forceinline__ PixelPairs(const GroupOperatorLaunch& launch, unsigned char* shared,
                                        int thread)
      : pairs_(launch.pairs),
        height_(launch.patch.height),
        width_(launch.patch.width),
        thread_(thread),
        count_(M::kItems * height_ * pairs_.cols),
        places_(reinterpret_cast<unsigned short*>(shared + M::kPlaces)) {}

  // Where they lie, once for all units. Others read the places behind a barrier.
  __device__ __forceinline__ void write_places() const {
    for (int i = thread_; i < count_; i += kThreads) {
      const int below = pairs_.row_of(i), col = 2 * (i - below * pairs_.cols);
      const int item = pairs_.col_of(below), row = below - item * height_;
      places_[i] = item / M::kAcross * M::kOfItems * (M::kWindow / 2) + W::pixel_at(row, col) +
                   W::template cell_at<0>(item % M::kAcross * kOfPlane) + (col + 1 == width_);
    }
  }
  // The pixels, as they lie in memory, to the windows.
  __device__ __forceinline__ void spread(const T* pixels, T* windows) const {
    unsigned place[kOfThread];
    Words left[kOfThread], right[kOfThread];
#pragma unroll
    for (int n = 0; n < kOfThread; ++n) {
      const int i = min(thread_ + n * kThreads, count_ - 1);
      const Words* from =
          reinterpret_cast<const Words*>(pixels) + 2 * i - width_ % 2 * pairs_.row_of(i);
      place[n] = places_[i], left[n] = from[0], right[n] = from[1];
    }
#pragma unroll
    for (int n = 0; n < kOfThread; ++n) {
      if (thread_ + n * kThreads >= count_) break;
#pragma unroll
      for (int c = 0; c < kGroup; ++c) {
        const uint32_t second = place[n] % 2 == 0 ? right[n].lane[c / 2] : 0;
        *channel_at(windows, place[n], c) =
            (c % 2 == 0 ? halves<0> : halves<1>)(left[n].lane[c / 2], second);
      }
    }
  }
  // f(item, row, column, channels there and in the next column, whether the plane has that column)
  // of each pair of the first `items` planes, from the windows.
  template <class F>
  __device__ __forceinline__ void gather(T* windows, int items, F f) const {
#pragma unroll
    for (int n = 0; n < kOfThread; ++n) {
      const int i = thread_ + n * kThreads;
      if (i >= count_) break;
      const unsigned place = places_[i];
      const int below = pairs_.row_of(i), col = 2 * (i - below * pairs_.cols);
      const int item = M::kItems == 1 ? 0 : pairs_.col_of(below), row = below - item * height_;
      Words left, right;
#pragma unroll
      for (int c = 0; c < kGroup; c += 2) {
        const uint32_t even = *channel_at(windows, place, c),
                       odd = *channel_at(windows, place, c + 1);
        left.lane[c / 2] = halves<0>(even, odd), right.lane[c / 2] = halves<1>(even, odd);
      }
      if (item >= items) break;
      f(item, row, col, left, right, place % 2 == 0);
    }
  }
};

template <class T, int K, int G>
__global__ void __launch_bounds__(MmaGroupMemory<K, G>::kThreads, 1)
    mma_group_kernel(const __grid_constant__ GroupOperatorLaunch launch) {
  using M = MmaGroupMemory<K, G>;
  using W = typename M::W;
  constexpr int kThreads = M::kThreads, kGroup = M::kGroup, kPlane = W::plane(0);
  const PatchLaunch& p = launch.patch;
  extern __shared__ __align__(16) unsigned char shared[];
  const int team = threadIdx.y, thread = team * kPatchThreads + int(threadIdx.x);
  T* windows = reinterpret_cast<T*>(shared);
  unsigned char* own = shared + M::kOwn + team * M::kTeam;
  T* lowpass = reinterpret_cast<T*>(own);
  float *raw = reinterpret_cast<float*>(own + M::kRaw),
        *filtered = reinterpret_cast<float*>(own + M::kFiltered);
  T* pixels = reinterpret_cast<T*>(shared + M::kPixels);
  const auto channel_at = [&](int channel) {
    return shared + M::kChannels + channel * M::kChannel;
  };
  const auto table = [&](unsigned char* channel, int level) {
    return reinterpret_cast<uint32_t*>(channel + M::table(level));
  };
  const auto deep_taps = [&](int channel) {
    return reinterpret_cast<float*>(channel_at(channel) + M::kDeepTaps);
  };
  const auto sync = [&] { sync_team<kPatchThreads>(team); };

  // A unit is kItems batch items of a group. Group g is of column g % columns, whose units its
  // blocks share: where each column is one group, they go through the items side by side; else each
  // block has a range of them, group by group, so that it forms the taps of few groups. Blocks that
  // run at the same time are neighbours in memory.
  const int units = ceil_div(p.batch, M::kItems), groups = ceil_div(p.channels, kGroup);
  const int column = blockIdx.x % launch.columns, split = blockIdx.x / launch.columns;
  const int of_column = ceil_div(groups - column, launch.columns) * units;
  const auto share = [&](int splits) { return int(int64_t(of_column) * splits / p.splits); };
  const bool side_by_side = launch.columns == groups;
  const int begin = side_by_side ? split : share(split), step = side_by_side ? p.splits : 1,
            end = side_by_side ? units : share(split + 1);
  const auto group_of_unit = [&](int unit) { return column + unit / units * launch.columns; };
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + M::kBarrier);
  const auto start = [&](int unit) {
    if (launch.loads_boxes) {
      if (thread > 0) return;
      expect_bytes(barrier, M::kItems * p.height * p.width * kGroup * 2);
      return load_pixels(pixels, launch.input, unit % units * M::kItems,
                         group_of_unit(unit) * kGroup, barrier);
    }
    constexpr int kOfItem = kThreads / M::kItems;
    const int n = thread / kOfItem, item = unit % units * M::kItems + n;
    if (item >= p.batch) return;
    const int first = group_of_unit(unit) * kGroup;
    const T* plane =
        static_cast<const T*>(p.input.data) + first * p.input.stride_c + item * p.input.stride_b;
    fill_group<kGroup>({thread % kOfItem, kOfItem}, plane, p.input, p.input_bytes,
                       min(kGroup, p.channels - first), p.height, p.width, launch.pixels,
                       pixels + n * p.height * p.width * kGroup);
  };
  // The taps of channels `team` and team + kTeams lie where levels past 2 do later.
  const auto taps = [&](int channel) -> auto& {
    return reinterpret_cast<ChannelTaps<K, 2>*>(shared + M::kOwn + channel % M::kTeams * M::kTeam +
                                                M::kRaw)[channel / M::kTeams];
  };
  const auto form_taps = [&](int first) {
    constexpr int kOfChannel = kThreads / kGroup;
    const int channel = thread / kOfChannel;
    read_all_scaled<K, G, kOfChannel>(p.params, min(first + channel, p.channels - 1), p.levels,
                                      taps(channel), deep_taps(channel), thread % kOfChannel);
    __syncthreads();
    for (int c = team; c < kGroup; c += M::kTeams) cross_bands(taps(c));
    __syncthreads();
    for (int c = team; c < kGroup; c += M::kTeams) {
      form_tap_table<W, T, 0>(taps(c), table(channel_at(c), 0));
      form_tap_table<W, T, 1>(taps(c), table(channel_at(c), 1));
      if (threadIdx.x == 0) {  // which wrote the factors
        *reinterpret_cast<Vector<float, 4>*>(channel_at(c) + M::kFactors) = {
            {taps(c).bias, taps(c).factor[0], taps(c).factor[1], 0}};
      }
    }
  };

  const PixelPairs<M, T> pairs(launch, shared, thread);
  const auto store = [&](int unit) {
    const int first = group_of_unit(unit) * kGroup, channels = min(kGroup, p.channels - first),
              first_item = unit % units * M::kItems;
    T* output = static_cast<T*>(p.output.data) + first * p.output.stride_c;
    pairs.gather(
        windows, p.batch - first_item,
        [&](int n, int row, int col, const Words& left, const Words& right, bool has_next) {
          T* to = output + (first_item + n) * p.output.stride_b + row * p.output.stride_y +
                  col * p.output.stride_x;
          store_pixel(p, channels, left, to);
          if (has_next) store_pixel(p, channels, right, to + p.output.stride_x);
        });
  };
  // Averages cannot overflow; sums of gradients, where rotated, shall not underflow.
  const float average = p.params.rotate ? 0.5f : 0.25f, raise = 0.25f / average;
  // A window becomes the outputs. Until all have, teams do not wait for each other.
  const auto compute = [&](int n) {
    T* window = windows + n * (M::kWindow / 2);
    const int first = n % M::kOfItems * G;  // channel of the group
    unsigned char* channel = channel_at(first + int(threadIdx.x) / 32 * kWarpCols / kPlane);
    float sum[8][4] = {}, low1[2][4] = {}, coarse[2][2] = {};
    if (p.levels > 1) form_planes_lowpass<W>(window, average, lowpass);
    sync();
    if (p.levels > 2) {
      filter_deep<W, K, G>(lowpass, raise, p.levels, deep_taps(first), raw, filtered,
                           M::kChannel / 4);
    }
    if (p.levels > 1) filter_level1<W>(lowpass, TableTaps<1>(table(channel, 1)), low1);
    sync();
    synthesise_deep<K, G>(filtered, p.levels, coarse);
    filter_pixels<W>(window, TableTaps<0>(table(channel, 0)), sum);
    const auto factors = *reinterpret_cast<const Vector<float, 4>*>(channel + M::kFactors);
    combine<2>({factors.lane[0], factors.lane[1], raise * factors.lane[2], 0}, low1, {}, sum);
    if (p.levels > 2) add_coarse<2>(1, coarse, sum);
    sync();
    write_outputs<W>(sum, p.height, p.width, window);
  };

  int loaded = 0;  // boxes
  if (thread == 0) init_byte_barrier(barrier);
  __syncthreads();  // as compute-sanitizer wants it even of the thread that arrives first
  if (begin < end) {
    start(begin);
  } else {
    wait_for_previous_grid();
  }
  clear_group({thread, kThreads}, shared, M::kPlaces);
  pairs.write_places();
#pragma unroll 1
  for (int unit = begin; unit < end; unit += step) {
    if (unit == begin || (step == 1 && unit % units == 0)) form_taps(group_of_unit(unit) * kGroup);
    if (launch.loads_boxes) {
      wait_for_bytes(barrier, loaded++);
    } else {
      wait_for_copies();
    }
    __syncthreads();
    pairs.spread(pixels, windows);
    __syncthreads();
    if (unit + step < end) start(unit + step);
#pragma unroll 1
    for (int n = team; n < M::kWindows; n += M::kTeams) compute(n);
    __syncthreads();
    wait_for_previous_grid();  // it may still read the memory of the output
    let_next_grid_start();
    store(unit);
  }
}

}  // namespace

const char* launch_mma_group(const PatchLaunch& p, DType activations, int multiprocessors,
                             cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(MmaGroupKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGroupCells(), p.cells, [&](auto g) {
        using M = MmaGroupMemory<k(), g()>;
        const auto kernel = &mma_group_kernel<decltype(t), k(), g()>;
        GroupOperatorLaunch launch(p);
        launch.loads_boxes =
            has_bulk_copies(kernel) && describe_pixels(launch.input, p.input, p.batch, p.channels,
                                                       p.height, p.width, M::kItems);
        const int groups = ceil_div(p.channels, M::kGroup), units = ceil_div(p.batch, M::kItems);
        const GroupShares shares(groups, units, multiprocessors);
        launch.columns = shares.columns, launch.patch.splits = shares.splits;
        return launch_kernel(kernel, launch, int64_t(shares.columns) * shares.splits,
                             dim3(kPatchThreads, M::kTeams), M::bytes(p.height, p.width), stream,
                             p.early);
      });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
