// The entry points of the forward pass, which differ in the dtypes they accept and in who names the
// layout of the output.
#pragma once

#include <utility>

#include "tensors.h"

namespace wtconv {

// A backend's implementation: input, parameters, whether the output is channels_last.
using ForwardRun = Tensor(const Tensor&, Parameters, bool);

// Checks the arguments, then calls Run for an output in the layout of the input.
template <ForwardRun* Run, DTypeRule Rule>
Tensor checked_forward(const Tensor& input, const Tensor& base_weight,
                       const std::optional<Tensor>& base_bias, const Tensor& base_scale,
                       const std::vector<Tensor>& wavelet_weights,
                       const std::vector<Tensor>& wavelet_scales) {
  Parameters params{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_fused("fused_forward", input, params, Rule);
  return Run(input, std::move(params), prefers_channels_last(input));
}

// The same for an output in the layout that the caller names.
template <ForwardRun* Run>
Tensor graph_forward(const Tensor& input, const Tensor& base_weight,
                     const std::optional<Tensor>& base_bias, const Tensor& base_scale,
                     const std::vector<Tensor>& wavelet_weights,
                     const std::vector<Tensor>& wavelet_scales, bool channels_last) {
  Parameters params{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_fused("fused_forward", input, params, DTypeRule::kMixed);
  return Run(input, std::move(params), channels_last);
}

}  // namespace wtconv
