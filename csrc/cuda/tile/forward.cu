// The operator in one pass over memory: y = b + w_0 * x + sum_l S_l^T (w_l * S_l x). The input
// gradient is the same launch with rotated weights and mirrored padding (the adjoint law).
//
//   load window -> analysis per level -> filter the bands -> base path + bit-indexed synthesis
//
// Traffic: x once with the halo (re-reads hit L2), y once, and the reconstruction of levels past
// the tile's. Arithmetic: k^2 (1 + 4/3) multiply-adds per element in strips of 8 x 4 outputs a
// thread, which reads each shared-memory row of a strip once for up to k output rows. Sources: sec.
// 3 and eq. synthesis_closed_form of the paper.
#include "../launch.cuh"
#include "device.cuh"

namespace wtconv::cuda {
namespace {

// The reconstruction of levels >= level + 1 at coefficient (y, x) of `level`: the closed form, with
// coordinates counted from the tile's origin, which is a multiple of 2^levels.
template <class A>
__device__ __forceinline__ A coarse_value(const TileLaunch& p, const A* base, const A* coarse,
                                          int level, int y, int x) {
  A value = 0, factor = 1;
  for (int l = level + 1; l <= p.shape.levels; ++l) {
    const TileLevel& v = p.shape.level[l];
    const int shift = l - level;
    factor *= A(0.5);
    const A* c = base + v.offset + (y >> shift) * v.pitch + (x >> shift);
    const A ll = c[0], lh = c[v.band_stride], hl = c[2 * v.band_stride], hh = c[3 * v.band_stride];
    const bool odd_y = (y >> (shift - 1)) & 1, odd_x = (x >> (shift - 1)) & 1;
    value += factor * (ll + (odd_y ? -lh : lh) + (odd_x ? -hl : hl) + (odd_y != odd_x ? -hh : hh));
  }
  if (coarse) {
    const int shift = p.shape.levels - level;
    value += factor * coarse[int64_t(y >> shift) * p.coarse_cols + (x >> shift)];
  }
  return value;
}

// Adds the synthesis of all levels to a strip of 8 x 4 outputs at (y, x).
template <class A>
__device__ __forceinline__ void add_synthesis(const TileLaunch& p, const A* base, const A* coarse,
                                              int y, int x, A (&sum)[8][kStripWidth]) {
  const TileLevel& v = p.shape.level[1];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    // A 2 x 2 block of level-1 coefficients shares one coefficient of level 2.
    A low[kSubbands] = {};
    if (p.shape.levels > 1 || coarse) {
      const int cy = y / 2 + i, cx = x / 2;
      if (p.shape.levels > 1) {
        const TileLevel& w = p.shape.level[2];
        const A* c = base + w.offset + (cy / 2) * w.pitch + cx / 2;
        const A ll = c[0] + coarse_value(p, base, coarse, 2, cy / 2, cx / 2);
        haar_butterfly<A>(ll, c[w.band_stride], c[2 * w.band_stride], c[3 * w.band_stride], low);
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q)
          low[q] = coarse_value(p, base, coarse, 1, cy + q / 2, cx + q % 2);
      }
    }
#pragma unroll
    for (int row = i; row < i + 2; ++row) {
      const A* c = base + v.offset + (y / 2 + row) * v.pitch + x / 2;
      Pair<A> bands[kSubbands];
#pragma unroll
      for (int b = 0; b < kSubbands; ++b)
        bands[b] = *reinterpret_cast<const Pair<A>*>(c + b * v.band_stride);
#pragma unroll
      for (int col = 0; col < 2; ++col) {
        A pixels[kSubbands];
        haar_butterfly<A>(bands[0].lane[col] + low[2 * (row - i) + col], bands[1].lane[col],
                          bands[2].lane[col], bands[3].lane[col], pixels);
#pragma unroll
        for (int b = 0; b < 4; ++b) sum[2 * row + b / 2][2 * col + b % 2] += pixels[b];
      }
    }
  }
}

template <class T, class A>
__device__ __forceinline__ void store_strip(const TileLaunch& p, T* out, int rows, int cols,
                                            const A (&sum)[8][kStripWidth]) {
  const bool whole = cols >= kStripWidth && p.output.stride_x == 1 &&
                     reinterpret_cast<uintptr_t>(out) % alignof(Quad<T>) == 0 &&
                     p.output.stride_y % kStripWidth == 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (r >= rows) break;
    if (whole) {
      Quad<T> row;
#pragma unroll
      for (int u = 0; u < kStripWidth; ++u) row.lane[u] = narrow<T>(sum[r][u]);
      *reinterpret_cast<Quad<T>*>(out + r * p.output.stride_y) = row;
    } else {
#pragma unroll
      for (int u = 0; u < kStripWidth; ++u) {
        if (u < cols) out[r * p.output.stride_y + u * p.output.stride_x] = narrow<T>(sum[r][u]);
      }
    }
  }
}

template <class T, class A, int K>
__device__ void base_path(const TileLaunch& p, int64_t item, int channel, int y, int x,
                          const A* weights, const A* biases, const A* memory) {
  const TileShape& s = p.shape;
  const TileLevel& v = s.level[0];
  const int k = K ? K : s.kernel_size, slots = slot_count(s.levels);
  const int rows = (v.own_rows + 7) / 8, cols = (v.own_cols + kStripWidth - 1) / kStripWidth;
  const Positions strips(s.group, rows, cols, p.channels_fast);
  for (int i = threadIdx.x; i < strips.count; i += blockDim.x) {
    int local, row, col;
    strips.decode(i, local, row, col);
    const int sy = row * 8, sx = col * kStripWidth, c = channel + local;
    if (c >= p.channels || y + sy >= p.height || x + sx >= p.width) continue;
    const A* base = memory + local * s.channel_stride;
    A sum[8][kStripWidth];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int u = 0; u < kStripWidth; ++u) sum[r][u] = biases[local];
    }
    convolve_strip<A, K, 8, kRowShift<K>>(
        base + v.offset + stored(v, sy - s.pad_top, sx - s.pad_left), v.pitch,
        weights + local * slots * k * k, k, sum);
    const A* coarse = nullptr;
    if (p.coarse) {
      coarse = static_cast<const A*>(p.coarse) +
               ((item * p.channels + c) * p.coarse_rows + (y >> s.levels)) * p.coarse_cols +
               (x >> s.levels);
    }
    add_synthesis<A>(p, base, coarse, sy, sx, sum);
    T* out = static_cast<T*>(p.output.data) + item * p.output.stride_b + c * p.output.stride_c +
             (y + sy) * p.output.stride_y + (x + sx) * p.output.stride_x;
    store_strip<T, A>(p, out, min(min(8, v.own_rows - sy), p.height - y - sy),
                      min(min(kStripWidth, v.own_cols - sx), p.width - x - sx), sum);
  }
}

template <class T, class A, int K>
__global__ void __launch_bounds__(128, 5) forward_kernel(const __grid_constant__ TileLaunch p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const TileShape& s = p.shape;
  A* memory = reinterpret_cast<A*>(shared);
  A* weights = memory + s.group * s.channel_stride;
  A* biases = weights + s.group * slot_count(s.levels) * s.kernel_size * s.kernel_size;

  const BlockIndex at(p);

  load_parameters<A>(p, at.channel, weights, biases);
  for (int64_t item = at.first; item < at.last; ++item) {
    load_window<T, A>(p, p.input, s, item, at.channel, at.y, at.x, memory);
    __syncthreads();
    for (int level = 1; level <= s.levels; ++level) {
      analyse<A>(s, level, p.channels_fast, memory);
      __syncthreads();
    }
    for (int level = 1; level <= s.levels; ++level) {
      filter_bands<A, K>(p, level, weights, memory);
    }
    __syncthreads();
    base_path<T, A, K>(p, item, at.channel, at.y, at.x, weights, biases, memory);
    __syncthreads();
  }
}

template <class T, class A, int K>
const char* launch(const TileLaunch& p, cudaStream_t stream) {
  auto* kernel = &forward_kernel<T, A, K>;
  const int64_t blocks = int64_t(p.groups) * p.tiles_x * p.tiles_y *
                         ((p.batch + p.batch_per_block - 1) / p.batch_per_block);
  return launch_kernel(kernel, p, blocks, p.shape.threads, p.shape.shared_bytes, stream);
}

template <class T, class A>
const char* launch_size(const TileLaunch& p, cudaStream_t stream) {
  if constexpr (sizeof(A) == 4) {
    switch (p.shape.kernel_size) {
      case 3:
        return launch<T, A, 3>(p, stream);
      case 5:
        return launch<T, A, 5>(p, stream);
      case 7:
        return launch<T, A, 7>(p, stream);
    }
  }
  return launch<T, A, 0>(p, stream);
}

}  // namespace

const char* launch_forward(const TileLaunch& p, DType activations, cudaStream_t stream) {
  return dispatch(activations,
                  [&](auto t, auto a) { return launch_size<decltype(t), decltype(a)>(p, stream); });
}

}  // namespace wtconv::cuda
