// The CPU kernels for x86-64 with AVX-512 F, VL, BW and DQ.
#include "../engine.h"
#include "../kernels/includes.h"

namespace wtconv::cpu::avx512 {
constexpr int kVectorBytes = 64;
#include "../kernels/engine.inc"
}  // namespace wtconv::cpu::avx512

namespace wtconv::cpu {
constexpr Engine kEngineAvx512 = avx512::make_engine("avx512");
}
