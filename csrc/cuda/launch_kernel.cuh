// The launch of one kernel, and the boxes of its tensors. Without a CUDA compiler cuda_on_cpu.h
// stands in, as for intrinsics.cuh.
#pragma once

#ifdef __CUDACC__

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "box.h"
#include "parameters.h"

namespace wtconv::cuda {

// Fills `map` for the boxes of a tensor; false where bulk copies cannot move them: their rows begin
// at multiples of 16 bytes, and no dimension is expanded.
inline bool describe_boxes(BoxMap& map, const View& v, int element_bytes, int64_t batch,
                           int channels, int height, int width, const BoxShape& box) {
  static_assert(sizeof(BoxMap) == sizeof(CUtensorMap) && alignof(BoxMap) >= alignof(CUtensorMap));
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode || v.stride_x != 1 || std::min({v.stride_y, v.stride_c, v.stride_b}) <= 0)
    return false;
  // The driver refuses others, but tools report its refusal as an error of the program.
  const auto aligned = [](int64_t bytes) { return bytes % 16 == 0; };
  if (!aligned(int64_t(reinterpret_cast<uintptr_t>(v.data)))) return false;
  const cuuint64_t sizes[] = {cuuint64_t(width), cuuint64_t(height), cuuint64_t(channels),
                              cuuint64_t(batch)};
  cuuint64_t strides[] = {cuuint64_t(v.stride_y), cuuint64_t(v.stride_c), cuuint64_t(v.stride_b)};
  for (cuuint64_t& stride : strides) {
    stride *= cuuint64_t(element_bytes);
    if (!aligned(int64_t(stride))) return false;
  }
  const cuuint32_t extent[] = {cuuint32_t(box.cols), cuuint32_t(box.rows * box.row_step),
                               cuuint32_t(box.channels), cuuint32_t(box.items)};
  const cuuint32_t steps[] = {1, cuuint32_t(box.row_step), 1, 1};
  return encode(
             reinterpret_cast<CUtensorMap*>(&map),
             element_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
             4, v.data, sizes, strides, extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Bytes of a multiprocessor: as many as there are. For kernels beside which others start: while any
// block runs the split stays, and those that want more shared memory would hold fewer blocks.
constexpr int kAllShared = 1 << 20;

// What is settled once per kernel and device.
struct Ready {
  cudaError_t error;  // of opting in to the shared memory of the device
  bool sm_90;         // its code has what intrinsics.cuh keeps to sm_90: an sm_80 binary has not
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

// Whether the code of a kernel has bulk copies; `shared` as in its launch.
template <class Kernel>
bool has_bulk_copies(Kernel* kernel, int shared = 0) {
  return make_ready(kernel, shared).sm_90;
}

// `early`: blocks may start while the kernel before this one, of the same call, still runs. The
// rules, for which an ordinary launch, as the first of a call is, has waited:
//
//   - A kernel lets the next one start only behind its own wait. So where a block starts, all
//     kernels but the one before have ended: what they wrote may be read without waiting. (PTX
//     promises to show it only behind a wait of this kernel. It is in L2, and in no L1 cache, for
//     nobody reads it before it is written.)
//   - It waits before it reads what the one before writes, and before it writes to what was
//     allocated since the first launch: an allocator may hand out memory that is still read.
//   - All its threads wait before they end, so that where a kernel has ended, all before it have.
template <class Kernel, class Params>
const char* launch_kernel(Kernel* kernel, const Params& p, int64_t blocks, dim3 threads,
                          int shared_bytes, cudaStream_t stream, bool early = false,
                          int shared = 0) {
  const Ready ready = make_ready(kernel, shared);
  cudaError_t error = ready.error;
  if (error == cudaSuccess) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks)), config.blockDim = threads;
    config.dynamicSmemBytes = size_t(shared_bytes), config.stream = stream;
    config.attrs = &overlap, config.numAttrs = early && ready.sm_90;
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
