#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <utility>

#include "tensors.h"

namespace wtconv {
namespace {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using Sizes = std::initializer_list<int64_t>;

// An argument by its name, which becomes text only for an error: the checks run at every call.
struct Name {
  const char* argument;
  int64_t level = -1;  // of a list of tensors

  std::string str() const {
    return level < 0 ? argument : std::string(argument) + "[" + std::to_string(level) + "]";
  }
};

template <class Range>
std::string str(const Range& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

std::string shape(const Tensor& t) { return str(t.sizes()); }

template <class Range>
bool has_sizes(const Tensor& t, const Range& expected) {
  const IntHeaderOnlyArrayRef sizes = t.sizes();
  return std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end());
}

std::string dtype_name(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "another dtype";
  }
}

bool is_supported(const Tensor& t) {
  const std::string name = dtype_name(t);
  for (const char* supported : kDTypeNames) {
    if (name == supported) return true;
  }
  return false;
}

std::string device_name(const Tensor& t) {
  switch (t.device().type()) {
    case torch::headeronly::DeviceType::CPU:
      return "cpu";
    case torch::headeronly::DeviceType::CUDA:
      return "cuda:" + std::to_string(t.get_device_index());
    default:
      return "another device";
  }
}

// "float32, float64, float16 or bfloat16"
std::string supported_dtypes() {
  std::string text;
  for (int i = 0; i < kNumDTypes; ++i) {
    text += (i == 0 ? "" : i + 1 < kNumDTypes ? ", " : " or ") + std::string(kDTypeNames[i]);
  }
  return text;
}

void check_image(const std::string& op, const std::string& name, const Tensor& t) {
  if (t.dim() != 4) fail(op + name + " must be 4-D [B, C, H, W], got " + shape(t));
  if (!is_supported(t)) {
    fail(op + name + " must be " + supported_dtypes() + ", got " + dtype_name(t));
  }
  if (t.size(1) < 1 || t.size(2) < 1 || t.size(3) < 1) {
    fail(op + name + " must have C, H, W >= 1, got " + shape(t));
  }
}

void check_shape(const std::string& op, const Name& name, const char* symbols, const Tensor& t,
                 Sizes expected) {
  if (!has_sizes(t, expected)) {
    fail(op + name.str() + " must be " + symbols + " = " + str(expected) + ", got " + shape(t));
  }
}

bool is_depthwise_weight(const Tensor& t) {
  return t.dim() == 4 && t.size(1) == 1 && t.size(2) == t.size(3) && t.size(2) >= 1 &&
         t.size(2) <= kMaxKernelSize;
}

const std::string kKernelRange = "1 <= k <= " + std::to_string(kMaxKernelSize);

void check_levels(const std::string& op, const char* name, size_t levels) {
  if (levels < 1 || levels > size_t(kMaxLevels)) {
    fail(op + name + " must have 1 to " + std::to_string(kMaxLevels) + " levels, got " +
         std::to_string(levels));
  }
}

void check_parameter_shapes(const std::string& op, const Tensor& input, const Parameters& p) {
  const int64_t channels = input.size(1);
  if (!is_depthwise_weight(p.base_weight)) {
    fail(op + "base_weight must be [C, 1, k, k] with C = " + std::to_string(channels) + " and " +
         kKernelRange + ", got " + shape(p.base_weight));
  }
  if (p.base_weight.size(0) != channels) {
    fail(op + "input has " + std::to_string(channels) + " channels but base_weight has " +
         std::to_string(p.base_weight.size(0)) +
         "; WTConv keeps the channel count, use a 1x1 convolution to change it");
  }
  if (p.base_bias) check_shape(op, {"base_bias"}, "[C]", *p.base_bias, {channels});
  check_shape(op, {"base_scale"}, "[1, C, 1, 1]", p.base_scale, {1, channels, 1, 1});
  check_levels(op, "wavelet_weights", p.weights.size());
  if (p.weights.size() != p.scales.size()) {
    fail(op + "wavelet_weights and wavelet_scales must have the same length, got " +
         std::to_string(p.weights.size()) + " and " + std::to_string(p.scales.size()));
  }
  const int64_t k = p.base_weight.size(2);
  for (size_t i = 0; i < p.weights.size(); ++i) {
    check_shape(op, {"wavelet_weights", int64_t(i)}, "[4*C, 1, k, k]", p.weights[i],
                {4 * channels, 1, k, k});
    check_shape(op, {"wavelet_scales", int64_t(i)}, "[1, 4*C, 1, 1]", p.scales[i],
                {1, 4 * channels, 1, 1});
  }
}

// Takes what a C function of libtorch returned.
void check_shim(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("a call of libtorch failed");
}

// dtype and device as libtorch numbers them. Tensor::scalar_type() and Tensor::device() translate
// the numbers by asking libtorch for that of one dtype after the other, at every call.
int32_t dtype_number(const Tensor& t) {
  int32_t dtype = 0;
  check_shim(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

std::pair<int32_t, int32_t> device_numbers(const Tensor& t) {
  std::pair<int32_t, int32_t> device;
  check_shim(aoti_torch_get_device_type(t.get(), &device.first));
  check_shim(aoti_torch_get_device_index(t.get(), &device.second));
  return device;
}

template <class F>
void for_each_parameter(const Parameters& p, F f) {
  f({"base_weight"}, p.base_weight);
  if (p.base_bias) f({"base_bias"}, *p.base_bias);
  f({"base_scale"}, p.base_scale);
  for (size_t i = 0; i < p.weights.size(); ++i) f({"wavelet_weights", int64_t(i)}, p.weights[i]);
  for (size_t i = 0; i < p.scales.size(); ++i) f({"wavelet_scales", int64_t(i)}, p.scales[i]);
}

void check_same_dtype(const std::string& op, const Name& name, const Tensor& t, const char* of,
                      const Tensor& expected, const char* way_out = "") {
  if (dtype_number(t) != dtype_number(expected)) {
    fail(op + name.str() + " must have the dtype of " + of + ", " + dtype_name(expected) +
         ", got " + dtype_name(t) + way_out);
  }
}

void check_same_device(const std::string& op, const Name& name, const Tensor& t, const char* of,
                       const Tensor& expected) {
  if (device_numbers(t) != device_numbers(expected)) {
    fail(op + name.str() + " must be on the device of " + of + ", " + device_name(expected) +
         ", got " + device_name(t));
  }
}

// torch::stable::new_empty without its boxed call through torch's dispatcher, which takes longer.
Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  int32_t layout = aoti_torch_layout_strided(), device = 0;
  check_shim(aoti_torch_get_device_type(like.get(), &device));
  AtenTensorHandle result = nullptr;
  check_shim(aoti_torch_aten_new_empty(like.get(), sizes.data(), int64_t(sizes.size()), &type,
                                       &layout, &device, like.get_device_index(), nullptr,
                                       &result));
  return Tensor(result);
}

constexpr const char* kCastHint = "; convert one of them or use torch.autocast";

}  // namespace

void fail(const std::string& message) { throw std::runtime_error(message); }

void check_fused(const char* op_name, const Tensor& input, const Parameters& params,
                 DTypeRule rule) {
  const std::string op = std::string(op_name) + ": ";
  check_image(op, "input", input);
  check_parameter_shapes(op, input, params);
  if (rule == DTypeRule::kMixed && !is_supported(params.base_weight)) {
    fail(op + "base_weight must be " + supported_dtypes() + ", got " +
         dtype_name(params.base_weight));
  }
  for_each_parameter(params, [&](const Name& name, const Tensor& t) {
    if (rule == DTypeRule::kStrict) {
      check_same_dtype(op, name, t, "input", input, kCastHint);
    } else {
      check_same_dtype(op, name, t, "base_weight", params.base_weight);
    }
  });
  for_each_parameter(params, [&](const Name& name, const Tensor& t) {
    check_same_device(op, name, t, "input", input);
  });
}

void check_grad(const Tensor& grad_output, const Tensor& input, const Parameters& params,
                const std::vector<bool>& output_mask) {
  check_fused("fused_backward", input, params, DTypeRule::kMixed);
  const std::string op = "fused_backward: ";
  if (!has_sizes(grad_output, input.sizes())) {
    fail(op + "grad_output must be " + shape(input) + " like input, got " + shape(grad_output));
  }
  check_same_dtype(op, {"grad_output"}, grad_output, "input", input);
  check_same_device(op, {"grad_output"}, grad_output, "input", input);
  const size_t entries = 4 + 2 * params.weights.size();
  if (output_mask.size() != entries) {
    fail(op + "output_mask must have 4 + 2*levels = " + std::to_string(entries) + " entries, got " +
         std::to_string(output_mask.size()));
  }
  if (output_mask[2] && !params.base_bias) {
    fail(op + "output_mask asks for base_bias, but base_bias is None");
  }
}

void check_analysis_conv(const Tensor& input, const Tensor& weight, const Tensor& scale) {
  const std::string op = "analysis_conv: ";
  check_image(op, "input", input);
  const int64_t groups = 4 * input.size(1);
  if (!is_depthwise_weight(weight) || weight.size(0) != groups) {
    fail(op + "weight must be [4*C, 1, k, k] with 4*C = " + std::to_string(groups) + " and " +
         kKernelRange + ", got " + shape(weight));
  }
  check_shape(op, {"scale"}, "[1, 4*C, 1, 1]", scale, {1, groups, 1, 1});
  check_same_dtype(op, {"weight"}, weight, "input", input, kCastHint);
  check_same_dtype(op, {"scale"}, scale, "input", input, kCastHint);
  check_same_device(op, {"weight"}, weight, "input", input);
  check_same_device(op, {"scale"}, scale, "input", input);
}

void check_synthesis(const Tensor& base, const std::vector<Tensor>& coefficients) {
  const std::string op = "synthesis: ";
  check_image(op, "base", base);
  check_levels(op, "coefficients", coefficients.size());
  int64_t height = base.size(2), width = base.size(3);
  for (size_t i = 0; i < coefficients.size(); ++i) {
    height = (height + 1) / 2;
    width = (width + 1) / 2;
    const Sizes expected = {base.size(0), 4 * base.size(1), height, width};
    if (has_sizes(coefficients[i], expected)) continue;
    const std::string block = std::to_string(int64_t(2) << i);
    const std::string symbols = "[B, 4*C, ceil(H/" + block + "), ceil(W/" + block + ")]";
    check_shape(op, {"coefficients", int64_t(i)}, symbols.c_str(), coefficients[i], expected);
  }
  for (size_t i = 0; i < coefficients.size(); ++i) {
    check_same_dtype(op, {"coefficients", int64_t(i)}, coefficients[i], "base", base, kCastHint);
  }
  for (size_t i = 0; i < coefficients.size(); ++i) {
    check_same_device(op, {"coefficients", int64_t(i)}, coefficients[i], "base", base);
  }
}

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return DType::kFloat32;
  }
}

Tensor as_contiguous(Tensor tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

bool prefers_channels_last(const Tensor& tensor) {
  return tensor.size(1) > 1 && tensor.stride(1) == 1 && (tensor.size(2) > 1 || tensor.size(3) > 1);
}

Tensor empty_image(const Tensor& like, const std::vector<int64_t>& sizes, bool channels_last) {
  return allocate(like, sizes, like.scalar_type(), channels_last);
}

Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes,
                torch::headeronly::ScalarType dtype, bool channels_last) {
  try {
    if (!channels_last) return new_empty(like, sizes, dtype);
    return torch::stable::empty({sizes.data(), sizes.size()}, dtype, std::nullopt, like.device(),
                                std::nullopt, torch::headeronly::MemoryFormat::ChannelsLast);
  } catch (const std::exception&) {
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    fail(std::string("wtconv: out of memory: ") +
         (like.device().type() == torch::headeronly::DeviceType::CPU
              ? "DefaultCPUAllocator: can't allocate memory for"
              : "CUDA out of memory. Tried to allocate") +
         " a tensor of shape [" + shape + "]");
  }
}

}  // namespace wtconv
