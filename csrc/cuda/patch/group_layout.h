// Shared memory of the kernels for channels_last planes: a group of neighbouring channels side by
// side at every position. Planes have their own sizes, known at run time. No CUDA header.
#pragma once

#include <algorithm>

#include "layout.h"

namespace wtconv::cuda {

// Channels of a block: pieces of 16 bytes of float32 of the largest planes, up to whole warps of
// the smallest ones.
using Groups = Constants<4, 8, 16, 32>;
constexpr int group_of(int longest) {
  return longest <= 8 ? 32 : longest <= 14 ? 16 : longest <= 16 ? 32 : longest <= 32 ? 8 : 4;
}
// The same of the forward kernel, which holds eight channels of 56 x 56: each access of a pixel is
// one of another line of memory, and a larger group has fewer (64x96x56x56, L=5, on an H200: 0.172
// ms for 0.213 in float32, 0.197 for 0.228 in float16).
constexpr int largest_group_of(int longest) {
  return longest > 48 && longest <= 56 ? 8 : group_of(longest);
}
// Coefficients of a strip, the work of a thread: 28, 14 and 7 are multiples of 7, and the strips of
// a row of 28 touch different banks.
constexpr int strip_of(int group) { return group == 32 ? 4 : 7; }
constexpr int coarse_strip_of(int group) { return group <= 8 ? 7 : 4; }  // from level 2 on
// Of a multiprocessor, which leaves a thread 72, 96 or 80 registers: eight channels of 56 x 56,
// five planes of 14 x 14, six of 8 x 8.
constexpr int group_threads(int group) { return group <= 8 ? 896 : group == 16 ? 640 : 768; }
constexpr int grad_threads(int group) { return group <= 8 ? 256 : 128; }
// Whether the weight-gradient kernel writes its low-pass bands as dense planes, all levels of which
// one launch takes, rather than in channels_last. Those of the smallest planes would leave most
// cells of a tile empty (64x768x7x7 float16 L=2 on an H200: 0.032 ms for that launch, in groups
// 0.019 ms).
constexpr bool hands_on_planes(int kernel_size, int group) {
  return kernel_size <= kMostForAllLevels && group < largest(Groups());
}
// Levels that the weight-gradient kernel takes: one; both of planes of at most 8 x 8 where there
// are two, since level 2 has few coefficients (64x768x7x7 float16 L=2 on an H200: the backward in
// 0.085 ms, with a launch for each level 0.100 ms).
constexpr int group_grad_levels(int group, int longest, int levels) {
  return group == largest(Groups()) && longest <= 8 && levels == 2 ? 2 : 1;
}
// Blocks that registers leave room for: a thread keeps two sums of each tap.
constexpr int grad_blocks(int kernel_size, int group) {
  return (kernel_size < 7 ? 512 : 256) / grad_threads(group);
}

// One band of a group, or several equal ones: the first channel of position (y, x) is element
// (y / 2) * pair + (y % 2) * pitch + x * group of it. Zeros end each row, and with them the row
// below begins. Level 1 of the forward kernel, in place of pixels, has a row for each pair of
// theirs and columns two pixels apart.
struct GroupBands {
  int rows, cols, pitch, pair, band;  // the latter three in elements
  int offset;                         // of the first position, in bytes
  int inverse = 0, inverse_rows = 0;  // of cols and rows, for row_of and col_of

  // n / cols; exact below 65536 / cols, which is past every plane of level 2, every block, and
  // every pair of columns of a unit (mma_group_layout.h).
  WTCONV_HOST_DEVICE constexpr int row_of(int n) const { return n * inverse >> 16; }
  // The same by rows: of positions whose columns follow each other, and of planes below each other.
  WTCONV_HOST_DEVICE constexpr int col_of(int n) const { return n * inverse_rows >> 16; }

  constexpr int strips(int cols_of_strip) const { return rows * ceil_div(cols, cols_of_strip); }
};

// Lays the shared memory of a block out, one part after the other.
struct GroupAllocator {
  int group, bytes;

  // The smallest sum of `least` positions and more that lies `bank` from a multiple of all banks.
  constexpr int banked(int least, int bank) const {
    while (group < kBanks && least * group % kBanks != bank) ++least;
    return least * group;
  }
  // Bands in float32. Strips of all bands touch different banks, and those of the rows below where
  // `rows_apart`.
  constexpr GroupBands bands(int rows, int cols, int zeros, int strip, bool rows_apart) {
    const int pitch = (rows_apart ? (cols + zeros) | 1 : cols + zeros) * group;
    const int band = banked(rows * pitch / group, std::max(8, group));
    return add({rows, cols, pitch, 2 * pitch, band, 0}, kSubbands * band, zeros, 4, strip);
  }
  // A window of x. Each pair of rows begins an odd number of positions after the one above: strips
  // are pairs.
  constexpr GroupBands pixels(int rows, int cols, int zeros, int element, int strip) {
    const int pitch = (cols + zeros) * group, pair = 2 * pitch + (group < kBanks ? group : 0);
    return add({rows, cols, pitch, pair, 0, 0}, (rows + 1) / 2 * pair, zeros, element, strip);
  }
  // Dense bands, without zeros: what the coarse levels filtered.
  constexpr GroupBands dense(int rows, int cols) {
    const int pitch = cols * group;
    return add({rows, cols, pitch, 2 * pitch, rows * pitch, 0}, kSubbands * rows * pitch, 0, 4, 0);
  }
  // Zeros in the place of a row past the first or the last one, as wide as a strip reads: of
  // pixels, or of coefficients `step` columns apart.
  constexpr int zeros(int kernel_size, int element, int strip, int step = 1) {
    return take((std::max(2 * strip * element, step * strip * 4) + step * (kernel_size - 1) * 4) *
                group);
  }
  // Returns the offset of `size` bytes.
  constexpr int take(int size) {
    const int offset = bytes;
    bytes = round_up(bytes + size, 16);
    return offset;
  }

 private:
  static constexpr int kBanks = 32;

  // Zeros precede the first row; a strip may reach past the last one.
  constexpr GroupBands add(GroupBands result, int elements, int zeros, int element, int strip) {
    const int around = (zeros + strip) * group;
    result.inverse = 65536 / result.cols + 1;
    result.inverse_rows = 65536 / result.rows + 1;
    result.offset = take((elements + around) * element) + zeros * group * element;
    return result;
  }
};

// The forward kernel, in float32. Level 1 takes the place of the pixels, each coefficient that of a
// pixel of its 2 x 2, and goes from registers to y; levels from 2 on keep what they filtered. The
// smallest planes share the taps: two of them, one after the other, each with its own `threads`.
struct GroupForwardMemory {
  GroupBands pixels, level[kMaxLaunchLevels + 1], filtered[kMaxLaunchLevels + 1];
  int zeros, plane_bytes, planes, taps, bytes, threads, most_blocks;

  // Taps of a channel lie group + 1 apart, so that neighbouring taps may be written at once; those
  // of the smallest group dense, so that two blocks of 56 x 56 have room with 7 x 7 taps, too.
  static constexpr int tap_pitch(int group) { return group > 4 ? group + 1 : group; }

  GroupForwardMemory(int height, int width, int kernel_size, int levels, int group) {
    const int radius = kernel_size / 2, strip = strip_of(group);
    GroupAllocator memory{group, 0};
    // Zeros are what odd sizes are padded with.
    pixels = memory.pixels(round_up(height, 2), round_up(width, 2), 2 * radius, 4, 2 * strip);
    level[1] = pixels;
    level[1].rows /= 2, level[1].cols /= 2, level[1].pitch = pixels.pair;
    for (int l = 2; l <= levels; ++l) {
      const int rows = (height + (1 << l) - 1) >> l, cols = (width + (1 << l) - 1) >> l;
      // A warp of small groups filters two rows of each band.
      level[l] = memory.bands(rows, cols, radius, coarse_strip_of(group), kSubbands * group < 32);
      filtered[l] = memory.dense(rows, cols);
    }
    zeros = memory.zeros(kernel_size, 4, strip, 2);
    plane_bytes = memory.bytes;
    const int taps_and_bias = slot_count(levels) * kernel_size * kernel_size + 1;
    const int tap_bytes = round_up(taps_and_bias * tap_pitch(group) * 4, 16);
    // Whole warps, and as many slots for each of four bands.
    threads = round_up(level[1].strips(strip) * group, std::max(32, kSubbands * group));
    const bool six = 6 * threads <= group_threads(group) &&
                     blocks_of(2 * plane_bytes + tap_bytes, 3) == 3;  // of a multiprocessor
    planes = group == 32 && six ? 2 : 1;
    taps = planes * plane_bytes;
    bytes = taps + tap_bytes;
    most_blocks = std::max(1, group_threads(group) / (planes * threads));
  }
  // Of a band of level 1, the element of its first coefficient.
  WTCONV_HOST_DEVICE constexpr int first_of(int band, int group) const {
    return band % 2 * pixels.pitch + band / 2 * group;
  }
  int blocks() const { return std::max(1, blocks_of(bytes, most_blocks)); }
};

// The weight-gradient kernel: level 1 of both operands, grad_output with the halo.
struct GroupGradMemory {
  struct Operand {
    GroupBands pixels, level1;
  } grad, input;
  int zeros, sums, bytes, most_blocks;

  GroupGradMemory(int height, int width, int kernel_size, int levels, int element, int group) {
    const int radius = kernel_size / 2, strip = strip_of(group);
    GroupAllocator memory{group, 0};
    const int rows = (height + 1) / 2, cols = (width + 1) / 2;
    grad = {memory.pixels(height, width, radius, element, 2 * strip),
            memory.bands(rows, cols, radius, strip, false)};
    // A column of zeros is what an odd width is padded with.
    input = {memory.pixels(height, width, 1, element, 2 * strip),
             memory.bands(rows, cols, 0, strip, false)};
    zeros = memory.zeros(kernel_size, element, strip);
    sums = memory.take(sum_count(kernel_size, levels) * group * 4);
    bytes = memory.bytes;
    most_blocks = grad_blocks(kernel_size, group);
  }
  int blocks() const { return std::max(1, blocks_of(bytes, most_blocks)); }
};

}  // namespace wtconv::cuda
