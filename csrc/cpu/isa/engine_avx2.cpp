// The CPU kernels for x86-64 with AVX2 and FMA.
#include "../engine.h"
#include "../kernels/includes.h"

namespace wtconv::cpu::avx2 {
constexpr int kVectorBytes = 32;
#include "../kernels/engine.inc"
}  // namespace wtconv::cpu::avx2

namespace wtconv::cpu {
constexpr Engine kEngineAvx2 = avx2::make_engine("avx2");
}
