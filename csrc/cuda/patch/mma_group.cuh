// Device code of the tensor-core kernels for channels_last planes: pixels as they lie in memory,
// and their places in the windows of single channels.
#pragma once

#include "../launch_kernel.cuh"
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

// The pixels of a group's planes, of `items` batch items, as boxes in which they lie as in memory:
// columns, rows and channels of a box are channels, columns and rows of the planes. False where
// they cannot be.
inline bool describe_pixels(BoxMap& map, const View& v, int64_t batch, int channels, int height,
                            int width, int items) {
  const View pixels{v.data, v.stride_b, v.stride_y, v.stride_x, v.stride_c};
  return describe_boxes(map, pixels, 2, batch, height, width, channels,
                        {kMmaGroup, width, 1, false, height, items});
}
// Starts to copy them, from channel `first` and batch item `item` on.
__device__ __forceinline__ void load_pixels(void* pixels, const BoxMap& map, int item, int first,
                                            uint64_t* barrier) {
  load_box(pixels, map, item, 0, 0, first, barrier);
}

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
