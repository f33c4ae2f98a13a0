// wtconv::fused_forward on CUDA.
#include <torch/csrc/stable/library.h>

#include "../common/entry.h"
#include "host.h"

namespace wtconv::cuda {
namespace {

Tensor run(const Tensor& input, Parameters given, bool channels_last) {
  const int device = input.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const std::vector<int64_t> sizes{input.sizes().begin(), input.sizes().end()};
  if (input.numel() == 0) return empty_image(input, sizes, channels_last);
  const Parameters params = prepare(std::move(given));
  const int height = int(input.size(2)), width = int(input.size(3));
  const DType dtype = dtype_of(input);
  Tensor output;
  const auto allocate_output = [&]() -> Plane {
    output = empty_image(input, sizes, channels_last);
    return {output_view(output), dtype, height, width, channels_last};
  };
  Call(params, input)
      .run_operator({input_view(input), dtype, height, width, prefers_channels_last(input), true},
                    allocate_output, 0, false);
  return output;
}

constexpr auto* kStrict = &checked_forward<&run, DTypeRule::kStrict>;
constexpr auto* kMixed = &checked_forward<&run, DTypeRule::kMixed>;
constexpr auto* kGraph = &graph_forward<&run>;

}  // namespace
}  // namespace wtconv::cuda

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) {
  m.impl("fused_forward", TORCH_BOX(wtconv::cuda::kStrict));
  m.impl("_fused_forward", TORCH_BOX(wtconv::cuda::kMixed));
  m.impl("_graph_forward", TORCH_BOX(wtconv::cuda::kGraph));
}
