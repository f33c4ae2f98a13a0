// Launchers: no Torch header. Each returns null, or what CUDA says went wrong.
#pragma once

#include <cuda_runtime.h>

#include "patch/patch.h"
#include "tile/tile.h"

namespace wtconv::cuda {

using LowpassLevels = Constants<1, 2, 3>;

// input [B, C, height, width] -> output [B, C, rows, cols], dense, accumulator type.
struct LowpassLaunch {
  View input;
  void* output;
  int64_t batch;
  int channels, height, width, rows, cols, levels;
  bool channels_fast, wide;  // wide: rows consist of aligned pieces of 16 bytes
};

// tile: of grad_output, padded for the adjoint; input_shape: the same tile without padding.
struct GradLaunch {
  TileLaunch tile;
  TileShape input_shape;
  View input;
  bool level_wanted[kMaxLaunchLevels + 1];
  int deepest;  // wanted level
  bool bias_wanted;
  int threads, shared_bytes;
  int64_t num_partials;
  void* partials;  // [C][num_partials][sum_count], accumulator type
};

// Partial sums of a level: its taps are those from `first` on of `sums`, divided by `scale`.
struct LevelSums {
  const void* partials;  // [C][count][sums], accumulator type
  int64_t count;
  int sums, first;
  float scale;
};

struct LevelGradient {
  void* weight;
  void* scale;
};

// The bias is the last of the sums of level 0.
struct FinishLaunch {
  RawParameters params;
  int channels, kernel_size, levels;
  LevelSums sums[kMaxLaunchLevels + 1];
  LevelGradient gradients[kMaxLaunchLevels + 1];  // null where not wanted
  void* grad_bias;
  bool early;  // may start before the kernel before it ends, one of the same call
  // The kernel before it writes no sums: they are read without waiting for that, and the gradients
  // written, which were allocated before the first launch of the call.
  bool sums_ready;
};

// tile.output: filtered coefficients [B, 4C, ceil(H/2), ceil(W/2)]; lowpass: raw LL.
struct AnalysisLaunch {
  TileLaunch tile;
  View lowpass;
};

struct SynthesisLaunch {
  View base, output, coefficients[kMaxLevels];
  int64_t batch;
  int channels, height, width, levels;
  bool channels_fast;
};

const char* launch_analysis_conv(const AnalysisLaunch& p, DType dtype, cudaStream_t stream);
const char* launch_synthesis(const SynthesisLaunch& p, DType dtype, cudaStream_t stream);
const char* launch_weight_grad(const GradLaunch& p, DType activations, cudaStream_t stream);
const char* launch_finish(const FinishLaunch& p, DType activations, cudaStream_t stream);
const char* launch_lowpass(const LowpassLaunch& p, DType activations, cudaStream_t stream);
const char* launch_patch_forward(const PatchLaunch& p, int multiprocessors, cudaStream_t stream);
const char* launch_mma_forward(const PatchLaunch& p, DType activations, int multiprocessors,
                               cudaStream_t stream);
const char* launch_mma_planes(const PatchLaunch& p, DType activations, int multiprocessors,
                              cudaStream_t stream);
const char* launch_mma_group(const PatchLaunch& p, DType activations, int multiprocessors,
                             cudaStream_t stream);
const char* launch_patch_planes(const PatchLaunch& p, DType activations, int multiprocessors,
                                cudaStream_t stream);
const char* launch_lowpass_planes(const LowpassPlanesLaunch& p, cudaStream_t stream);
const char* launch_group_forward(const PatchLaunch& p, DType activations, int multiprocessors,
                                 cudaStream_t stream);
const char* launch_group_weight_grad(const PatchGradLaunch& p, DType activations,
                                     cudaStream_t stream);
const char* launch_mma_group_weight_grad(const PatchGradLaunch& p, DType activations,
                                         cudaStream_t stream);
const char* launch_patch_weight_grad(const PatchGradLaunch& p, DType activations,
                                     cudaStream_t stream);
const char* launch_mma_weight_grad(const PatchGradLaunch& p, DType activations,
                                   cudaStream_t stream);
const char* launch_mma_planes_weight_grad(const PatchGradLaunch& p, DType activations,
                                          cudaStream_t stream);
const char* launch_forward(const TileLaunch& p, DType activations, cudaStream_t stream);

// The patch kernel that a launch names.
inline const char* launch_patch_operator(const PatchLaunch& p, DType activations,
                                         int multiprocessors, cudaStream_t stream) {
  const auto run = [&](auto launch) { return launch(p, activations, multiprocessors, stream); };
  if (p.group > 0) return run(p.tensor_cores ? launch_mma_group : launch_group_forward);
  if (p.tensor_cores) return run(p.cells > 0 ? launch_mma_planes : launch_mma_forward);
  if (p.cells > 0) return run(launch_patch_planes);
  return launch_patch_forward(p, multiprocessors, stream);
}
inline const char* launch_patch_gradients(const PatchGradLaunch& p, DType activations,
                                          cudaStream_t stream) {
  const auto run = [&](auto launch) { return launch(p, activations, stream); };
  if (p.group > 0)
    return run(p.tensor_cores ? launch_mma_group_weight_grad : launch_group_weight_grad);
  if (p.tensor_cores)
    return run(p.cells > 0 ? launch_mma_planes_weight_grad : launch_mma_weight_grad);
  return run(launch_patch_weight_grad);
}

}  // namespace wtconv::cuda
