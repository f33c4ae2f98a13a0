// Stands in for the CUDA compiler, so that g++ compiles the kernels and a CPU runs them: keywords
// and built-in variables, shared memory, the barrier, the warp's exchanges, what
// csrc/cuda/intrinsics.cuh wraps, and the launch. csrc/cuda includes this file where __CUDACC__ is
// not defined.
//
// It is stricter than a GPU where it can be: a copy fills its target with NaN until it is waited
// for, every access of a wrapped instruction must lie in the block's shared memory and be aligned,
// the lanes of a warp must meet at the same instruction. The launch returns what went wrong.
//
// cuda_on_cpu.cpp is the scheduler of the threads, boxes.h has the bulk copies, driver.cpp what
// tests/emulator.py calls, device.cpp and registration.h make operators of all of it
// (tests/emulated_operator.py), and races.cpp is the program that ThreadSanitizer watches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

// The other keywords are empty in the toolkit's headers already.
#define __launch_bounds__(...)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

using std::max;
using std::min;

namespace cuda_on_cpu {

constexpr unsigned char kPoison = 0xff;  // NaN in every type

// Ends the grid; its launch returns `what`, a string literal.
[[noreturn]] void fault(const char* what);

// Runs every block, one after the other, on shared memory full of poison. The threads of a grid
// that starts early must wait for the previous one.
const char* run_grid(int64_t blocks, dim3 threads, int shared_bytes, bool early,
                     const std::function<void()>& kernel);

// Faults unless `bytes` from p on lie in the block's shared memory, at a multiple of `bytes`.
void check_shared(const void* p, int bytes);

// What a lane brings to an instruction of its warp.
struct Operands {
  uint64_t word[6];
};
// Those of the 32 lanes, once all are at the same instruction; valid until the warp's next.
const Operands* exchange(const char* instruction, const Operands& mine);

// Waits for the threads from team * size on, as many as `size`; none of them may have returned.
void sync_team(int team, int size);

// A copy under way.
struct Copy {
  void* shared;
  const void* global;  // null: zeros
  int bytes;
};
std::vector<Copy>& copies_of_this_thread();

// Byte by byte, in the instrumented code of the kernel's file.
inline void write_shared(void* to, const void* from, int bytes, unsigned char otherwise) {
  for (int i = 0; i < bytes; ++i) {
    static_cast<unsigned char*>(to)[i] =
        from ? static_cast<const unsigned char*>(from)[i] : otherwise;
  }
}

inline int lane() { return int(threadIdx.x % 32); }

template <class V>
V from_lane(const char* instruction, V value, int source) {
  static_assert(sizeof(V) <= 8);
  Operands mine{};
  std::memcpy(&mine.word[0], &value, sizeof(V));
  const Operands* all = exchange(instruction, mine);
  if (source < 32) std::memcpy(&value, &all[source].word[0], sizeof(V));
  return value;
}

// Element `half` of a pair of T in a register.
template <class T>
float element(uint64_t pair, int half) {
  return float(std::bit_cast<T>(uint16_t(pair >> (16 * half))));
}

// Row r of a lane's 8 x 8 matrices m is at the address of lane 8 m + r.
template <int N>
void load_matrices(const void* row, bool transposed, uint32_t (&a)[N]) {
  const Operands* all = exchange(transposed ? "ldmatrix.trans" : "ldmatrix",
                                 {{uint64_t(reinterpret_cast<uintptr_t>(row))}});
  const auto at = [&](int matrix, int r, int column) {
    const auto* p = reinterpret_cast<const uint16_t*>(all[8 * matrix + r].word[0]);
    check_shared(p, 16);
    return uint32_t(p[column]);
  };
  const int major = lane() / 4, minor = lane() % 4 * 2;
  for (int m = 0; m < N; ++m) {
    a[m] = transposed ? at(m, minor, major) | at(m, minor + 1, major) << 16
                      : at(m, major, minor) | at(m, major, minor + 1) << 16;
  }
}

// The fragments of mma.sync: row m of a lies in the lanes 4 (m % 8) on, column n of b in those 4 n
// on. Tensor cores truncate their sums, and so does this.
template <class T>
void multiply(const char* instruction, float (&sum)[4], int columns, const Operands& mine) {
  const Operands* all = exchange(instruction, mine);
  for (int e = 0; e < 4; ++e) {
    const int m = lane() / 4 + e / 2 * 8, n = lane() % 4 * 2 + e % 2;
    double total = sum[e];
    for (int k = 0; k < columns; ++k) {
      const int from = k % 8 / 2, upper = k / 8;
      const double a = element<T>(all[m % 8 * 4 + from].word[m / 8 + 2 * upper], k % 2);
      total += a * element<T>(all[n * 4 + from].word[4 + upper], k % 2);
    }
    const float rounded = float(total);
    sum[e] = std::fabs(double(rounded)) > std::fabs(total) ? std::nextafterf(rounded, 0) : rounded;
  }
}

}  // namespace cuda_on_cpu

// Waits for all threads of the block that have not returned.
void __syncthreads();
// Waits for all lanes of the warp.
void __syncwarp();

template <class V>
V __shfl_down_sync(unsigned, V value, int offset) {
  return cuda_on_cpu::from_lane("shfl.down", value, cuda_on_cpu::lane() + offset);
}
template <class V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  return cuda_on_cpu::from_lane("shfl.bfly", value, cuda_on_cpu::lane() ^ mask);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  const cuda_on_cpu::Operands* all = cuda_on_cpu::exchange("redux.max", {{value}});
  for (int i = 0; i < 32; ++i) value = std::max(value, uint32_t(all[i].word[0]));
  return value;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const int byte = selector >> 4 * i & 0xf;
    if (byte > 7) std::abort();  // signs, which are not emulated
    result |= uint32_t(bytes >> 8 * byte & 0xff) << 8 * i;
  }
  return result;
}
inline int __clz(int value) { return std::countl_zero(uint32_t(value)); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t value) { return std::bit_cast<float>(value); }

#include "boxes.h"

namespace wtconv::cuda {

// The array that kernels declare `extern __shared__`, in their unnamed namespace: of every file the
// same memory.
namespace {
extern unsigned char shared[] __asm__("cuda_on_cpu_shared");
}

template <int kBytes, bool kCached = (kBytes < 16)>
void copy_async(void* to, const void* global, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  static_assert(kCached || kBytes == 16, "cp.async.cg copies 16 bytes");
  cuda_on_cpu::check_shared(to, kBytes);
  if (inside && reinterpret_cast<uintptr_t>(global) % kBytes)
    cuda_on_cpu::fault("cp.async: address in memory not aligned");
  cuda_on_cpu::write_shared(to, nullptr, kBytes, cuda_on_cpu::kPoison);
  cuda_on_cpu::copies_of_this_thread().push_back({to, inside ? global : nullptr, kBytes});
}
inline void wait_for_copies() {
  auto& copies = cuda_on_cpu::copies_of_this_thread();
  for (const auto& c : copies) cuda_on_cpu::write_shared(c.shared, c.global, c.bytes, 0);
  copies.clear();
}

template <class V>
V load_once(const void* global) {
  static_assert(sizeof(V) == 16);
  if (reinterpret_cast<uintptr_t>(global) % 16)
    cuda_on_cpu::fault("ld.global: address in memory not aligned");
  return *static_cast<const V*>(global);
}

template <class V>
void store_whole(void* global, const V& value) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  if (reinterpret_cast<uintptr_t>(global) % sizeof(V))
    cuda_on_cpu::fault("st.global: address in memory not aligned");
  *static_cast<V*>(global) = value;
}

template <int kThreads>
void sync_team(int team) {
  static_assert(kThreads % 32 == 0);
  cuda_on_cpu::sync_team(team, kThreads);
}

inline void prefetch(const void*) {}
inline void prefetch_bytes(const void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % 16 || bytes % 16)
    cuda_on_cpu::fault("cp.async.bulk.prefetch: not in pieces of 16 bytes");
}
void let_next_grid_start();
void wait_for_previous_grid();

template <class T, int N>
void load_matrices(const T* row, uint32_t (&a)[N]) {
  cuda_on_cpu::load_matrices(row, false, a);
}
template <class T>
void load_transposed(const T* row, uint32_t (&a)[4]) {
  cuda_on_cpu::load_matrices(row, true, a);
}
template <class T>
void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_on_cpu::multiply<T>("mma.m16n8k16", sum, 16, {{a[0], a[1], a[2], a[3], b0, b1}});
}
template <class T>
void multiply(float (&sum)[4], const uint32_t (&a)[2], uint32_t b) {
  cuda_on_cpu::multiply<T>("mma.m16n8k8", sum, 8, {{a[0], a[1], 0, 0, b, 0}});
}
template <class T>
uint32_t load_pair(const T* p) {
  cuda_on_cpu::check_shared(p, 4);
  return *reinterpret_cast<const uint32_t*>(p);
}

constexpr int kAllShared = 1 << 20;

template <class Kernel>
bool has_bulk_copies(Kernel*, int = 0) {
  return bulk_copies != 0;
}

template <class Kernel, class Params>
const char* launch_kernel(Kernel* kernel, const Params& p, int64_t blocks, dim3 threads,
                          int shared_bytes, cudaStream_t, bool early = false, int = 0) {
  return cuda_on_cpu::run_grid(blocks, threads, shared_bytes, early, [&] { kernel(p); });
}

}  // namespace wtconv::cuda
