// The interface between the host functions and the CPU kernels.
//
// The kernels work on blocks of channels: one SIMD lane is one channel, so that the Haar butterfly,
// the convolutions of any size and the weight gradients are plain vertical arithmetic, and both
// layouts share one core (NCHW is transposed on load and store). One call handles one *tile*: the
// rows [y0, y1) of the planes of one channel block of one batch item, with the whole pyramid of the
// tile in scratch memory. Per tile the tensor is read once and written once.
//
// Plain structs of integers and pointers: the kernels are compiled once per instruction set and
// must not share inline code with the rest of the library. Strides are in elements.
#pragma once

#include <cstdint>

#include "../common/limits.h"

namespace wtconv::cpu {

// One strided tensor [B, C, H, W].
struct View {
  void* data;
  int64_t stride_b, stride_c, stride_y, stride_x;
};

// The rows of one level that a tile touches. Stored rows and columns include zero padding.
struct LevelPlan {
  int64_t height, width;     // of the level
  int64_t own_lo, own_hi;    // rows that the tile computes
  int64_t need_lo, need_hi;  // rows of the level that its convolutions or coarser levels read
  int64_t store_lo, store_hi, pitch;
  int64_t offset, band_stride;  // of the first stored vector in scratch; from subband to subband
};

struct Padding {
  int64_t top, left, bottom, right;
};

// Scratch layout of one tile, in vectors. Level 0 is the input, one band; levels 1..L have four.
struct TilePlan {
  int64_t levels, kernel_size;
  Padding pad;
  LevelPlan level[kMaxLevels + 1];
  int64_t pyramid_vectors;                 // pyramid of the tile
  int64_t reconstruction[kMaxLevels + 1];  // offset of R^(l), rows of level l-1; [0] unused
  int64_t row_buffer, total_vectors;
};

// Parameters packed by pack_block: [block][slot][tap][lane]; slot 0 = base, 1 + 4*(l-1) + s = band.
struct PackArgs {
  int64_t channels, kernel_size;
  bool rotate;         // rotated by 180 degrees, for the adjoint
  const void* weight;  // [G, 1, k, k] contiguous, G = groups_per_channel * C
  const void* scale;   // [G] contiguous
  int64_t groups_per_channel, slot, slots;
  void* packed;
};

// sum over channels of one packed weight gradient back to grad_weight = s * g, grad_scale = <g, w>.
struct UnpackArgs {
  int64_t channels, kernel_size, groups_per_channel, slot, slots;
  int64_t num_partials;    // partial sums to add, in order
  const double* partials;  // [block][partial][slots * taps + 1][lane]
  const void* weight;      // as in PackArgs
  const void* scale;
  const void* bias;   // [C] or null (base slot only)
  void* grad_weight;  // like weight, or null
  void* grad_scale;   // like scale, or null
  void* grad_bias;    // like bias, or null
  void* scratch;      // unpack_scratch_bytes(kernel_size, vector_bytes)
};

// Of one thread: the taps of a slot as float64 and twice in the accumulator type.
constexpr int64_t unpack_scratch_bytes(int64_t kernel_size, int64_t vector_bytes) {
  return kernel_size * kernel_size * 4 * vector_bytes;
}

struct TileArgs {
  int64_t channels;
  View input, output;
  const void* weights;  // packed
  const void* bias;     // packed, [block][lane], or null
};

struct GradArgs {
  View input;
  int64_t slots;
  const bool* level_wanted;  // [L + 1]
  bool bias_wanted;
};

// Running sums of one channel block over several tiles: float32 (or float64) sums of at most
// kFlushPixels terms, then float64.
struct GradSums {
  void* partial;  // [slots * taps + 1][lane], accumulator type
  double* total;  // the same shape
  int64_t pixels[kMaxLevels + 1];
};

struct StagedArgs {
  int64_t channels, batch_item, block;
  View input, output, lowpass;  // synthesis: base, output, unused
  const View* coefficients;     // synthesis: one per level
  const void* weights;          // analysis_conv: packed, 4 slots
};

// The kernels of one element type.
struct Kernels {
  void (*pack_block)(const PackArgs&, int64_t block);
  void (*unpack_block)(const UnpackArgs&, int64_t block);
  void (*forward_tile)(const TileArgs&, const TilePlan&, int64_t batch_item, int64_t block,
                       void* scratch);
  void (*grad_tile)(const TileArgs&, const TilePlan&, const GradArgs&, const TilePlan& input_plan,
                    int64_t batch_item, int64_t block, bool grad_input, GradSums*, void* scratch);
  void (*flush_sums)(const TilePlan&, GradSums*);
  void (*analysis_conv_tile)(const StagedArgs&, const TilePlan&, void* scratch);
  void (*synthesis_tile)(const StagedArgs&, const TilePlan&, void* scratch);
};

struct Engine {
  const char* name;
  int vector_bytes;
  Kernels kernels[kNumDTypes];
};

// The fastest engine this machine can run.
const Engine& engine();

// The same, but with vectors no wider than the channels fill: a lane without a channel costs as
// much time and scratch memory as one with.
const Engine& engine_for(int64_t channels, DType dtype);

extern const Engine kEngineBaseline, kEngineAvx2, kEngineAvx512;

}  // namespace wtconv::cpu
