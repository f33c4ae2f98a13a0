// What the CUDA host functions share: device, stream, device properties, parameters; and Call, the
// recursion over low-pass bands.
//
//   fused_forward.cpp, fused_backward.cpp, staged.cpp   the ops
//   patch/, tile/                                       kernels of the fused ops, and their choice
//   lowpass.cu, finish.cu                               what both need between launches, and after
//   staged.cu                                           kernels of the staged ops
//   launch.h, launch.cuh, launch_kernel.cuh             all launchers, and how they launch
//   element.cuh, intrinsics.cuh, box.h                  what all kernels share
//
// Below host.h no file includes a Torch header.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <functional>
#include <optional>
#include <utility>

#include "../common/tensors.h"
#include "launch.h"
#include "patch/choose.h"
#include "tile/choose.h"

namespace wtconv::cuda {

// A tensor that kernels read, and one that they write.
inline View input_view(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2),
          t.stride(3)};
}
inline View output_view(const Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// The current stream of a device.
cudaStream_t current_stream(int device);

// Properties of a device; checks once that its driver can run this library.
const Device& device_properties(int device);

void check_launch(const char* error);

// Refuses a launch that this GPU cannot hold, in a sentence.
void check_shared_memory(int64_t needed, const Device& properties, int64_t kernel_size);

// Contiguous parameters, on the current device.
Parameters prepare(Parameters params);

// How a block reads `view`, which has the sizes of the launch.
LoadPath choose_load_path(const TileLaunch& launch, const View& view, DType dtype);

// Batch items per block that leave several blocks for every multiprocessor.
int share_of_batch(const TileLaunch& launch, int multiprocessors);

// A tensor of one recursion level: the call's own, or a low-pass band of it.
struct Plane {
  View view;
  DType dtype;
  int height, width;
  bool channels_last;
  // Whether a kernel may read it without waiting for the one before it (launch_kernel.cuh).
  bool at_once = false;
};

// The most bytes, at most 16, of aligned pieces of which every row consists, or all `channels` of
// every pixel.
int access_bytes(const Plane& plane, int channels = 0);

// Allocates what a call writes, once the bands that only its deep levels need are free again.
using Output = std::function<Plane()>;

// One call of an op. Levels that a launch cannot hold run on the low-pass band of those it does,
// and before it: the launch adds what they reconstruct.
struct Call {
  const Parameters& params;
  const Tensor& like;  // device and options of workspaces
  int device;
  int64_t batch;
  int channels;
  cudaStream_t stream;
  // A low-pass band of the tensor of the call, where one is at hand. It has the bits of any other
  // (element.cuh): results do not depend on who formed it. The levels that begin with it take it.
  mutable std::pair<Tensor, Plane> low;
  mutable int low_levels = 0;
  // What the levels past those of the launch on its tensor add, where they have run.
  mutable std::optional<std::pair<Tensor, Plane>> coarse;
  // Whether a kernel of the call was launched: those after it may start before it ends.
  mutable bool started = false;

  Call(const Parameters& params, const Tensor& input);
  int levels() const { return int(params.weights.size()); }
  int kernel_size() const { return int(params.base_weight.size(2)); }
  // Takes what a launch returned.
  void launched(const char* error) const {
    check_launch(error);
    started = true;
  }

  // Levels that one launch of the operator takes.
  int launch_levels(const Plane& input, int first_level, bool adjoint) const;
  // output = F(input), with every kernel rotated and the padding mirrored for the adjoint.
  void run_operator(const Plane& input, const Output& output, int first_level, bool adjoint) const;
  // Parameters of the `levels` levels after the first `first_level`; the adjoint has no bias.
  RawParameters parameters(int first_level, int levels, bool adjoint) const;
  // The launch of levels first_level .. of `input`, without its shape.
  TileLaunch describe(const Plane& input, int first_level, const TileShape& shape,
                      bool adjoint) const;
  // Room for the low-pass band `levels` levels down, of a dtype or of the accumulator type.
  std::pair<Tensor, Plane> allocate_lowpass(const Plane& input, int levels, DType dtype,
                                            bool channels_last = false) const;
  std::pair<Tensor, Plane> allocate_lowpass(const Plane& input, int levels) const;
  // The low-pass band `levels` levels down, of the accumulator type.
  std::pair<Tensor, Plane> form_lowpass(const Plane& input, int levels) const;
  // The reconstruction of the levels past the first `levels`, at the size of their low-pass band:
  // by one launch that forms that band on chip, or by the operator on a band in memory.
  std::pair<Tensor, Plane> coarse_levels(const Plane& input, int first_level, int levels,
                                         bool adjoint) const;
  // Runs the levels past those of the operator's launch on `input`, where there are any, ahead of
  // it.
  void run_deep_levels(const Plane& input, bool adjoint) const;
  // Runs the levels past the first `levels`, where there are any, and gives `launch` what they add.
  // The launch reads the tensor returned.
  template <class Launch>
  Tensor add_coarse_levels(Launch& launch, const Plane& input, int first_level, int levels,
                           bool adjoint) const;
  // run_operator() by a patch kernel.
  void run_patches(const Plane& input, const Output& output, int first_level,
                   const PatchChoice& choice, bool adjoint) const;
  // The launch of a patch kernel, without the levels past its own and without its output.
  PatchLaunch describe_patches(const Plane& input, int first_level, const PatchChoice& choice,
                               bool adjoint) const;
  void set_output(PatchLaunch& launch, const Plane& output) const;
  Problem problem(const Plane& input, int first_level, bool adjoint) const;
};

}  // namespace wtconv::cuda
