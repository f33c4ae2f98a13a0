// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <utility>

#include "element.cuh"
#include "launch.h"

namespace wtconv::cuda {

// Opts in to the shared memory a kernel needs, once per kernel and device, and launches it.
template <class Kernel, class Params>
const char* launch_kernel(Kernel* kernel, const Params& p, int64_t blocks, int threads,
                          int shared_bytes, cudaStream_t stream) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> ready;
  int device = 0;
  cudaGetDevice(&device);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (ready.insert({reinterpret_cast<const void*>(kernel), device}).second) {
      int most = 0;
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      if (error != cudaSuccess) return cudaGetErrorString(error);
    }
  }
  kernel<<<dim3(unsigned(blocks)), threads, shared_bytes, stream>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
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
