// What every launch takes: tensors by strides and raw parameters. No Torch and no CUDA header.
#pragma once

#include <cstdint>

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

}  // namespace wtconv::cuda
