// What launch choices depend on. No Torch and no CUDA header: tests compile the choices alone.
#pragma once

#include <cstdint>

namespace wtconv::cuda {

// A call at one level of the recursion: `levels` from this plane size on.
struct Problem {
  int64_t batch;
  int channels, height, width, kernel_size, levels;
  int accumulator_bytes, element_bytes;
  bool channels_last, adjoint;
  bool of_grad_output;  // the plane is grad_output, not a band of it
};

struct Device {
  int multiprocessors, shared_per_block, shared_per_multiprocessor;
};

}  // namespace wtconv::cuda
