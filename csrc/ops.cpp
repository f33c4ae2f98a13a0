// Schemas of every op. Defined here so that a process without Python can run exported programs.
// Gradients, fake impls, autocast and vmap are registered in wtconv_ops/.
#include <torch/csrc/stable/library.h>

#define WTCONV_PARAMETERS                                                                \
  "Tensor base_weight, Tensor? base_bias, Tensor base_scale, Tensor[] wavelet_weights, " \
  "Tensor[] wavelet_scales"

STABLE_TORCH_LIBRARY(wtconv, m) {
  // The public operator: every tensor has the input's dtype.
  m.def("fused_forward(Tensor input, " WTCONV_PARAMETERS ") -> Tensor");
  // The same with parameters of another floating dtype, for autocast.
  m.def("_fused_forward(Tensor input, " WTCONV_PARAMETERS ") -> Tensor");
  // output_mask: input, base_weight, base_bias, base_scale, each wavelet weight, each wavelet
  // scale. Returns their gradients, levels stacked; what is not asked for has shape [0].
  m.def("fused_backward(Tensor grad_output, Tensor input, " WTCONV_PARAMETERS
        ", bool[] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // What compiled graphs call: _fused_forward and fused_backward without a kernel for autograd. The
  // caller names the layout of the output.
  m.def("_graph_forward(Tensor input, " WTCONV_PARAMETERS ", bool channels_last) -> Tensor");
  m.def("_graph_backward(Tensor grad_output, Tensor input, " WTCONV_PARAMETERS
        ", bool[] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The paper's staged form: one level of analysis, convolution and scale (and the raw low-pass);
  // the synthesis of all levels with the base add.
  m.def("analysis_conv(Tensor input, Tensor weight, Tensor scale) -> (Tensor, Tensor)");
  m.def("synthesis(Tensor base, Tensor[] coefficients) -> Tensor");
}
