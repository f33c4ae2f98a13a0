// Device code of the patch kernels for planes that fit a tile, G x G of a channel in its cells.
#pragma once

#include "device.cuh"

namespace wtconv::cuda {

// The zeros between the cells stay: only the cells are written afterwards.
__device__ __forceinline__ void clear(unsigned char* shared, int bytes) {
  for (int i = threadIdx.x; i < bytes / 4; i += kPatchThreads)
    reinterpret_cast<float*>(shared)[i] = 0;
  __syncthreads();
}

template <class W, int kBytes, class T>
__device__ __forceinline__ void fill_cells(const T* channel, const View& view, int height,
                                           int width, int first, int batch, T* pixels) {
  constexpr int kElements = kBytes / int(sizeof(T)), kPieces = kPatchTile / kElements,
                kCell = W::cell(0);
#pragma unroll 4
  for (int i = threadIdx.x; i < kPatchTile * kPieces; i += kPatchThreads) {
    const int row = i / kPieces, col = i % kPieces * kElements, y = row % kCell, x = col % kCell;
    const int item = first + row / kCell * W::kCells + col / kCell;
    const bool inside = y < height && x < width && item < batch;
    const T* from = channel + item * view.stride_b + y * view.stride_y + x * view.stride_x;
    T* to = pixels + W::stored_pixel(row, col);
    if constexpr (kBytes >= 4) {
      copy_async<kBytes>(to, from, inside);
    } else {
      *to = inside ? *from : narrow<T>(0.0f);
    }
  }
}

// Starts to copy the planes of batch items first .. first + G * G - 1, in pieces of `bytes`; zero
// outside them.
template <class W, class T>
__device__ __forceinline__ void fill_planes(const T* channel, const View& view, int bytes,
                                            int height, int width, int first, int batch,
                                            T* pixels) {
  switch (bytes) {
    case 16:
      return fill_cells<W, 16>(channel, view, height, width, first, batch, pixels);
    case 8:
      return fill_cells<W, 8>(channel, view, height, width, first, batch, pixels);
    case 4:
      return fill_cells<W, 4>(channel, view, height, width, first, batch, pixels);
    default:
      if constexpr (sizeof(T) == 2)
        fill_cells<W, 2>(channel, view, height, width, first, batch, pixels);
  }
}

}  // namespace wtconv::cuda
