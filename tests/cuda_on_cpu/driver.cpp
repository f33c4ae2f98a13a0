// What tests/emulator.py calls of launch.h, by the names of C; and kernels with a fault each, which
// the emulator must find.
#include "launch.h"
#include "launch_kernel.cuh"

namespace wtconv::cuda {
namespace {

enum Fault { kOutside, kMisaligned, kWildStore, kDivergence, kNoWait, kRace, kEarlyRead, kNone };

struct FaultLaunch {
  Fault fault;
  float* output;  // [64]
};

// out[i] = value i + 1 of 64, by way of shared memory.
__global__ void faulty_kernel(FaultLaunch p) {
  const int id = int(threadIdx.x);
  alignas(16) static float source[64];
  extern __shared__ __align__(16) unsigned char shared[];
  float* values = reinterpret_cast<float*>(shared);
  source[id] = float(id);
  if (p.fault == kOutside) copy_async<16>(values + 64, source, true);
  if (p.fault == kMisaligned) copy_async<16>(values + 1, source, true);
  if (p.fault == kWildStore) values[64 + id] = 0;
  copy_async<4>(values + id, source + id, true);
  if (p.fault == kDivergence && id % 2 == 0) __shfl_xor_sync(~0u, id, 1);
  if (p.fault != kEarlyRead) wait_for_copies();
  if (p.fault != kRace) __syncthreads();
  p.output[id] = values[(id + 1) % 64];
}

}  // namespace
}  // namespace wtconv::cuda

using namespace wtconv;
using namespace wtconv::cuda;

extern "C" {

// Sizes of the structs that the caller mirrors.
int struct_sizes[] = {sizeof(PatchLaunch), sizeof(LowpassPlanesLaunch), sizeof(PatchGradLaunch),
                      sizeof(FinishLaunch), sizeof(LowpassLaunch)};

const char* forward(const PatchLaunch& p, DType dtype, int multiprocessors) {
  if (p.group > 0) return launch_group_forward(p, dtype, multiprocessors, nullptr);
  if (p.cells > 0) return launch_patch_planes(p, dtype, multiprocessors, nullptr);
  return dtype == DType::kFloat32 ? launch_patch_forward(p, multiprocessors, nullptr)
                                  : launch_mma_forward(p, dtype, multiprocessors, nullptr);
}

const char* lowpass_planes(const LowpassPlanesLaunch& p, DType) {
  return launch_lowpass_planes(p, nullptr);
}

const char* weight_grad(const PatchGradLaunch& p, DType dtype) {
  if (p.group > 0) return launch_group_weight_grad(p, dtype, nullptr);
  return p.cells > 0 || dtype == DType::kFloat32 ? launch_patch_weight_grad(p, dtype, nullptr)
                                                 : launch_mma_weight_grad(p, dtype, nullptr);
}

const char* finish(const FinishLaunch& p, DType dtype) { return launch_finish(p, dtype, nullptr); }

const char* lowpass(const LowpassLaunch& p, DType dtype) {
  return launch_lowpass(p, dtype, nullptr);
}

const char* faulty(Fault fault, float* output) {
  return launch_kernel(&faulty_kernel, FaultLaunch{fault, output}, 1, 64, 256, nullptr,
                       fault == kNoWait);
}

}  // extern "C"
