// Which rows of which level a tile touches, and where they lie in scratch memory.
#pragma once

#include <cstdint>

#include "engine.h"

namespace wtconv::cpu {

// Sizes of the planes at every level: level 0 is the input, each level halves, rounding up.
struct Geometry {
  int64_t batch, channels, levels, kernel_size;
  int64_t height[kMaxLevels + 1], width[kMaxLevels + 1];
};

Geometry make_geometry(int64_t batch, int64_t channels, int64_t height, int64_t width,
                       int64_t levels, int64_t kernel_size);

// Zero padding of a k x k convolution that keeps the size; an even kernel pads one pixel more at
// the bottom and right. The adjoint pads mirrored.
Padding forward_padding(int64_t kernel_size);
Padding adjoint_padding(int64_t kernel_size);

// Rows per tile, a multiple of 2^levels: whole planes while their pyramid fits the cache and there
// is work for every core. A function of the sizes alone, so that sums do not depend on threads.
int64_t choose_tile_rows(const Geometry& geometry, int64_t vector_bytes, int64_t blocks);

// The plan of the tile that computes rows [row_lo, row_hi) of level 0.
TilePlan plan_tile(const Geometry& geometry, const Padding& pad, int64_t row_lo, int64_t row_hi);

}  // namespace wtconv::cpu
