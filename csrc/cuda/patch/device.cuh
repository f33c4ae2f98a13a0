// Device code of the patch kernels: asynchronous fill, analysis, filters, the tiles of a block.
#pragma once

#include "../../common/haar.h"
#include "../element.cuh"
#include "../intrinsics.cuh"
#include "layout.h"
#include "patch.h"

namespace wtconv::cuda {

// The first pixel of this thread's patch, counted from the tile.
template <class P>
__device__ __forceinline__ int patch_row() {
  return threadIdx.x / P::kAcross * P::kRows;
}
template <class P>
__device__ __forceinline__ int patch_col() {
  return threadIdx.x % P::kAcross * P::kCols;
}

// The scaled taps of a channel, zero where the base path is missing, and its scaled bias, or zero,
// as tap 0 of the slot past them, in two steps: between them is the time of the loads. This thread
// has kBatch of them, from number `first` on each kThreads-th. `levels` is at most what the kernel
// takes.
template <int K, int kBatch, int kThreads = kPatchThreads>
class TapLoads {
  static constexpr int kTaps = K * K;
  uint32_t weight_[kBatch] = {}, scale_[kBatch] = {};

 public:
  // The taps and the bias.
  static constexpr int count(int levels) { return slot_count(levels) * kTaps + 1; }
  // kBatch such that each thread has one batch.
  static constexpr int rounds(int levels) { return ceil_div(count(levels), kThreads); }

  __device__ __forceinline__ TapLoads(const RawParameters& p, int channel, int levels, int first) {
    const int bias = count(levels) - 1;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = first + i * kThreads, slot = n / kTaps, tap = n % kTaps;
      const int level = n < bias ? (slot + kSubbands - 1) / kSubbands : 0;
      const int64_t group =
          level == 0 ? channel : kSubbands * int64_t(channel) + (slot - 1) % kSubbands;
      const void* from = n < bias ? p.weight[level] : p.bias;
      if (n > bias || !from) continue;
      const int64_t at = n < bias ? group * kTaps + (p.rotate ? kTaps - 1 - tap : tap) : group;
      weight_[i] = read_bits(from, p.dtype, at);
      scale_[i] = read_bits(p.scale[level], p.dtype, group);
    }
  }
  // store(slot, tap, value) of each.
  template <class Store>
  __device__ __forceinline__ void finish(const RawParameters& p, int levels, int first,
                                         Store store) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = first + i * kThreads;
      if (n >= count(levels)) continue;
      store(n / kTaps, n % kTaps,
            float_of_bits(scale_[i], p.dtype) * float_of_bits(weight_[i], p.dtype));
    }
  }
};

// store(slot, tap, value) for each of them, at most kMostLevels levels. By kThreads threads, of
// which this one is `thread`.
//
// Loads of a batch are under way together: a block begins with the wait for them, and one after the
// other would be as many waits (8xCxHxW float32 on an H200, mean over C = 32 to 128 and H = 128 to
// 512, K = 5, L = 3: 0.157 ms for 0.161). Larger batches are more code than they save;
// fewer threads than a tile's, which read the taps of a channel while others read those of the
// next, have all in one.
template <int K, int kMostLevels, int kThreads = kPatchThreads, class Store>
__device__ __forceinline__ void read_scaled(const RawParameters& p, int channel, int levels,
                                            Store store, int thread = threadIdx.x) {
  constexpr int kRounds = TapLoads<K, 1, kThreads>::rounds(kMostLevels),
                kMostOfBatch = kThreads < kPatchThreads ? 9 : 3,
                kBatch = kRounds < kMostOfBatch ? kRounds : kMostOfBatch;
  using Loads = TapLoads<K, kBatch, kThreads>;
#pragma unroll 1
  for (int first = thread; first < Loads::count(levels); first += kBatch * kThreads)
    Loads(p, channel, levels, first).finish(p, levels, first, store);
}

// What a coefficient of LL of level L adds to a pixel.
template <int L>
constexpr float kLowpassFactor = 1.0f / (1 << L);

// The tiles of a block, all of one channel. Blocks that run at the same time are neighbouring
// channels of the same tiles, which share the sectors of a channels_last tensor. A block begins
// with this: few divisions, of 32 bits without a sign.
struct BlockTiles {
  int channel, first, step, count;

  // Blocks that run together go through their share of the tiles side by side: what they read twice
  // is still in L2.
  template <class Launch>
  static __device__ __forceinline__ BlockTiles strided(const Launch& p) {
    const Shares shares(p);
    const unsigned split = shares.split, together = p.together,
                   before = split < together ? 0 : split / together * together,
                   blocks = min(together, p.splits - before), begin = shares.begin(before),
                   left = shares.begin(before + blocks) - begin - blocks * shares.least;
    return {shares.channel, int(begin + split - before), int(blocks),
            int(shares.least + (split - before < left))};
  }
  // Neighbours in turn: what two windows share stays in the L1 cache.
  template <class Launch>
  static __device__ __forceinline__ BlockTiles contiguous(const Launch& p) {
    const Shares shares(p);
    const unsigned first = shares.begin(shares.split);
    return {shares.channel, int(first), 1, int(shares.begin(shares.split + 1) - first)};
  }

 private:
  // The tiles of each channel, shared evenly among its blocks; the first have one more.
  struct Shares {
    unsigned split, least, left;
    int channel;

    template <class Launch>
    __device__ __forceinline__ explicit Shares(const Launch& p)
        : split(blockIdx.x / unsigned(p.channels)),
          least(unsigned(p.tiles) / unsigned(p.splits)),
          left(unsigned(p.tiles) - least * unsigned(p.splits)),
          channel(int(blockIdx.x - split * unsigned(p.channels))) {}
    __device__ __forceinline__ unsigned begin(unsigned block) const {
      return block * least + min(block, left);
    }
  };
};

// A tile of a large plane: its plane and first pixel.
struct TileIndex {
  int channel, item, y, x;
  template <class Launch>
  __device__ __forceinline__ TileIndex(const Launch& p, int channel, unsigned tile)
      : channel(channel) {
    const unsigned row = tile / unsigned(p.tiles_x), plane = row / unsigned(p.tiles_y);
    x = int(tile - row * unsigned(p.tiles_x)) * kPatchTile;
    y = int(row - plane * unsigned(p.tiles_y)) * kPatchTile;
    item = int(plane);
  }
  // Goes on by as many tiles as `step` is from the first one of the channel: no division.
  template <class Launch>
  __device__ __forceinline__ void advance(const Launch& p, const TileIndex& step) {
    const int rows = p.tiles_y * kPatchTile, cols = p.tiles_x * kPatchTile;
    x += step.x, y += step.y, item += step.item;
    if (x >= cols) x -= cols, y += kPatchTile;
    if (y >= rows) y -= rows, ++item;
  }
};

// f(row, col) for all of kRows x kCols, each thread in one column of a power of two: addresses that
// are linear in the row become immediates.
template <int kRows, int kCols, int kFirst = 0, class F>
__device__ __forceinline__ void for_each_position(F f) {
  constexpr int kLeft = kCols - kFirst;
  constexpr int kColumns = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
  constexpr int kStep = kPatchThreads / kColumns;
  const int row = threadIdx.x / kColumns, col = kFirst + threadIdx.x % kColumns;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    if (r + kStep <= kRows || r + row < kRows) f(r + row, col);
  }
  if constexpr (kLeft > kColumns) for_each_position<kRows, kCols, kFirst + kColumns>(f);
}

// Starts to copy the window of a tile, zero outside the plane.
template <class W, class T, class Launch>
__device__ __forceinline__ void fill_window(const View& view, bool wide, const Launch& p,
                                            const TileIndex& at, T* pixels) {
  const T* plane =
      static_cast<const T*>(view.data) + at.item * view.stride_b + at.channel * view.stride_c;
  const int y0 = at.y - W::halo(0), x0 = at.x - W::lead(0);
  if (wide) {
    const T* origin = plane + y0 * view.stride_y + x0;
    for_each_position<W::rows(0), W::pitch(0) / W::kUnit>([&](int row, int q) {
      const int col = q * W::kUnit;
      const bool inside =
          unsigned(y0 + row) < unsigned(p.height) && unsigned(x0 + col) < unsigned(p.width);
      copy_async<16>(pixels + row * W::pitch(0) + col, origin + row * view.stride_y + col, inside);
    });
    return;
  }
  for (int i = threadIdx.x; i < W::rows(0) * W::pitch(0); i += kPatchThreads) {
    const int row = i / W::pitch(0), col = i % W::pitch(0);
    const bool inside =
        unsigned(y0 + row) < unsigned(p.height) && unsigned(x0 + col) < unsigned(p.width);
    const T* from = plane + (y0 + row) * view.stride_y + (x0 + col) * view.stride_x;
    if constexpr (sizeof(T) == 4) {
      copy_async<4>(pixels + i, from, inside);
    } else {
      pixels[i] = inside ? *from : narrow<T>(0.0f);
    }
  }
}

// Starts to copy the same window by one bulk copy; a single thread does.
template <class W, class T>
__device__ __forceinline__ void load_window_box(const BoxMap& map, const TileIndex& at, T* pixels,
                                                uint64_t* barrier) {
  load_box(pixels, map, at.item, at.channel, at.y - W::halo(0), at.x - W::lead(0), barrier);
}

// Level 1 from the pixels, two coefficients at a time.
template <class W, class T>
__device__ __forceinline__ void analyse_pixels(const T* pixels, float* bands) {
  for_each_position<W::formed_rows(1), W::formed_cols(1) / 2>([&](int r, int q) {
    const int row = r - W::first_row(1), col = 2 * q - W::first_col(1);
    const T* p = pixels + W::stored_pixel(2 * row, 2 * col);
    const auto top = *reinterpret_cast<const Vector<T, 4>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<T, 4>*>(p + W::pitch(0));
    float left[kSubbands], right[kSubbands];
    haar_butterfly<float>(widen<float>(top.lane[0]), widen<float>(top.lane[1]),
                          widen<float>(bottom.lane[0]), widen<float>(bottom.lane[1]), left);
    haar_butterfly<float>(widen<float>(top.lane[2]), widen<float>(top.lane[3]),
                          widen<float>(bottom.lane[2]), widen<float>(bottom.lane[3]), right);
    const bool all = W::uniform(1) || W::holds(1, 1, row, col);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) {
      if (b == 0 || all) {
        *reinterpret_cast<Vector<float, 2>*>(bands +
                                             W::stored(1, b, row, col)) = {{left[b], right[b]}};
      }
    }
  });
}

// A level from the low-pass band of the finer one.
template <class W, int kLevel>
__device__ __forceinline__ void analyse_level(float* bands) {
  for_each_position<W::formed_rows(kLevel), W::formed_cols(kLevel)>([&](int r, int c) {
    const int row = r - W::first_row(kLevel), col = c - W::first_col(kLevel);
    const float* p = bands + W::stored(kLevel - 1, 0, 2 * row, 2 * col);
    const auto top = *reinterpret_cast<const Vector<float, 2>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<float, 2>*>(p + W::pitch(kLevel - 1));
    float value[kSubbands];
    haar_butterfly<float>(top.lane[0], top.lane[1], bottom.lane[0], bottom.lane[1], value);
    const bool all = W::uniform(kLevel) || W::holds(kLevel, 1, row, col);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b)
      if (b == 0 || all) bands[W::stored(kLevel, b, row, col)] = value[b];
  });
}

// The inputs of one row of a thread: N values after kShift, in accesses of kWidth.
template <int kWidth, int kAccesses, int kShift, int N, class T>
__device__ __forceinline__ void load_inputs(const T* row, float (&value)[N]) {
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) {
    const auto q = *reinterpret_cast<const Vector<T, kWidth>*>(row + a * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int n = a * kWidth + j - kShift;
      if (n >= 0 && n < N) value[n] = widen<float>(q.lane[j]);
    }
  }
}

// N pixels of a row, from kFirst columns after the patch's first one, `pixel`, on.
template <class W, int kFirst, class T, int N>
__device__ __forceinline__ void load_pixels(const T* pixel, float (&value)[N]) {
  constexpr int kShift = (W::lead(0) + kFirst) % W::kUnit;
  load_inputs<W::kUnit, ceil_div(kShift + N, W::kUnit), kShift>(pixel + kFirst - kShift, value);
}

// sum[r][u] += sum_ij taps[i * K + j] * in(r + i)[u + j]: each row is loaded once for K outputs.
template <int K, int kRows, int kCols, class LoadRow>
__device__ __forceinline__ void convolve(const float* weights, LoadRow load,
                                         float (&sum)[kRows][kCols]) {
  float taps[tap_floats(K)];
#pragma unroll
  for (int t = 0; t < K * K; t += 4) {
    const auto q = *reinterpret_cast<const Vector<float, 4>*>(weights + t);
#pragma unroll
    for (int j = 0; j < 4; ++j) taps[t + j] = q.lane[j];
  }
#pragma unroll
  for (int y = 0; y < kRows + K - 1; ++y) {
    float row[kCols + K - 1];
    load(y, row);
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const int r = y - i;
      if (r < 0 || r >= kRows) continue;
#pragma unroll
      for (int j = 0; j < K; ++j) {
#pragma unroll
        for (int u = 0; u < kCols; ++u) sum[r][u] += taps[i * K + j] * row[u + j];
      }
    }
  }
}

// Filters kRows x kCols coefficients of a band, the first at (row, col) of the tile.
template <class W, int K, int kLevel, int kRows, int kCols>
__device__ __forceinline__ void filter(const float* bands, int band, const float* weights, int row,
                                       int col, float (&sum)[kRows][kCols]) {
  constexpr int kShift = W::shift(kLevel, kCols);
  constexpr int kLowpassPitch = W::pitch(kLevel, 0), kPitch = W::pitch(kLevel, 1);
  const int pitch = band == 0 ? kLowpassPitch : kPitch;
  const int first = band == 0 ? W::stored(kLevel, 0, row, col)
                              : W::stored(kLevel, 1, row, col) + (band - 1) * W::size(kLevel, 1);
  const float* in = bands + first - K / 2 * (pitch + 1) - kShift;
  convolve<K, kRows, kCols>(
      weights,
      [&](int y, float (&values)[kCols + K - 1]) {
        load_inputs<kCols, W::accesses(kLevel, kCols), kShift>(in + y * pitch, values);
      },
      sum);
}

}  // namespace wtconv::cuda
