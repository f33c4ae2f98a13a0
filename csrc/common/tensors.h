// What the host functions of every backend share: checks with their sentences, and output layouts.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "limits.h"

namespace wtconv {

using torch::stable::Tensor;

// The parameters of one call, as the schema of fused_forward orders them.
struct Parameters {
  Tensor base_weight;               // [C, 1, k, k]
  std::optional<Tensor> base_bias;  // [C]
  Tensor base_scale;                // [1, C, 1, 1]
  std::vector<Tensor> weights;      // per level [4C, 1, k, k]
  std::vector<Tensor> scales;       // per level [1, 4C, 1, 1]

  // f(tensor) for every parameter.
  template <class F>
  void for_each(F f) {
    f(base_weight);
    if (base_bias) f(*base_bias);
    f(base_scale);
    for (Tensor& t : weights) f(t);
    for (Tensor& t : scales) f(t);
  }
};

// Strict: parameters have the input's dtype. Mixed: any one floating dtype (autocast).
enum class DTypeRule { kStrict, kMixed };

// Each throws std::runtime_error with one sentence that names the op and the argument, in the order
// and words of wtconv_ops/_checks.py.
void check_fused(const char* op, const Tensor& input, const Parameters& params, DTypeRule rule);
void check_grad(const Tensor& grad_output, const Tensor& input, const Parameters& params,
                const std::vector<bool>& output_mask);
void check_analysis_conv(const Tensor& input, const Tensor& weight, const Tensor& scale);
void check_synthesis(const Tensor& base, const std::vector<Tensor>& coefficients);

[[noreturn]] void fail(const std::string& message);

// The dtype of a checked tensor.
DType dtype_of(const Tensor& tensor);

// The tensor itself where it is contiguous, without a call through torch's dispatcher.
Tensor as_contiguous(Tensor tensor);

// Layout of an output made from `tensor`: channels_last where its channels are consecutive, of an
// empty batch too. A single channel or pixel has none.
bool prefers_channels_last(const Tensor& tensor);

// A new dense tensor with the dtype and device of `like`, channels_last or contiguous.
Tensor empty_image(const Tensor& like, const std::vector<int64_t>& sizes, bool channels_last);
// An uninitialised tensor on the device of `like`. Through torch's stable interface a failed
// allocation has neither its type nor its text: the sentence that it fails with here is what the
// Python kernels raise as torch.OutOfMemoryError. It has the words of torch's own errors, which
// batch-size finders look for.
Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes,
                torch::headeronly::ScalarType dtype, bool channels_last = false);

}  // namespace wtconv
