#include "engine.h"

#include <cstdlib>
#include <string>
#include <vector>

namespace wtconv::cpu {
namespace {

// The engines of this machine, narrowest vectors first.
std::vector<const Engine*> find_engines() {
  std::vector<const Engine*> engines{&kEngineBaseline};
#ifdef WTCONV_X86
  // WTCONV_CPU_ISA=baseline|avx2 keeps to an older instruction set, to test it or to compare bits.
  // The Python package warns of values that are no instruction set of build_info.cpp.
  const char* variable = std::getenv("WTCONV_CPU_ISA");
  const std::string limit = variable ? variable : "";
  if (limit == "baseline" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return engines;
  }
  engines.push_back(&kEngineAvx2);
  if (limit != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")) {
    engines.push_back(&kEngineAvx512);
  }
#endif
  return engines;
}

const std::vector<const Engine*>& engines() {
  static const std::vector<const Engine*> found = find_engines();
  return found;
}

}  // namespace

const Engine& engine() { return *engines().back(); }

const Engine& engine_for(int64_t channels, DType dtype) {
  const int64_t bytes = channels * (accumulates_in_double(dtype) ? 8 : 4);
  for (const Engine* candidate : engines()) {
    if (candidate->vector_bytes >= bytes) return *candidate;
  }
  return engine();
}

}  // namespace wtconv::cpu
