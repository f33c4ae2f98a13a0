// Device code of the tensor-core kernels on whole planes.
#pragma once

#include "mma.cuh"
#include "mma_planes_layout.h"
#include "planes.cuh"

namespace wtconv::cuda {

// f(element of the window, element of the channel, whether it is one of the planes) of every kPiece
// elements of the tile's rows: planes of batch items first .. first + G * G - 1. A thread keeps its
// column and its row in a pass, which makes what it adds from pass to pass the same for all.
template <class W, int kPiece, class Launch, class F>
__device__ __forceinline__ void for_each_piece(const Launch& p, const View& view, int first, F f) {
  constexpr int kColumns = kPatchTile / kPiece, kStep = kPatchThreads / kColumns,
                kPlane = W::plane(0), kCell = W::cell(0);
  static_assert(kStep <= kPlane && (kStep % kCell == 0 || kCell % kStep == 0));
  const int row = threadIdx.x / kColumns, col = threadIdx.x % kColumns * kPiece;
  const int x = col % kPlane, item = first + col / kPlane;
  const int at = W::pixel_at(row, col);
  const int64_t from = item * view.stride_b + row * view.stride_y + x * view.stride_x;
#pragma unroll
  for (int r = 0; r < kPatchTile; r += kStep) {
    const int down = r / kPlane * (kPatchTile / kPlane), y = r % kPlane;
    f(at + W::pixel_at(r, 0) - W::pixel_at(0, 0), from + down * view.stride_b + y * view.stride_y,
      row + y < p.height && x < p.width && item + down < p.batch);
  }
}

// f(std::integral_constant) of the elements of an access of `bytes`, at most kMost.
template <int kMost, class F>
__device__ __forceinline__ void with_piece(int bytes, F f) {
  if constexpr (kMost >= 8) {
    if (bytes == 16) return f(std::integral_constant<int, 8>());
  }
  if (bytes >= 8) return f(std::integral_constant<int, 4>());
  if (bytes == 4) return f(std::integral_constant<int, 2>());
  f(std::integral_constant<int, 1>());
}

// Starts to copy the planes of batch items first .. first + G * G - 1, zeros past their ends, where
// the tensor has accesses of as many `bytes`; single elements it has copied.
template <class W, class T, class Launch>
__device__ __forceinline__ void copy_planes(const Launch& p, const View& view, int bytes,
                                            const T* channel, int first, T* pixels) {
  with_piece<W::own_col(0) % 8 == 0 ? 8 : 4>(bytes, [&](auto piece) {
    for_each_piece<W, piece()>(p, view, first, [&](int at, int64_t from, bool inside) {
      if constexpr (piece() > 1) {
        copy_async<piece() * 2>(pixels + at, channel + from, inside);
      } else {
        pixels[at] = inside ? channel[from] : narrow<T>(0.0f);
      }
    });
  });
}

// Forms the low-pass band of the planes of a tile, `factor` times the sum of four pixels: of the
// columns of this warp, rows of equal position in their cells at once. What parts the planes stays
// as it is.
template <class W, class T>
__device__ __forceinline__ void form_planes_lowpass(const T* pixels, float factor, T* lowpass) {
  constexpr int kCells = kPatchTile / W::cell(0), kPositions = 16 / kCells;  // of a product
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const ColumnSums<T> columns(factor);
  // Where row m of the first product begins, of the pixels (level 0) their upper one.
  const auto row_of = [](auto level, int m) {
    constexpr int kDown = (2 >> level()) * W::group(level());
    return m / kCells * kDown + W::template cell_at<level()>(m % kCells);
  };
  constexpr std::integral_constant<int, 0> kPixels;
  constexpr std::integral_constant<int, 1> kBand;
  pixels += W::template row_at<0>(W::own_row(0)) + W::own_col(0) +
            W::template col_at<0>(warp * kWarpCols);
  lowpass += W::template row_at<1>(W::own_row(1)) + W::own_col(1) +
             W::template col_at<1>(warp * kWarpCols / 2) + lane % 4 * 2;
  constexpr bool kAligned = W::own_col(0) % 8 == 0;
  const T* from[2];
  T* to[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    from[h] = pixels + (kAligned ? row_of(kPixels, lane % 16) + lane / 16 * 8
                                 : row_of(kPixels, row) + lane % 4 * 2);
    to[h] = lowpass + row_of(kBand, row);
  }
#pragma unroll
  for (int n = 0; n < W::cell(1); n += kPositions) {
    float sum[4] = {};
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int down = (2 * n + odd) * W::group(0);
      uint32_t a[4];
      if constexpr (kAligned) {
        load_matrices(from[0] + down, a);
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          a[h] = load_pair(from[h] + down), a[2 + h] = load_pair(from[h] + down + 8);
      }
      columns.add(sum, a);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<uint32_t*>(to[h] + n * W::group(1)) = pack<T>(sum[2 * h], sum[2 * h + 1]);
    }
  }
}

// f(row, h, place) of each pair of this lane's outputs (filter_pixels()), elements 2 h and 2 h + 1
// of that row: where it lies in the window.
template <class W, class T, class F>
__device__ __forceinline__ void for_each_output(T* window, F f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* corner = window + W::own_col(0) + W::template col_at<0>(warp * kWarpCols) + lane % 4 * 2 +
              W::template cell_at<0>(lane / 4);
#pragma unroll
  for (int row = 0; row < 8; ++row) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      f(row, h, corner + W::template row_at<0>(W::own_row(0) + row) + 8 * h);
  }
}

}  // namespace wtconv::cuda
