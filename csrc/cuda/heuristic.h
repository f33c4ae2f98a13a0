// Launch choices as one pure function of sizes, dtype and device properties.
#pragma once

#include <cstdint>

#include "tile.h"

namespace wtconv::cuda {

struct Problem {
  int64_t batch;
  int channels, height, width, kernel_size, levels;
  int accumulator_bytes, element_bytes;
  bool channels_last, adjoint;
};

struct Device {
  int multiprocessors, shared_per_block, shared_per_multiprocessor;
};

// The shape of the launch that runs the finest `shape.levels` <= problem.levels levels.
TileShape choose_tile(const Problem& problem, const Device& device);

// A launch of the patch kernels.
struct PatchChoice {
  int levels;  // of this launch; 0 where the tile kernel takes the problem
  int cells;   // planes of a tile on each side, all levels on chip; 0: tiles of a large plane
};
PatchChoice choose_patch(const Problem& problem);
// Tiles of a channel.
int patch_tiles(const Problem& problem, const PatchChoice& choice);

// Blocks of a channel, where the multiprocessors hold `slots` blocks at once.
int split_tiles(int channels, int tiles, int slots);
// Partial sums that a block writes for its share of a channel's tiles.
int grad_parts(int tiles, int splits);
// The base path and the first level, or the tile kernel.
PatchChoice choose_patch_grad(const Problem& problem);

// The shapes of one launch of the weight gradient: grad_output padded, the input not.
struct GradShapes {
  TileShape grad_output, input;
  int threads, shared_bytes;
};
GradShapes choose_grad_tile(const Problem& problem, const Device& device);

}  // namespace wtconv::cuda
