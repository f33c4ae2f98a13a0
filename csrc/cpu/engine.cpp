#include "engine.h"

#include <cstdlib>
#include <string>

namespace wtconv::cpu {
namespace {

const Engine& choose_engine() {
#ifdef WTCONV_X86
  // WTCONV_CPU_ISA=baseline|avx2 keeps to an older instruction set, to test it or to compare bits.
  const char* variable = std::getenv("WTCONV_CPU_ISA");
  const std::string limit = variable ? variable : "";
  if (limit != "baseline" && limit != "avx2" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq")) {
    return kEngineAvx512;
  }
  if (limit != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kEngineAvx2;
  }
#endif
  return kEngineBaseline;
}

}  // namespace

const Engine& engine() {
  static const Engine& chosen = choose_engine();
  return chosen;
}

}  // namespace wtconv::cpu
