// The two entry points of fused_forward, which differ in the dtypes they accept.
#pragma once

#include "tensors.h"

namespace wtconv {

// Checks the arguments, then calls Run, a backend's implementation.
template <Tensor (*Run)(const Tensor&, const Parameters&), DTypeRule Rule>
Tensor checked_forward(const Tensor& input, const Tensor& base_weight,
                       std::optional<Tensor> base_bias, const Tensor& base_scale,
                       std::vector<Tensor> wavelet_weights, std::vector<Tensor> wavelet_scales) {
  const Parameters params{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_fused("fused_forward", input, params, Rule);
  return Run(input, params);
}

}  // namespace wtconv
