// wtconv::fused_backward on the CPU, by the adjoint law: the input gradient is the operator applied
// to grad_output with every kernel rotated by 180 degrees and the padding mirrored; the weight
// gradients correlate the pyramids of input and grad_output. Both are formed from one read of the
// two tensors. Sums go to float64 partial sums whose number and order depend on the sizes alone, so
// results are bitwise repeatable with any number of threads.
#include <torch/csrc/stable/library.h>

#include "host.h"

namespace wtconv::cpu {
namespace {

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Which gradients are wanted, and of which levels (0 = base) the weight sums are needed.
struct Wanted {
  bool input, base_weight, base_bias, base_scale, any_weight, any_scale, any_sum;
  std::vector<char> weight, scale;  // per level
  bool level[kMaxLevels + 1];

  explicit Wanted(const std::vector<bool>& mask) {
    const size_t levels = (mask.size() - 4) / 2;
    input = mask[0], base_weight = mask[1], base_bias = mask[2], base_scale = mask[3];
    any_weight = any_scale = false;
    level[0] = base_weight || base_scale;
    any_sum = base_bias || level[0];
    for (size_t i = 0; i < levels; ++i) {
      weight.push_back(mask[4 + i]);
      scale.push_back(mask[4 + levels + i]);
      level[i + 1] = weight[i] || scale[i];
      any_weight |= bool(weight[i]);
      any_scale |= bool(scale[i]);
      any_sum |= level[i + 1];
    }
  }
};

// Work split: items of consecutive (batch item, tile) pairs of one channel block.
struct Split {
  int64_t tile_rows, tiles, groups;

  Split(const Geometry& g, const Blocks& blocks) {
    constexpr int64_t kItems = 64;
    tile_rows = choose_tile_rows(g, blocks.vector_bytes, blocks.count);
    tiles = (g.height[0] + tile_rows - 1) / tile_rows;
    groups = std::min(g.batch * tiles, (kItems + blocks.count - 1) / blocks.count);
  }
};

Tensor empty_like_shape(const Tensor& like, std::vector<int64_t> sizes, bool wanted) {
  if (!wanted) sizes = {0};
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()});
}

Outputs allocate(const Tensor& input, const Parameters& p, const Wanted& wanted) {
  const int64_t c = input.size(1), k = p.base_weight.size(2), levels = int64_t(p.weights.size());
  const Tensor& like = p.base_weight;
  return {wanted.input ? empty_image(input, {input.sizes().begin(), input.sizes().end()},
                                     prefers_channels_last(input))
                       : empty_like_shape(input, {}, false),
          empty_like_shape(like, {c, 1, k, k}, wanted.base_weight),
          empty_like_shape(like, {c}, wanted.base_bias),
          empty_like_shape(like, {1, c, 1, 1}, wanted.base_scale),
          empty_like_shape(like, {levels, 4 * c, 1, k, k}, wanted.any_weight),
          empty_like_shape(like, {levels, 1, 4 * c, 1, 1}, wanted.any_scale)};
}

// Runs every tile; leaves the weight sums in `partials` [block][group][slots * taps + 1][lane].
void run_tiles(const Tensor& grad_output, const Tensor& input, const Parameters& params,
               const Tensor& grad_input, const Geometry& g, const Blocks& blocks,
               const Split& split, const Wanted& wanted, double* partials) {
  const int64_t slots = 1 + 4 * g.levels, taps = g.kernel_size * g.kernel_size;
  const int64_t sums = (slots * taps + 1) * blocks.lanes;
  std::vector<TilePlan> plans, input_plans;
  int64_t scratch_vectors = 0;
  for (int64_t tile = 0; tile < split.tiles; ++tile) {
    const int64_t lo = tile * split.tile_rows, hi = std::min(g.height[0], lo + split.tile_rows);
    plans.push_back(plan_tile(g, adjoint_padding(g.kernel_size), lo, hi));
    input_plans.push_back(plan_tile(g, Padding{0, 0, 0, 0}, lo, hi));
    scratch_vectors =
        std::max(scratch_vectors, plans.back().total_vectors + input_plans.back().pyramid_vectors);
  }

  const int64_t items = blocks.count * split.groups, steps = g.batch * split.tiles;
  const int64_t cost = 4 * taps * g.batch * g.height[0] * g.width[0] * blocks.lanes / split.groups;
  const int64_t threads = worthwhile_threads(items, cost);
  const int64_t weight_bytes = wanted.input ? aligned(packed_bytes(g, blocks)) : 0;
  const int64_t scratch_bytes = aligned(scratch_vectors * blocks.vector_bytes);
  const int64_t sum_bytes = wanted.any_sum ? aligned((slots * taps + 1) * blocks.vector_bytes) : 0;
  const Workspace workspace(input, weight_bytes + threads * (scratch_bytes + sum_bytes));
  char* weights = workspace.data();
  char* per_thread = weights + weight_bytes;
  if (wanted.input) pack_parameters(params, g, blocks, true, weights, nullptr);

  const Kernels& kernels = kernels_for(blocks.dtype);
  const TileArgs args{g.channels, view_of(grad_output), wanted.input ? view_of(grad_input) : View{},
                      weights, nullptr};
  const bool sum_bias = wanted.base_bias || (wanted.base_scale && params.base_bias);
  const GradArgs grad{view_of(input), slots, wanted.level, sum_bias};
  for_each_item(items, threads, [&](int64_t thread, int64_t item) {
    const int64_t block = item % blocks.count, group = item / blocks.count;
    char* scratch = per_thread + thread * (scratch_bytes + sum_bytes);
    GradSums state{scratch + scratch_bytes, nullptr, {}};
    if (wanted.any_sum) {
      state.total = partials + (block * split.groups + group) * sums;
      std::fill_n(state.total, sums, 0.0);
      std::fill_n(static_cast<char*>(state.partial), sum_bytes, char(0));
    }
    GradSums* running = wanted.any_sum ? &state : nullptr;
    for (int64_t s = steps * group / split.groups; s < steps * (group + 1) / split.groups; ++s) {
      kernels.grad_tile(args, plans[s % split.tiles], grad, input_plans[s % split.tiles],
                        s / split.tiles, block, wanted.input, running, scratch);
    }
    if (running) kernels.flush_sums(plans[0], running);
  });
}

char* level_data(const Tensor& stack, int64_t level) {
  return static_cast<char*>(stack.mutable_data_ptr()) +
         level * stack.stride(0) * int64_t(stack.element_size());
}

// Adds the partial sums and applies eq. foldgrad.
void finish(const Parameters& params, const Geometry& g, const Blocks& blocks, const Split& split,
            const Wanted& wanted, const double* partials, const Outputs& out) {
  const Kernels& kernels = kernels_for(dtype_of(params.base_weight));
  const auto& [grad_input, base_weight, base_bias, base_scale, weights, scales] = out;
  const int64_t slots = 1 + 4 * g.levels, tasks = 1 + g.levels, items = blocks.count * tasks;
  const int64_t cost = 16 * blocks.lanes * g.kernel_size * g.kernel_size * split.groups;
  for_each_item(items, worthwhile_threads(items, cost), [&](int64_t, int64_t item) {
    const int64_t block = item / tasks, level = item % tasks, i = level - 1;
    UnpackArgs args{};
    args.channels = g.channels, args.kernel_size = g.kernel_size, args.slots = slots;
    args.num_partials = split.groups, args.partials = partials;
    if (level == 0) {
      args.groups_per_channel = 1, args.slot = 0;
      args.weight = params.base_weight.const_data_ptr();
      args.scale = params.base_scale.const_data_ptr();
      args.bias = params.base_bias ? params.base_bias->const_data_ptr() : nullptr;
      args.grad_weight = wanted.base_weight ? base_weight.mutable_data_ptr() : nullptr;
      args.grad_scale = wanted.base_scale ? base_scale.mutable_data_ptr() : nullptr;
      args.grad_bias = wanted.base_bias ? base_bias.mutable_data_ptr() : nullptr;
    } else {
      args.groups_per_channel = 4, args.slot = 4 * level - 3;
      args.weight = params.weights[i].const_data_ptr();
      args.scale = params.scales[i].const_data_ptr();
      args.grad_weight = wanted.weight[i] ? level_data(weights, i) : nullptr;
      args.grad_scale = wanted.scale[i] ? level_data(scales, i) : nullptr;
    }
    kernels.unpack_block(args, block);
  });
}

void zero_fill(Tensor& t) { torch::stable::zero_(t); }

bool all_of(const std::vector<char>& flags) {
  return std::find(flags.begin(), flags.end(), 0) == flags.end();
}

Outputs fused_backward(const Tensor& grad_output, const Tensor& input, const Tensor& base_weight,
                       std::optional<Tensor> base_bias, const Tensor& base_scale,
                       std::vector<Tensor> wavelet_weights, std::vector<Tensor> wavelet_scales,
                       std::vector<bool> output_mask) {
  const Parameters given{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_grad(grad_output, input, given, output_mask);
  const Wanted wanted(output_mask);
  const Parameters params = prepare(given, dtype_of(input));
  Outputs out = allocate(input, params, wanted);
  // Levels of a stack that are not asked for are zero; so is every sum over an empty batch.
  const bool empty = input.numel() == 0;
  if (empty || !all_of(wanted.weight)) zero_fill(std::get<4>(out));
  if (empty || !all_of(wanted.scale)) zero_fill(std::get<5>(out));
  if (empty) {
    for (Tensor* t : {&std::get<1>(out), &std::get<2>(out), &std::get<3>(out)}) zero_fill(*t);
  } else if (wanted.input || wanted.any_sum) {
    const Geometry g = make_geometry(input.size(0), input.size(1), input.size(2), input.size(3),
                                     int64_t(params.weights.size()), base_weight.size(2));
    const Blocks blocks(dtype_of(input), g.channels);
    const Split split(g, blocks);
    const int64_t taps = g.kernel_size * g.kernel_size;
    const int64_t sums = (1 + 4 * g.levels) * taps + 1;
    const Workspace partials(input, wanted.any_sum ? blocks.count * split.groups * sums *
                                                         blocks.lanes * int64_t(sizeof(double))
                                                   : 0);
    double* data = reinterpret_cast<double*>(partials.data());
    run_tiles(grad_output, input, params, std::get<0>(out), g, blocks, split, wanted, data);
    if (wanted.any_sum) finish(params, g, blocks, split, wanted, data, out);
  }
  if (params.base_weight.scalar_type() != base_weight.scalar_type()) {
    std::apply(
        [&](Tensor&, auto&... grads) {
          ((grads = torch::stable::to(grads, base_weight.scalar_type())), ...);
        },
        out);
  }
  return out;
}

}  // namespace
}  // namespace wtconv::cpu

STABLE_TORCH_LIBRARY_IMPL(wtconv, CPU, m) {
  m.impl("fused_backward", TORCH_BOX(&wtconv::cpu::fused_backward));
}
