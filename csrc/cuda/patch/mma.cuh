// Device code of the tensor-core kernels: windows in shared memory, their low-pass bands.
#pragma once

#include "device.cuh"
#include "mma_layout.h"

namespace wtconv::cuda {

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// Copies a window in pieces of kBytes. `corner` is its first pixel, in row y and column x of a
// plane. A thread keeps its column and the position of its rows in their cells, which makes what it
// adds from row to row a constant; threads that no whole rows are left for have none.
template <class W, int kBytes, bool kCached, class T, class Launch>
__device__ __forceinline__ void fill_pieces(const T* corner, const View& view, const Launch& p,
                                            int y, int x, T* pixels) {
  constexpr int kPiece = kBytes / 2, kColumns = W::cols(0) / kPiece, kCell = W::cell(0);
  constexpr int kStep = kPatchThreads / kColumns / kCell * kCell, kRows = W::rows(0);
  static_assert(kStep > 0, "a cell's rows fit the threads");
  const int col = threadIdx.x % kColumns * kPiece, row = threadIdx.x / kColumns;
  if (row >= kStep) return;
  const bool inside = unsigned(x + col) < unsigned(p.width);
  const int64_t step = kStep * view.stride_y;
  const T* from = corner + row * view.stride_y + col;
  T* to = pixels + W::template row_at<0>(row) + col;
#pragma unroll
  for (int r = 0; r < kRows; r += kStep) {
    if (r + kStep <= kRows || r + row < kRows) {
      copy_async<kBytes, kCached>(to + r / kCell * W::pitch(0), from,
                                  inside && unsigned(y + row + r) < unsigned(p.height));
    }
    from += step;
  }
}

// Starts to copy the window of a tile, zero outside the plane, in pieces of kBytes, or else of four
// bytes, where the tensor has accesses of as many `bytes`; single elements by loads and stores.
template <class W, int kBytes, bool kCached, class T, class Launch>
__device__ __forceinline__ void fill_mma_window(const View& view, int bytes, const Launch& p,
                                                const TileIndex& at, T* pixels) {
  const int y = at.y - W::halo(0), x = at.x - W::lead(0);
  const T* corner = static_cast<const T*>(view.data) + at.item * view.stride_b +
                    at.channel * view.stride_c + y * view.stride_y + x * view.stride_x;
  if (bytes >= kBytes) return fill_pieces<W, kBytes, kCached>(corner, view, p, y, x, pixels);
  static_assert(sizeof(T) == 2);
  // f(target, source, whether it is inside the plane) of every kElements of a row.
  const auto for_each = [&](auto elements, auto f) {
    constexpr int kElements = decltype(elements)(), kPieces = W::cols(0) / kElements;
    constexpr int kUnrolled = kElements == 1 ? 2 : 1;  // with more, registers spill
#pragma unroll kUnrolled
    for (int i = threadIdx.x; i < W::rows(0) * kPieces; i += kPatchThreads) {
      const int row = i / kPieces, col = i % kPieces * kElements;
      f(pixels + W::template row_at<0>(row) + col,
        corner + row * view.stride_y + col * view.stride_x,
        unsigned(y + row) < unsigned(p.height) && unsigned(x + col) < unsigned(p.width));
    }
  };
  if (bytes >= 4) {
    for_each(std::integral_constant<int, 2>(),
             [](T* to, const T* from, bool inside) { copy_async<4>(to, from, inside); });
  } else {
    for_each(std::integral_constant<int, 1>(),
             [](T* to, const T* from, bool inside) { *to = inside ? *from : narrow<T>(0.0f); });
  }
}

// The windows of a tensor as boxes: one per position in the cells.
template <class W>
constexpr BoxShape window_box() {
  return {W::pitch(0), W::cells(0), W::cell(0), false};
}

// The box, of kCount, that this thread starts; from kCount on, none. They are spread over the
// warps: the lanes of a warp start theirs one after the other, and all wait for the slowest warp at
// the next barrier.
template <int kCount>
__device__ __forceinline__ int box_of_thread() {
  constexpr int kOfWarp = ceil_div(kCount, kPatchThreads / 32);
  const int lane = threadIdx.x % 32;
  return lane < kOfWarp ? threadIdx.x / 32 * kOfWarp + lane : kCount;
}

// Starts to copy the window of a tile by its boxes.
template <class W, class T>
__device__ __forceinline__ void load_window(const BoxMap& map, const TileIndex& at, T* pixels,
                                            uint64_t* barrier) {
  const int position = box_of_thread<W::cell(0)>();
  if (position >= W::cell(0)) return;
  load_box(pixels + position * W::group(0), map, at.item, at.channel, at.y - W::halo(0) + position,
           at.x - W::lead(0), barrier);
}
template <class W>
constexpr int window_bytes() {
  return W::cell(0) * W::cells(0) * W::pitch(0) * 2;
}

// The matrix that adds neighbouring columns, times `factor`, as the second operand of a product.
template <class T>
struct ColumnSums {
  uint32_t b0, b1;

  __device__ __forceinline__ explicit ColumnSums(float factor) {
    const int lane = threadIdx.x % 32;
    const uint32_t add = pack<T>(factor, factor);
    b0 = lane / 4 == lane % 4 ? add : 0, b1 = lane / 4 == lane % 4 + 4 ? add : 0;
  }
  // sum += those of a.
  __device__ __forceinline__ void add(float (&sum)[4], const uint32_t (&a)[4]) const {
    multiply<T>(sum, a, b0, b1);
  }
};

// Forms the low-pass band of level kLevel + 1 from that of kLevel (0: the pixels), `factor` times
// the sum of four values. Row r comes from rows 2r and 2r + 1, column c from columns 2c and 2c + 1:
// 16 rows and 8 columns are two products with the matrix that adds neighbouring columns.
// The products of a warp overlap: loads and sums of all, then the stores (8x64x512x512 float16 L=3
// on an H200: the backward in 0.658 ms, one by one 0.678).
template <class W, int kLevel>
class FormLowpass {
  using P = LowpassProducts<W, kLevel>;
  static constexpr int kNext = kLevel + 1, kCells = W::cells(kNext);
  static constexpr int kRows = P::kRows, kCols = W::cols(kNext);
  static constexpr bool kAligned = P::kWords == 1;
  static_assert(W::cells(kLevel) == kCells, "a cell of the band is one of the finer");
  static_assert(W::size(kLevel) <= 1 << 16 && W::size(kNext) < 1 << 15, "places are half words");

  // Where the thread reads and writes in each product, in elements, settled once for all tiles. The
  // halves of a word: where it reads; where it writes, kTwice set where row + 8 is wanted, too, or
  // kNowhere. Where rows are not loaded as matrices, a second word says where it reads row + 8.
  static constexpr unsigned kTwice = 1u << 15, kNowhere = kTwice - 1;
  unsigned* places_;

  // Stored row: the finer ones are at twice its position in the cell, and at the next.
  static __device__ __forceinline__ unsigned finer(int row) {
    const int r = min(row, kRows - 1);
    return r / kCells * 2 * W::group(kLevel) + r % kCells * W::pitch(kLevel);
  }
  __device__ __forceinline__ void settle(int product, unsigned* words) {
    const int lane = threadIdx.x % 32, row = product / P::kColumns * 16,
              first = product % P::kColumns * 8;
    // The last columns of a window that ends within a product are formed with those before.
    const int col = min(first, W::cols(kLevel) / 2 - 8), left = W::shift(kLevel) + 2 * col;
    const int to_col = col + lane % 4 * 2 - P::kBefore, to_row = row + lane / 4;
    const bool wanted = product < P::kProducts && to_col >= max(first - P::kBefore, 0) &&
                        to_col < kCols && to_row < kRows;
    const unsigned to = wanted ? unsigned(to_row * W::pitch(kNext) + W::shift(kNext) + to_col) +
                                     (to_row + 8 < kRows ? kTwice : 0)
                               : kNowhere;
    const unsigned from = kAligned ? finer(row + lane % 16) + left + lane / 16 * 8
                                   : finer(to_row) + left + lane % 4 * 2;
    words[0] = from + (to << 16);
    if (!kAligned) words[kPatchThreads] = finer(to_row + 8) + left + lane % 4 * 2;
  }
  // sum += the columns of the finer rows at a place, and of those below.
  template <class T>
  static __device__ __forceinline__ void add_rows(const T* fine, unsigned place, unsigned further,
                                                  const ColumnSums<T>& columns, float (&sum)[4]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const T* rows = fine + odd * W::group(kLevel);
      uint32_t a[4];
      if constexpr (kAligned) {
        load_matrices(rows + (place & 0xffff), a);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const T* p = rows + (h == 0 ? place & 0xffff : further);
          a[h] = load_pair(p), a[2 + h] = load_pair(p + 8);
        }
      }
      columns.add(sum, a);
    }
  }

 public:
  // `shared` has P::kBytes, which are written by the threads that `settles` is true of.
  __device__ __forceinline__ explicit FormLowpass(unsigned char* shared, bool settles = true)
      : places_(reinterpret_cast<unsigned*>(shared) + threadIdx.x) {
    if (!settles) return;
#pragma unroll 1
    for (int n = 0; n < P::kOfWarp; ++n)
      settle(threadIdx.x / 32 + n * P::kWarps, places_ + n * P::kWords * kPatchThreads);
  }

  template <class T>
  __device__ __forceinline__ void operator()(const T* fine, float factor, T* lowpass) const {
    const ColumnSums<T> columns(factor);
    unsigned place[P::kOfWarp], further[P::kOfWarp] = {};
#pragma unroll
    for (int n = 0; n < P::kOfWarp; ++n) {
      const unsigned* words = places_ + n * P::kWords * kPatchThreads;
      place[n] = words[0];
      if (!kAligned) further[n] = words[kPatchThreads];
    }
    float sum[P::kOfWarp][4] = {};
#pragma unroll
    for (int n = 0; n < P::kOfWarp; ++n) {
      const bool all_have = (n + 1) * P::kWarps <= P::kProducts;
      if (!all_have && int(threadIdx.x) / 32 + n * P::kWarps >= P::kProducts) break;
      add_rows(fine, place[n], further[n], columns, sum[n]);
    }
#pragma unroll
    for (int n = 0; n < P::kOfWarp; ++n) {
      const unsigned to = place[n] >> 16;  // two stores, so that neither needs a branch
      uint32_t* target = reinterpret_cast<uint32_t*>(lowpass + (to & ~kTwice));
      if (to != kNowhere) target[0] = pack<T>(sum[n][0], sum[n][1]);
      if (to & kTwice) target[4 * W::pitch(kNext)] = pack<T>(sum[n][2], sum[n][3]);
    }
  }
};

// The same where `kWanted`, else nothing.
struct FormNothing {
  __device__ __forceinline__ explicit FormNothing(unsigned char*, bool = true) {}
};
template <bool kWanted, class W, int kLevel>
using FormLowpassIf = std::conditional_t<kWanted, FormLowpass<W, kLevel>, FormNothing>;

}  // namespace wtconv::cuda
