// From sizes to the shape of a launch, without touching a device.
//
// search() goes from the most to the least welcome shape and takes the first that fits:
//   1. whole planes, several to a block where they are small: every level on chip, no halo;
//   2. tiles of 64 x 64 down to 16 x 16 with two levels, then with one: the halo of a level costs
//      radius * 2^levels pixels on each side, and deeper levels go through the lowpass band;
//   3. small tiles that fill the shared memory of a block: large kernels, float64.
// Shared memory decides how many blocks share a multiprocessor, and with 128 threads of up to 102
// registers each, occupancy decides the time: 8x64x256x256 float32 L=1 went from 0.29 to 0.24 ms on
// an H100 when filtering in place made room for five blocks instead of three.
// In NHWC whole planes of few channels beat tiles of many, although they waste memory sectors:
// 64x96x56x56 float16 L=5 took 2.12 ms with tiles of 16 channels, 0.77 ms with planes.
#include "choose.h"

#include <algorithm>

#include "../rounding.h"

namespace wtconv::cuda {
namespace {

int strip_rows_for(int rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

// Fills the levels of a tile; returns the elements per channel.
int lay_out(TileShape& s, int pad_bottom, int pad_right, int height, int width) {
  int offset = 0;
  for (int l = 0; l <= s.levels; ++l) {
    TileLevel& v = s.level[l];
    const int grow = s.plane ? 1 : 1 << (s.levels - l);
    v.own_rows = (s.tile_rows + (1 << l) - 1) >> l;
    v.own_cols = (s.tile_cols + (1 << l) - 1) >> l;
    const int before_y = s.pad_top * grow, before_x = s.pad_left * grow;
    const int after_y = pad_bottom * grow, after_x = pad_right * grow;
    if (s.plane) {
      v.own_rows = (height + (1 << l) - 1) >> l;
      v.own_cols = (width + (1 << l) - 1) >> l;
      v.first_row = v.first_col = 0;
      v.last_row = v.own_rows;
      v.last_col = v.own_cols;
    } else {
      v.first_row = -before_y;
      v.first_col = -before_x;
      v.last_row = v.own_rows + after_y;
      v.last_col = v.own_cols + after_x;
    }
    v.strip_rows = strip_rows_for(v.own_rows);
    v.lead_rows = before_y;
    v.lead_cols = round_up(before_x, kStripWidth);
    // Strips may end beyond the own rows and columns; one more of each covers an odd edge.
    v.stored_rows =
        v.lead_rows + std::max(round_up(v.own_rows, v.strip_rows) + s.kernel_size - 1 - s.pad_top,
                               v.own_rows + std::max(1, after_y));
    v.pitch =
        round_up(v.lead_cols +
                     std::max(round_up(v.own_cols, kStripWidth) + s.kernel_size - 1 - s.pad_left,
                              v.own_cols + std::max(1, after_x)) +
                     3,
                 4);
    // The filtered bands replace the raw ones, from the start of the band on; the base path reads
    // those of whole strips of 8 x 4 pixels.
    v.stored_rows = std::max(v.stored_rows, round_up(s.plane ? height : s.tile_rows, 8) >> l);
    v.band_stride = v.stored_rows * v.pitch;
    v.offset = offset;
    offset += (l ? 4 : 1) * v.band_stride;
  }
  return offset;
}

void finish(TileShape& s, const Problem& p, int elements) {
  // Channels of a warp fall into different banks.
  const int banks = std::max(4, 32 / s.group);
  s.channel_stride = round_up(elements, 32) + (s.group > 1 ? banks : 0);
  const int64_t weights =
      int64_t(s.group) * slot_count(s.levels) * s.kernel_size * s.kernel_size + s.group;
  s.shared_bytes = int((int64_t(s.group) * s.channel_stride + weights) * p.accumulator_bytes);
}

TileShape make_shape(const Problem& p, bool plane, int rows, int cols, int levels, int group) {
  TileShape s{};
  s.kernel_size = p.kernel_size;
  s.levels = levels;
  const int before = (p.kernel_size - 1) / 2, after = p.kernel_size / 2;
  s.pad_top = s.pad_left = p.adjoint ? after : before;
  s.tile_rows = rows;
  s.tile_cols = cols;
  s.group = group;
  s.plane = plane;
  const int end = p.adjoint ? before : after;
  const int elements = lay_out(s, end, end, p.height, p.width);
  finish(s, p, elements);
  const int strips = ((cols + 3) / 4) * ((rows + 7) / 8) * group;
  s.threads = strips <= 64 ? 64 : 128;
  return s;
}

// A round of filtering holds whole bands in registers, of every channel where those are the fast
// index, before it overwrites them.
bool fits(const TileShape& s, const Problem& p, int shared_bytes) {
  for (int l = 1; l <= s.levels; ++l) {
    const TileLevel& v = s.level[l];
    const int strips = ((v.own_rows + v.strip_rows - 1) / v.strip_rows) * ((v.own_cols + 3) / 4);
    if (strips * (p.channels_last ? s.group : 1) > s.threads) return false;
  }
  return s.shared_bytes <= shared_bytes;
}

// The first shape, from the most to the least welcome, that accept(shape, shared bytes) takes.
// `blocks` shall share a multiprocessor.
template <class Accept>
TileShape search(const Problem& p, const Device& device, int blocks, Accept accept) {
  const int limit = device.shared_per_block, share = device.shared_per_multiprocessor / blocks;
  const int levels = std::min(p.levels, kMaxLaunchLevels);
  // NHWC: neighbouring channels share memory sectors. NCHW: small planes, several to a block.
  int group = 1;
  if (p.channels_last) {
    while (group < 8 && group < p.channels) group *= 2;
  } else {
    while (group < 16 && group * 2 <= p.channels && int64_t(group) * p.height * p.width < 1024)
      group *= 2;
  }
  // Whole planes where that many blocks fit; at many levels where one does.
  constexpr int64_t kLargestPlane = int64_t(1) << 18;  // past any shared memory, and no overflow
  const bool small = int64_t(p.height) * p.width <= kLargestPlane;
  for (int g = small ? group : 0; g >= 1; g /= 2) {
    const TileShape s = make_shape(p, true, p.height, p.width, levels, g);
    if (accept(s, std::min(limit, p.levels > 2 && g == 1 ? limit : share))) return s;
  }
  const auto tile = [&](int size_y, int size_x, int l, int g) {
    return make_shape(p, false, round_up(std::min(size_y, p.height), 1 << l),
                      round_up(std::min(size_x, p.width), 1 << l), l, g);
  };
  for (int g = group; g >= 1; g /= 2) {
    for (int l = std::min(levels, 2); l >= 1; --l) {
      for (int size = 64; size >= 16; size /= 2) {
        for (const TileShape& s : {tile(size, size, l, g), tile(size / 2, size, l, g)}) {
          if (accept(s, std::min(limit, g > 1 ? limit : share))) return s;
        }
      }
    }
  }
  for (int size = 32; size > 2; size /= 2) {
    const TileShape s = tile(size, size, 1, 1);
    if (accept(s, limit)) return s;
  }
  return tile(2, 2, 1, 1);
}

}  // namespace

TileShape choose_tile(const Problem& p, const Device& device) {
  return search(p, device, 3, [&](const TileShape& s, int bytes) { return fits(s, p, bytes); });
}

GradShapes choose_grad_tile(const Problem& p, const Device& device) {
  GradShapes result{};
  const auto input_of = [&](const TileShape& s) {
    Problem plain = p;
    plain.kernel_size = 1;
    return make_shape(plain, s.plane, s.tile_rows, s.tile_cols, s.levels, s.group);
  };
  const auto shared_bytes = [&](const TileShape& s, const TileShape& input) {
    const int taps = p.kernel_size * p.kernel_size, warps = 2 * s.threads / 32;
    // Unrolled kernel sizes exchange the sums of a warp through shared memory.
    const int exchange = p.kernel_size == 3 || p.kernel_size == 5 ? warps * taps * 33 : 0;
    const int sums = s.group * ((kBaseParts + 4 * s.levels) * taps + 1) + exchange;
    return (s.group * (s.channel_stride + input.channel_stride) + sums) * p.accumulator_bytes;
  };
  result.grad_output = search(p, device, 2, [&](const TileShape& s, int bytes) {
    return shared_bytes(s, input_of(s)) <= bytes;
  });
  result.input = input_of(result.grad_output);
  result.threads = 2 * result.grad_output.threads;
  result.shared_bytes = shared_bytes(result.grad_output, result.input);
  return result;
}

}  // namespace wtconv::cuda
