// One launch of the patch kernels, whose blocks compute tiles of at most 64 x 64 pixels: the first
// levels, or all of them, in one pass over memory. They have kernel sizes that their code unrolls,
// in types that accumulate in float32; the tile kernels (../tile) take the rest.
//
//   choose.cpp            from sizes to a form, without touching a device
//   layout.h, device.cuh  windows and bands in shared memory, and code on them
//
//   form                                    operator           weight gradients      shared code
//   tiles of large planes, float32          forward.cu         weight_grad.cu        synthesis.cuh
//   the same of half types                  mma_forward.cu     mma_weight_grad.cu    mma*
//   planes that fit a tile, G x G to it     planes.cu          weight_grad*           planes*.cuh
//   and of these, half types past 8 x 8     mma_planes.cu      mma_planes_weight*     mma*
//   those that are a low-pass band of x     lowpass_planes.cu  -                     planes*.cuh
//   those of a channels_last tensor         group_forward.cu   group_weight_grad.cu  group*
//   and of these, half types past 8 x 8     mma_group.cu       mma_group_weight*     mma*
//
// weight_grad.cu gives the input gradient, too, where kInputGradFits (layout.h). Of planes past 8 x
// 8 in half types it gives the weight gradients where planes are few; of those past 32 x 32 that
// fit a tile, mma_weight_grad.cu does. Of channels_last planes of half types, tensor cores give the
// weight gradients past 32 x 32, and the operator of most smaller ones (choose.cpp).
//
// But on tensor cores (mma*) and in groups of channels, a thread computes a patch of 32 pixels from
// its 8 coefficients of level 1 up.
//
// Plain structs without any Torch header. Strides and offsets are in elements.
#pragma once

#include <type_traits>

#include "../parameters.h"
#include "../rounding.h"

namespace wtconv::cuda {

constexpr int kPatchTile = 64;  // pixels of a tile on each side
constexpr int kPatchThreads = 128;

// Pixels of a thread, 16 bytes of each row: neighbouring threads read and write neighbouring pieces
// of shared memory and of whole sectors.
template <int kElement>
struct Patch {
  static constexpr int kCols = 16 / kElement, kAcross = kPatchTile / kCols;  // patches of a tile
  static constexpr int kRows = kPatchTile / (kPatchThreads / kAcross);
};
constexpr int tiles_across(int pixels) { return ceil_div(pixels, kPatchTile); }

// Values that kernels are compiled for.
template <int... kValues>
struct Constants {};
using PatchKernelSizes = Constants<3, 5, 7, 9>;  // tiles of large planes
using PlaneKernelSizes = Constants<3, 5, 7>;     // whole planes, and weight gradients
using PlaneCells = Constants<1, 2, 4, 8>;
using LowpassCells = Constants<1, 2, 4>;      // of a low-pass band
using GradCells = Constants<0, 1, 2, 4, 8>;   // 0: tiles of large planes, in float32
using MmaPlaneCells = Constants<1, 2, 4>;     // the operator on planes of half types
using MmaPlaneGradCells = Constants<2, 4>;    // their weight gradients, where there are many
using MmaGroupKernelSizes = Constants<3, 5>;  // channels_last planes of half types
using MmaGroupCells = Constants<1, 2, 4>;     // of these, for the operator
constexpr int kMmaGroup = 8;                  // their channels of a block
using TileLevels = Constants<1, 2, 3>;        // on chip, of a tile
using MmaGradLevels = Constants<1, 2>;        // weight gradients of half types, of a tile
constexpr int kMostForThreeLevels = 5;        // kernel size: the halo is 8 times its radius
constexpr int kMostForAllLevels = 5;          // the same for all weight gradients of whole planes

// f(std::integral_constant<int, value>()) of the value among the constants; `value` is one of them.
template <int kFirst, int... kRest, class F>
auto with_constant(Constants<kFirst, kRest...>, int value, F f) {
  if constexpr (sizeof...(kRest) > 0) {
    if (value != kFirst) return with_constant(Constants<kRest...>(), value, f);
  }
  return f(std::integral_constant<int, kFirst>());
}

template <int... kValues>
constexpr bool is_among(Constants<kValues...>, int value) {
  return ((value == kValues) || ...);
}
template <int... kValues>
constexpr int largest(Constants<kValues...>) {
  int most = 0;
  ((most = kValues > most ? kValues : most), ...);
  return most;
}

// A launch of a forward kernel.
struct PatchLaunch {
  RawParameters params;
  View input, output;
  // [B, C, ceil(H / 2^levels), ...] float32, or null; on tensor cores at two levels alone.
  const void* coarse;
  int coarse_rows, coarse_cols;
  int batch, channels, height, width, kernel_size, levels;
  int tiles_y, tiles_x, tiles;    // of a plane, and of a channel; of a group its planes
  int cells;                      // planes of a tile on each side; 0: a plane has many tiles
  int group;                      // channels of a block, of whole planes; 0: one channel
  int splits, together;           // blocks of a channel, or of groups; those that run at once
  int input_bytes, output_bytes;  // of one access
  // May start before the kernel before it ends, one of the same call, and read the input without
  // waiting for that (launch_kernel.cuh). Groups of channels and tensor cores always do the latter.
  bool early, reads_at_once;
  bool tensor_cores;  // half types: tiles of large planes, and planes that fit a tile
};

constexpr int kLowpassDown = 2;
// A launch on planes that are the low-pass band of the input kLowpassDown levels below it:
// planes.height and planes.width are sizes of the band, output and arithmetic float32.
struct LowpassPlanesLaunch {
  PatchLaunch planes;
  DType dtype;  // of the input, in rows of aligned pieces of 16 bytes
  int input_height, input_width;
};

// The input gradient, where the launch of the weight gradients takes all levels and gives it, too.
struct InputGradLaunch {
  RawParameters params;
  View output;
  int output_bytes;
};

// Weight gradients of the base path and of the first levels. A block takes `parts` of the
// splits * parts pieces into which the tiles of a channel fall.
struct PatchGradLaunch {
  View grad_output, input;
  // Low-pass bands of the first level, [B, C, ceil(H / 2), ceil(W / 2)] in float32, or null, of a
  // group in channels_last unless it hands on planes; on tensor cores those of the last one, in the
  // type of the tensors, that of the input divided by 2^levels.
  void *low_grad, *low_input;
  float* exact_low_grad;  // that of grad_output in float32, on tensor cores, or null
  float* partials;        // [C][splits * parts][sum_count]
  int batch, channels, height, width, kernel_size, levels;
  int tiles_y, tiles_x, tiles;                // of a plane, and of a channel
  int cells, group, grad_bytes, input_bytes;  // as above
  int splits, together, parts;
  bool tensor_cores;  // half types, as in choose.h
  bool base_wanted, level_wanted, bias_wanted;
  bool early;  // as above; groups of channels never do
  // The next kernel starts beside this one, not when it ends (groups of channels: when it ends).
  bool lets_next_start;
  bool input_wanted;
  InputGradLaunch input_grad;  // where that is wanted
};

}  // namespace wtconv::cuda
