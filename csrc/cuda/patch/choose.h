// Launch choices of the patch kernels, from sizes, dtype and device properties alone.
#pragma once

#include "../problem.h"
#include "patch.h"

namespace wtconv::cuda {

// A launch of a patch kernel.
struct PatchChoice {
  int levels;     // of this launch; 0 where the tile kernel takes the problem
  int cells;      // planes of a tile on each side; 0: tiles of a large plane
  int group = 0;  // channels of a block, of channels_last planes; 0: one channel
  bool tensor_cores = false;
  bool input_grad = false;  // of weight gradients: the launch gives the input gradient, too
};
PatchChoice choose_patch(const Problem& problem, const Device& device);
// Planes of a tile on each side where they are a low-pass band `down` levels below an input in rows
// of 16-byte pieces, and one kernel can form and filter them; else 0.
int choose_lowpass_cells(const Problem& band, int down, const Device& device);
// The base path and the first level; of half types larger than half a tile (channels_last: that fit
// a tile), and of many that fit a tile, the first two; of channels_last planes of at most 8 x 8
// both where there are two; of other planes that fit a tile all, but for groups of channels and 7 x
// 7 taps. No level: the tile kernel. `input_wanted`: the input gradient is wanted of the same
// levels; `input_grad` says whether the launch gives it.
PatchChoice choose_patch_grad(const Problem& problem, const Device& device, bool input_wanted);

// Shared memory that a block of the forward or weight-gradient kernel takes.
int patch_bytes(const Problem& problem, const PatchChoice& choice);
int patch_grad_bytes(const Problem& problem, const PatchChoice& choice);

// Blocks of the weight-gradient kernel that a multiprocessor holds.
int patch_grad_blocks(const Problem& problem, const PatchChoice& choice);
// Tiles of a channel; of a group its planes.
int patch_tiles(const Problem& problem, const PatchChoice& choice);
// Blocks of a channel, where the multiprocessors hold `slots` blocks at once.
int split_tiles(int channels, int tiles, int slots, int most = INT32_MAX);
// Of the `splits` blocks of a channel, those that run at the same time.
int blocks_together(int channels, int splits, int slots);
// A partial sum covers no more than 16 tiles: 512 products a thread, which keeps the rounding of
// float32 sums below 1e-6.
constexpr int kMostTilesOfSum = 16;
// Partial sums that a block writes for its share of a channel's tiles.
int grad_parts(int tiles, int splits);

}  // namespace wtconv::cuda
