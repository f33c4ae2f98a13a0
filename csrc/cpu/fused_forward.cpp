// wtconv::fused_forward on the CPU: one pass over the input, tile by tile (engine.h).
#include <torch/csrc/stable/library.h>

#include "../common/entry.h"
#include "host.h"

namespace wtconv::cpu {
namespace {

Tensor run(const Tensor& input, Parameters given, bool channels_last) {
  Tensor output = empty_image(input, {input.sizes().begin(), input.sizes().end()}, channels_last);
  if (output.numel() == 0) return output;

  const Parameters params = prepare(std::move(given), dtype_of(input));
  const Geometry g = make_geometry(input.size(0), input.size(1), input.size(2), input.size(3),
                                   int64_t(params.weights.size()), params.base_weight.size(2));
  const Blocks blocks(dtype_of(input), g.channels);
  const Padding pad = forward_padding(g.kernel_size);
  const int64_t tile_rows = choose_tile_rows(g, blocks.vector_bytes, blocks.count);
  const int64_t tiles = (g.height[0] + tile_rows - 1) / tile_rows;

  std::vector<TilePlan> plans;
  int64_t scratch_vectors = 0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    plans.push_back(
        plan_tile(g, pad, tile * tile_rows, std::min(g.height[0], (tile + 1) * tile_rows)));
    scratch_vectors = std::max(scratch_vectors, plans.back().total_vectors);
  }

  const int64_t items = g.batch * tiles * blocks.count;
  const int64_t cost = 2 * g.kernel_size * g.kernel_size * tile_rows * g.width[0] * blocks.lanes;
  const int64_t threads = worthwhile_threads(items, cost);
  const int64_t weight_bytes = aligned(packed_bytes(g, blocks));
  const int64_t bias_bytes = aligned(blocks.count * blocks.vector_bytes);
  const int64_t scratch_bytes = aligned(scratch_vectors * blocks.vector_bytes);
  const Workspace workspace(input, weight_bytes + bias_bytes + threads * scratch_bytes);
  char* weights = workspace.data();
  char* bias = params.base_bias ? weights + weight_bytes : nullptr;
  char* scratch = weights + weight_bytes + bias_bytes;
  pack_parameters(params, g, blocks, false, weights, bias);

  const Kernels& kernels = blocks.kernels();
  const TileArgs args{g.channels, input_view(input), output_view(output), weights, bias};
  for_each_item(items, threads, [&](int64_t thread, int64_t item) {
    const int64_t block = item % blocks.count, tile = item / blocks.count % tiles;
    kernels.forward_tile(args, plans[tile], item / blocks.count / tiles, block,
                         scratch + thread * scratch_bytes);
  });
  return output;
}

constexpr auto* kStrict = &checked_forward<&run, DTypeRule::kStrict>;
constexpr auto* kMixed = &checked_forward<&run, DTypeRule::kMixed>;
constexpr auto* kGraph = &graph_forward<&run>;

}  // namespace
}  // namespace wtconv::cpu

STABLE_TORCH_LIBRARY_IMPL(wtconv, CPU, m) {
  m.impl("fused_forward", TORCH_BOX(wtconv::cpu::kStrict));
  m.impl("_fused_forward", TORCH_BOX(wtconv::cpu::kMixed));
  m.impl("_graph_forward", TORCH_BOX(wtconv::cpu::kGraph));
}
