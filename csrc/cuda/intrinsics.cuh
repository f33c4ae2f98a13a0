// What the patch kernels ask of the hardware in PTX: asynchronous and bulk copies, matrix
// instructions, overlap of kernels.
//
// Without a CUDA compiler cuda_on_cpu.h stands in for the keywords and for this: a test runs the
// kernels on the CPU (tests/cuda_on_cpu).
#pragma once

#ifdef __CUDACC__

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "box.h"

namespace wtconv::cuda {

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return unsigned(__cvta_generic_to_shared(p));
}

// Starts a copy of 4, 8 or 16 bytes to shared memory, or of zeros. One of 16 goes past the L1 cache
// where not `kCached`.
template <int kBytes, bool kCached = (kBytes < 16)>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool inside) {
  const unsigned target = shared_address(shared);
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

// Loads 16 bytes that the kernel does not write and reads once: they leave the L1 cache alone.
template <class V>
__device__ __forceinline__ V load_once(const void* global) {
  static_assert(sizeof(V) == 16);
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(global)));
  return {{v.x, v.y, v.z, v.w}};
}

// Stores 4, 8 or 16 bytes at once. The compiler may split a plain store of as many, where stores of
// single elements stand beside it, and then each instruction of a warp writes parts of all sectors.
template <class V>
__device__ __forceinline__ void store_whole(void* global, const V& value) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  const auto address = __cvta_generic_to_global(global);
  uint32_t v[sizeof(V) / 4];
  memcpy(v, &value, sizeof(V));
  if constexpr (sizeof(V) == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(address), "r"(v[0]), "r"(v[1]) : "memory");
  } else {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(v[0]) : "memory");
  }
}

// Waits for the threads of a team, those from team * kThreads on, which are whole warps. A block
// has at most 15 teams.
template <int kThreads>
__device__ __forceinline__ void sync_team(int team) {
  static_assert(kThreads % 32 == 0);
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(1 + team), "n"(kThreads) : "memory");
}

// Bulk copies, of sm_90 on. One thread starts them; the bytes of those to shared memory are counted
// by a barrier there, whose phases 0, 1, 2, ... all threads may wait for, each in turn.
__device__ __forceinline__ void init_byte_barrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// The bytes of the barrier's next phase.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase % 2)
      : "memory");
#endif
}
// Starts a copy of the box at (b, c, y, x), to an address that 128 divides, or 1024 where swizzled.
__device__ __forceinline__ void load_box(void* shared, const BoxMap& map, int b, int c, int y,
                                         int x, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(c), "r"(b), "r"(shared_address(barrier))
      : "memory");
#endif
}
__device__ __forceinline__ void store_box(const void* shared, const BoxMap& map, int b, int c,
                                          int y, int x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(x), "r"(y), "r"(c), "r"(b), "r"(shared_address(shared))
      : "memory");
#endif
}
// Waits until the stores that this thread started have read shared memory.
__device__ __forceinline__ void wait_for_box_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// Puts what this thread wrote to shared memory before the bulk copies that start behind the next
// barrier.
__device__ __forceinline__ void fence_for_boxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts to bring the line of an address to the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same for `bytes`, a multiple of 16, from an address aligned to 16: one instruction for many
// lines.
__device__ __forceinline__ void prefetch_bytes(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
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
               : "r"(shared_address(row)));
}
template <class T>
__device__ __forceinline__ void load_matrices(const T* row, uint32_t (&a)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(a[0]), "=r"(a[1])
               : "r"(shared_address(row)));
}

// The same, each matrix transposed: a lane holds two rows of a column.
template <class T>
__device__ __forceinline__ void load_transposed(const T* row, uint32_t (&a)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row)));
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
  asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(pair) : "r"(shared_address(p)));
  return pair;
}

}  // namespace wtconv::cuda

#else
#include "cuda_on_cpu.h"
#endif
