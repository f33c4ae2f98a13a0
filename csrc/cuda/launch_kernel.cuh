// The launch of one kernel. Without a CUDA compiler cuda_on_cpu.h stands in, as for intrinsics.cuh.
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

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

}  // namespace wtconv::cuda

#else
#include "cuda_on_cpu.h"
#endif
