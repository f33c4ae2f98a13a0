// Runs kernels whose blocks reuse shared memory while copies are under way, for ThreadSanitizer to
// watch. With an argument, a kernel without its barrier instead.
#include <cstdio>
#include <vector>

#include "launch.h"
#include "launch_kernel.cuh"
#include "patch/group_layout.h"

namespace wtconv::cuda {
namespace {

constexpr int kChannels = 1, kHeight = 66, kWidth = 136, kPixels = kHeight * kWidth;

struct NoParams {};

__global__ void racing_kernel(NoParams) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* values = reinterpret_cast<float*>(shared);
  values[threadIdx.x] = 1;
  values[(threadIdx.x + 1) % 64] += 1;
}

// A value of every type is zero: only the accesses matter.
template <class T>
const char* run_forward(DType dtype, int levels, std::vector<T>& x, std::vector<T>& y,
                        const float* coarse = nullptr, int bytes = 16) {
  const std::vector<float> taps(4 * 25, 0.25f);
  PatchLaunch p{};
  p.params.dtype = DType::kFloat32;
  for (int l = 0; l <= levels; ++l) p.params.weight[l] = p.params.scale[l] = taps.data();
  p.input = {x.data(), kPixels, kPixels, kWidth, 1};
  p.output = {y.data(), kPixels, kPixels, kWidth, 1};
  p.batch = 1, p.channels = kChannels, p.height = kHeight, p.width = kWidth;
  p.kernel_size = 5, p.levels = levels;
  p.tiles_y = 2, p.tiles_x = 3, p.tiles = 6;
  p.input_bytes = p.output_bytes = bytes;
  p.coarse = coarse, p.coarse_rows = kHeight >> levels, p.coarse_cols = kWidth >> levels;
  return dtype == DType::kFloat32 ? launch_patch_forward(p, 1, nullptr)
                                  : launch_mma_forward(p, dtype, 1, nullptr);
}

const char* run_lowpass_planes(const std::vector<float>& x) {
  const std::vector<float> taps(4 * 25, 0.25f);
  std::vector<float> y(17 * 34);
  LowpassPlanesLaunch p{};
  PatchLaunch& planes = p.planes;
  planes.params.dtype = p.dtype = DType::kFloat32;
  for (int l = 1; l <= 5; ++l) planes.params.weight[l] = planes.params.scale[l] = taps.data();
  planes.input = {const_cast<float*>(x.data()), kPixels, kPixels, kWidth, 1};
  planes.output = {y.data(), 17 * 34, 17 * 34, 34, 1};
  planes.batch = 1, planes.channels = kChannels, planes.height = 17, planes.width = 34;
  planes.kernel_size = 5, planes.levels = 5, planes.cells = 1, planes.tiles = 1;
  p.input_height = kHeight, p.input_width = kWidth;
  return launch_lowpass_planes(p, nullptr);
}

template <class T>
const char* run_weight_grad(DType dtype, int levels, std::vector<T>& x, std::vector<T>& g,
                            int bytes = 16) {
  std::vector<float> partials(2 * sum_count(5, levels));
  PatchGradLaunch p{};
  p.input = {x.data(), kPixels, kPixels, kWidth, 1};
  p.grad_output = {g.data(), kPixels, kPixels, kWidth, 1};
  p.partials = partials.data();
  p.batch = 1, p.channels = kChannels, p.height = kHeight, p.width = kWidth, p.kernel_size = 5;
  p.levels = levels;
  p.tiles_y = 2, p.tiles_x = 3, p.tiles = 6;
  p.grad_bytes = p.input_bytes = bytes;
  p.splits = p.together = 1, p.parts = 2;
  p.base_wanted = p.level_wanted = p.bias_wanted = true;
  const std::vector<float> taps(4 * 25, 0.25f);
  std::vector<T> input_grad(kPixels);
  p.input_wanted = dtype == DType::kFloat32;
  p.input_grad.params.dtype = DType::kFloat32;
  for (int l = 0; l <= 1; ++l)
    p.input_grad.params.weight[l] = p.input_grad.params.scale[l] = taps.data();
  p.input_grad.output = {input_grad.data(), kPixels, kPixels, kWidth, 1};
  p.input_grad.output_bytes = 16;
  return dtype == DType::kFloat32 ? launch_patch_weight_grad(p, dtype, nullptr)
                                  : launch_mma_weight_grad(p, dtype, nullptr);
}

// All gradients of whole planes in one launch, kCells x kCells to a tile, more than one tile.
template <int kCells, int kLevels, class T>
const char* run_all_gradients(DType dtype, T) {
  constexpr int kSide = kPatchTile / kCells - 1, kArea = kSide * kSide;
  constexpr int kItems = 2 * kCells * kCells + 1;
  std::vector<T> x(kItems * kArea), y(x.size());
  std::vector<float> partials(2 * sum_count(5, kLevels));
  const std::vector<float> taps(4 * 25, 0.25f);
  PatchGradLaunch p{};
  p.input = p.grad_output = {x.data(), kArea, kArea, kSide, 1};
  p.partials = partials.data();
  p.batch = kItems, p.channels = 1, p.height = p.width = kSide, p.kernel_size = 5;
  p.levels = kLevels, p.cells = kCells, p.tiles = 3, p.tiles_y = p.tiles_x = 1;
  p.grad_bytes = p.input_bytes = int(sizeof(T));
  p.splits = p.together = 1, p.parts = 2;
  p.base_wanted = p.level_wanted = p.bias_wanted = p.input_wanted = true;
  p.input_grad.params.dtype = DType::kFloat32;
  for (int l = 0; l <= kLevels; ++l)
    p.input_grad.params.weight[l] = p.input_grad.params.scale[l] = taps.data();
  p.input_grad.output = {y.data(), kArea, kArea, kSide, 1};
  p.input_grad.output_bytes = int(sizeof(T));
  return launch_patch_weight_grad(p, dtype, nullptr);
}

// Planes of a group of channels, more than one to each block.
template <int kGroup, int kSide, int kItems, class T>
const char* run_group(DType dtype, T) {
  constexpr int kLevels = 4;
  std::vector<T> x(kItems * kGroup * kSide * kSide), y(x.size());
  const std::vector<float> taps(4 * kGroup * 25, 0.25f);
  PatchLaunch p{};
  p.params.dtype = DType::kFloat32;
  for (int l = 0; l <= kLevels; ++l) p.params.weight[l] = p.params.scale[l] = taps.data();
  p.input = {x.data(), kGroup * kSide * kSide, 1, kGroup * kSide, kGroup};
  p.output = {y.data(), kGroup * kSide * kSide, 1, kGroup * kSide, kGroup};
  p.batch = kItems, p.channels = kGroup, p.height = p.width = kSide;
  p.kernel_size = 5, p.levels = kLevels, p.tiles = kItems;
  p.cells = 1, p.group = kGroup, p.input_bytes = p.output_bytes = 4 * int(sizeof(T));
  if (const char* error = launch_group_forward(p, dtype, 1, nullptr)) return error;

  const int levels = group_grad_levels(kGroup, kSide, 2);
  std::vector<float> partials(kGroup * 2 * sum_count(5, levels));
  PatchGradLaunch g{};
  g.grad_output = p.output, g.input = p.input;
  g.partials = partials.data();
  g.batch = kItems, g.channels = kGroup, g.height = g.width = kSide, g.kernel_size = 5;
  g.levels = levels;
  g.cells = 1, g.group = kGroup, g.grad_bytes = g.input_bytes = p.input_bytes;
  g.splits = g.together = 1, g.parts = 2;
  g.base_wanted = g.level_wanted = g.bias_wanted = true;
  return launch_group_weight_grad(g, dtype, nullptr);
}

// Planes on tensor cores, cells x cells to a tile, several tiles to a block: of a channel, or of
// groups. Of two groups, a block of three goes from one to the other.
const char* run_planes(int groups, int cells, int bytes, int kernel_size = 5, int levels = 4) {
  const bool group = groups > 0;
  const int tiles = group && cells > 1 ? 2 : 3;
  const int rows = 40 / cells, cols = 48 / cells, area = rows * cols;
  const int channels = group ? groups * kMmaGroup : 1, items = (tiles - 1) * cells * cells + 1;
  std::vector<__half> x(items * channels * area), y(x.size());
  const std::vector<float> taps(4 * channels * 25, 0.25f);
  PatchLaunch p{};
  p.params.dtype = DType::kFloat32;
  for (int l = 0; l <= levels; ++l) p.params.weight[l] = p.params.scale[l] = taps.data();
  const auto view = [&](__half* data) {
    return group ? View{data, channels * area, 1, channels * cols, channels}
                 : View{data, area, area, cols, 1};
  };
  p.input = view(x.data()), p.output = view(y.data());
  p.batch = items, p.channels = channels, p.height = rows, p.width = cols;
  p.kernel_size = kernel_size, p.levels = levels, p.tiles = tiles, p.tiles_y = p.tiles_x = 1;
  p.cells = cells, p.group = group ? kMmaGroup : 0, p.input_bytes = p.output_bytes = bytes;
  p.tensor_cores = true;
  const char* error = launch_patch_operator(p, DType::kFloat16, groups > 1 ? 3 : 1, nullptr);
  if (error || (group ? cells > 1 : !is_among(MmaPlaneGradCells(), cells))) return error;

  std::vector<float> partials(channels * 2 * sum_count(5, 2));
  std::vector<__half> bands(2 * items * channels * ceil_div(rows, 4) * ceil_div(cols, 4));
  PatchGradLaunch g{};
  g.grad_output = p.output, g.input = p.input;
  g.partials = partials.data();
  g.low_grad = bands.data(), g.low_input = bands.data() + bands.size() / 2;
  g.batch = items, g.channels = channels, g.height = rows, g.width = cols, g.kernel_size = 5;
  g.levels = 2, g.tiles_y = g.tiles_x = 1, g.tiles = tiles;
  g.cells = cells, g.group = p.group, g.grad_bytes = g.input_bytes = bytes;
  g.splits = g.together = 1, g.parts = 2;
  g.tensor_cores = g.base_wanted = g.level_wanted = g.bias_wanted = true;
  return launch_patch_gradients(g, DType::kFloat16, nullptr);
}

}  // namespace
}  // namespace wtconv::cuda

using namespace wtconv;
using namespace wtconv::cuda;

int main(int count, char**) {
  const char* error = nullptr;
  if (count > 1) {
    error = launch_kernel(&racing_kernel, NoParams(), 1, 64, 256, nullptr);
  } else {
    std::vector<float> a(kPixels), b(kPixels);
    std::vector<__half> x(kPixels), y(kPixels);
    for (int levels = 1; levels <= 3 && !error; ++levels) {
      error = run_forward(DType::kFloat32, levels, a, b);
      if (!error) error = run_forward(DType::kFloat16, levels, x, y);
    }
    const std::vector<float> coarse((kHeight / 4) * (kWidth / 4));
    if (!error) error = run_forward(DType::kFloat16, 2, x, y, coarse.data());
    if (!error) error = run_weight_grad(DType::kFloat32, 1, a, b);
    if (!error) error = run_planes(0, 1, 16);
    if (!error) error = run_planes(0, 2, 16);
    if (!error) error = run_planes(0, 4, 2);
    bulk_copies = 0;
    for (int bytes = 2; bytes <= 4 && !error; bytes *= 2) {
      error = run_forward(DType::kFloat16, 2, x, y, coarse.data(), bytes);
      if (!error) error = run_weight_grad(DType::kFloat16, 2, x, y, bytes);
    }
    for (int bytes = 8; bytes <= 16 && !error; bytes *= 2) error = run_planes(1, 1, bytes);
    for (int cells = 2; cells <= 4 && !error; cells *= 2) {
      error = run_planes(1, cells, 4);
      if (!error) error = run_planes(2, cells, 16);
      if (!error) error = run_planes(1, cells, 16, 3, 1);
    }
    for (int levels = 1; levels <= 2 && !error; ++levels) {
      error = run_forward(DType::kFloat32, levels, a, b);
      if (!error) error = run_forward(DType::kFloat16, levels, x, y);
    }
    if (!error) error = run_weight_grad(DType::kFloat32, 1, a, b);
    if (!error) error = run_lowpass_planes(a);
    for (int levels = 1; levels <= 2 && !error; ++levels)
      error = run_weight_grad(DType::kFloat16, levels, x, y);
    if (!error) error = run_group<4, 33, 5>(DType::kFloat32, float());
    if (!error) error = run_group<4, 33, 5>(DType::kFloat16, __half());
    if (!error) error = run_group<32, 5, 10>(DType::kFloat32, float());
    if (!error) error = run_group<32, 5, 10>(DType::kFloat16, __half());
    if (!error) error = run_all_gradients<2, 4>(DType::kFloat32, float());
    if (!error) error = run_all_gradients<4, 3>(DType::kFloat32, float());
    if (!error) error = run_all_gradients<8, 2>(DType::kFloat32, float());
    if (!error) error = run_all_gradients<8, 3>(DType::kFloat16, __half());
  }
  if (error) std::puts(error);
  return error ? 1 : 0;
}
