// What this library is, as JSON, for wtconv_ops._library.
#include <string>

#include "common/limits.h"
#include "cpu/engine.h"

namespace wtconv {
namespace {

std::string quoted_list(const char* const* names, int count) {
  std::string text = "[";
  for (int i = 0; i < count; ++i) text += (i ? ", \"" : "\"") + std::string(names[i]) + "\"";
  return text + "]";
}

// "9.0 10.0" -> ["9.0", "10.0"]
std::string split_list(const std::string& words) {
  std::string text = "[";
  for (size_t begin = 0; begin < words.size();) {
    size_t end = words.find(' ', begin);
    if (end == std::string::npos) end = words.size();
    if (end > begin)
      text += (text.size() > 1 ? ", \"" : "\"") + words.substr(begin, end - begin) + "\"";
    begin = end + 1;
  }
  return text + "]";
}

std::string build_info() {
#ifdef WTCONV_X86
  const char* isas[] = {cpu::kEngineBaseline.name, cpu::kEngineAvx2.name, cpu::kEngineAvx512.name};
#else
  const char* isas[] = {cpu::kEngineBaseline.name};
#endif
#ifdef WTCONV_CUDA
  const std::string cuda = "true";
#else
  const std::string cuda = "false";
#endif
  return "{\"version\": \"" WTCONV_VERSION "\", \"source_hash\": \"" WTCONV_SOURCE_HASH
         "\", \"cuda\": " +
         cuda + ", \"cuda_archs\": " + split_list(WTCONV_CUDA_ARCHS) +
         ", \"cpu_isas\": " + quoted_list(isas, sizeof(isas) / sizeof(isas[0])) +
         ", \"cpu_isa\": \"" + cpu::engine().name +
         "\", \"max_kernel_size\": " + std::to_string(kMaxKernelSize) +
         ", \"max_levels\": " + std::to_string(kMaxLevels) +
         ", \"dtypes\": " + quoted_list(kDTypeNames, kNumDTypes) + ", \"torch_target\": \"2.11\"}";
}

}  // namespace
}  // namespace wtconv

extern "C" __attribute__((visibility("default"))) const char* wtconv_build_info() {
  static const std::string info = wtconv::build_info();
  return info.c_str();
}
