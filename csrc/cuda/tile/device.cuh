// Device code of the tile kernels: work mapping, load, analysis, strip convolution (tile.h).
#pragma once

#include "../../common/haar.h"
#include "../element.cuh"
#include "tile.h"

namespace wtconv::cuda {

// n / d for 0 <= n < 2^22 by the reciprocal of d: exact, and a few instructions.
struct Divisor {
  int divisor;
  float reciprocal;
  __device__ __forceinline__ explicit Divisor(int d) : divisor(d), reciprocal(1.0f / float(d)) {}
  __device__ __forceinline__ int quotient(int n) const {
    return int((float(n) + 0.5f) * reciprocal);
  }
};

// Position `item` of channels x rows x cols: neighbouring items are neighbouring columns, or
// channels where those are consecutive in memory.
struct Positions {
  int count, channels;
  Divisor rows, cols;
  bool channels_fast;

  __device__ __forceinline__ Positions(int channels, int rows, int cols, bool channels_fast)
      : count(channels * rows * cols),
        channels(channels),
        rows(rows),
        cols(cols),
        channels_fast(channels_fast) {}

  __device__ __forceinline__ void decode(int item, int& c, int& row, int& col) const {
    c = 0;
    if (channels_fast) {
      c = item & (channels - 1);
      item = item >> (31 - __clz(channels));
    }
    const int line = cols.quotient(item);
    col = item - line * cols.divisor;
    row = line;
    if (!channels_fast && channels > 1) {
      c = rows.quotient(line);
      row = line - c * rows.divisor;
    }
  }
};

// The index of (row, col), relative to the tile, in a stored band.
__device__ __forceinline__ int stored(const TileLevel& v, int row, int col) {
  return (row + v.lead_rows) * v.pitch + col + v.lead_cols;
}

// Scaled weights of the block's channels: [channel][slot][tap], then [channel] biases. A warp reads
// one slot.
template <class A>
__device__ void load_parameters(const TileLaunch& p, int channel, A* weights, A* biases) {
  const RawParameters& q = p.params;
  const int taps = p.shape.kernel_size * p.shape.kernel_size, slots = slot_count(p.shape.levels);
  for (int unit = threadIdx.x / 32; unit < p.shape.group * slots; unit += blockDim.x / 32) {
    const int local = unit / slots, slot = unit - local * slots, c = channel + local;
    const int level = (slot + kSubbands - 1) / kSubbands;
    const bool used = c < p.channels && q.weight[level];
    const int64_t group = level ? kSubbands * int64_t(c) + (slot - 1) % kSubbands : c;
    const A scale = used ? read<A>(q.scale[level], q.dtype, group) : A(0);
    for (int tap = threadIdx.x % 32; tap < taps; tap += 32) {
      const int64_t from = group * taps + (q.rotate ? taps - 1 - tap : tap);
      weights[unit * taps + tap] = used ? scale * read<A>(q.weight[level], q.dtype, from) : A(0);
    }
  }
  for (int i = threadIdx.x; i < p.shape.group; i += blockDim.x) {
    const bool used = q.bias && channel + i < p.channels;
    biases[i] =
        used ? read<A>(q.scale[0], q.dtype, channel + i) * read<A>(q.bias, q.dtype, channel + i)
             : A(0);
  }
}

// Neighbouring elements of one access; of double as much as 16 bytes hold.
template <class T>
struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Quad {
  T lane[4];
};
template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T lane[2];
};

template <class T, class A>
__device__ __forceinline__ void store_quad(A* p, const Quad<T>& q) {
  Quad<A> wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) wide.lane[i] = widen<A>(q.lane[i]);
  *reinterpret_cast<Quad<A>*>(p) = wide;
}

// The window of level 0, zero outside the plane and for channels beyond the last.
template <class T, class A>
__device__ void load_window(const TileLaunch& p, const View& view, const TileShape& s, int64_t item,
                            int channel, int y, int x, A* memory) {
  constexpr int kBatch = 4;  // loads in flight per thread
  const TileLevel& v = s.level[0];
  const T* src = static_cast<const T*>(view.data) + item * view.stride_b + channel * view.stride_c;
  const int y0 = y - v.lead_rows, x0 = x - v.lead_cols;
  const int rows = min(p.height, y + v.last_row), cols = min(p.width, x + v.last_col);
  const int wide_x = p.load_path == LoadPath::kQuadX ? 4 : 1;
  const int wide_c = p.load_path == LoadPath::kQuadChannels ? 4 : 1;
  const Positions positions(s.group / wide_c, v.stored_rows, v.pitch / wide_x, p.channels_fast);
  A* out = memory + v.offset;
  for (int first = threadIdx.x; first < positions.count; first += kBatch * blockDim.x) {
    Quad<T> value[kBatch];
    int target[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = first + i * blockDim.x;
      int c, row, col;
      positions.decode(n, c, row, col);
      c *= wide_c;
      col *= wide_x;
      const bool inside = unsigned(y0 + row) < unsigned(rows) &&
                          unsigned(x0 + col) < unsigned(cols) && channel + c < p.channels;
      target[i] = n < positions.count ? c * s.channel_stride + row * v.pitch + col : -1;
      value[i] = Quad<T>{};
      if (!inside || target[i] < 0) continue;
      const T* from =
          src + c * view.stride_c + (y0 + row) * view.stride_y + (x0 + col) * view.stride_x;
      if (p.load_path == LoadPath::kScalar) {
        value[i].lane[0] = *from;
      } else {
        value[i] = *reinterpret_cast<const Quad<T>*>(from);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (target[i] < 0) continue;
      if (p.load_path == LoadPath::kQuadX) {
        store_quad(out + target[i], value[i]);
      } else {
        out[target[i]] = widen<A>(value[i].lane[0]);
        if (p.load_path == LoadPath::kQuadChannels) {
#pragma unroll
          for (int q = 1; q < 4; ++q)
            out[target[i] + q * s.channel_stride] = widen<A>(value[i].lane[q]);
        }
      }
    }
  }
}

// One level of analysis, two coefficients of a row at a time. A plane's own padding is written as
// zeros.
template <class A>
__device__ void analyse(const TileShape& s, int level, bool channels_fast, A* memory) {
  const TileLevel &v = s.level[level], &finer = s.level[level - 1];
  const Positions positions(s.group, v.stored_rows, v.pitch / 2, channels_fast);
  for (int item = threadIdx.x; item < positions.count; item += blockDim.x) {
    int c, row, col;
    positions.decode(item, c, row, col);
    col *= 2;
    const int y = row - v.lead_rows, x = col - v.lead_cols;
    A* base = memory + c * s.channel_stride;
    A left[kSubbands] = {}, right[kSubbands] = {};
    if (y >= v.first_row && y < v.last_row && x + 1 >= v.first_col && x < v.last_col) {
      const A* p = base + finer.offset + stored(finer, 2 * y, 2 * x);
      const Quad<A> top = *reinterpret_cast<const Quad<A>*>(p);
      const Quad<A> bottom = *reinterpret_cast<const Quad<A>*>(p + finer.pitch);
      if (x >= v.first_col)
        haar_butterfly<A>(top.lane[0], top.lane[1], bottom.lane[0], bottom.lane[1], left);
      if (x + 1 < v.last_col)
        haar_butterfly<A>(top.lane[2], top.lane[3], bottom.lane[2], bottom.lane[3], right);
    }
    A* out = base + v.offset + row * v.pitch + col;
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) {
      *reinterpret_cast<Pair<A>*>(out + b * v.band_stride) = Pair<A>{{left[b], right[b]}};
    }
  }
}

// Distance from the first input of a strip down to an address aligned to four elements: strips
// start at multiples of four, their inputs k / 2 before.
template <int K>
constexpr int kRowShift = (4 - K / 2 % 4) % 4;

// N values from p, of which p - kShift is aligned to four elements.
template <class A, int N, int kShift>
__device__ __forceinline__ void load_row(const A* p, A (&row)[N]) {
#pragma unroll
  for (int i = 0; i < N + kShift; i += 4) {
    const Quad<A> q = *reinterpret_cast<const Quad<A>*>(p - kShift + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= kShift && i + j < N + kShift) row[i + j - kShift] = q.lane[j];
    }
  }
}

// sum[r][u] += sum_ij taps[i][j] * in[r + i][u + j] for a strip of R x 4 outputs. Each input row is
// read once and serves up to K output rows.
template <class A, int K, int R, int kShift>
__device__ __forceinline__ void convolve_strip(const A* in, int pitch, const A* weights, int k,
                                               A (&sum)[R][kStripWidth]) {
  if constexpr (K > 0) {
    A taps[K][K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
#pragma unroll
      for (int j = 0; j < K; ++j) taps[i][j] = weights[i * K + j];
    }
#pragma unroll
    for (int y = 0; y < R + K - 1; ++y) {
      A row[K + kStripWidth - 1];
      load_row<A, K + kStripWidth - 1, kShift>(in + y * pitch, row);
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const int r = y - i;
        if (r < 0 || r >= R) continue;
#pragma unroll
        for (int j = 0; j < K; ++j) {
#pragma unroll
          for (int u = 0; u < kStripWidth; ++u) sum[r][u] += taps[i][j] * row[j + u];
        }
      }
    }
  } else {
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < k; ++j) {
        const A tap = weights[i * k + j];
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
          for (int u = 0; u < kStripWidth; ++u) sum[r][u] += tap * in[(r + i) * pitch + j + u];
        }
      }
    }
  }
}

// Filters the four bands of a level in place, in rounds of whole bands: a thread keeps its strip in
// registers until every thread of the round has read its inputs.
template <class A, int K, int R>
__device__ void filter_level(const TileLaunch& p, int level, const A* weights, A* memory) {
  const TileShape& s = p.shape;
  const TileLevel& v = s.level[level];
  const int k = K ? K : s.kernel_size, taps = k * k, slots = slot_count(s.levels);
  const int rows = (v.own_rows + R - 1) / R, cols = (v.own_cols + kStripWidth - 1) / kStripWidth;
  const int units = (p.channels_fast ? 1 : s.group) * kSubbands;  // bands, or channels x bands
  const int strips = (p.channels_fast ? s.group : 1) * rows * cols;
  const int per_round = blockDim.x / strips;
  const int unit_in_round = Divisor(strips).quotient(threadIdx.x);
  const Positions positions(p.channels_fast ? s.group : 1, rows, cols, p.channels_fast);
  int c, y, x;
  positions.decode(threadIdx.x - unit_in_round * strips, c, y, x);
  y *= R;
  x *= kStripWidth;
  for (int round = 0; round < units; round += per_round) {
    const int unit = round + unit_in_round;
    const bool active = unit_in_round < per_round && unit < units;
    const int band = unit % kSubbands;
    if (!p.channels_fast) c = unit / kSubbands;
    A* base = memory + c * s.channel_stride + v.offset + band * v.band_stride;
    A sum[R][kStripWidth] = {};
    if (active) {
      convolve_strip<A, K, R, kRowShift<K>>(
          base + stored(v, y - s.pad_top, x - s.pad_left), v.pitch,
          weights + (c * slots + slot_of(level, band)) * taps, k, sum);
    }
    __syncthreads();
    if (!active) continue;
    A* out = base + y * v.pitch + x;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      Quad<A> row;
#pragma unroll
      for (int u = 0; u < kStripWidth; ++u) row.lane[u] = sum[r][u];
      *reinterpret_cast<Quad<A>*>(out + r * v.pitch) = row;
    }
  }
}

template <class A, int K>
__device__ __forceinline__ void filter_bands(const TileLaunch& p, int level, const A* weights,
                                             A* memory) {
  switch (p.shape.level[level].strip_rows) {
    case 8:
      return filter_level<A, K, 8>(p, level, weights, memory);
    case 4:
      return filter_level<A, K, 4>(p, level, weights, memory);
    case 2:
      return filter_level<A, K, 2>(p, level, weights, memory);
    default:
      return filter_level<A, K, 1>(p, level, weights, memory);
  }
}

// The tile and batch items of a block.
struct BlockIndex {
  int channel, x, y;
  int64_t first, last, part;  // batch items; position of the block among those of its channels

  __device__ __forceinline__ explicit BlockIndex(const TileLaunch& p) {
    int64_t block = blockIdx.x;
    channel = int(block % p.groups) * p.shape.group;
    block /= p.groups;
    part = block;
    x = int(block % p.tiles_x) * p.shape.tile_cols;
    block /= p.tiles_x;
    y = int(block % p.tiles_y) * p.shape.tile_rows;
    first = block / p.tiles_y * p.batch_per_block;
    last = min(first + p.batch_per_block, p.batch);
  }
};

}  // namespace wtconv::cuda
