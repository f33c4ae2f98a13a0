// wtconv::fused_backward on CUDA: the input gradient is the operator with rotated weights and
// mirrored padding; the weight gradients come from one more pass over grad_output and input, and
// over low-pass bands of both for the levels past its own. That pass is the first, because the
// operator's deep levels take the band of grad_output that it leaves; or it is the only one, and
// gives the input gradient, too (kInputGradFits, patch/layout.h).
//
// Kernels overlap with the one before (launch_kernel.cuh), so that few blocks leave no
// multiprocessor idle: the operator's deep levels run beside the launch of weight gradients after
// the one that leaves their band, its first levels follow the last of those, and what adds up the
// sums follows them.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../common/gradients.h"
#include "host.h"
#include "patch/group_layout.h"

namespace wtconv::cuda {
namespace {

// The weight gradients: partial sums, launch by launch down the low-pass bands, among them the deep
// levels of the operator; then one launch that adds those of all levels (of kMaxLaunchLevels at a
// time).
class WeightGradient {
 public:
  WeightGradient(Call& call, const Wanted& wanted, const Gradients& out)
      : call_(call), wanted_(wanted), out_(out) {}

  // Returns whether the input gradient came with them.
  bool run(const Plane& grad_output, const Plane& input, const Output& input_grad) {
    grad_output_ = &grad_output, input_grad_ = &input_grad;
    if (wanted_.input) operator_levels_ = call_.launch_levels(grad_output, 0, true);
    add_levels(grad_output, input, 0);
    return gave_input_grad_;
  }

  // `sums_ready`: whether the operator was launched since.
  void finish(bool sums_ready) const {
    for (int first = 0; first == 0 || first < call_.levels(); first += kMaxLaunchLevels) {
      FinishLaunch launch{};
      launch.levels = std::min(kMaxLaunchLevels, call_.levels() - first);
      launch.params = call_.parameters(first, launch.levels, false);
      launch.channels = call_.channels;
      launch.kernel_size = call_.kernel_size();
      for (int l = first == 0 ? 0 : 1; l <= launch.levels; ++l) {
        launch.sums[l] = sums_[first + l];
        launch.gradients[l] = {out_.weight(first + l, wanted_), out_.scale(first + l, wanted_)};
      }
      launch.grad_bias = first == 0 ? out_.bias(wanted_) : nullptr;
      launch.early = call_.started;
      launch.sums_ready = sums_ready;
      call_.launched(launch_finish(launch, dtype_, call_.stream));
    }
  }

 private:
  // Those of levels first_level .. (and the base path where that is 0).
  void add_levels(const Plane& grad_output, const Plane& input, int first_level) {
    if (!wants_beyond(first_level)) return;
    const Problem problem = call_.problem(grad_output, first_level, true);
    const PatchChoice choice = choose_patch_grad(problem, device_properties(call_.device),
                                                 wanted_.input && first_level == 0);
    if (choice.levels > 0 && (choice.cells > 0 || !input.channels_last)) {
      run_patches(grad_output, input, first_level, choice, problem);
    } else {
      run_tiles(grad_output, input, first_level, problem);
    }
  }

  bool wants_level(int first_level, int level) const {
    return level == 0 ? first_level == 0 && wanted_.level[0] : wanted_.level[first_level + level];
  }
  bool wants_bias(int first_level) const {
    return first_level == 0 &&
           (wanted_.base_bias || (wanted_.base_scale && call_.params.base_bias));
  }
  // Whether the deep levels of the input gradient begin with the low-pass band of `grad`, which is
  // `first_level` levels down, or below it. A band in a half type is rounded, so its own is not it.
  bool operator_takes(int first_level, int levels, const Plane& grad) const {
    const bool exact = first_level == 0 || element_bytes(grad.dtype) >= 4;
    return exact && operator_levels_ < call_.levels() && first_level + levels <= operator_levels_;
  }
  // The operator's deep levels, if the band that they begin with came from a launch before the
  // last: beside that.
  void run_deep_operator() {
    if (operator_levels_ == 0 || call_.low_levels < operator_levels_) return;
    call_.low.second.at_once = true;
    call_.run_deep_levels(*grad_output_, true);
  }
  // Whether anything is wanted of the base path or of levels past first_level.
  bool wants_beyond(int first_level) const {
    bool any = wants_bias(first_level) || wants_level(first_level, 0);
    for (int l = first_level + 1; l <= call_.levels(); ++l) any |= wanted_.level[l];
    return any;
  }

  // Room for the partial sums of a launch: base path, levels, bias.
  Tensor partials(int64_t count, int first_level, int levels, DType dtype) {
    const auto scalar = accumulates_in_double(dtype) ? torch::headeronly::ScalarType::Double
                                                     : torch::headeronly::ScalarType::Float;
    const int kernel_size = call_.kernel_size(), sums = sum_count(kernel_size, levels);
    kept_.push_back(allocate(call_.like, {call_.channels, count, sums}, scalar));
    for (int l = first_level == 0 ? 0 : 1; l <= levels; ++l) {
      const int first = (l == 0 ? 0 : slot_of(l, 0)) * kernel_size * kernel_size;
      sums_[first_level + l] = {kept_.back().const_data_ptr(), count, sums, first, scale_};
    }
    dtype_ = dtype;
    return kept_.back();
  }

  void run_patches(const Plane& grad_output, const Plane& input, int first_level,
                   const PatchChoice& choice, const Problem& problem) {
    PatchGradLaunch launch = describe_patches(grad_output, input, first_level, choice, problem);
    const int levels = choice.levels;
    const Tensor sums =
        partials(int64_t(launch.splits) * launch.parts, first_level, levels, input.dtype);
    launch.partials = static_cast<float*>(sums.mutable_data_ptr());
    std::pair<Tensor, Plane> low_grad, low_input;
    const bool deeper = first_level + levels < call_.levels() && wants_beyond(first_level + levels);
    const bool tensor_cores = choice.tensor_cores;
    const int down = tensor_cores ? levels : 1;
    const bool taken = operator_takes(first_level, down, grad_output);
    const bool channels_last =
        choice.group > 0 && !hands_on_planes(problem.kernel_size, choice.group);
    const DType low_dtype = tensor_cores ? input.dtype : DType::kFloat32;
    // The bias comes from that band wherever there are levels past these: its bits do not depend on
    // what else is wanted.
    const bool sums_bias =
        tensor_cores && launch.bias_wanted && first_level + levels < call_.levels();
    if (deeper || taken || sums_bias) {
      low_grad = call_.allocate_lowpass(grad_output, down, low_dtype, channels_last);
      launch.low_grad = low_grad.first.mutable_data_ptr();
    }
    if (deeper) {
      low_input = call_.allocate_lowpass(input, down, low_dtype, channels_last);
      launch.low_input = low_input.first.mutable_data_ptr();
    }
    std::pair<Tensor, Plane> exact = low_grad;
    if (taken && tensor_cores) {
      exact = call_.allocate_lowpass(grad_output, down);
      launch.exact_low_grad = static_cast<float*>(exact.first.mutable_data_ptr());
    }
    if (choice.input_grad) {
      const Plane to = (*input_grad_)();
      launch.input_wanted = gave_input_grad_ = true;
      launch.input_grad = {call_.parameters(0, levels, true), to.view, access_bytes(to)};
    }
    launch.early = call_.started;
    call_.launched(launch_patch_gradients(launch, input.dtype, call_.stream));
    run_deep_operator();  // on a band from before this launch
    if (taken) call_.low = std::move(exact), call_.low_levels = first_level + down;
    if (!deeper) return;
    if (tensor_cores) scale_ *= 1 << levels;
    add_levels(low_grad.second, low_input.second, first_level + levels);
  }

  // The launch of a patch kernel, without partial sums and low-pass bands.
  PatchGradLaunch describe_patches(const Plane& grad_output, const Plane& input, int first_level,
                                   const PatchChoice& choice, const Problem& problem) const {
    PatchGradLaunch launch{};
    launch.grad_output = grad_output.view;
    launch.input = input.view;
    launch.batch = int(call_.batch);
    launch.channels = call_.channels;
    launch.height = input.height, launch.width = input.width;
    launch.kernel_size = call_.kernel_size();
    launch.levels = choice.levels;
    launch.tiles_y = tiles_across(input.height);
    launch.tiles_x = tiles_across(input.width);
    launch.cells = choice.cells;
    launch.group = choice.group;
    launch.tensor_cores = choice.tensor_cores;
    launch.tiles = patch_tiles(problem, choice);
    const int multiprocessors = device_properties(call_.device).multiprocessors;
    const int slots = patch_grad_blocks(problem, choice) * multiprocessors;
    const int channels_or_groups = ceil_div(call_.channels, std::max(choice.group, 1));
    launch.splits = split_tiles(channels_or_groups, launch.tiles, slots,
                                choice.cells == 0 ? kMostTilesOfSum : INT32_MAX);
    launch.together = blocks_together(channels_or_groups, launch.splits, slots);
    // Where blocks are few, and for the last levels on tensor cores (8x64x256x256 float16 L=1 on an
    // H200: 0.097 ms, without 0.0995).
    launch.lets_next_start = (choice.tensor_cores && choice.levels == problem.levels) ||
                             channels_or_groups * launch.splits <= multiprocessors;
    launch.parts = grad_parts(launch.tiles, launch.splits);
    launch.base_wanted = wants_level(first_level, 0);
    launch.level_wanted = wants_level(first_level, 1);
    launch.bias_wanted = wants_bias(first_level);
    const int channels = choice.group > 0 ? call_.channels : 0;
    launch.grad_bytes = access_bytes(grad_output, channels);
    launch.input_bytes = access_bytes(input, channels);
    return launch;
  }

  void run_tiles(const Plane& grad_output, const Plane& input, int first_level,
                 const Problem& problem) {
    const Device& properties = device_properties(call_.device);
    const GradShapes shapes = choose_grad_tile(problem, properties);
    check_shared_memory(shapes.shared_bytes, properties, call_.kernel_size());
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
      const Tensor sums = partials(launch.num_partials, first_level, levels, input.dtype);
      launch.partials = sums.mutable_data_ptr();
      call_.launched(launch_weight_grad(launch, input.dtype, call_.stream));
    }
    if (first_level + levels == call_.levels() || !wants_beyond(first_level + levels)) return;
    const auto low_grad = call_.form_lowpass(grad_output, levels);
    const auto low_input = call_.form_lowpass(input, levels);
    if (operator_takes(first_level, levels, grad_output))
      call_.low = low_grad, call_.low_levels = first_level + levels;
    add_levels(low_grad.second, low_input.second, first_level + levels);
  }

  Call& call_;
  const Wanted& wanted_;
  const Gradients& out_;
  std::vector<Tensor> kept_;
  LevelSums sums_[kMaxLevels + 1] = {};
  DType dtype_ = DType::kFloat32;       // of the activations
  float scale_ = 1;                     // that the input of the next levels was divided by
  int operator_levels_ = 0;             // that the operator's launch on grad_output takes
  const Plane* grad_output_ = nullptr;  // of the call
  const Output* input_grad_ = nullptr;  // allocates it
  bool gave_input_grad_ = false;
};

Outputs fused_backward(const Tensor& grad_output, const Tensor& input, const Tensor& base_weight,
                       const std::optional<Tensor>& base_bias, const Tensor& base_scale,
                       const std::vector<Tensor>& wavelet_weights,
                       const std::vector<Tensor>& wavelet_scales,
                       const std::vector<bool>& output_mask) {
  Parameters given{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_grad(grad_output, input, given, output_mask);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  const Wanted wanted(output_mask);
  const Parameters params = prepare(std::move(given));
  Gradients out = allocate_gradients(input, params, wanted);
  if (input.numel() == 0 || !wanted.input) out.input = allocate_input_gradient(input, wanted);
  if (input.numel() > 0) {
    Call call(params, input);
    const int height = int(input.size(2)), width = int(input.size(3));
    const DType dtype = dtype_of(input);
    const Plane grad{
        input_view(grad_output), dtype, height, width, prefers_channels_last(grad_output), true};
    const Plane in{input_view(input), dtype, height, width, prefers_channels_last(input)};
    const Output allocate_gradient = [&]() -> Plane {
      out.input = allocate_input_gradient(input, wanted);
      return {output_view(out.input), dtype, height, width, in.channels_last};
    };
    WeightGradient sums(call, wanted, out);
    const bool has_input_grad = wanted.any_sum && sums.run(grad, in, allocate_gradient);
    const bool runs_operator = wanted.input && !has_input_grad;
    if (runs_operator) call.run_operator(grad, allocate_gradient, 0, true);
    if (wanted.any_sum) sums.finish(runs_operator);
  }
  return out.tuple();
}

}  // namespace
}  // namespace wtconv::cuda

STABLE_TORCH_LIBRARY_IMPL(wtconv, CUDA, m) {
  m.impl("fused_backward", TORCH_BOX(&wtconv::cuda::fused_backward));
  m.impl("_graph_backward", TORCH_BOX(&wtconv::cuda::fused_backward));
}
