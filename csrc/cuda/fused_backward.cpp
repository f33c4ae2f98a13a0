// wtconv::fused_backward on CUDA: the input gradient is the operator with rotated weights and
// mirrored padding; the weight gradients come from one more pass over grad_output and input.
#include <torch/csrc/stable/library.h>

#include "../common/gradients.h"
#include "host.h"

namespace wtconv::cuda {
namespace {

// The weight gradients of levels first_level .. (and the base path where that is 0).
void run_weight_grad(const Call& call, const Plane& grad_output, const Plane& input,
                     int first_level, const Wanted& wanted, const Gradients& out) {
  const Device& properties = device_properties(call.device);
  const GradShapes shapes =
      choose_grad_tile(call.problem(grad_output, first_level, true), properties);
  check_shared_memory(shapes.shared_bytes, properties, call.params.base_weight.size(2));
  GradLaunch launch{};
  launch.tile = call.describe(grad_output, first_level, shapes.grad_output, false);
  const LoadPath input_path = choose_load_path(launch.tile, input.view, input.dtype);
  if (input_path != launch.tile.load_path || grad_output.channels_last != input.channels_last) {
    launch.tile.load_path = LoadPath::kScalar;
  }
  launch.tile.batch_per_block = share_of_batch(launch.tile, properties.multiprocessors);
  launch.input_shape = shapes.input;
  launch.input = input.view;
  launch.threads = shapes.threads;
  launch.shared_bytes = shapes.shared_bytes;
  const int levels = shapes.grad_output.levels,
            taps = int(call.params.base_weight.size(2) * call.params.base_weight.size(3));
  launch.bias_wanted =
      first_level == 0 && (wanted.base_bias || (wanted.base_scale && call.params.base_bias));
  bool any = launch.bias_wanted;
  for (int l = 0; l <= levels; ++l) {
    const bool want = l == 0 ? first_level == 0 && wanted.level[0] : wanted.level[first_level + l];
    launch.level_wanted[l] = want;
    if (want) launch.deepest = l;
    any |= want;
  }
  if (any) {
    const TileLaunch& t = launch.tile;
    launch.num_partials =
        int64_t(t.tiles_x) * t.tiles_y * ((t.batch + t.batch_per_block - 1) / t.batch_per_block);
    const int64_t sums = (1 + 4 * levels) * taps + 1;
    const bool in_double = accumulates_in_double(grad_output.dtype);
    const Tensor partials = torch::stable::new_empty(
        call.like, {call.channels, launch.num_partials, sums},
        in_double ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float);
    launch.partials = partials.mutable_data_ptr();
    check_launch(launch_weight_grad(launch, grad_output.dtype, call.stream));
    FinishLaunch finish{};
    finish.params = launch.tile.params;
    finish.channels = call.channels;
    finish.kernel_size = int(call.params.base_weight.size(2));
    finish.levels = levels;
    finish.num_partials = launch.num_partials;
    finish.partials = launch.partials;
    for (int l = first_level == 0 ? 0 : 1; l <= levels; ++l) {
      finish.gradients[l] = {out.weight(first_level + l, wanted),
                             out.scale(first_level + l, wanted)};
    }
    finish.grad_bias = first_level == 0 ? out.bias(wanted) : nullptr;
    check_launch(launch_finish(finish, grad_output.dtype, call.stream));
  }
  bool deeper = false;
  for (int l = first_level + levels + 1; l <= call.levels(); ++l) deeper |= wanted.level[l];
  if (!deeper) return;
  const auto low = [&](const Plane& plane) {
    auto band = call.lowpass(plane, levels);
    check_launch(launch_lowpass(
        {plane.view, band.first.mutable_data_ptr(), call.batch, call.channels, plane.height,
         plane.width, band.second.height, band.second.width, levels, plane.channels_last},
        plane.dtype, call.stream));
    return band;
  };
  const auto low_grad = low(grad_output);
  const auto low_input = low(input);
  run_weight_grad(call, low_grad.second, low_input.second, first_level + levels, wanted, out);
}

Outputs fused_backward(const Tensor& grad_output, const Tensor& input, const Tensor& base_weight,
                       std::optional<Tensor> base_bias, const Tensor& base_scale,
                       std::vector<Tensor> wavelet_weights, std::vector<Tensor> wavelet_scales,
                       std::vector<bool> output_mask) {
  const Parameters given{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_grad(grad_output, input, given, output_mask);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Wanted wanted(output_mask);
  const Parameters params = prepare(given);
  const Gradients out = allocate_gradients(input, params, wanted);
  if (input.numel() > 0) {
    const Call call(params, input);
    const int height = int(input.size(2)), width = int(input.size(3));
    const DType dtype = dtype_of(input);
    const Plane grad{input_view(grad_output), dtype, height, width,
                     prefers_channels_last(grad_output)};
    const Plane in{input_view(input), dtype, height, width, prefers_channels_last(input)};
    if (wanted.input) {
      call.run_operator(grad, {output_view(out.input), dtype, height, width, in.channels_last}, 0,
                        true);
    }
    if (wanted.any_sum) run_weight_grad(call, grad, in, 0, wanted, out);
  }
  return out.tuple();
}

}  // namespace
}  // namespace wtconv::cuda

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) {
  m.impl("fused_backward", TORCH_BOX(&wtconv::cuda::fused_backward));
}
