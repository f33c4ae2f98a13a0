// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "element.cuh"
#include "launch.h"
#include "patch/choose.h"

namespace wtconv::cuda {

// Opts a kernel in to the shared memory of the device, once per kernel and device.
template <class Kernel>
const char* opt_in(Kernel* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> ready;
  int device = 0;
  cudaGetDevice(&device);
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  std::lock_guard<std::mutex> lock(mutex);
  if (ready.count(key)) return nullptr;
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  ready.insert(key);
  return nullptr;
}

template <class Kernel, class Params>
const char* launch_kernel(Kernel* kernel, const Params& p, int64_t blocks, int threads,
                          int shared_bytes, cudaStream_t stream) {
  if (const char* error = opt_in(kernel)) return error;
  kernel<<<dim3(unsigned(blocks)), threads, shared_bytes, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// A forward patch kernel of which the multiprocessors hold `slots` blocks at once.
template <class Kernel>
const char* launch_patches(Kernel* kernel, PatchLaunch p, int slots, int shared_bytes,
                           cudaStream_t stream) {
  p.splits = split_tiles(p.channels, p.tiles, slots);
  return launch_kernel(kernel, p, int64_t(p.channels) * p.splits, kPatchThreads, shared_bytes,
                       stream);
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
