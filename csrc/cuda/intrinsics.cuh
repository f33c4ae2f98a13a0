// What the patch kernels ask of the hardware in PTX: asynchronous copies, matrix instructions,
// overlap of kernels.
//
// Without a CUDA compiler cuda_on_cpu.h stands in for the keywords and for this: a test runs the
// kernels on the CPU (tests/cuda_on_cpu).
#pragma once

#ifdef __CUDACC__

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace wtconv::cuda {

// Starts a copy of 4, 8 or 16 bytes to shared memory, or of zeros. One of 16 goes past the L1 cache
// where not `kCached`.
template <int kBytes, bool kCached = (kBytes < 16)>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  const unsigned target = unsigned(__cvta_generic_to_shared(shared));
  if constexpr (!kCached && kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global),
                 "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(target), "l"(global),
                 "r"(inside ? kBytes : 0), "n"(kBytes)
                 : "memory");
  }
}
// Waits for the copies that this thread started; others see them behind a barrier.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Ends a group of copies; waits for the groups of this thread but the latest kLatest.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLatest>
__device__ __forceinline__ void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

// Lets blocks of the next kernel in the stream start, where it is launched to start early.
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the kernel before has ended, where it still runs; its writes are visible then.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Loads 8 x 8 matrices, a row of 16 bytes from the address of each lane: matrix m from the lanes
// 8 m on.
template <class T>
__device__ __forceinline__ void load_matrices(const T* row, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}
template <class T>
__device__ __forceinline__ void load_matrices(const T* row, uint32_t (&a)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(a[0]), "=r"(a[1])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// The same, each matrix transposed: a lane holds two rows of a column.
template <class T>
__device__ __forceinline__ void load_transposed(const T* row, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// sum += a b, 16 x 8 outputs in float32 over 16 columns of a, in the fragments of mma.sync.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same over 8 columns.
template <class T>
__device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[2], uint32_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
  }
}

// Loads two neighbouring columns. Not merged with an equal load: the operands of a product are four
// registers in a row, and a copy from register to register costs as much as a load.
template <class T>
__device__ __forceinline__ uint32_t load_pair(const T* p) {
  uint32_t pair;
  asm volatile("ld.volatile.shared.b32 %0, [%1];"
               : "=r"(pair)
               : "r"(unsigned(__cvta_generic_to_shared(p))));
  return pair;
}

}  // namespace wtconv::cuda

#else
#include "cuda_on_cpu.h"
#endif
