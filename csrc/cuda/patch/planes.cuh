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
  constexpr int kTurn = kStep > kCell ? kStep : kCell, kPasses = kTurn / kStep;
  constexpr int kCellsOfTurn = kTurn / kCell * W::kCells;
  constexpr int kNextTurn = kTurn / kCell * (kCell + W::gap_rows()) * W::pitch(0);
  // Elements too small to be copied are loaded, so many or a turn's at once.
  constexpr bool kAsync = kBytes >= 4;
  constexpr int kLoads = 16, kTurns = kAsync || kPasses >= kLoads ? 1 : kLoads / kPasses;
  static_assert(kPatchTile % (kTurns * kTurn) == 0);
  const int row = threadIdx.x / kColumns, col = threadIdx.x % kColumns * kElements;
  const int y = row % kCell, x = col % kCell;
  int item = first + row / kCell * W::kCells + col / kCell;
  const T* from = channel + item * view.stride_b + y * view.stride_y + x * view.stride_x;
  T* to = pixels + W::stored_pixel(row, col);
#pragma unroll 1
  for (int turn = 0; turn < kPatchTile; turn += kTurns * kTurn) {
    T value[kTurns * kPasses];
#pragma unroll
    for (int i = 0; i < kTurns * kPasses; ++i) {
      const int r = i % kPasses * kStep, later = i / kPasses * kCellsOfTurn;
      const bool inside = y + r < height && x < width && item + later < batch;
      const T* source = from + later * view.stride_b + r * view.stride_y;
      if constexpr (kAsync) {
        copy_async<kBytes>(to + r * W::pitch(0), source, inside);
      } else {
        value[i] = inside ? *source : narrow<T>(0.0f);
      }
    }
    if constexpr (!kAsync) {
#pragma unroll
      for (int i = 0; i < kTurns * kPasses; ++i)
        to[i / kPasses * kNextTurn + i % kPasses * kStep * W::pitch(0)] = value[i];
    }
    item += kTurns * kCellsOfTurn;
    from += kTurns * kCellsOfTurn * view.stride_b;
    to += kTurns * kNextTurn;
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
