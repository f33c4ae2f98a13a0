// The operator on channels_last planes of at most a tile, all levels on chip: a lane is a channel.
//
// A block takes a plane of a group of neighbouring channels, as memory has them: shared memory
// holds the channels of a pixel side by side, from the window of x to the coarsest band, so that
// whole pieces are copied and lanes touch different banks without any rule for the columns. A
// thread takes a strip of one channel, 1 x 7 coefficients of level 1 and their 2 x 14 pixels;
// neighbouring strips of a warp lie below each other:
//
//   copy the window -> base path of the strip in registers -> level 1 in place of the window ->
//   the coarse levels, the filters of all, their sum at level 2, and meanwhile the bands of level 1
//   -> the next window's copy starts, the strip is stored
//
// So smaller planes leave room for another block, which computes while one waits for its window,
// and eight channels of 56 x 56 fit a multiprocessor. Of the smallest planes, a block takes two at
// a time, which share its taps.
//
// A plane takes its own size and no more; rows past its ends are read from a row of zeros. x is
// read once and y written once.
#include "../launch.cuh"
#include "group.cuh"
#include "group_store.cuh"

namespace wtconv::cuda {
namespace {

struct GroupLaunch {
  PatchLaunch patch;
  GroupForwardMemory memory;
};

// Starts to bring the taps of all levels near, which load_group_taps() takes level by level.
template <class S, int K>
__device__ __forceinline__ void prefetch_group_taps(const RawParameters& p, int first, int channels,
                                                    int levels) {
  constexpr int kLine = 128;
#pragma unroll 1
  for (int level = 0; level <= levels; ++level) {
    if (!p.weight[level]) continue;
    const int bands = level ? kSubbands : 1, bytes = channels * bands * K * K * int(sizeof(S));
    const int64_t origin = int64_t(first) * bands;
    const char* weights = static_cast<const char*>(p.weight[level]) + origin * K * K * sizeof(S);
    for (int at = threadIdx.x * kLine; at < bytes; at += blockDim.x * kLine) prefetch(weights + at);
    if (threadIdx.x == 0) prefetch(static_cast<const S*>(p.scale[level]) + origin);
  }
}

// Scaled taps of the group, [slot][tap][tap_pitch], then the biases. The loads of a batch, as many
// as a group's registers leave room for, are under way together.
template <class S, int K, int kGroup>
__device__ __forceinline__ void load_group_taps(const RawParameters& p, int first, int channels,
                                                int levels, float* taps) {
  constexpr int kTaps = K * K, kPitch = GroupForwardMemory::tap_pitch(kGroup),
                kBatch = sizeof(S) == 8 || kGroup < 8 ? 4
                         : kGroup == 8                ? 8
                                                      : 13;
  const int slots = slot_count(levels);
#pragma unroll 1
  for (int level = 0; level <= levels; ++level) {
    const int band_bits = level ? 2 : 0,
              count = p.weight[level] ? channels * kTaps << band_bits : 0;
    const int64_t origin = int64_t(first) << band_bits;
    const S* weights = static_cast<const S*>(p.weight[level]) + origin * kTaps;
    const S* scales = static_cast<const S*>(p.scale[level]) + origin;
    const float factor = 1.0f / float(1 << level);
    for (int n = threadIdx.x; n < count; n += kBatch * blockDim.x) {
      S weight[kBatch], scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = min(n + i * int(blockDim.x), count - 1);
        weight[i] = weights[at], scale[i] = scales[at / kTaps];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = n + i * int(blockDim.x), tap = at % kTaps, group = at / kTaps;
        if (at >= count) break;
        const int slot = level ? slot_of(level, group % kSubbands) : 0;
        taps[(slot * kTaps + (p.rotate ? kTaps - 1 - tap : tap)) * kPitch + (group >> band_bits)] =
            widen<float>(scale[i]) * widen<float>(weight[i]) * factor;
      }
    }
  }
  if (p.bias && int(threadIdx.x) < channels) {
    const int channel = first + int(threadIdx.x);
    taps[slots * kTaps * kPitch + threadIdx.x] =
        widen<float>(static_cast<const S*>(p.scale[0])[channel]) *
        widen<float>(static_cast<const S*>(p.bias)[channel]);
  }
}

template <int kGroup>
using Level1 = Rows<float, 2 * kGroup, false>;

// kCols coefficients of each band of level 1 in place of their pixels, the first of which is
// *pixel; `cols` of them lie within the plane.
template <int kGroup, int kCols>
__device__ __forceinline__ void analyse_in_place(float* pixel, int pitch, int cols) {
  float top[2 * kCols] = {}, bottom[2 * kCols] = {};
  // Past the row, other threads' pixels.
#pragma unroll
  for (int u = 0; u < 2 * kCols; ++u) {
    if (u < 2 * cols) top[u] = pixel[u * kGroup], bottom[u] = pixel[pitch + u * kGroup];
  }
#pragma unroll
  for (int u = 0; u < kCols; ++u) {
    if (u >= cols) break;
    float value[kSubbands];
    haar_butterfly<float>(top[2 * u], top[2 * u + 1], bottom[2 * u], bottom[2 * u + 1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) pixel[b % 2 * pitch + (2 * u + b / 2) * kGroup] = value[b];
  }
}

// The four bands at a position of a level, from the low-pass band two levels below.
template <class In>
__device__ __forceinline__ void analyse_twice(const In& finest, int y, int x,
                                              float (&value)[kSubbands]) {
  float pixel[4][4], low[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    load_values<In::kStep>(finest.row(4 * y + r, 4 * x), pixel[r]);
    // Fewer zeros may follow a row than two levels pad it with.
#pragma unroll
    for (int c = 0; c < 4; ++c) pixel[r][c] = 4 * x + c < finest.cols ? pixel[r][c] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = i / 2 * 2, c = i % 2 * 2;
    haar_butterfly<float>(pixel[r][c], pixel[r][c + 1], pixel[r + 1][c], pixel[r + 1][c + 1],
                          value);
    low[i] = value[0];
  }
  haar_butterfly<float>(low[0], low[1], low[2], low[3], value);
}

// A level, and the next where there are as many, from the low-pass band of the finer one: in one
// list of positions, a column after the other.
template <int kGroup, class In>
__device__ __forceinline__ void analyse_coarse(Team team, const GroupForwardMemory& memory,
                                               int level, int levels, unsigned char* shared,
                                               int channel) {
  const In finer(memory.level[level - 1], 0, shared, memory.zeros, channel);
  const auto store = [&](const GroupBands& to, int y, int x, const float (&value)[kSubbands]) {
    float* out = reinterpret_cast<float*>(shared + to.offset) + y * to.pitch + x * kGroup + channel;
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) out[b * to.band] = value[b];
  };
  const GroupBands &first = memory.level[level], &second = memory.level[level + 1];
  const int slots = team.threads / kGroup, count = first.rows * first.cols;
  int n = team.thread / kGroup;
  float value[kSubbands];
#pragma unroll 1
  for (; n < count; n += slots) {
    const int x = first.col_of(n), y = n - x * first.rows;
    const float *top = finer.row(2 * y, 2 * x), *bottom = finer.row(2 * y + 1, 2 * x);
    haar_butterfly<float>(top[0], top[In::kStep], bottom[0], bottom[In::kStep], value);
    store(first, y, x, value);
  }
  if (level == levels) return;
#pragma unroll 1
  for (n -= count; n < second.rows * second.cols; n += slots) {
    const int x = second.col_of(n), y = n - x * second.rows;
    analyse_twice(finer, y, x, value);
    store(second, y, x, value);
  }
}

// Levels from 2 on: a quarter of the threads takes a band, a strip at a time, in one list.
template <int K, int kGroup>
__device__ __forceinline__ void filter_coarse(Team team, const GroupForwardMemory& memory,
                                              int levels, unsigned char* shared, int channel,
                                              const float* taps) {
  constexpr int kCols = coarse_strip_of(kGroup), kPitch = GroupForwardMemory::tap_pitch(kGroup);
  const int slot = team.thread / kGroup, slots = team.threads / kGroup, band = slot % kSubbands;
  int n = slot / kSubbands;
#pragma unroll 1
  for (int level = 2; level <= levels; ++level) {
    const GroupBands &raw = memory.level[level], &to = memory.filtered[level];
    const Band<kGroup> in(raw, band * raw.band, shared, memory.zeros, channel);
    const float* band_taps = taps + slot_of(level, band) * K * K * kPitch;
    float* out = reinterpret_cast<float*>(shared + to.offset) + band * to.band + channel;
    // A column of strips after the other.
    int y = n, x = 0;
#pragma unroll 1
    for (; n < raw.strips(kCols); n += slots / kSubbands, y += slots / kSubbands) {
      while (y >= raw.rows) y -= raw.rows, x += kCols;
      float sum[kCols] = {};
      convolve_small<K, kPitch>(in, y, x, band_taps, sum);
#pragma unroll
      for (int u = 0; u < kCols; ++u) {
        if (x + u < to.cols) out[y * to.pitch + (x + u) * kGroup] = sum[u];
      }
    }
    n -= raw.strips(kCols);
  }
}

// The reconstruction of a level at (y, x) of the next finer one, but for what `low` adds to the
// low-pass coefficient.
template <int kGroup>
__device__ __forceinline__ float synthesise(const float* filtered, const GroupBands& bands, int y,
                                            int x, float low = 0) {
  const float* f = filtered + (y >> 1) * bands.pitch + (x >> 1) * kGroup;
  const float row_sign = y & 1 ? -1.0f : 1.0f, col_sign = x & 1 ? -1.0f : 1.0f;
  return ((f[0] + low) + row_sign * f[bands.band]) +
         col_sign * (f[2 * bands.band] + row_sign * f[3 * bands.band]);
}

// Adds the reconstruction of the levels from 3 on to what level 2 filtered of its low-pass band.
template <int kGroup>
__device__ __forceinline__ void add_coarse(Team team, const GroupForwardMemory& memory, int levels,
                                           unsigned char* shared, int channel) {
  const GroupBands& to = memory.filtered[2];
  float* fine = reinterpret_cast<float*>(shared + to.offset) + channel;
#pragma unroll 1
  for (int n = team.thread / kGroup; n < to.rows * to.cols; n += team.threads / kGroup) {
    const int y = to.row_of(n), x = n - y * to.cols;
    float low = 0;
#pragma unroll 1
    for (int level = levels; level > 2; --level) {
      const GroupBands& from = memory.filtered[level];
      low = synthesise<kGroup>(reinterpret_cast<const float*>(shared + from.offset) + channel, from,
                               y >> (level - 3), x >> (level - 3), low);
    }
    fine[n * kGroup] += low;
  }
}

// What the levels from 2 on take, step by step: each relies on all threads' steps before. Two
// levels at a time from fine to coarse, all filters, the sum at level 2.
constexpr int coarse_steps(int levels) { return levels / 2 + (levels > 1) + (levels > 2); }
template <int K, int kGroup>
__device__ __forceinline__ void coarse_step(Team team, const GroupForwardMemory& memory, int levels,
                                            int step, unsigned char* shared, int channel,
                                            const float* taps) {
  const int filter = levels / 2;
  if (step < filter) {
    if (step == 0) {
      analyse_coarse<kGroup, Level1<kGroup>>(team, memory, 2, levels, shared, channel);
    } else {
      analyse_coarse<kGroup, Band<kGroup>>(team, memory, 2 + 2 * step, levels, shared, channel);
    }
  } else if (step == filter && levels > 1) {
    filter_coarse<K, kGroup>(team, memory, levels, shared, channel, taps);
  } else if (step == filter + 1 && levels > 2) {
    add_coarse<kGroup>(team, memory, levels, shared, channel);
  }
}

// sum += the synthesis of a band of level 1, to which `more` belongs.
template <int K, int kGroup, int kCols>
__device__ __forceinline__ void add_band(const GroupForwardMemory& memory, int band,
                                         const unsigned char* shared, int channel, int y, int x,
                                         const float* taps, float (&more)[1][kCols],
                                         float (&sum)[2][2 * kCols]) {
  constexpr int kPitch = GroupForwardMemory::tap_pitch(kGroup);
  const Level1<kGroup> in(memory.level[1], memory.first_of(band, kGroup), shared, memory.zeros,
                          channel);
  convolve_strip<K, kPitch>(in, y, x, taps + slot_of(1, band) * K * K * kPitch, more);
  const float row_sign = band & 1 ? -1.0f : 1.0f, col_sign = band & 2 ? -1.0f : 1.0f;
#pragma unroll
  for (int u = 0; u < kCols; ++u) {
    const float value = more[0][u];
    sum[0][2 * u] += value;
    sum[0][2 * u + 1] += col_sign * value;
    sum[1][2 * u] += row_sign * value;
    sum[1][2 * u + 1] += row_sign * col_sign * value;
  }
}

template <class T, int K, int kGroup>
__global__ void __launch_bounds__(group_threads(kGroup))
    group_forward_kernel(const __grid_constant__ GroupLaunch launch) {
  constexpr int kCols = strip_of(kGroup), kPitch = GroupForwardMemory::tap_pitch(kGroup);
  const PatchLaunch& p = launch.patch;
  const GroupForwardMemory& memory = launch.memory;
  extern __shared__ __align__(16) unsigned char shared[];
  const int plane = int(threadIdx.x) / memory.threads;
  const Team team{int(threadIdx.x) - plane * memory.threads, memory.threads};
  unsigned char* own = shared + plane * memory.plane_bytes;
  float* pixels = reinterpret_cast<float*>(own + memory.pixels.offset);
  float* taps = reinterpret_cast<float*>(shared + memory.taps);

  // Blocks that run at the same time are neighbours in memory.
  const int groups = ceil_div(p.channels, kGroup);
  const int split = blockIdx.x / groups * memory.planes, splits = p.splits * memory.planes;
  const int first = blockIdx.x % groups * kGroup, channels = min(kGroup, p.channels - first);
  const T* input = static_cast<const T*>(p.input.data) + first * p.input.stride_c;
  const auto start = [&](int item) {
    if (item >= p.batch) return;
    fill_group<kGroup>(team, input + item * p.input.stride_b, p.input, p.input_bytes, channels,
                       p.height, p.width, memory.pixels, pixels);
  };
  with_type(p.params.dtype, [&](auto s) {
    prefetch_group_taps<decltype(s), K>(p.params, first, channels, p.levels);
  });
  clear_group({int(threadIdx.x), int(blockDim.x)}, shared, memory.bytes);
  // Half types pass through registers, which the sums leave behind the stores.
  constexpr bool kCopies = sizeof(T) == sizeof(float);
  if constexpr (kCopies) start(split + plane);
  with_type(p.params.dtype, [&](auto s) {
    load_group_taps<decltype(s), K, kGroup>(p.params, first, channels, p.levels, taps);
  });

  const int channel = team.thread % kGroup, strip = team.thread / kGroup;
  const GroupBands& level1 = memory.level[1];
  const int y = strip % level1.rows, x = strip / level1.rows * kCols;
  const bool mine = x < level1.cols;
  taps += channel;
#pragma unroll 1
  for (int begin = split; begin < p.batch; begin += splits) {
    const int item = begin + plane;
    if constexpr (!kCopies) start(item);
    wait_for_copies();
    __syncthreads();
    if (item + splits < p.batch) {
      prefetch_row<T>(p.input, p.input_bytes, item + splits,
                      int(blockIdx.x) % groups + team.thread * groups, p.height, p.width,
                      p.channels);
    }
    float sum[2][2 * kCols] = {};
    if (mine) {
      const float bias = taps[slot_count(p.levels) * K * K * kPitch];
#pragma unroll
      for (int u = 0; u < 2 * kCols; ++u) sum[0][u] = sum[1][u] = bias;
      convolve_strip<K, kPitch>(Pixels<float, kGroup>(memory.pixels, 0, own, memory.zeros, channel),
                                2 * y, 2 * x, taps, sum);
    }
    __syncthreads();
    if (mine) {
      analyse_in_place<kGroup, kCols>(pixels + y * level1.pitch + 2 * x * kGroup + channel,
                                      memory.pixels.pitch, level1.cols - x);
    }
    __syncthreads();
    // The coarse levels leave most threads idle: the bands of level 1 fill their time, the low-pass
    // band last.
    const int last = max(coarse_steps(p.levels), kSubbands - 1);
#pragma unroll 1
    for (int step = 0; step <= last; ++step) {
      coarse_step<K, kGroup>(team, memory, p.levels, step, own, channel, taps);
      if (mine && (step < kSubbands - 1 || step == last)) {
        float more[1][kCols] = {};
        if (step == last && p.levels > 1) {
          const float* filtered =
              reinterpret_cast<const float*>(own + memory.filtered[2].offset) + channel;
#pragma unroll
          for (int u = 0; u < kCols; ++u)
            more[0][u] = synthesise<kGroup>(filtered, memory.filtered[2], y, x + u);
        }
        add_band<K, kGroup>(memory, step == last ? 0 : 1 + step, own, channel, y, x, taps, more,
                            sum);
      }
      __syncthreads();
    }
    if constexpr (kCopies) start(item + splits);
    wait_for_previous_grid();  // it may still read the memory of the output
    let_next_grid_start();
    T* out = static_cast<T*>(p.output.data) + first * p.output.stride_c + item * p.output.stride_b +
             2 * y * p.output.stride_y + 2 * x * p.output.stride_x;
    const int rows = p.height - 2 * y, cols = p.width - 2 * x;
    const bool wanted = mine && channel < channels && item < p.batch;
    if (p.output_bytes >= 4 * int(sizeof(T))) {
      store_channels(p.output, out + channel / 4 * 4, wanted, rows, cols, sum);
    } else if (wanted) {
      store_strip(p.output, out + channel * p.output.stride_c, rows, cols, sum);
    }
  }
}

}  // namespace

const char* launch_group_forward(const PatchLaunch& p, DType activations, int multiprocessors,
                                 cudaStream_t stream) {
  return dispatch_float(activations, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(Groups(), p.group, [&](auto group) {
        GroupLaunch launch{p, {p.height, p.width, p.kernel_size, p.levels, p.group}};
        const int groups = ceil_div(p.channels, p.group);
        launch.patch.splits = split_tiles(groups, ceil_div(p.batch, launch.memory.planes),
                                          launch.memory.blocks() * multiprocessors);
        return launch_kernel(&group_forward_kernel<decltype(t), k(), group()>, launch,
                             int64_t(groups) * launch.patch.splits,
                             launch.memory.planes * launch.memory.threads, launch.memory.bytes,
                             stream, p.early);
      });
    });
  });
}

}  // namespace wtconv::cuda
