// What the CPU host functions share: views, packed parameters, workspaces, the thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "../common/tensors.h"
#include "engine.h"
#include "tile_plan.h"

namespace wtconv::cpu {

// A tensor that kernels read, and one that they write.
inline View input_view(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2),
          t.stride(3)};
}
inline View output_view(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The channel blocks of one call and the engine that works on them.
struct Blocks {
  DType dtype;  // of the activations
  const Engine& engine;
  int64_t vector_bytes;
  int64_t lanes, count;  // channels per block, blocks

  Blocks(DType dtype, int64_t channels)
      : dtype(dtype),
        engine(engine_for(channels, dtype)),
        vector_bytes(engine.vector_bytes),
        lanes(vector_bytes / (accumulates_in_double(dtype) ? 8 : 4)),
        count((channels + lanes - 1) / lanes) {}

  const Kernels& kernels() const { return engine.kernels[int(dtype)]; }
  const Kernels& kernels(DType parameters) const { return engine.kernels[int(parameters)]; }
};

// Uninitialised memory, aligned for vectors, owned by a tensor.
class Workspace {
 public:
  Workspace(const Tensor& like, int64_t bytes)
      : tensor_(allocate(like, {bytes + kAlignment}, torch::headeronly::ScalarType::Byte)) {
    const auto address = reinterpret_cast<uintptr_t>(tensor_.mutable_data_ptr());
    data_ = reinterpret_cast<char*>((address + kAlignment - 1) / kAlignment * kAlignment);
  }
  char* data() const { return data_; }

 private:
  static constexpr int64_t kAlignment = 64;
  Tensor tensor_;
  char* data_;
};

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// How many threads `items` of `cost` multiply-adds each are worth.
inline int64_t worthwhile_threads(int64_t items, int64_t cost) {
  constexpr int64_t kCostPerThread = 1 << 18;
  const int64_t threads = torch::stable::get_num_threads();
  return std::max<int64_t>(1, std::min({items, threads, items * cost / kCostPerThread}));
}

// f(thread, item) for every item, items in contiguous shares.
template <class F>
void for_each_item(int64_t items, int64_t threads, const F& f) {
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) f(int64_t(0), i);
    return;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = items * t / threads; i < items * (t + 1) / threads; ++i) f(t, i);
    }
  });
}

// The parameters, contiguous and in a dtype the kernels of the activations can read.
Parameters prepare(Parameters params, DType activations);

// Bytes of, and packing into, [block][slot][tap][lane] scaled weights; then [block][lane] biases.
int64_t packed_bytes(const Geometry& geometry, const Blocks& blocks);
void pack_parameters(const Parameters& params, const Geometry& geometry, const Blocks& blocks,
                     bool rotate, char* weights, char* bias);

}  // namespace wtconv::cpu
