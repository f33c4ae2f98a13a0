// Built in place of csrc/cuda: an op called on another device says what is missing.
#include <torch/csrc/stable/library.h>

#include <stdexcept>

namespace {

void unavailable(StableIValue*, uint64_t, uint64_t) {
  throw std::runtime_error(
      "wtconv: this build of libwtconv_ops has CPU kernels only; move the tensors to the CPU, use "
      "the layer wtconv_ops.WTConv2d, which runs in plain PyTorch on other devices, or for CUDA "
      "reinstall with WTCONV_CUDA=1");
}

void register_all(torch::stable::detail::StableLibrary& m) {
  for (const char* op : {"fused_forward", "_fused_forward", "fused_backward", "_graph_forward",
                         "_graph_backward", "analysis_conv", "synthesis"}) {
    m.impl(op, &unavailable);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) { register_all(m); }
STABLE_TORCH_LIBRARY_IMPL(wtconv, MPS, m) { register_all(m); }
STABLE_TORCH_LIBRARY_IMPL(wtconv, XPU, m) { register_all(m); }
