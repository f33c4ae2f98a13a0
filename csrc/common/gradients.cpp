#include "gradients.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace wtconv {
namespace {

Tensor gradient(const Tensor& like, std::vector<int64_t> sizes, bool wanted, bool zero) {
  if (!wanted) sizes = {0};
  Tensor result = allocate(like, sizes, like.scalar_type());
  if (wanted && zero) torch::stable::zero_(result);
  return result;
}

bool any(const std::vector<char>& flags) {
  return std::find(flags.begin(), flags.end(), 1) != flags.end();
}

bool all(const std::vector<char>& flags) {
  return std::find(flags.begin(), flags.end(), 0) == flags.end();
}

void* at(const Tensor& stack, int64_t level) {
  return static_cast<char*>(stack.mutable_data_ptr()) +
         level * stack.stride(0) * int64_t(stack.element_size());
}

}  // namespace

Wanted::Wanted(const std::vector<bool>& mask)
    : input(mask[0]), base_weight(mask[1]), base_bias(mask[2]), base_scale(mask[3]) {
  const size_t levels = (mask.size() - 4) / 2;
  level[0] = base_weight || base_scale;
  any_sum = base_bias || level[0];
  for (size_t i = 0; i < levels; ++i) {
    weights.push_back(mask[4 + i]);
    scales.push_back(mask[4 + levels + i]);
    level[i + 1] = weights[i] || scales[i];
    any_sum |= level[i + 1];
  }
}

void* Gradients::weight(int64_t level, const Wanted& wanted) const {
  if (level == 0) return wanted.base_weight ? base_weight.mutable_data_ptr() : nullptr;
  return wanted.weights[level - 1] ? at(weights, level - 1) : nullptr;
}

void* Gradients::scale(int64_t level, const Wanted& wanted) const {
  if (level == 0) return wanted.base_scale ? base_scale.mutable_data_ptr() : nullptr;
  return wanted.scales[level - 1] ? at(scales, level - 1) : nullptr;
}

void* Gradients::bias(const Wanted& wanted) const {
  return wanted.base_bias ? base_bias.mutable_data_ptr() : nullptr;
}

Tensor allocate_input_gradient(const Tensor& input, const Wanted& wanted) {
  if (!wanted.input) return gradient(input, {}, false, false);
  return empty_image(input, {input.sizes().begin(), input.sizes().end()},
                     prefers_channels_last(input));
}

Gradients allocate_gradients(const Tensor& input, const Parameters& p, const Wanted& wanted) {
  const int64_t c = input.size(1), k = p.base_weight.size(2), levels = int64_t(p.weights.size());
  const bool empty = input.numel() == 0;
  const Tensor& like = p.base_weight;
  return {
      Tensor(),
      gradient(like, {c, 1, k, k}, wanted.base_weight, empty),
      gradient(like, {c}, wanted.base_bias, empty),
      gradient(like, {1, c, 1, 1}, wanted.base_scale, empty),
      gradient(like, {levels, 4 * c, 1, k, k}, any(wanted.weights), empty || !all(wanted.weights)),
      gradient(like, {levels, 1, 4 * c, 1, 1}, any(wanted.scales), empty || !all(wanted.scales))};
}

}  // namespace wtconv
