// What the library supports, in one list. Python reads it back through wtconv_build_info().
#pragma once

#include <cstdint>

namespace wtconv {

constexpr int64_t kMaxKernelSize = 31;
constexpr int64_t kMaxLevels = 32;

enum class DType : int { kFloat32, kFloat64, kFloat16, kBFloat16 };
constexpr int kNumDTypes = 4;
constexpr const char* kDTypeNames[kNumDTypes] = {"float32", "float64", "float16", "bfloat16"};

constexpr int element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Sums over half types are accumulated in float32.
constexpr bool accumulates_in_double(DType dtype) { return dtype == DType::kFloat64; }

}  // namespace wtconv
