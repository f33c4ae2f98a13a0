// Bulk copies, for cuda_on_cpu.h: boxes between memory and shared memory, barriers that count their
// bytes.
//
// What a copy leaves undecided is taken the worst way. A load fills its target with NaN, and with
// values when its phase is first waited for; others may rely on it behind the next barrier of the
// block. A store writes to memory when its thread waits for the reads, and what it stores must not
// have changed until then. A store sees what the last fence of any thread found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "box.h"
#include "cuda_on_cpu.h"
#include "parameters.h"

extern "C" int bulk_copies;  // whether kernels have them; a test may choose

namespace cuda_on_cpu {

// What a BoxMap holds.
struct BoxTensor {
  wtconv::cuda::View view;
  int element_bytes, batch, channels, height, width;
  wtconv::cuda::BoxShape shape;

  int bytes() const {
    return shape.items * shape.channels * shape.rows * shape.cols * element_bytes;
  }
};
static_assert(sizeof(BoxTensor) <= sizeof(wtconv::cuda::BoxMap));

// A copy of one box.
struct Box {
  BoxTensor tensor;
  int b, c, y, x;
  unsigned char* shared;

  // f(byte in shared memory, byte in memory or null outside the plane) of every byte.
  template <class F>
  void for_each_byte(F f) const {
    const auto& [view, element, batch, channels, height, width, shape] = tensor;
    unsigned char* data = static_cast<unsigned char*>(view.data);
    const int row_bytes = shape.cols * element;
    for (int i = 0; i < tensor.bytes(); ++i) {
      const int n = i / row_bytes, plane = n / shape.rows;
      const int item = b + plane / shape.channels, channel = c + plane % shape.channels;
      const int row = y + n % shape.rows * shape.row_step, col = x + i % row_bytes / element;
      const bool inside = unsigned(item) < unsigned(batch) &&
                          unsigned(channel) < unsigned(channels) &&
                          unsigned(row) < unsigned(height) && unsigned(col) < unsigned(width);
      const int64_t at = item * view.stride_b + channel * view.stride_c + row * view.stride_y + col;
      f(shared + (shape.swizzled ? i ^ (i / 128 % 8 * 16) : i),
        inside ? data + at * element + i % element : nullptr);
    }
  }
};
// Faults unless the hardware takes it.
Box make_box(const void* shared, const wtconv::cuda::BoxMap& map, int b, int c, int y, int x);

// A store under way, and what it found in shared memory.
struct Store {
  Box box;
  std::vector<unsigned char> found;
};
std::vector<Store>& stores_of_this_thread();

// Remembers shared memory as it is; whether it was so at the last call.
void publish_shared();
bool is_published(const void* p, int bytes);

// The word of a barrier in use. A plain access: ThreadSanitizer shall see it.
constexpr uint64_t kByteBarrier = 0x62797465;
inline void check_barrier(const uint64_t* barrier) {
  check_shared(barrier, 8);
  if (*barrier != kByteBarrier) fault("a barrier of bulk copies is not initialised");
}
void start_barrier(const uint64_t* barrier);
void arm_barrier(const uint64_t* barrier, int bytes);
void add_to_phase(const uint64_t* barrier, const Box& box);
// Ends a phase; its boxes where no thread has waited for it.
std::span<const Box> end_phase(const uint64_t* barrier, int phase);

}  // namespace cuda_on_cpu

namespace wtconv::cuda {

inline void init_byte_barrier(uint64_t* barrier) {
  cuda_on_cpu::check_shared(barrier, 8);
  *barrier = cuda_on_cpu::kByteBarrier;
  cuda_on_cpu::start_barrier(barrier);
}
inline void expect_bytes(uint64_t* barrier, int bytes) {
  cuda_on_cpu::check_barrier(barrier);
  cuda_on_cpu::arm_barrier(barrier, bytes);
}
inline void wait_for_bytes(uint64_t* barrier, int phase) {
  cuda_on_cpu::check_barrier(barrier);
  for (const auto& box : cuda_on_cpu::end_phase(barrier, phase))
    box.for_each_byte([](auto* to, const auto* from) { *to = from ? *from : 0; });
}

inline void load_box(void* shared, const BoxMap& map, int b, int c, int y, int x,
                     uint64_t* barrier) {
  cuda_on_cpu::check_barrier(barrier);
  const cuda_on_cpu::Box box = cuda_on_cpu::make_box(shared, map, b, c, y, x);
  box.for_each_byte([](auto* to, const auto*) { *to = cuda_on_cpu::kPoison; });
  cuda_on_cpu::add_to_phase(barrier, box);
}
inline void store_box(const void* shared, const BoxMap& map, int b, int c, int y, int x) {
  const cuda_on_cpu::Box box = cuda_on_cpu::make_box(shared, map, b, c, y, x);
  const int bytes = box.tensor.bytes();
  if (!cuda_on_cpu::is_published(box.shared, bytes))
    cuda_on_cpu::fault("a box was written without a fence before its store");
  cuda_on_cpu::stores_of_this_thread().push_back({box, {box.shared, box.shared + bytes}});
}
inline void wait_for_box_reads() {
  auto& stores = cuda_on_cpu::stores_of_this_thread();
  for (const auto& [box, found] : stores) {
    if (std::memcmp(found.data(), box.shared, found.size()) != 0)
      cuda_on_cpu::fault("a box was overwritten before its store had read it");
    box.for_each_byte([](const auto* from, auto* to) {
      if (to) *to = *from;
    });
  }
  stores.clear();
}
inline void fence_for_boxes() { cuda_on_cpu::publish_shared(); }

// As the driver does, false where the hardware cannot move such boxes.
inline bool describe_boxes(BoxMap& map, const View& v, int element_bytes, int64_t batch,
                           int channels, int height, int width, const BoxShape& box) {
  constexpr int kMostExtent = 256, kMostStep = 8;  // elements
  bool aligned = reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
  for (const int64_t elements : {v.stride_b, v.stride_c, v.stride_y, int64_t(box.cols)})
    aligned &= elements * element_bytes % 16 == 0;
  const bool expanded = std::min({v.stride_b, v.stride_c, v.stride_y}) <= 0;
  if (!aligned || expanded || v.stride_x != 1 || box.row_step > kMostStep ||
      box.cols > kMostExtent || box.rows * box.row_step > kMostExtent ||
      box.channels > kMostExtent || box.items > kMostExtent ||
      (box.swizzled && box.cols * element_bytes != 128))
    return false;
  const cuda_on_cpu::BoxTensor tensor{v, element_bytes, int(batch), channels, height, width, box};
  std::memcpy(map.words, &tensor, sizeof(tensor));
  return true;
}

}  // namespace wtconv::cuda
