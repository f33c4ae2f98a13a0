// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include "element.cuh"
#include "launch.h"
#include "launch_kernel.cuh"
#include "patch/choose.h"

namespace wtconv::cuda {

// Shares the tiles of each channel among blocks, of which the multiprocessors hold `slots` at once.
inline void share_tiles(PatchLaunch& p, int slots, int most_tiles = INT32_MAX) {
  p.splits = split_tiles(p.channels, p.tiles, slots, most_tiles);
  p.together = blocks_together(p.channels, p.splits, slots);
}

// A forward patch kernel of which the multiprocessors hold `slots` blocks at once.
template <class Kernel>
const char* launch_patches(Kernel* kernel, PatchLaunch p, int slots, int shared_bytes,
                           cudaStream_t stream, bool early) {
  share_tiles(p, slots);
  return launch_kernel(kernel, p, int64_t(p.channels) * p.splits, kPatchThreads, shared_bytes,
                       stream, early, kAllShared);
}

// f(T()) for the stored type of a dtype that accumulates in float.
template <class F>
const char* dispatch_float(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
    default:
      return f(float());
  }
}

// f(T(), A()) for the stored type of a dtype and its accumulator type.
template <class F>
const char* dispatch(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double(), double());
    case DType::kFloat16:
      return f(__half(), float());
    case DType::kBFloat16:
      return f(__nv_bfloat16(), float());
    default:
      return f(float(), float());
  }
}

}  // namespace wtconv::cuda
