// The launch of one kernel. Without a CUDA compiler cuda_on_cpu.h stands in, as for intrinsics.cuh.
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace wtconv::cuda {

// What is settled once per kernel and device.
struct Ready {
  cudaError_t error;  // of opting in to the shared memory of the device
  bool waits;         // its code has wait_for_previous_grid: an sm_80 binary or PTX has not
};

// `shared`: bytes that the blocks of a multiprocessor shall have of it, the rest being L1 cache; 0:
// CUDA decides, for as many blocks as fit.
template <class Kernel>
Ready make_ready(Kernel* kernel, int shared) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, Ready> all;
  int device = 0;
  cudaGetDevice(&device);
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto known = all.find(key); known != all.end()) return known->second;
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes code{};
  cudaError_t error = cudaFuncGetAttributes(&code, kernel);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error == cudaSuccess && shared > 0) {
    int all_shared = 0;
    cudaDeviceGetAttribute(&all_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    const int percent = int((int64_t(shared) * 100 + all_shared - 1) / all_shared);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 percent < 100 ? percent : 100);
  }
  const Ready ready{error, code.ptxVersion >= 90};
  if (error == cudaSuccess) all.emplace(key, ready);
  return ready;
}

// `early`: blocks may start while the kernel before this one still runs. Until they wait for it,
// they read only what was complete before the call's first kernel, an ordinary launch, began (x and
// the parameters), and write no memory, which an allocator may take from a kernel that still reads.
template <class Kernel, class Params>
const char* launch_kernel(Kernel* kernel, const Params& p, int64_t blocks, int threads,
                          int shared_bytes, cudaStream_t stream, bool early = false,
                          int shared = 0) {
  const Ready ready = make_ready(kernel, shared);
  cudaError_t error = ready.error;
  if (error == cudaSuccess) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared_bytes), config.stream = stream;
    config.attrs = &overlap, config.numAttrs = early && ready.waits;
    error = cudaLaunchKernelEx(&config, kernel, p);
  }
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // so that no later check reports it again
  return cudaGetErrorString(error);
}

}  // namespace wtconv::cuda

#else
#include "cuda_on_cpu.h"
#endif
