#include "choose.h"

#include <algorithm>

#include "group_layout.h"
#include "mma_group_layout.h"
#include "mma_planes_layout.h"

namespace wtconv::cuda {
namespace {

template <class F>
int with_element(int bytes, F f) {
  return bytes == 4 ? f(std::integral_constant<int, 4>()) : f(std::integral_constant<int, 2>());
}

// A channels_last plane of a group of channels, unless more than half of them would be missing: a
// kernel of one channel takes a sector of 32 bytes for each element (64x768x7x7 float16 L=2 on an
// H100: 0.047 against 0.083 ms).
PatchChoice choose_group(const Problem& p, int group) {
  const bool can = is_among(PlaneKernelSizes(), p.kernel_size) && p.levels < kMaxLaunchLevels &&
                   round_up(p.channels, group) <= 2 * p.channels;
  return can ? PatchChoice{p.levels, 1, group} : PatchChoice{};
}

// Most levels of planes on chip, `cells` on each side of a tile.
int deepest_of(int cells) {
  return with_constant(PlaneCells(), cells,
                       [](auto g) { return PlanesMemory<4, 3, g()>::kLevels; });
}

int longest_side(const Problem& p) { return std::max(p.height, p.width); }

// Channels_last planes of a tile on each side that tensor cores take, at most `most`, or 0. Not
// where more than half of the channels would be missing. On an H200, float16, in ms, and as they
// run without:
//
//   64x96x56x56 L=5   0.103  0.194
//   64x192x28x28 L=4  0.055  0.093   (L=1: 0.042  0.064; K=3, L=1: 0.037  0.046)
//   64x384x14x14 L=3  0.034  0.053   (K=3: 0.028  0.035)
//   1x192x28x28 L=4   0.016  0.020   (1x384x14x14 L=3: 0.014  0.022)
//   64x96x17x17 L=3   0.025  0.038   (1x96x9x9 L=2: 0.013  0.018)
//   33x64x20x20 L=3   0.021  0.020   (the whole backward: 0.053  0.062)
//   64x4x14x14 L=3    0.015  0.015   (the whole backward: 0.027  0.030)
int mma_group_cells(const Problem& p, const Device& device, int most) {
  constexpr int kLeastShared = 200 * 1024;  // of a block; not measured on GPUs with less
  int cells = 1;
  while (cells < most && longest_side(p) * cells * 2 <= kPatchTile) cells *= 2;
  const int side = kPatchTile / cells;
  const bool can =
      device.shared_per_block >= kLeastShared && p.channels_last && p.element_bytes == 2 &&
      p.batch * p.channels <= INT32_MAX && is_among(MmaGroupKernelSizes(), p.kernel_size) &&
      p.levels <= deepest_of(cells) && longest_side(p) <= side &&
      2 * std::min(p.height, p.width) > side && round_up(p.channels, kMmaGroup) <= 2 * p.channels;
  return can ? cells : 0;
}

// Channels of a block of the forward kernel: more, unless more of them would be missing.
int forward_group_of(const Problem& p) {
  const int group = group_of(longest_side(p)), larger = largest_group_of(longest_side(p));
  return round_up(p.channels, larger) == round_up(p.channels, group) ? larger : group;
}

// Whole planes: as many to a tile as fit it. Tiles that stay nearly empty are worth it where
// `slots` blocks at once take them all.
PatchChoice choose_planes(const Problem& p, const Device& device, int slots) {
  int cells = 1;
  while (cells < largest(PlaneCells()) && std::max(p.height, p.width) * cells * 2 <= kPatchTile)
    cells *= 2;
  const PatchChoice choice{p.levels, cells, 0};
  // Cells and planes that stay empty cost as much as full ones.
  const int64_t pixels = p.batch * p.height * p.width;
  const int64_t tiles = patch_tiles(p, choice), computed = tiles * kPatchTile * kPatchTile;
  const bool can = is_among(PlaneKernelSizes(), p.kernel_size) && p.levels <= deepest_of(cells) &&
                   patch_bytes(p, choice) <= device.shared_per_block;
  return can && (pixels * 4 >= computed || p.channels * tiles <= slots) ? choice : PatchChoice{};
}

// Whether the input gradient takes two of three levels on chip, and the third from the low-pass
// band that the weight gradients, which run before it, leave. Where they are not wanted the choice
// is the same, so that the bits are, and the band costs a pass of its own. On an H200, NCHW, in ms:
// the whole backward with the band and without, and no weight gradients:
//
//   8x64x256x256 float16 K=5   0.160  0.172   0.088  0.080
//   8x64x256x256 float32 K=5   0.300  0.319   0.170  0.152
//   8x64x128x128 float16 K=5   0.058  0.059   0.034  0.027   (15.5 tiles a multiprocessor)
//   8x64x128x128 float32 K=5   0.093  0.098   0.051  0.044
//   and not taken
//   8x32x128x128 float16 K=5   0.041  0.039   0.023  0.018
//   8x64x512x512 float32 K=3   0.902  0.897   0.511  0.377
//   8x64x512x512 float16 K=3   0.496  0.502   0.298  0.238
bool leaves_third_level(const Problem& p, const Device& device) {
  constexpr int kLeastTiles = 12;  // of a multiprocessor, to pay for one more launch
  const int64_t tiles = int64_t(p.channels) * patch_tiles(p, {3, 0, 0});
  return p.of_grad_output && p.kernel_size == 5 && tiles >= kLeastTiles * device.multiprocessors;
}

// `group`: channels of a block, where it fits. `bytes_of`: shared memory that a block of a choice
// takes.
template <class Bytes>
PatchChoice choose(const Problem& p, const Device& device, int group, int slots, Bytes bytes_of) {
  constexpr int64_t kMostPixels = int64_t(INT32_MAX) * 1024;  // so that tiles fit an int
  if (p.accumulator_bytes != 4 || !is_among(PatchKernelSizes(), p.kernel_size) ||
      p.batch > INT32_MAX || p.batch * p.channels * p.height * p.width > kMostPixels) {
    return {};
  }
  const int longest = longest_side(p), shortest = std::min(p.height, p.width);
  // Tensor cores take tiles of planes of one tile, too: no other plane would share it.
  const bool large = !p.channels_last && shortest > kPatchTile / 2 &&
                     (longest > kPatchTile || p.element_bytes == 2);
  if (!large && longest > kPatchTile) return {};
  if (p.channels_last) {
    for (const int channels : {group, group_of(longest)}) {
      const PatchChoice choice = choose_group(p, channels);
      if (choice.levels > 0 && bytes_of(choice) <= device.shared_per_block) return choice;
    }
  }
  if (!large) return choose_planes(p, device, slots);
  const bool tensor_cores = p.element_bytes == 2;
  // Three levels on chip where they are all: the halo of the third costs less than a pass over x
  // for it alone, but that pass serves all levels past two (8x64x256x256 on an H100, float32: L=3
  // 0.183 ms; L=5 in two levels and the pass 0.216, in three 0.314 ms; 8x128x512x512 float16 on an
  // H200, L=5: 0.83 and 0.86 ms).
  const bool three =
      p.levels == 3 && p.kernel_size <= kMostForThreeLevels && !leaves_third_level(p, device);
  for (int levels = three ? largest(TileLevels()) : std::min(p.levels, 2); levels > 0; --levels) {
    const PatchChoice choice{levels, 0, 0, tensor_cores};
    if (patch_bytes(p, choice) <= device.shared_per_block) return choice;
  }
  return {};
}

// f of the layout of shared memory of a weight-gradient kernel, but of a group's.
template <class F>
int with_grad_memory(const Problem& p, const PatchChoice& choice, F f) {
  if (choice.tensor_cores && choice.cells > 0) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), choice.levels, [&](auto l) {
        return with_constant(MmaPlaneGradCells(), choice.cells,
                             [&](auto g) { return f(MmaPlanesGradMemory<k(), l(), g()>()); });
      });
    });
  }
  return with_element(p.element_bytes, [&](auto element) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(GradCells(), choice.cells, [&](auto g) {
        if constexpr (element() == 2 && g() == 0) {
          return with_constant(MmaGradLevels(), choice.levels,
                               [&](auto l) { return f(MmaGradMemory<k(), l()>()); });
        } else {
          return choice.input_grad ? f(GradMemory<element(), k(), g(), true>())
                                   : f(GradMemory<element(), k(), g()>());
        }
      });
    });
  });
}

GroupGradMemory group_grad_memory(const Problem& p, const PatchChoice& choice) {
  return {p.height, p.width, p.kernel_size, choice.levels, p.element_bytes, choice.group};
}

// The choice for planes that fit a tile with all levels on tensor cores, no level where these
// cannot take them. On an H200, float16, in ms, with and without: 64x192x28x28 L=4 0.039 and 0.069,
// 64x384x14x14 L=3 0.027 and 0.045; 64x96x56x56 L=5 0.067, in two kernels 0.095.
PatchChoice choose_mma_planes(const Problem& p, const PatchChoice& choice, const Device& device) {
  const PatchChoice planes{p.levels, std::max(choice.cells, 1), 0, true};
  const bool can = choice.levels > 0 && choice.group == 0 && p.element_bytes == 2 &&
                   longest_side(p) <= kPatchTile && is_among(MmaPlaneCells(), planes.cells) &&
                   is_among(PlaneKernelSizes(), p.kernel_size) &&
                   p.levels <= deepest_of(planes.cells);
  return can && patch_bytes(p, planes) <= device.shared_per_block ? planes : PatchChoice{};
}

// The same of their weight gradients: where rows are copied by more than an element, there are
// tiles enough, more to pay for a launch of the levels past two, and a patch kernel takes these. On
// an H200, float16, the whole backward in ms, with and without:
//
//   64x192x28x28 L=4   0.092  0.124   (23 tiles a multiprocessor)
//   64x384x14x14 L=3   0.069  0.074   (12)
//   32x256x16x16 L=2   0.026  0.028   (4)
//   and not taken
//   128x64x17x17 L=3   0.132  0.120   (16; rows copied by elements)
//   16x256x20x20 L=3   0.081  0.057   (8; the tile kernel takes the third level)
//   8x64x64x64 L=3     0.037  0.031   (1; that level is one of 16x16)
PatchChoice choose_mma_plane_grads(const Problem& p, const PatchChoice& choice,
                                   const Device& device) {
  const PatchChoice planes{std::min(p.levels, largest(MmaGradLevels())), choice.cells, 0, true};
  const int least = planes.levels == p.levels ? 3 : 8;  // tiles of a multiprocessor
  const int64_t tiles = int64_t(p.channels) * patch_tiles(p, choice);
  const bool can = p.element_bytes == 2 && !p.channels_last && p.width % 2 == 0 &&
                   is_among(MmaPlaneGradCells(), choice.cells) &&
                   tiles >= least * device.multiprocessors &&
                   patch_grad_bytes(p, planes) <= device.shared_per_block;
  if (!can || planes.levels == p.levels) return can ? planes : PatchChoice{};
  Problem deeper = p;
  deeper.height = ceil_div(p.height, 1 << planes.levels);
  deeper.width = ceil_div(p.width, 1 << planes.levels);
  deeper.levels -= planes.levels, deeper.channels_last = false;
  return choose_patch_grad(deeper, device, false).levels > 0 ? planes : PatchChoice{};
}

// Whether a launch of weight gradients gives the input gradient as well: where it takes all levels,
// and a multiprocessor holds as many of its blocks as without. Only in the form of the operator's
// own launch, so that the bits do not depend on what else is wanted.
bool gives_input_grad(const Problem& p, const PatchChoice& choice, const Device& device) {
  if (choice.levels < p.levels || choice.group > 0 || choice.tensor_cores ||
      !input_grad_fits(p.element_bytes, p.kernel_size, choice.cells)) {
    return false;
  }
  const PatchChoice own = choose_patch(p, device);
  return own.levels == p.levels && own.cells == choice.cells && own.group == 0 && !own.tensor_cores;
}

}  // namespace

int patch_bytes(const Problem& p, const PatchChoice& choice) {
  if (choice.group > 0 && choice.tensor_cores) {
    return with_constant(MmaGroupKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGroupCells(), choice.cells, [&](auto g) {
        return MmaGroupMemory<k(), g()>::bytes(p.height, p.width);
      });
    });
  }
  if (choice.group > 0) {
    return GroupForwardMemory(p.height, p.width, p.kernel_size, choice.levels, choice.group).bytes;
  }
  if (choice.tensor_cores && choice.cells > 0) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaPlaneCells(), choice.cells,
                           [&](auto g) { return MmaPlanesMemory<k(), g()>::kBytes; });
    });
  }
  return with_element(p.element_bytes, [&](auto element) {
    if (choice.cells == 0) {
      return with_constant(PatchKernelSizes(), p.kernel_size, [&](auto k) {
        return with_constant(TileLevels(), choice.levels, [&](auto l) {
          if constexpr (element() == 2) {
            return MmaMemory<k(), l()>::kBytes;
          } else {
            return ForwardMemory<k(), l()>::kBytes;
          }
        });
      });
    }
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(PlaneCells(), choice.cells,
                           [&](auto g) { return PlanesMemory<element(), k(), g()>::kBytes; });
    });
  });
}

int patch_grad_bytes(const Problem& p, const PatchChoice& choice) {
  if (choice.group > 0 && choice.tensor_cores) {
    return with_constant(MmaGroupKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), choice.levels, [&](auto l) {
        return MmaGroupGradMemory<k(), l()>::bytes(p.height, p.width);
      });
    });
  }
  if (choice.group > 0) return group_grad_memory(p, choice).bytes;
  return with_grad_memory(p, choice, [](auto memory) { return decltype(memory)::kBytes; });
}

int patch_grad_blocks(const Problem& p, const PatchChoice& choice) {
  if (choice.group > 0 && choice.tensor_cores) return 1;
  if (choice.group > 0) return group_grad_memory(p, choice).blocks();
  return with_grad_memory(p, choice, [](auto memory) { return decltype(memory)::kBlocks; });
}

int patch_tiles(const Problem& p, const PatchChoice& choice) {
  if (choice.group > 0) return int(p.batch);
  if (choice.cells > 0) return int((p.batch - 1) / (choice.cells * choice.cells) + 1);
  return int(p.batch) * tiles_across(p.height) * tiles_across(p.width);
}

PatchChoice choose_patch(const Problem& p, const Device& device) {
  const int cells = mma_group_cells(p, device, largest(MmaGroupCells()));
  const PatchChoice group{p.levels, cells, kMmaGroup, true};
  if (cells > 0 && patch_bytes(p, group) <= device.shared_per_block) return group;
  const PatchChoice choice =
      choose(p, device, forward_group_of(p), 0,
             [&](const PatchChoice& choice) { return patch_bytes(p, choice); });
  const PatchChoice planes = choose_mma_planes(p, choice, device);
  return planes.levels > 0 ? planes : choice;
}

int choose_lowpass_cells(const Problem& band, int down, const Device& device) {
  const PatchChoice whole = choose_patch(band, device);
  if (whole.cells == 0 || whole.group > 0 || down != kLowpassDown) return 0;
  // Blocks read 16 times their planes: as many as the multiprocessors hold at once, rather than
  // full tiles.
  constexpr int kBlocks = 4;  // of a multiprocessor
  int cells = std::min(whole.cells, largest(LowpassCells()));
  while (cells > 1 && int64_t(band.channels) * patch_tiles(band, {band.levels, cells / 2, 0}) <=
                          kBlocks * device.multiprocessors) {
    cells /= 2;
  }
  return cells;
}

PatchChoice choose_patch_grad(const Problem& p, const Device& device, bool input_wanted) {
  if (!is_among(PlaneKernelSizes(), p.kernel_size)) return {};
  const PatchChoice group{std::min(p.levels, largest(MmaGradLevels())), 1, kMmaGroup, true};
  if (mma_group_cells(p, device, 1) == 1 && patch_grad_bytes(p, group) <= device.shared_per_block)
    return group;
  Problem one_level = p;
  one_level.levels = 1;
  const auto bytes_of = [&](const PatchChoice& choice) { return patch_grad_bytes(p, choice); };
  // Nearly empty tiles, where one round takes them all: the tile kernel needs 0.028 ms for 8x64x8x8
  // float32 on an H100, one round of tiles of 8x64x16x16 needs 0.006 ms.
  PatchChoice choice =
      choose(one_level, device, group_of(longest_side(p)), device.multiprocessors, bytes_of);
  if (choice.levels == 0) return choice;
  const PatchChoice planes = choose_mma_plane_grads(p, choice, device);
  if (planes.levels > 0) return planes;
  if (choice.cells == 0 && p.element_bytes == 2) {
    choice.levels = std::min(p.levels, largest(MmaGradLevels()));
  } else if (choice.group > 0) {
    choice.levels = group_grad_levels(choice.group, longest_side(p), p.levels);
  } else {
    const int most = with_grad_memory(p, choice, [](auto m) { return decltype(m)::kLevels; });
    choice.levels = p.levels <= most ? p.levels : 1;
  }
  while (choice.levels > 0 && bytes_of(choice) > device.shared_per_block) --choice.levels;
  if (choice.levels == 0 || !input_wanted || !gives_input_grad(p, choice, device)) return choice;
  PatchChoice all = choice;
  all.input_grad = true;
  return bytes_of(all) <= device.shared_per_block ? all : choice;
}

int blocks_together(int channels, int splits, int slots) {
  return std::clamp(slots / channels, 1, splits);
}

// The fewest rounds of tiles, a round being what the slots hold; a block costs about a tile more,
// for its weights and the wait for its first window. Blocks of more than `most` tiles end too far
// apart.
int split_tiles(int channels, int tiles, int slots, int most) {
  constexpr int kMostRounds = 8;
  const auto cost = [&](int splits) {
    const int64_t rounds = (int64_t(channels) * splits + slots - 1) / slots;
    return rounds * (ceil_div(tiles, splits) + 1);
  };
  int best = 1;
  for (int rounds = 1; rounds <= kMostRounds; ++rounds) {
    const int splits = int(std::min<int64_t>(tiles, int64_t(rounds) * slots / channels));
    if (splits > 0 && cost(splits) < cost(best)) best = splits;
  }
  const int fewest = (tiles - 1) / most + 1;
  if (best >= fewest) return best;
  // Whole rounds, of as many blocks of a channel as run together.
  const int64_t together = blocks_together(channels, tiles, slots);
  return int(std::min<int64_t>(tiles, (fewest + together - 1) / together * together));
}

int grad_parts(int tiles, int splits) { return ceil_div(ceil_div(tiles, splits), kMostTilesOfSum); }

}  // namespace wtconv::cuda
