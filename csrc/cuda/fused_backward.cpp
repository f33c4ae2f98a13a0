// wtconv::fused_backward on CUDA: the input gradient is the operator with rotated weights and
// mirrored padding; the weight gradients come from one more pass over grad_output and input.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../common/gradients.h"
#include "host.h"

namespace wtconv::cuda {
namespace {

// The weight gradients of levels first_level .. (and the base path where that is 0).
class WeightGradient {
 public:
  WeightGradient(const Call& call, const Wanted& wanted, const Gradients& out)
      : call_(call),
        wanted_(wanted),
        out_(out),
        kernel_size_(int(call.params.base_weight.size(2))) {}

  void run(const Plane& grad_output, const Plane& input, int first_level) const {
    if (!wants_beyond(first_level)) return;
    const Problem problem = call_.problem(grad_output, first_level, true);
    const PatchChoice choice = choose_patch_grad(problem, device_properties(call_.device));
    if (choice.levels > 0 && (choice.cells > 0 || !input.channels_last)) {
      run_patches(grad_output, input, first_level, choice, problem);
    } else {
      run_tiles(grad_output, input, first_level, problem);
    }
  }

 private:
  bool wants_level(int first_level, int level) const {
    return level == 0 ? first_level == 0 && wanted_.level[0] : wanted_.level[first_level + level];
  }
  bool wants_bias(int first_level) const {
    return first_level == 0 &&
           (wanted_.base_bias || (wanted_.base_scale && call_.params.base_bias));
  }
  // Whether anything is wanted of the base path or of levels past first_level.
  bool wants_beyond(int first_level) const {
    bool any = wants_bias(first_level) || wants_level(first_level, 0);
    for (int l = first_level + 1; l <= call_.levels(); ++l) any |= wanted_.level[l];
    return any;
  }

  Tensor partials(int64_t count, int levels, DType dtype) const {
    const auto scalar = accumulates_in_double(dtype) ? torch::headeronly::ScalarType::Double
                                                     : torch::headeronly::ScalarType::Float;
    const int64_t sums = (1 + 4 * levels) * kernel_size_ * kernel_size_ + 1;
    return allocate(call_.like, {call_.channels, count, sums}, scalar);
  }

  void finish(const Tensor& partials, int first_level, int levels, DType dtype) const {
    FinishLaunch launch{};
    launch.params = call_.parameters(first_level, levels, false);
    launch.channels = call_.channels;
    launch.kernel_size = kernel_size_;
    launch.levels = levels;
    launch.num_partials = partials.size(1);
    launch.partials = partials.const_data_ptr();
    for (int l = first_level == 0 ? 0 : 1; l <= levels; ++l) {
      launch.gradients[l] = {out_.weight(first_level + l, wanted_),
                             out_.scale(first_level + l, wanted_)};
    }
    launch.grad_bias = first_level == 0 ? out_.bias(wanted_) : nullptr;
    check_launch(launch_finish(launch, dtype, call_.stream));
  }

  void run_patches(const Plane& grad_output, const Plane& input, int first_level,
                   const PatchChoice& choice, const Problem& problem) const {
    PatchGradLaunch launch{};
    launch.grad_output = grad_output.view;
    launch.input = input.view;
    launch.batch = int(call_.batch);
    launch.channels = call_.channels;
    launch.height = input.height, launch.width = input.width;
    launch.kernel_size = kernel_size_;
    launch.tiles_y = (input.height + kPatchTile - 1) / kPatchTile;
    launch.tiles_x = (input.width + kPatchTile - 1) / kPatchTile;
    launch.cells = choice.cells;
    launch.group = choice.group;
    launch.tiles = patch_tiles(problem, choice);
    const int slots =
        patch_grad_blocks(problem, choice) * device_properties(call_.device).multiprocessors;
    const int group = std::max(choice.group, 1);
    launch.splits = split_tiles((call_.channels + group - 1) / group, launch.tiles, slots);
    launch.parts = grad_parts(launch.tiles, launch.splits);
    launch.base_wanted = wants_level(first_level, 0);
    launch.level_wanted = wants_level(first_level, 1);
    launch.bias_wanted = wants_bias(first_level);
    const int channels = choice.group > 0 ? call_.channels : 0;
    launch.grad_bytes = access_bytes(grad_output, channels);
    launch.input_bytes = access_bytes(input, channels);
    const Tensor sums = partials(int64_t(launch.splits) * launch.parts, 1, input.dtype);
    launch.partials = static_cast<float*>(sums.mutable_data_ptr());
    std::pair<Tensor, Plane> low_grad, low_input;
    const bool deeper = first_level + 1 < call_.levels() && wants_beyond(first_level + 1);
    if (deeper) {
      low_grad = call_.lowpass(grad_output, 1, choice.group > 0);
      low_input = call_.lowpass(input, 1, choice.group > 0);
      launch.low_grad = static_cast<float*>(low_grad.first.mutable_data_ptr());
      launch.low_input = static_cast<float*>(low_input.first.mutable_data_ptr());
    }
    check_launch(choice.group > 0 ? launch_group_weight_grad(launch, input.dtype, call_.stream)
                 : choice.cells > 0 || input.dtype == DType::kFloat32
                     ? launch_patch_weight_grad(launch, input.dtype, call_.stream)
                     : launch_mma_weight_grad(launch, input.dtype, call_.stream));
    finish(sums, first_level, 1, input.dtype);
    if (deeper) run(low_grad.second, low_input.second, first_level + 1);
  }

  void run_tiles(const Plane& grad_output, const Plane& input, int first_level,
                 const Problem& problem) const {
    const Device& properties = device_properties(call_.device);
    const GradShapes shapes = choose_grad_tile(problem, properties);
    check_shared_memory(shapes.shared_bytes, properties, kernel_size_);
    const int levels = shapes.grad_output.levels;
    GradLaunch launch{};
    TileLaunch& tile = launch.tile;
    tile = call_.describe(grad_output, first_level, shapes.grad_output, false);
    const LoadPath input_path = choose_load_path(tile, input.view, input.dtype);
    if (input_path != tile.load_path || grad_output.channels_last != input.channels_last) {
      tile.load_path = LoadPath::kScalar;
    }
    tile.batch_per_block = share_of_batch(tile, properties.multiprocessors);
    launch.input_shape = shapes.input;
    launch.input = input.view;
    launch.threads = shapes.threads;
    launch.shared_bytes = shapes.shared_bytes;
    launch.bias_wanted = wants_bias(first_level);
    bool any = launch.bias_wanted;
    for (int l = 0; l <= levels; ++l) {
      launch.level_wanted[l] = wants_level(first_level, l);
      if (launch.level_wanted[l]) launch.deepest = l;
      any |= launch.level_wanted[l];
    }
    if (any) {
      launch.num_partials = int64_t(tile.tiles_x) * tile.tiles_y *
                            ((tile.batch + tile.batch_per_block - 1) / tile.batch_per_block);
      const Tensor sums = partials(launch.num_partials, levels, input.dtype);
      launch.partials = sums.mutable_data_ptr();
      check_launch(launch_weight_grad(launch, input.dtype, call_.stream));
      finish(sums, first_level, levels, input.dtype);
    }
    if (first_level + levels == call_.levels() || !wants_beyond(first_level + levels)) return;
    const auto low_grad = call_.form_lowpass(grad_output, levels);
    const auto low_input = call_.form_lowpass(input, levels);
    run(low_grad.second, low_input.second, first_level + levels);
  }

  const Call& call_;
  const Wanted& wanted_;
  const Gradients& out_;
  const int kernel_size_;
};

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
    if (wanted.any_sum) WeightGradient(call, wanted, out).run(grad, in, 0);
  }
  return out.tuple();
}

}  // namespace
}  // namespace wtconv::cuda

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) {
  m.impl("fused_backward", TORCH_BOX(&wtconv::cuda::fused_backward));
  m.impl("_graph_backward", TORCH_BOX(&wtconv::cuda::fused_backward));
}
