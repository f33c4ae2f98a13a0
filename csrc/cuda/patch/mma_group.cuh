// Device code of the tensor-core kernels for channels_last planes: pixels as they lie in memory,
// and their places in the windows of single channels.
#pragma once

#include "group.cuh"
#include "mma.cuh"
#include "mma_group_layout.h"

namespace wtconv::cuda {

// A launch of patch.h, and the pixels of a plane as they lie in shared memory.
template <class Patch>
struct MmaGroupLaunch {
  Patch patch;
  GroupBands pixels;

  explicit MmaGroupLaunch(const Patch& p)
      : patch(p), pixels(GroupAllocator{kMmaGroup, 0}.dense(p.height, p.width)) {}
};

// f(i, row, col) of each pixel i of a plane that is this thread's.
template <int kThreads, class F>
__device__ __forceinline__ void for_each_pixel(const GroupBands& plane, int thread, F f) {
  const int step_rows = plane.row_of(kThreads), step_cols = kThreads - step_rows * plane.cols;
  int row = plane.row_of(thread), col = thread - row * plane.cols;
#pragma unroll 2
  for (int i = thread; row < plane.rows; i += kThreads) {
    f(i, row, col);
    col += step_cols, row += step_rows;
    if (col >= plane.cols) col -= plane.cols, ++row;
  }
}

// Where a pixel of the plane lies in a window.
template <class W>
__device__ __forceinline__ int window_at(int row, int col) {
  return W::template row_at<0>(row + W::halo(0)) + W::shift(0) + W::lead(0) + col;
}

}  // namespace wtconv::cuda
