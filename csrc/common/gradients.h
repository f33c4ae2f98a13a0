// The outputs of fused_backward on every backend.
#pragma once

#include <tuple>

#include "tensors.h"

namespace wtconv {

// Which gradients output_mask asks for, and of which levels (0 = base path) weight sums are needed.
struct Wanted {
  bool input, base_weight, base_bias, base_scale;
  std::vector<char> weights, scales;  // per wavelet level
  bool level[kMaxLevels + 1];
  bool any_sum;  // of weights or bias

  explicit Wanted(const std::vector<bool>& output_mask);
};

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct Gradients {
  Tensor input, base_weight, base_bias, base_scale;
  Tensor weights;  // [L, 4C, 1, k, k]
  Tensor scales;   // [L, 1, 4C, 1, 1]

  // Where the gradient of one level (0 = base path) goes; null where it is not asked for.
  void* weight(int64_t level, const Wanted& wanted) const;
  void* scale(int64_t level, const Wanted& wanted) const;
  void* bias(const Wanted& wanted) const;

  Outputs tuple() const { return {input, base_weight, base_bias, base_scale, weights, scales}; }
};

// What is not asked for is empty. The gradient of the input has its layout.
Tensor allocate_input_gradient(const Tensor& input, const Wanted& wanted);
// Gradients of all but the input, in the dtype of the parameters; levels of a stack that are not
// asked for, and all sums over an empty batch, are zero.
Gradients allocate_gradients(const Tensor& input, const Parameters& params, const Wanted& wanted);

}  // namespace wtconv
