// Device code of the patch kernels: layout in shared memory, asynchronous fill, analysis, strips.
#pragma once

#include "../common/haar.h"
#include "element.cuh"
#include "patch.h"

namespace wtconv::cuda {

constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Neighbouring elements of one access.
template <class T, int N>
struct alignas(N * sizeof(T)) Vector {
  T lane[N];
};

// Where a tile with a halo of `R` coefficients at its coarsest level lies in shared memory. Level 0
// is the window of x as stored in memory (T); levels 1..L are four bands each, in float.
template <class T, int R, int L>
struct Window {
  static constexpr int kUnit = 16 / int(sizeof(T));  // elements of one access of level 0

  static constexpr int halo(int level) { return R << (L - level); }
  static constexpr int own(int level) { return kPatchTile >> level; }
  static constexpr int rows(int level) { return own(level) + 2 * halo(level); }
  // Elements of one access of a level, and outputs of a thread along x.
  static constexpr int unit(int level) { return level == 0 ? kUnit : 4; }
  static constexpr int outputs(int level) { return level == 0 ? kPatchCols : 4; }

  // Stored column of the tile's first own column: as far right as the halo needs, such that the
  // inputs of a thread start as close as possible to an aligned address.
  static constexpr int lead(int level) {
    if (level == 0) return round_up(halo(0), kUnit);
    const int even = round_up(R, 2);
    return round_up(halo(level) - even, 4) + even;
  }
  // Distance of the first input of a thread from the aligned address below, and accesses per row.
  static constexpr int shift(int level) { return (lead(level) - R) % unit(level); }
  static constexpr int accesses(int level) {
    return (shift(level) + outputs(level) + 2 * R + unit(level) - 1) / unit(level);
  }
  // Level 1 is formed from four pixels at once, the others from two.
  static constexpr int first_item() {
    return lead(0) / 2 > lead(1) ? (lead(0) / 2 - lead(1) + 1) / 2 : 0;
  }
  static constexpr int last_item() { return (own(1) + halo(1) + lead(0) / 2 + 1) / 2; }
  static constexpr int pitch(int level) {
    if (level == 0) return round_up(lead(0) + own(0) + halo(0), 2 * kUnit);
    const int read =
        lead(level) - R - shift(level) + own(level) - outputs(level) + accesses(level) * 4;
    const int written = level == 1 ? 2 * last_item() - lead(0) / 2 + lead(1)
                                   : lead(level) + own(level) + halo(level);
    const int most = read > written ? read : written;
    // Four threads of a row and the four of the row two below touch different banks.
    return level == 1 ? round_up(most, 4) : round_up(most - 8, 16) + 8;
  }
  static constexpr int band(int level) { return rows(level) * pitch(level); }
  // Offset of a level from the end of level 0, in floats.
  static constexpr int offset(int level) {
    return level == 1 ? 0 : offset(level - 1) + kSubbands * band(level - 1);
  }
  static constexpr int kPixelBytes = rows(0) * pitch(0) * int(sizeof(T));
  static constexpr int kFloats = offset(L + 1);

  // A float32 patch reads every second piece of 16 bytes: neighbouring pieces change places in the
  // upper half of each 256 bytes, so that the patches of a row touch different banks.
  static __device__ __forceinline__ int piece(int q) {
    return sizeof(T) == 4 ? q ^ ((q >> 3) & 1) : q;
  }
  static __device__ __forceinline__ int stored(int level, int row, int col) {
    return (row + halo(level)) * pitch(level) + col + lead(level);
  }
};

__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside,
                                           bool wide) {
  const unsigned target = unsigned(__cvta_generic_to_shared(shared));
  if (wide) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(global),
                 "r"(inside ? 4 : 0)
                 : "memory");
  }
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Columns of the window from kFirst on, in pieces of 16 bytes: as many at once as divide the
// threads.
template <class W, class T, int kFirst>
__device__ __forceinline__ void fill_columns(const T* plane, const View& view, int height,
                                             int width, int y, int x, T* pixels) {
  constexpr int kLeft = W::pitch(0) / W::kUnit - kFirst;
  constexpr int kColumns = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : kLeft >= 2 ? 2 : 1;
  constexpr int kStep = kPatchThreads / kColumns;
  const int q = kFirst + threadIdx.x % kColumns, first = threadIdx.x / kColumns;
  const int col = x - W::lead(0) + q * W::kUnit, row = y - W::halo(0) + first;
  const bool inside = unsigned(col) < unsigned(width);
  const T* from = plane + row * view.stride_y + col;
  T* to = pixels + first * W::pitch(0) + W::piece(q) * W::kUnit;
#pragma unroll
  for (int r = 0; r < W::rows(0); r += kStep) {
    if (W::rows(0) % kStep == 0 || r + first < W::rows(0)) {
      copy_async(to + r * W::pitch(0), from + r * view.stride_y,
                 inside && unsigned(row + r) < unsigned(height), true);
    }
  }
  if constexpr (kLeft > kColumns)
    fill_columns<W, T, kFirst + kColumns>(plane, view, height, width, y, x, pixels);
}

// Starts to copy the window whose tile begins at (y, x), zero outside the plane.
template <class W, class T>
__device__ __forceinline__ void fill(const T* plane, const View& view, int height, int width, int y,
                                     int x, bool wide, T* pixels) {
  if (wide) return fill_columns<W, T, 0>(plane, view, height, width, y, x, pixels);
  const int y0 = y - W::halo(0), x0 = x - W::lead(0);
  for (int i = threadIdx.x; i < W::rows(0) * W::pitch(0); i += kPatchThreads) {
    const int row = i / W::pitch(0), col = i % W::pitch(0);
    const bool inside =
        unsigned(y0 + row) < unsigned(height) && unsigned(x0 + col) < unsigned(width);
    const T* from = plane + (y0 + row) * view.stride_y + (x0 + col) * view.stride_x;
    T* to = pixels + row * W::pitch(0) + W::piece(col / W::kUnit) * W::kUnit + col % W::kUnit;
    if constexpr (sizeof(T) == 4) {
      copy_async(to, from, inside, false);
    } else {
      *to = inside ? *from : narrow<T>(0.0f);
    }
  }
}

// Level 1 from the pixels, two coefficients at a time.
template <class W, class T>
__device__ __forceinline__ void analyse_pixels(const T* pixels, float* bands) {
  constexpr int kItems = W::last_item() - W::first_item();
#pragma unroll 2
  for (int i = threadIdx.x; i < W::rows(1) * kItems; i += kPatchThreads) {
    const int row = i / kItems, q = W::first_item() + i % kItems;
    const T* p = pixels + (2 * row) * W::pitch(0) + (sizeof(T) == 4 ? W::piece(q) : q) * 4;
    const auto top = *reinterpret_cast<const Vector<T, 4>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<T, 4>*>(p + W::pitch(0));
    float left[kSubbands], right[kSubbands];
    haar_butterfly<float>(widen<float>(top.lane[0]), widen<float>(top.lane[1]),
                          widen<float>(bottom.lane[0]), widen<float>(bottom.lane[1]), left);
    haar_butterfly<float>(widen<float>(top.lane[2]), widen<float>(top.lane[3]),
                          widen<float>(bottom.lane[2]), widen<float>(bottom.lane[3]), right);
    float* out = bands + row * W::pitch(1) + 2 * q - W::lead(0) / 2 + W::lead(1);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b)
      *reinterpret_cast<Vector<float, 2>*>(out + b * W::band(1)) = {{left[b], right[b]}};
  }
}

// A level from the low-pass band of the finer one.
template <class W, int kLevel>
__device__ __forceinline__ void analyse_level(float* bands) {
  constexpr int kCols = W::own(kLevel) + 2 * W::halo(kLevel);
  const float* finer = bands + W::offset(kLevel - 1);
  float* out = bands + W::offset(kLevel);
  for (int i = threadIdx.x; i < W::rows(kLevel) * kCols; i += kPatchThreads) {
    const int row = i / kCols, col = i % kCols;
    const float* p = finer + 2 * row * W::pitch(kLevel - 1) + W::lead(kLevel - 1) -
                     2 * W::halo(kLevel) + 2 * col;
    const auto top = *reinterpret_cast<const Vector<float, 2>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<float, 2>*>(p + W::pitch(kLevel - 1));
    float value[kSubbands];
    haar_butterfly<float>(top.lane[0], top.lane[1], bottom.lane[0], bottom.lane[1], value);
    float* to = out + row * W::pitch(kLevel) + col + W::lead(kLevel) - W::halo(kLevel);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) to[b * W::band(kLevel)] = value[b];
  }
}

// The inputs of one row of a thread: N values after kShift, in accesses of kWidth.
template <int kWidth, int kAccesses, int kShift, int N, class T, class Piece>
__device__ __forceinline__ void load_inputs(const T* row, Piece piece, float (&value)[N]) {
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) {
    const auto q = *reinterpret_cast<const Vector<T, kWidth>*>(row + piece(a));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int n = a * kWidth + j - kShift;
      if (n >= 0 && n < N) value[n] = widen<float>(q.lane[j]);
    }
  }
}

// sum[r][u] += sum_ij taps[i * K + j] * in(r + i)[u + j]: each row is loaded once for K outputs.
template <int K, int kRows, int kCols, class LoadRow>
__device__ __forceinline__ void convolve(const float* weights, LoadRow load,
                                         float (&sum)[kRows][kCols]) {
  float taps[round_up(K * K, 4)];
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

// Filters 2 x 4 coefficients of a band, the first at (row, col) of the tile.
template <class W, int K, int kLevel>
__device__ __forceinline__ void filter(const float* bands, int band, const float* weights, int row,
                                       int col, float (&sum)[2][4]) {
  const float* in = bands + W::offset(kLevel) + band * W::band(kLevel) +
                    W::stored(kLevel, row - K / 2, col - K / 2) - W::shift(kLevel);
  convolve<K, 2, 4>(
      weights,
      [&](int y, float (&values)[4 + K - 1]) {
        load_inputs<4, W::accesses(kLevel), W::shift(kLevel)>(
            in + y * W::pitch(kLevel), [](int a) { return a * 4; }, values);
      },
      sum);
}

// The tiles of a block: a contiguous part of all, so that most of them share their channel.
struct TileRange {
  int first, last;
  __device__ __forceinline__ explicit TileRange(int total)
      : first(int(int64_t(total) * blockIdx.x / gridDim.x)),
        last(int(int64_t(total) * (blockIdx.x + 1) / gridDim.x)) {}
};

struct TileIndex {
  int channel, item, y, x;
  template <class Launch>
  __device__ __forceinline__ TileIndex(const Launch& p, int tile) {
    x = tile % p.tiles_x * kPatchTile;
    tile /= p.tiles_x;
    y = tile % p.tiles_y * kPatchTile;
    tile /= p.tiles_y;
    item = tile % p.batch;
    channel = tile / p.batch;
  }
};

}  // namespace wtconv::cuda
