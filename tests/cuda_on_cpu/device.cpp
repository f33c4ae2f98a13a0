// What the host code of csrc/cuda asks of torch and of the CUDA runtime, beside the launches: one
// device, that of tensors on the CPU, with the shared memory of an H200.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern "C" {

// Few: blocks run one after the other.
int multiprocessors = 1;

AOTITorchError aoti_torch_get_device_index(AtenTensorHandle, int32_t* index) {
  *index = 0;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return AOTI_TORCH_SUCCESS; }
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 * 1024;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

}  // extern "C"
