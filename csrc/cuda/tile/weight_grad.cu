// The gradients of the folded weights: G[c, s, i, j] = sum (S x)[..., y + i, x + j] (S g)[..., y,
// x].
//
//   load windows of grad_output (padded) and input (own positions only) -> analysis of both
//   -> each warp sums the taps of one band, a lane a strip of 4 columns -> partial sums per block
//
// Traffic: both tensors once. A row of grad_output is read from shared memory once for all k rows
// of taps that it meets. Source: the adjoint law; the sums come out rotated by 180 degrees because
// grad_output is the padded operand.
#include <type_traits>

#include "../launch.cuh"
#include "device.cuh"

namespace wtconv::cuda {
namespace {

// sum[i][j] += in[r][u] * g[r + i][u + j] over a strip of R x 4 positions.
template <class A, int K, int R>
__device__ __forceinline__ void correlate_strip(const A* in, int in_pitch, const A* g, int g_pitch,
                                                A (&sum)[K][K]) {
  A rows[R][kStripWidth];
#pragma unroll
  for (int m = 0; m < R + K - 1; ++m) {
    A row[K + kStripWidth - 1];
    load_row<A, K + kStripWidth - 1, kRowShift<K>>(g + m * g_pitch, row);
    if (m < R) load_row<A, kStripWidth, 0>(in + m * in_pitch, rows[m < R ? m : 0]);
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int r = m - i;
      if (r < 0 || r >= R) continue;
#pragma unroll
      for (int j = 0; j < K; ++j) {
#pragma unroll
        for (int u = 0; u < kStripWidth; ++u) sum[i][j] += rows[r][u] * row[u + j];
      }
    }
  }
}

// Adds the taps of rows [first, last) of one band to `total` [taps]; one warp.
template <class A, int K, int R>
__device__ void correlate_band(const TileLevel& v, const A* in, const TileLevel& w, const A* g,
                               int pad_top, int pad_left, int k, int first, int last, A* exchange,
                               A* total) {
  const int lane = threadIdx.x % 32;
  if constexpr (K > 0) {
    const int cols = (v.own_cols + kStripWidth - 1) / kStripWidth,
              segments = (last - first + R - 1) / R;
    const Divisor columns(cols);
    A sum[K][K] = {};
    for (int n = lane; n < cols * segments; n += 32) {
      const int segment = columns.quotient(n), y = first + segment * R,
                x = (n - segment * cols) * kStripWidth;
      correlate_strip<A, K, R>(in + stored(v, y, x), v.pitch,
                               g + stored(w, y - pad_top, x - pad_left), w.pitch, sum);
    }
#pragma unroll
    for (int t = 0; t < K * K; ++t) exchange[t * 33 + lane] = sum[t / K][t % K];
    __syncwarp();
    for (int t = lane; t < K * K; t += 32) {
      A tap = 0;
#pragma unroll 8
      for (int n = 0; n < 32; ++n) tap += exchange[t * 33 + n];
      total[t] += tap;
    }
    __syncwarp();
  } else {
    for (int t = 0; t < k * k; ++t) {
      A tap = 0;
      for (int y = first; y < last; ++y) {
        for (int x = lane; x < v.own_cols; x += 32) {
          tap += in[stored(v, y, x)] * g[stored(w, y - pad_top + t / k, x - pad_left + t % k)];
        }
      }
      tap = warp_sum(tap);
      if (lane == 0) total[t] += tap;
    }
  }
}

// One band of one channel of the tile, or a part of the base path's rows.
template <class A, int K>
__device__ void correlate_unit(const GradLaunch& p, int unit, const A* memory,
                               const A* input_memory, A* exchange, A* totals) {
  const TileShape &s = p.tile.shape, &q = p.input_shape;
  const int per_channel = kBaseParts + kSubbands * s.levels, taps = s.kernel_size * s.kernel_size;
  const int c = unit / per_channel, part = unit % per_channel;
  const int level = part < kBaseParts ? 0 : (part - kBaseParts) / kSubbands + 1;
  if (!p.level_wanted[level]) return;
  const int band = level ? (part - kBaseParts) % kSubbands : 0;
  const TileLevel &v = q.level[level], &w = s.level[level];
  const A* in = input_memory + c * q.channel_stride + v.offset + band * v.band_stride;
  const A* g = memory + c * s.channel_stride + w.offset + band * w.band_stride;
  A* total = totals + (c * per_channel + part) * taps;
  int first = 0, last = v.own_rows;
  if (level == 0) {
    const int rows = ((v.own_rows + kBaseParts - 1) / kBaseParts + v.strip_rows - 1) /
                     v.strip_rows * v.strip_rows;
    first = min(last, part * rows);
    last = min(last, first + rows);
  }
  const auto run = [&](auto rows) {
    correlate_band<A, K, decltype(rows)::value>(v, in, w, g, s.pad_top, s.pad_left, s.kernel_size,
                                                first, last, exchange, total);
  };
  switch (v.strip_rows) {
    case 8:
      return run(std::integral_constant<int, 8>());
    case 4:
      return run(std::integral_constant<int, 4>());
    case 2:
      return run(std::integral_constant<int, 2>());
    default:
      return run(std::integral_constant<int, 1>());
  }
}

template <class A>
__device__ void sum_bias(const TileShape& s, int height, int width, int channel, const A* memory,
                         A* total) {
  const TileLevel& v = s.level[0];
  const A* g = memory + channel * s.channel_stride + v.offset;
  A sum = 0;
  for (int y = 0; y < min(v.own_rows, height); ++y) {
    for (int x = threadIdx.x % 32; x < min(v.own_cols, width); x += 32) sum += g[stored(v, y, x)];
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) *total += sum;
}

template <class T, class A, int K>
__global__ void __launch_bounds__(256, 2) weight_grad_kernel(const __grid_constant__ GradLaunch p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const TileLaunch& t = p.tile;
  const TileShape &s = t.shape, &q = p.input_shape;
  const int taps = s.kernel_size * s.kernel_size, per_channel = kBaseParts + kSubbands * s.levels;
  A* memory = reinterpret_cast<A*>(shared);
  A* input_memory = memory + s.group * s.channel_stride;
  A* totals = input_memory + s.group * q.channel_stride;
  A* biases = totals + s.group * per_channel * taps;
  A* exchange = biases + s.group + threadIdx.x / 32 * K * K * 33;

  const BlockIndex at(t);

  for (int i = threadIdx.x; i < s.group * (per_channel * taps + 1); i += blockDim.x) totals[i] = 0;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int64_t item = at.first; item < at.last; ++item) {
    load_window<T, A>(t, t.input, s, item, at.channel, at.y, at.x, memory);
    load_window<T, A>(t, p.input, q, item, at.channel, at.y, at.x, input_memory);
    __syncthreads();
    for (int level = 1; level <= p.deepest; ++level) {
      analyse<A>(s, level, t.channels_fast, memory);
      analyse<A>(q, level, t.channels_fast, input_memory);
      __syncthreads();
    }
    for (int unit = warp; unit < s.group * per_channel; unit += warps) {
      correlate_unit<A, K>(p, unit, memory, input_memory, exchange, totals);
    }
    if (p.bias_wanted) {
      for (int c = warp; c < s.group; c += warps)
        sum_bias<A>(s, t.height - at.y, t.width - at.x, c, memory, biases + c);
    }
    __syncthreads();
  }
  // [channel][part][slot][tap], the base parts added up; then the bias.
  const int sums = slot_count(s.levels) * taps + 1;
  A* out = static_cast<A*>(p.partials);
  for (int i = threadIdx.x; i < s.group * sums; i += blockDim.x) {
    const int c = i / sums, n = i % sums;
    if (at.channel + c >= t.channels) continue;
    const A* total = totals + c * per_channel * taps;
    A value = n == sums - 1 ? biases[c] : total[n < taps ? n : n + (kBaseParts - 1) * taps];
    if (n < taps) {
      for (int b = 1; b < kBaseParts; ++b) value += total[b * taps + n];
    }
    out[((at.channel + c) * p.num_partials + at.part) * sums + n] = value;
  }
}

template <class T, class A, int K>
const char* launch(const GradLaunch& p, cudaStream_t stream) {
  const TileLaunch& t = p.tile;
  const int64_t blocks = int64_t(t.groups) * p.num_partials;
  return launch_kernel(&weight_grad_kernel<T, A, K>, p, blocks, p.threads, p.shared_bytes, stream);
}

template <class T, class A>
const char* launch_size(const GradLaunch& p, cudaStream_t stream) {
  if constexpr (sizeof(A) == 4) {
    switch (p.tile.shape.kernel_size) {
      case 3:
        return launch<T, A, 3>(p, stream);
      case 5:
        return launch<T, A, 5>(p, stream);
    }
  }
  return launch<T, A, 0>(p, stream);
}

}  // namespace

const char* launch_weight_grad(const GradLaunch& p, DType activations, cudaStream_t stream) {
  return dispatch(activations,
                  [&](auto t, auto a) { return launch_size<decltype(t), decltype(a)>(p, stream); });
}

}  // namespace wtconv::cuda
