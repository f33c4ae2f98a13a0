// Device code of the patch kernels for planes that fit a tile, G x G of a channel in its cells.
#pragma once

#include "device.cuh"

namespace wtconv::cuda {

// Whole accesses of 16 bytes. The zeros between the cells stay: only the cells are written
// afterwards.
__device__ __forceinline__ void clear(unsigned char* shared, int bytes) {
  using Zeros = Vector<float, 4>;
  for (int i = threadIdx.x; i < bytes / int(sizeof(Zeros)); i += kPatchThreads)
    reinterpret_cast<Zeros*>(shared)[i] = Zeros{};
  __syncthreads();
}

// In pieces of kBytes: a thread keeps its column of pieces and its row within a pass, so that what
// it adds from pass to pass is the same for all threads.
template <class W, int kBytes, class T>
__device__ __forceinline__ void fill_cells(const T* channel, const View& view, int height,
                                           int width, int first, int batch, T* pixels) {
  constexpr int kElements = kBytes / int(sizeof(T)), kColumns = kPatchTile / kElements,
                kStep = kPatchThreads / kColumns, kCell = W::cell(0);
  // Rows of a turn: whole cells and whole passes.
  constexpr int kTurn = kStep > kCell ? kStep : kCell, kCellsOfTurn = kTurn / kCell * W::kCells;
  const int row = threadIdx.x / kColumns, col = threadIdx.x % kColumns * kElements;
  const int y = row % kCell, x = col % kCell;
  int item = first + row / kCell * W::kCells + col / kCell;
  const T* from = channel + item * view.stride_b + y * view.stride_y + x * view.stride_x;
  T* to = pixels + W::stored_pixel(row, col);
#pragma unroll 1
  for (int turn = 0; turn < kPatchTile; turn += kTurn) {
#pragma unroll
    for (int r = 0; r < kTurn; r += kStep) {
      const bool inside = y + r < height && x < width && item < batch;
      if constexpr (kBytes >= 4) {
        copy_async<kBytes>(to + r * W::pitch(0), from + r * view.stride_y, inside);
      } else {
        to[r * W::pitch(0)] = inside ? from[r * view.stride_y] : narrow<T>(0.0f);
      }
    }
    item += kCellsOfTurn;
    from += kCellsOfTurn * view.stride_b;
    to += kTurn / kCell * (kCell + W::gap_rows()) * W::pitch(0);
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
