// The weight gradients of channels_last planes of at most a tile: the base path and one level, of
// the smallest two, in one pass over both tensors, a lane a channel (group_forward.cu).
//
//   copy both windows -> level 1 of both, the base path's taps -> the next copies start; a quarter
//   of the threads sums the taps of each band, of the smallest planes level 2, too -> after some
//   planes, partial sums to memory
//
// A thread sums all taps over strips of its channel, 2 x 14 pixels and 2 x 7 coefficients. The
// low-pass bands are written in float32, as dense planes, of which weight_grad.cu takes all levels
// at once, or of tiny planes in the same layout. As there, the sums come out rotated by 180
// degrees.
#include "../launch.cuh"
#include "group.cuh"

namespace wtconv::cuda {
namespace {

struct GroupGradLaunch {
  PatchGradLaunch patch;
  GroupGradMemory memory;
};

// sum[i * K + j] += in(y + r, x + u) * grad(y + r + i - R, x + u + j - R) over kRows x kCols.
template <int K, int kRows, int kCols, class In>
__device__ __forceinline__ void correlate_strip(const In& in, const In& grad, int y, int x,
                                                float (&sum)[K * K]) {
  constexpr int R = K / 2;
  float value[kRows][kCols];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    load_values<In::kStep>(in.row(y + r, x), value[r]);
#pragma unroll
    for (int u = 0; u < kCols; ++u) value[r][u] = x + u < in.cols ? value[r][u] : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kRows + K - 1; ++n) {
    float g[kCols + K - 1];
    load_values<In::kStep>(grad.row(y + n - R, x, R) - R * In::kStep, g);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = n - r;
      if (i < 0 || i >= K) continue;
#pragma unroll
      for (int u = 0; u < kCols; ++u) {
#pragma unroll
        for (int j = 0; j < K; ++j) sum[i * K + j] += value[r][u] * g[u + j];
      }
    }
  }
}

// The sum over the lanes of a warp that are `stride`, 2 * `stride`, ... apart, in all of them.
template <int kStride>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int mask = kStride; mask < 32; mask *= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// Level 2 of planes with at most 2 x 2 coefficients of it, from LL of level 1. Only the 3 x 3 taps
// in the middle meet two of them; the gradients of the others are zero.
constexpr int kMiddle = 3;

// A coefficient of a band of level 2.
template <int kGroup>
__device__ __forceinline__ float level2_of(const Band<kGroup>& low, int band, int y, int x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * y + i / 2, col = 2 * x + i % 2;
    const float value = col < low.cols ? *low.row(row, col) : 0.0f;
    const bool minus = (band & 1 && i / 2) != (band & 2 && i % 2);
    sum += minus ? -value : value;
  }
  return 0.5f * sum;
}

// sum[i * kMiddle + j] += in(y, x) * grad(y + i - 1, x + j - 1) of a band.
template <int kGroup>
__device__ __forceinline__ void correlate_level2(const Band<kGroup>& input,
                                                 const Band<kGroup>& grad, int band,
                                                 float (&sum)[kMiddle * kMiddle]) {
  float in[2][2], g[2][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    in[n / 2][n % 2] = level2_of(input, band, n / 2, n % 2);
    g[n / 2][n % 2] = level2_of(grad, band, n / 2, n % 2);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int i = m / 2 - n / 2 + 1, j = m % 2 - n % 2 + 1;
      sum[i * kMiddle + j] += in[n / 2][n % 2] * g[m / 2][m % 2];
    }
  }
}

// Adds the sums of all threads up in shared memory, [slot][tap][channel] and the biases, a warp
// after the other; the threads' sums start again from zero. A warp has a band of level 2.
template <int K, int kGroup, int kLevels>
__device__ void add_up(float (&base)[K * K], float (&band)[K * K],
                       float (&level2)[kMiddle * kMiddle], float& bias, float* sums) {
  constexpr int kTaps = K * K, kSums = sum_count(K, kLevels);
  const int lane = threadIdx.x % 32, channel = threadIdx.x % kGroup;
  const int slot = slot_of(1, threadIdx.x / kGroup % kSubbands);
  for (int i = threadIdx.x; i < kSums * kGroup; i += blockDim.x) sums[i] = 0;
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    base[t] = lanes_sum<kGroup>(base[t]);
    band[t] = lanes_sum<kGroup * kSubbands>(band[t]);
  }
  bias = lanes_sum<kGroup>(bias);
#pragma unroll 1
  for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) {
    __syncthreads();
    if (int(threadIdx.x) / 32 != warp) continue;
    if (lane < kGroup * kSubbands) {
#pragma unroll
      for (int t = 0; t < kTaps; ++t) sums[(slot * kTaps + t) * kGroup + channel] += band[t];
    }
    if (lane < kGroup) {
#pragma unroll
      for (int t = 0; t < kTaps; ++t) sums[t * kGroup + channel] += base[t];
      // The sum of grad_output is twice that of its low-pass band.
      sums[(kSums - 1) * kGroup + channel] += 2 * bias;
    }
  }
  if constexpr (kLevels > 1) {
#pragma unroll
    for (int t = 0; t < kMiddle * kMiddle; ++t) {
      const int tap = (K / 2 - 1 + t / kMiddle) * K + K / 2 - 1 + t % kMiddle;
      sums[(slot_of(2, threadIdx.x / kGroup) * kTaps + tap) * kGroup + channel] = level2[t];
      level2[t] = 0;
    }
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTaps; ++t) base[t] = band[t] = 0;
  bias = 0;
}

// The low-pass bands of `channels` channels to dense planes, up to eight neighbours of a row at
// once. As in fill_pieces, a thread keeps its column.
template <int kGroup>
__device__ __forceinline__ void store_planes(const GroupBands& level1, const unsigned char* shared,
                                             int channels, float* planes) {
  constexpr int kColumns = grad_threads(kGroup) / kGroup, kPiece = kColumns < 8 ? kColumns : 8;
  const int channel = threadIdx.x / kPiece % kGroup;
  const int place = threadIdx.x / (kPiece * kGroup) * kPiece + threadIdx.x % kPiece;
  const int together = max(1, level1.row_of(kColumns)), first = level1.row_of(place);
  if (channel >= channels || first >= together) return;
  const float* band = reinterpret_cast<const float*>(shared + level1.offset) + channel;
  planes += channel * level1.rows * level1.cols;
#pragma unroll 1
  for (int x = place - first * level1.cols; x < level1.cols; x += kColumns) {
    const float* from = band + first * level1.pitch + x * kGroup;
    float* to = planes + first * level1.cols + x;
#pragma unroll 4
    for (int y = first; y < level1.rows; y += together) {
      *to = *from;
      from += together * level1.pitch, to += together * level1.cols;
    }
  }
}

template <class T, int K, int kGroup, int kLevels>
__global__ void __launch_bounds__(grad_threads(kGroup), grad_blocks(K, kGroup))
    group_weight_grad_kernel(const __grid_constant__ GroupGradLaunch launch) {
  constexpr int kCols = strip_of(kGroup), kSums = sum_count(K, kLevels);
  constexpr bool kPlanes = hands_on_planes(K, kGroup);
  const PatchGradLaunch& p = launch.patch;
  const GroupGradMemory& memory = launch.memory;
  extern __shared__ __align__(16) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared + memory.sums);

  const int groups = ceil_div(p.channels, kGroup), split = blockIdx.x / groups;
  const int first = blockIdx.x % groups * kGroup, channels = min(kGroup, p.channels - first);
  const int channel = threadIdx.x % kGroup, slot = threadIdx.x / kGroup;
  const int slots = blockDim.x / kGroup;
  const GroupBands& level1 = memory.grad.level1;
  const int rows = level1.rows, across = level1.strips(kCols) / rows;

  const auto start = [&](int n) {
    const int item = split + n * p.splits;
    if (item >= p.batch) return;
    const auto copy = [&](const View& v, int bytes, const GroupBands& to) {
      fill_group<kGroup>({int(threadIdx.x), int(blockDim.x)},
                         static_cast<const T*>(v.data) + item * v.stride_b + first * v.stride_c, v,
                         bytes, channels, p.height, p.width, to,
                         reinterpret_cast<T*>(shared + to.offset));
    };
    copy(p.grad_output, p.grad_bytes, memory.grad.pixels);
    copy(p.input, p.input_bytes, memory.input.pixels);
  };
  const auto pixels = [&](const GroupGradMemory::Operand& operand) {
    return Pixels<T, kGroup>(operand.pixels, 0, shared, memory.zeros, channel);
  };
  const auto level = [&](const GroupGradMemory::Operand& operand, int band) {
    return Band<kGroup>(operand.level1, band * operand.level1.band, shared, memory.zeros, channel);
  };
  float base[K * K] = {}, band[K * K] = {}, level2[kMiddle * kMiddle] = {}, bias = 0;
  // Level 1 of a strip; its low-pass band to memory, if in this layout.
  const auto analyse = [&](const GroupGradMemory::Operand& operand, void* lowpass, int item, int y,
                           int x) {
    float* low = kPlanes ? nullptr : static_cast<float*>(lowpass);
    if (low) low += ((int64_t(item) * rows + y) * level1.cols + x) * p.channels + first + channel;
    float sum = 0;
    analyse_strip<kCols>(pixels(operand), operand.level1, y, x,
                         reinterpret_cast<float*>(shared + operand.level1.offset) + channel,
                         [&](int u, float value) {
                           sum += value;
                           if (low && channel < channels) low[u * p.channels] = value;
                         });
    return sum;
  };
  const auto store = [&](const GroupGradMemory::Operand& operand, void* lowpass, int item) {
    if (!kPlanes || !lowpass) return;
    const int64_t plane = (int64_t(item) * p.channels + first) * rows * level1.cols;
    store_planes<kGroup>(operand.level1, shared, channels, static_cast<float*>(lowpass) + plane);
  };

  clear_group({int(threadIdx.x), int(blockDim.x)}, shared, memory.bytes);
  start(0);
  const int count = ceil_div(p.batch - split, p.splits);
#pragma unroll 1
  for (int part = 0, n = 0; part < p.parts; ++part) {
    const int end = int(int64_t(count) * (part + 1) / p.parts);
#pragma unroll 1
    for (; n < end; ++n) {
      const int item = split + n * p.splits;
      wait_for_copies();
      __syncthreads();
#pragma unroll 1
      for (int strip = slot; strip < rows * across; strip += slots) {
        const int y = strip / across, x = strip % across * kCols;
        bias += analyse(memory.grad, p.low_grad, item, y, x);
        analyse(memory.input, p.low_input, item, y, x);
        if (p.base_wanted) {
          correlate_strip<K, 2, 2 * kCols>(pixels(memory.input), pixels(memory.grad), 2 * y, 2 * x,
                                           base);
        }
      }
      __syncthreads();
      start(n + 1);
      // Of the planes whose pixels lie furthest apart (64x96x56x56 float16 on an H200: 0.24 ms,
      // without 0.25).
      if (const int later = split + (n + 2) * p.splits; kGroup <= 8 && later < p.batch) {
        const int row = int(blockIdx.x) % groups + int(threadIdx.x) * groups;
        prefetch_row<T>(p.grad_output, p.grad_bytes, later, row, p.height, p.width, p.channels);
        prefetch_row<T>(p.input, p.input_bytes, later, row, p.height, p.width, p.channels);
      }
      store(memory.grad, p.low_grad, item);
      store(memory.input, p.low_input, item);
      if constexpr (kLevels > 1) {
        static_assert(grad_threads(kGroup) == kSubbands * kGroup, "a warp takes a band");
        correlate_level2<kGroup>(level(memory.input, 0), level(memory.grad, 0), slot, level2);
      }
      if (!p.level_wanted) continue;
      const int subband = slot % kSubbands;
#pragma unroll 1
      for (int strip = slot / kSubbands; strip < (rows + 1) / 2 * across;
           strip += slots / kSubbands) {
        correlate_strip<K, 2, kCols>(level(memory.input, subband), level(memory.grad, subband),
                                     strip / across * 2, strip % across * kCols, band);
      }
    }
    if (part + 1 == p.parts) let_next_grid_start();
    add_up<K, kGroup, kLevels>(base, band, level2, bias, sums);
    for (int i = threadIdx.x; i < kSums * channels; i += blockDim.x) {
      const int64_t index = (int64_t(first + i / kSums) * p.splits + split) * p.parts + part;
      p.partials[index * kSums + i % kSums] = sums[i % kSums * kGroup + i / kSums];
    }
    __syncthreads();
  }
}

}  // namespace

const char* launch_group_weight_grad(const PatchGradLaunch& p, DType activations,
                                     cudaStream_t stream) {
  return dispatch_float(activations, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(Groups(), p.group, [&](auto group) {
        const GroupGradLaunch launch{
            p, {p.height, p.width, p.kernel_size, p.levels, sizeof(t), p.group}};
        const int groups = ceil_div(p.channels, p.group);
        const auto run = [&](auto kernel) {
          return launch_kernel(kernel, launch, int64_t(groups) * p.splits, grad_threads(p.group),
                               launch.memory.bytes, stream);
        };
        if constexpr (group() == largest(Groups())) {
          if (p.levels == 2) return run(&group_weight_grad_kernel<decltype(t), k(), group(), 2>);
        }
        return run(&group_weight_grad_kernel<decltype(t), k(), group(), 1>);
      });
    });
  });
}

}  // namespace wtconv::cuda
