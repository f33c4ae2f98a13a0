// The paper's staged form on the CPU: wtconv::analysis_conv (one level of Haar analysis, depthwise
// convolution with the folded scale) and wtconv::synthesis (bit-indexed, with the base add).
#include <torch/csrc/stable/library.h>

#include "host.h"

namespace wtconv::cpu {
namespace {

// Runs f(thread, batch item, block) over the whole planes of every channel block.
template <class F>
void for_each_plane_block(const Geometry& g, const Blocks& blocks, int64_t threads, const F& f) {
  for_each_item(g.batch * blocks.count, threads, [&](int64_t thread, int64_t item) {
    f(thread, item / blocks.count, item % blocks.count);
  });
}

int64_t threads_for(const Geometry& g, const Blocks& blocks) {
  return worthwhile_threads(g.batch * blocks.count, g.kernel_size * g.kernel_size * g.height[0] *
                                                        g.width[0] * blocks.lanes);
}

std::tuple<Tensor, Tensor> analysis_conv(const Tensor& input, const Tensor& given_weight,
                                         const Tensor& given_scale) {
  check_analysis_conv(input, given_weight, given_scale);
  const int64_t batch = input.size(0), channels = input.size(1);
  const Geometry g =
      make_geometry(batch, channels, input.size(2), input.size(3), 1, given_weight.size(2));
  const bool channels_last = prefers_channels_last(input);
  Tensor coefficients =
      empty_image(input, {batch, 4 * channels, g.height[1], g.width[1]}, channels_last);
  Tensor lowpass = empty_image(input, {batch, channels, g.height[1], g.width[1]}, channels_last);
  if (input.numel() == 0) return {coefficients, lowpass};

  const Tensor weight = as_contiguous(given_weight);
  const Tensor scale = as_contiguous(given_scale);
  const Blocks blocks(dtype_of(input), channels);
  const Kernels& kernels = blocks.kernels();
  const TilePlan plan = plan_tile(g, forward_padding(g.kernel_size), 0, g.height[0]);
  const int64_t threads = threads_for(g, blocks);
  const int64_t packed_size =
      aligned(blocks.count * 4 * g.kernel_size * g.kernel_size * blocks.vector_bytes);
  const int64_t scratch_size = aligned(plan.total_vectors * blocks.vector_bytes);
  const Workspace workspace(input, packed_size + threads * scratch_size);
  const PackArgs pack{
      channels, g.kernel_size,   false, weight.const_data_ptr(), scale.const_data_ptr(), 4, 0,
      4,        workspace.data()};
  for (int64_t block = 0; block < blocks.count; ++block) kernels.pack_block(pack, block);
  for_each_plane_block(g, blocks, threads, [&](int64_t thread, int64_t item, int64_t block) {
    kernels.analysis_conv_tile({channels, item, block, input_view(input), output_view(coefficients),
                                output_view(lowpass), nullptr, workspace.data()},
                               plan, workspace.data() + packed_size + thread * scratch_size);
  });
  return {coefficients, lowpass};
}

Tensor synthesis(const Tensor& base, std::vector<Tensor> coefficients) {
  check_synthesis(base, coefficients);
  Tensor output =
      empty_image(base, {base.sizes().begin(), base.sizes().end()}, prefers_channels_last(base));
  if (output.numel() == 0) return output;

  const Geometry g = make_geometry(base.size(0), base.size(1), base.size(2), base.size(3),
                                   int64_t(coefficients.size()), 1);
  const Blocks blocks(dtype_of(base), g.channels);
  const Kernels& kernels = blocks.kernels();
  const TilePlan plan = plan_tile(g, Padding{0, 0, 0, 0}, 0, g.height[0]);
  std::vector<View> views;
  for (const Tensor& t : coefficients) views.push_back(input_view(t));
  const int64_t threads = threads_for(g, blocks);
  const int64_t scratch_size = aligned(plan.total_vectors * blocks.vector_bytes);
  const Workspace workspace(base, threads * scratch_size);
  for_each_plane_block(g, blocks, threads, [&](int64_t thread, int64_t item, int64_t block) {
    kernels.synthesis_tile({g.channels, item, block, input_view(base), output_view(output), View{},
                            views.data(), nullptr},
                           plan, workspace.data() + thread * scratch_size);
  });
  return output;
}

}  // namespace
}  // namespace wtconv::cpu

STABLE_TORCH_LIBRARY_IMPL(wtconv, CPU, m) {
  m.impl("analysis_conv", TORCH_BOX(&wtconv::cpu::analysis_conv));
  m.impl("synthesis", TORCH_BOX(&wtconv::cpu::synthesis));
}
