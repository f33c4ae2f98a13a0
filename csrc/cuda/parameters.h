// What every launch takes: tensors by strides, raw parameters and their order. No Torch and no CUDA
// header.
#pragma once

#include <cstdint>

#include "../common/haar.h"
#include "../common/limits.h"

namespace wtconv::cuda {

constexpr int kMaxLaunchLevels = 7;  // of one launch

// Strides in elements.
struct View {
  void* data;
  int64_t stride_b, stride_c, stride_y, stride_x;
};

// Raw parameters; scales are folded when a block reads them.
struct RawParameters {
  const void* weight[kMaxLaunchLevels + 1];  // base [C, k*k], levels [4C, k*k]; base may be null
  const void* scale[kMaxLaunchLevels + 1];
  const void* bias;  // [C] or null
  DType dtype;
  bool rotate;
};

// The slots of a channel, each k*k taps: 0 is the base path, then come the subbands of each level.
WTCONV_HOST_DEVICE constexpr int slot_count(int levels) { return 1 + kSubbands * levels; }
WTCONV_HOST_DEVICE constexpr int slot_of(int level, int band) {  // level >= 1
  return kSubbands * level - (kSubbands - 1) + band;
}
// Partial sums of a launch of weight gradients, [slot][tap] rotated by 180 degrees, then the bias.
WTCONV_HOST_DEVICE constexpr int sum_count(int kernel_size, int levels) {
  return slot_count(levels) * kernel_size * kernel_size + 1;
}

}  // namespace wtconv::cuda
