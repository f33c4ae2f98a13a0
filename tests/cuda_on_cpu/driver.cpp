// What tests/emulator.py calls of launch.h, by the names of C; and kernels with a fault each, which
// the emulator must find.
#include "launch.h"
#include "launch_kernel.cuh"
#include "patch/layout.h"

namespace wtconv::cuda {
namespace {

enum Fault {
  kOutside,
  kMisaligned,
  kWildStore,
  kDivergence,
  kNoWait,
  kEarlyRelease,
  kOtherTeam,
  kLargeTeam,
  kGoneMember,
  kRace,
  kEarlyRead,
  kNone
};

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
  if (p.fault == kEarlyRelease) let_next_grid_start();
  if (p.fault == kOtherTeam) sync_team<32>(1);
  if (p.fault == kLargeTeam) sync_team<96>(0);
  if (p.fault == kGoneMember) {
    if (id < 32) return;
    sync_team<64>(0);
  }
  if (p.fault != kRace) __syncthreads();
  p.output[id] = values[(id + 1) % 64];
}

enum class BoxFault {
  kNotReady,
  kNotArmed,
  kArmedTwice,
  kOtherBytes,
  kMisplaced,
  kOddColumn,
  kNoFence,
  kOverwritten,
  kNotRead,
  kNotArrived,
  kEarlyRead,
  kNone
};

struct BoxLaunch {
  BoxFault fault;
  BoxMap input, output;  // [1, 1, 4, 16]
};

// out[i] = in[i] + 1 of 64 values, which travel as boxes.
__global__ void faulty_boxes_kernel(BoxLaunch p) {
  using enum BoxFault;
  const int id = int(threadIdx.x), bytes = p.fault == kOtherBytes ? 128 : 256;
  extern __shared__ __align__(16) unsigned char shared[];
  float* values = reinterpret_cast<float*>(shared);
  uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + 320);
  if (id == 0) {
    if (p.fault != kNotReady) init_byte_barrier(barrier);
    if (p.fault != kNotArmed) expect_bytes(barrier, bytes);
    if (p.fault == kArmedTwice) expect_bytes(barrier, bytes);
    load_box(p.fault == kMisplaced ? shared + 64 : shared, p.input, 0, 0, 0,
             p.fault == kOddColumn ? 1 : 0, barrier);
  }
  __syncthreads();
  const float early = values[id];
  if (p.fault != kNotArrived) wait_for_bytes(barrier, 0);
  __syncthreads();
  const float value = (p.fault == kEarlyRead ? early : values[id]) + 1;
  __syncthreads();
  values[id] = value;
  if (p.fault != kNoFence) fence_for_boxes();
  __syncthreads();
  if (id == 0) store_box(values, p.output, 0, 0, 0, 0);
  if (p.fault == kOverwritten) values[id] = 0;
  if (p.fault != kNotRead) wait_for_box_reads();
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
  return launch_patch_operator(p, dtype, multiprocessors, nullptr);
}

const char* lowpass_planes(const LowpassPlanesLaunch& p, DType) {
  return launch_lowpass_planes(p, nullptr);
}

const char* weight_grad(const PatchGradLaunch& p, DType dtype) {
  return launch_patch_gradients(p, dtype, nullptr);
}

bool gives_input_grad(int element_bytes, int kernel_size, int cells) {
  return input_grad_fits(element_bytes, kernel_size, cells);
}

const char* finish(const FinishLaunch& p, DType dtype) { return launch_finish(p, dtype, nullptr); }

const char* lowpass(const LowpassLaunch& p, DType dtype) {
  return launch_lowpass(p, dtype, nullptr);
}

const char* faulty(Fault fault, float* output) {
  return launch_kernel(&faulty_kernel, FaultLaunch{fault, output}, 1, 64, 256, nullptr,
                       fault == kNoWait || fault == kEarlyRelease);
}

const char* faulty_boxes(BoxFault fault, float* output) {
  alignas(16) static float source[64];
  for (int i = 0; i < 64; ++i) source[i] = float(i);
  BoxLaunch p{fault, {}, {}};
  const auto describe = [](BoxMap& map, float* data) {
    return describe_boxes(map, {data, 64, 64, 16, 1}, 4, 1, 1, 4, 16, {16, 4, 1, false});
  };
  if (!describe(p.input, source) || !describe(p.output, output)) return "not aligned";
  return launch_kernel(&faulty_boxes_kernel, p, 1, 64, 328, nullptr);
}

}  // extern "C"
