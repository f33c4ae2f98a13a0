// Launch choices of the tile kernels, from sizes, dtype and device properties alone.
#pragma once

#include "../problem.h"
#include "tile.h"

namespace wtconv::cuda {

// The shape of the launch that runs the finest `shape.levels` <= problem.levels levels.
TileShape choose_tile(const Problem& problem, const Device& device);

// The shapes of one launch of the weight gradient: grad_output padded, the input not.
struct GradShapes {
  TileShape grad_output, input;
  int threads, shared_bytes;
};
GradShapes choose_grad_tile(const Problem& problem, const Device& device);

}  // namespace wtconv::cuda
