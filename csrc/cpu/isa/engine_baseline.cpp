// The CPU kernels for the instruction set every machine of this architecture has (SSE2, NEON).
#include "../engine.h"
#include "../kernels/includes.h"

namespace wtconv::cpu::baseline {
constexpr int kVectorBytes = 16;
#include "../kernels/engine.inc"
}  // namespace wtconv::cpu::baseline

namespace wtconv::cpu {
constexpr Engine kEngineBaseline = baseline::make_engine("baseline");
}
