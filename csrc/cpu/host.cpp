#include "host.h"

namespace wtconv::cpu {

Parameters prepare(Parameters params, DType activations) {
  const bool in_double = accumulates_in_double(activations);
  const bool convert = in_double != accumulates_in_double(dtype_of(params.base_weight));
  const auto scalar =
      in_double ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  params.for_each(
      [&](Tensor& t) { t = as_contiguous(convert ? torch::stable::to(t, scalar) : std::move(t)); });
  return params;
}

int64_t packed_bytes(const Geometry& g, const Blocks& blocks) {
  return blocks.count * (1 + 4 * g.levels) * g.kernel_size * g.kernel_size * blocks.vector_bytes;
}

void pack_parameters(const Parameters& params, const Geometry& g, const Blocks& blocks, bool rotate,
                     char* weights, char* bias) {
  const Kernels& kernels = blocks.kernels(dtype_of(params.base_weight));
  const int64_t slots = 1 + 4 * g.levels, tasks = 1 + g.levels;
  const int64_t cost = 16 * blocks.lanes * g.kernel_size * g.kernel_size;
  const int64_t items = blocks.count * tasks;
  for_each_item(items, worthwhile_threads(items, cost), [&](int64_t, int64_t item) {
    const int64_t block = item / tasks, level = item % tasks;
    const bool base = level == 0;
    const Tensor& weight = base ? params.base_weight : params.weights[level - 1];
    const Tensor& scale = base ? params.base_scale : params.scales[level - 1];
    kernels.pack_block(
        {g.channels, g.kernel_size, rotate, weight.const_data_ptr(), scale.const_data_ptr(),
         base ? 1 : 4, base ? 0 : 4 * level - 3, slots, weights},
        block);
    if (base && bias) {
      kernels.pack_block({g.channels, 1, false, params.base_bias->const_data_ptr(),
                          scale.const_data_ptr(), 1, 0, 1, bias},
                         block);
    }
  });
}

}  // namespace wtconv::cpu
