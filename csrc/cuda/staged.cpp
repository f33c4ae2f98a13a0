// wtconv::analysis_conv and wtconv::synthesis on CUDA.
#include <torch/csrc/stable/library.h>

#include "host.h"

namespace wtconv::cuda {
namespace {

std::tuple<Tensor, Tensor> analysis_conv(const Tensor& input, const Tensor& weight,
                                         const Tensor& scale) {
  check_analysis_conv(input, weight, scale);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const int64_t batch = input.size(0), channels = input.size(1);
  const int height = int(input.size(2)), width = int(input.size(3));
  const bool channels_last = prefers_channels_last(input);
  const int64_t rows = (height + 1) / 2, cols = (width + 1) / 2;
  Tensor coefficients = empty_image(input, {batch, 4 * channels, rows, cols}, channels_last);
  Tensor lowpass = empty_image(input, {batch, channels, rows, cols}, channels_last);
  if (input.numel() == 0) return {coefficients, lowpass};

  // One level without a base path: the base weight only tells the kernel size.
  const Parameters params{
      weight, std::nullopt, scale, {as_contiguous(weight)}, {as_contiguous(scale)}};
  const Call call(params, input);
  const DType dtype = dtype_of(input);
  const Plane plane{input_view(input), dtype, height, width, channels_last};
  const Device& properties = device_properties(call.device);
  const TileShape shape = choose_tile(call.problem(plane, 0, false), properties);
  check_shared_memory(shape.shared_bytes, properties, shape.kernel_size);
  AnalysisLaunch launch{call.describe(plane, 0, shape, false), output_view(lowpass)};
  launch.tile.params.weight[0] = nullptr;
  launch.tile.output = output_view(coefficients);
  check_launch(launch_analysis_conv(launch, dtype, call.stream));
  return {coefficients, lowpass};
}

Tensor synthesis(const Tensor& base, std::vector<Tensor> coefficients) {
  check_synthesis(base, coefficients);
  const torch::stable::accelerator::DeviceGuard guard(base.get_device_index());
  const bool channels_last = prefers_channels_last(base);
  Tensor output = empty_image(base, {base.sizes().begin(), base.sizes().end()}, channels_last);
  if (output.numel() == 0) return output;
  SynthesisLaunch launch{};
  launch.base = input_view(base);
  launch.output = output_view(output);
  launch.levels = int(coefficients.size());
  for (int l = 0; l < launch.levels; ++l) launch.coefficients[l] = input_view(coefficients[l]);
  launch.batch = base.size(0);
  launch.channels = int(base.size(1)), launch.height = int(base.size(2)),
  launch.width = int(base.size(3));
  launch.channels_fast = channels_last;
  device_properties(base.get_device_index());
  check_launch(launch_synthesis(launch, dtype_of(base), current_stream(base.get_device_index())));
  return output;
}

}  // namespace
}  // namespace wtconv::cuda

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) {
  m.impl("analysis_conv", TORCH_BOX(&wtconv::cuda::analysis_conv));
  m.impl("synthesis", TORCH_BOX(&wtconv::cuda::synthesis));
}
