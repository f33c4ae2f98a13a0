// One launch of the tile kernel: what a block computes and where it keeps it in shared memory.
//
// A block takes `group` channels of one tile of the plane and a range of batch items. Per item it
// loads the tile with its halo once, forms the Haar pyramid in shared memory (level 0 = the input,
// levels 1..L four bands each), filters every band, and adds the synthesis to the base path in the
// registers of the final store: x is read once and y written once.
//
// Two forms share the code. A *plane* launch holds the whole plane, so the pyramid needs only the
// convolution's zero padding. A *tile* launch holds a window whose halo grows by 2^levels; outside
// the plane x is zero, and so is every coefficient formed from it.
//
// Plain structs without any Torch header. Strides and offsets are in elements.
#pragma once

#include <cstdint>

#include "../parameters.h"

namespace wtconv::cuda {

constexpr int kBaseParts = 4;   // weight gradient: the base path is as much work as four bands
constexpr int kStripWidth = 4;  // outputs of one thread along x; along y a level's strip_rows

// Stored window of one level; position (0, 0) is the tile's first own coefficient.
struct TileLevel {
  int own_rows, own_cols;    // coefficients that the tile computes
  int first_row, first_col;  // first position that is formed: -halo, or 0 in a plane launch
  int last_row, last_col;    // one past the last
  int lead_rows, lead_cols;  // stored index of position (0, 0)
  int stored_rows, pitch;    // allocated rows, elements per row
  int offset, band_stride;   // from the channel's base; from subband to subband
  int strip_rows;            // 8, 4, 2 or 1
};

struct TileShape {
  int kernel_size, levels;
  int pad_top, pad_left;
  int tile_rows, tile_cols;  // multiples of 2^levels, or the plane
  int group, threads;
  bool plane;
  int channel_stride;  // elements of shared memory per channel
  int shared_bytes;
  TileLevel level[kMaxLaunchLevels + 1];
};

// How a block reads its window: element by element, or four elements at once along x (NCHW) or
// along the channels (NHWC), where sizes and addresses allow.
enum class LoadPath { kScalar, kQuadX, kQuadChannels };

struct TileLaunch {
  TileShape shape;
  RawParameters params;
  View input, output;
  const void* coarse;  // [B, C, ceil(H / 2^levels), ...] accumulator type, or null
  int coarse_rows, coarse_cols;
  int64_t batch;
  int channels, height, width;
  int tiles_y, tiles_x, groups, batch_per_block;
  LoadPath load_path;
  bool channels_fast;  // NHWC: neighbouring threads take neighbouring channels
};

}  // namespace wtconv::cuda
