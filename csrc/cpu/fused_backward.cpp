// wtconv::fused_backward on the CPU, by the adjoint law: the input gradient is the operator applied
// to grad_output with every kernel rotated by 180 degrees and the padding mirrored; the weight
// gradients correlate the pyramids of input and grad_output. Both are formed from one read of the
// two tensors. Sums go to float64 partial sums whose number and order depend on the sizes alone, so
// results are bitwise repeatable with any number of threads.
#include <torch/csrc/stable/library.h>

#include "../common/gradients.h"
#include "host.h"

namespace wtconv::cpu {
namespace {

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

  const Kernels& kernels = blocks.kernels();
  const TileArgs args{g.channels, input_view(grad_output),
                      wanted.input ? output_view(grad_input) : View{}, weights, nullptr};
  const bool sum_bias = wanted.base_bias || (wanted.base_scale && params.base_bias);
  const GradArgs grad{input_view(input), slots, wanted.level, sum_bias};
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

// Adds the partial sums and applies eq. foldgrad.
void finish(const Parameters& params, const Geometry& g, const Blocks& blocks, const Split& split,
            const Wanted& wanted, const double* partials, const Gradients& out) {
  const Kernels& kernels = blocks.kernels(dtype_of(params.base_weight));
  const int64_t slots = 1 + 4 * g.levels, tasks = 1 + g.levels, items = blocks.count * tasks;
  const int64_t cost = 16 * blocks.lanes * g.kernel_size * g.kernel_size * split.groups;
  const int64_t threads = worthwhile_threads(items, cost);
  const int64_t scratch_bytes = aligned(unpack_scratch_bytes(g.kernel_size, blocks.vector_bytes));
  const Workspace scratch(params.base_weight, threads * scratch_bytes);
  for_each_item(items, threads, [&](int64_t thread, int64_t item) {
    const int64_t block = item / tasks, level = item % tasks;
    const bool base = level == 0;
    const Tensor& weight = base ? params.base_weight : params.weights[level - 1];
    const Tensor& scale = base ? params.base_scale : params.scales[level - 1];
    const bool biased = base && params.base_bias.has_value();
    kernels.unpack_block(
        {g.channels, g.kernel_size, base ? 1 : 4, base ? 0 : 4 * level - 3, slots, split.groups,
         partials, weight.const_data_ptr(), scale.const_data_ptr(),
         biased ? params.base_bias->const_data_ptr() : nullptr, out.weight(level, wanted),
         out.scale(level, wanted), base ? out.bias(wanted) : nullptr,
         scratch.data() + thread * scratch_bytes},
        block);
  });
}

Outputs fused_backward(const Tensor& grad_output, const Tensor& input, const Tensor& base_weight,
                       const std::optional<Tensor>& base_bias, const Tensor& base_scale,
                       const std::vector<Tensor>& wavelet_weights,
                       const std::vector<Tensor>& wavelet_scales,
                       const std::vector<bool>& output_mask) {
  Parameters given{base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales};
  check_grad(grad_output, input, given, output_mask);
  const Wanted wanted(output_mask);
  const Parameters params = prepare(std::move(given), dtype_of(input));
  Gradients out = allocate_gradients(input, params, wanted);
  out.input = allocate_input_gradient(input, wanted);
  if (input.numel() > 0 && (wanted.input || wanted.any_sum)) {
    const Geometry g = make_geometry(input.size(0), input.size(1), input.size(2), input.size(3),
                                     int64_t(params.weights.size()), base_weight.size(2));
    const Blocks blocks(dtype_of(input), g.channels);
    const Split split(g, blocks);
    const int64_t sums = ((1 + 4 * g.levels) * g.kernel_size * g.kernel_size + 1) * blocks.lanes;
    const int64_t bytes = blocks.count * split.groups * sums * int64_t(sizeof(double));
    const Workspace partials(input, wanted.any_sum ? bytes : 0);
    double* data = reinterpret_cast<double*>(partials.data());
    run_tiles(grad_output, input, params, out.input, g, blocks, split, wanted, data);
    if (wanted.any_sum) finish(params, g, blocks, split, wanted, data, out);
  }
  if (params.base_weight.scalar_type() != base_weight.scalar_type()) {
    for (Tensor* t :
         {&out.base_weight, &out.base_bias, &out.base_scale, &out.weights, &out.scales}) {
      *t = torch::stable::to(*t, base_weight.scalar_type());
    }
  }
  return out.tuple();
}

}  // namespace
}  // namespace wtconv::cpu

STABLE_TORCH_LIBRARY_IMPL(wtconv, CPU, m) {
  m.impl("fused_backward", TORCH_BOX(&wtconv::cpu::fused_backward));
  m.impl("_graph_backward", TORCH_BOX(&wtconv::cpu::fused_backward));
}
