// An operator with the arguments of wtconv::fused_forward that allocates an output and does nothing
// else: what a call of any such operator costs. bench/empty_operator.py defines its schema.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <stdexcept>
#include <vector>

using torch::stable::Tensor;

namespace {

void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call of libtorch failed");
}

Tensor empty_forward(const Tensor& input, const Tensor&, std::optional<Tensor>, const Tensor&,
                     std::vector<Tensor>, std::vector<Tensor>) {
  int32_t type, layout, device;
  check(aoti_torch_get_dtype(input.get(), &type));
  check(aoti_torch_get_layout(input.get(), &layout));
  check(aoti_torch_get_device_type(input.get(), &device));
  AtenTensorHandle output = nullptr;
  check(aoti_torch_aten_new_empty(input.get(), input.sizes().data(), input.dim(), &type, &layout,
                                  &device, input.get_device_index(), nullptr, &output));
  return Tensor(output);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(wtconv_bench, CPU, m) {
  m.impl("empty_forward", TORCH_BOX(&empty_forward));
}

STABLE_TORCH_LIBRARY_IMPL(wtconv_bench, CUDA, m) {
  m.impl("empty_forward", TORCH_BOX(&empty_forward));
}
