#include "host.h"

#include <algorithm>
#include <mutex>

// Declared weak: a CPU-only torch has no libtorch_cuda, and this library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);

namespace wtconv::cuda {

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) {
    fail("wtconv: torch's CUDA library is not loaded; install a CUDA build of torch");
  }
  return static_cast<cudaStream_t>(stream);
}

const Device& device_properties(int device) {
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];
  static Device devices[kMaxDevices];
  std::call_once(once[device], [device] {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver < CUDART_VERSION / 1000 * 1000) {
      fail("wtconv: this build needs a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
           " (version 580 or newer for CUDA 13); update the driver or rebuild with WTCONV_CUDA=0");
    }
    Device& d = devices[device];
    cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&d.shared_per_multiprocessor,
                           cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  });
  return devices[device];
}

void check_launch(const char* error) {
  if (error) fail(std::string("wtconv: CUDA kernel launch failed: ") + error);
}

Parameters prepare(Parameters params) {
  params.for_each([](Tensor& t) { t = as_contiguous(std::move(t)); });
  return params;
}

// Four elements at once where every group of four lies in one aligned piece of memory.
LoadPath choose_load_path(const TileLaunch& p, const View& v, DType dtype) {
  const int bytes = element_bytes(dtype);
  const int alignment = std::min(16, 4 * bytes);
  const auto aligned = [&](int64_t elements) { return elements * bytes % alignment == 0; };
  if (reinterpret_cast<uintptr_t>(v.data) % alignment != 0 || !aligned(v.stride_b) ||
      !aligned(v.stride_y)) {
    return LoadPath::kScalar;
  }
  if (p.channels_fast) {
    const bool whole = p.shape.group % 4 == 0 && p.channels % 4 == 0;
    return v.stride_c == 1 && whole && aligned(v.stride_x) ? LoadPath::kQuadChannels
                                                           : LoadPath::kScalar;
  }
  return v.stride_x == 1 && p.width % 4 == 0 && aligned(v.stride_c) ? LoadPath::kQuadX
                                                                    : LoadPath::kScalar;
}

int access_bytes(const Plane& plane, int channels) {
  const View& v = plane.view;
  const int element = element_bytes(plane.dtype);
  const bool pixels = channels > 0;
  if ((pixels ? v.stride_c : v.stride_x) != 1) return element;
  const int64_t address = int64_t(reinterpret_cast<uintptr_t>(v.data));
  int bytes = 16;
  for (const int64_t elements : {v.stride_b, pixels ? v.stride_x : v.stride_c, v.stride_y,
                                 int64_t(pixels ? channels : plane.width)}) {
    while (bytes > element && (elements * element % bytes != 0 || address % bytes != 0)) bytes /= 2;
  }
  return bytes;
}

void check_shared_memory(int64_t needed, const Device& properties, int64_t kernel_size) {
  if (needed <= properties.shared_per_block) return;
  fail("wtconv: kernel size " + std::to_string(kernel_size) + " in this dtype needs " +
       std::to_string(needed) + " bytes of shared memory a block and this GPU has " +
       std::to_string(properties.shared_per_block) + "; use float32 or a smaller kernel");
}

Call::Call(const Parameters& params, const Tensor& input)
    : params(params),
      like(input),
      device(input.get_device_index()),
      batch(input.size(0)),
      channels(int(input.size(1))),
      stream(current_stream(device)) {}

Problem Call::problem(const Plane& input, int first_level, bool adjoint) const {
  return {batch,
          channels,
          input.height,
          input.width,
          kernel_size(),
          levels() - first_level,
          accumulates_in_double(input.dtype) ? 8 : 4,
          element_bytes(input.dtype),
          input.channels_last,
          adjoint,
          adjoint && first_level == 0};
}

std::pair<Tensor, Plane> Call::allocate_lowpass(const Plane& input, int levels, DType dtype,
                                                bool channels_last) const {
  using torch::headeronly::ScalarType;
  constexpr ScalarType kTypes[kNumDTypes] = {ScalarType::Float, ScalarType::Double,
                                             ScalarType::Half, ScalarType::BFloat16};
  const int rows = ceil_div(input.height, 1 << levels), cols = ceil_div(input.width, 1 << levels);
  const Tensor band =
      allocate(like, {batch, channels, rows, cols}, kTypes[int(dtype)], channels_last);
  return {band, {output_view(band), dtype, rows, cols, channels_last}};
}

std::pair<Tensor, Plane> Call::allocate_lowpass(const Plane& input, int levels) const {
  return allocate_lowpass(input, levels,
                          accumulates_in_double(input.dtype) ? DType::kFloat64 : DType::kFloat32);
}

RawParameters Call::parameters(int first_level, int levels, bool adjoint) const {
  RawParameters result{};
  if (first_level == 0) {
    result.weight[0] = params.base_weight.const_data_ptr();
    result.scale[0] = params.base_scale.const_data_ptr();
    if (params.base_bias && !adjoint) result.bias = params.base_bias->const_data_ptr();
  }
  for (int l = 1; l <= levels; ++l) {
    result.weight[l] = params.weights[first_level + l - 1].const_data_ptr();
    result.scale[l] = params.scales[first_level + l - 1].const_data_ptr();
  }
  result.dtype = dtype_of(params.base_weight);
  result.rotate = adjoint;
  return result;
}

TileLaunch Call::describe(const Plane& input, int first_level, const TileShape& shape,
                          bool adjoint) const {
  TileLaunch launch{};
  launch.shape = shape;
  launch.params = parameters(first_level, shape.levels, adjoint);
  launch.input = input.view;
  launch.batch = batch;
  launch.channels = channels, launch.height = input.height, launch.width = input.width;
  launch.tiles_y = shape.plane ? 1 : ceil_div(input.height, shape.tile_rows);
  launch.tiles_x = shape.plane ? 1 : ceil_div(input.width, shape.tile_cols);
  launch.groups = ceil_div(channels, shape.group);
  launch.channels_fast = input.channels_last;
  launch.load_path = choose_load_path(launch, input.view, input.dtype);
  launch.batch_per_block = 1;
  return launch;
}

int share_of_batch(const TileLaunch& launch, int multiprocessors) {
  constexpr int kBlocksPerMultiprocessor = 4;
  const int64_t blocks = int64_t(launch.tiles_y) * launch.tiles_x * launch.groups * launch.batch;
  return int(
      std::clamp<int64_t>(blocks / (kBlocksPerMultiprocessor * multiprocessors), 1, launch.batch));
}

std::pair<Tensor, Plane> Call::form_lowpass(const Plane& input, int levels) const {
  if (constexpr int kMost = largest(LowpassLevels()); levels > kMost) {
    const auto finer = form_lowpass(input, kMost);
    return form_lowpass(finer.second, levels - kMost);
  }
  auto band = allocate_lowpass(input, levels);
  launched(launch_lowpass({input.view, band.first.mutable_data_ptr(), batch, channels, input.height,
                           input.width, band.second.height, band.second.width, levels,
                           input.channels_last, access_bytes(input) == 16},
                          input.dtype, stream));
  return band;
}

std::pair<Tensor, Plane> Call::coarse_levels(const Plane& input, int first_level, int levels,
                                             bool adjoint) const {
  const bool at_hand = first_level == 0 && low_levels > 0 && low_levels <= levels;
  const int first_deep = first_level + levels;
  auto result = allocate_lowpass(input, levels);
  const Plane& output = result.second;
  int cells = 0;
  if (!at_hand && !input.channels_last && access_bytes(input) == 16) {
    cells = choose_lowpass_cells(problem(output, first_deep, adjoint), levels,
                                 device_properties(device));
  }
  if (cells > 0) {
    PatchLaunch planes =
        describe_patches(output, first_deep, {this->levels() - first_deep, cells}, adjoint);
    planes.input = input.view;
    set_output(planes, output);
    launched(launch_lowpass_planes({planes, input.dtype, input.height, input.width}, stream));
    return result;
  }
  std::pair<Tensor, Plane> band;
  const int left = at_hand ? levels - low_levels : levels;
  if (at_hand) band = std::exchange(low, {}), low_levels = 0;
  if (left > 0) band = form_lowpass(at_hand ? band.second : input, left);
  run_operator(band.second, [&] { return output; }, first_deep, adjoint);
  return result;
}

void Call::run_deep_levels(const Plane& input, bool adjoint) const {
  const int levels = launch_levels(input, 0, adjoint);
  if (!coarse && levels < this->levels()) coarse = coarse_levels(input, 0, levels, adjoint);
}

template <class Launch>
Tensor Call::add_coarse_levels(Launch& launch, const Plane& input, int first_level, int levels,
                               bool adjoint) const {
  if (first_level + levels >= this->levels()) return Tensor();
  const auto [band, plane] = first_level == 0 && coarse
                                 ? *std::exchange(coarse, std::nullopt)
                                 : coarse_levels(input, first_level, levels, adjoint);
  launch.coarse = band.const_data_ptr();
  launch.coarse_rows = plane.height;
  launch.coarse_cols = plane.width;
  return band;
}

PatchLaunch Call::describe_patches(const Plane& input, int first_level, const PatchChoice& choice,
                                   bool adjoint) const {
  PatchLaunch launch{};
  launch.params = parameters(first_level, choice.levels, adjoint);
  launch.input = input.view;
  launch.batch = int(batch);
  launch.channels = channels, launch.height = input.height, launch.width = input.width;
  launch.kernel_size = kernel_size();
  launch.levels = choice.levels;
  launch.tiles_y = tiles_across(input.height);
  launch.tiles_x = tiles_across(input.width);
  launch.cells = choice.cells;
  launch.group = choice.group;
  launch.tensor_cores = choice.tensor_cores;
  launch.tiles = patch_tiles(problem(input, first_level, adjoint), choice);
  launch.input_bytes = access_bytes(input, choice.group > 0 ? channels : 0);
  return launch;
}

void Call::set_output(PatchLaunch& launch, const Plane& output) const {
  launch.output = output.view;
  launch.output_bytes = access_bytes(output, launch.group > 0 ? channels : 0);
}

void Call::run_patches(const Plane& input, const Output& output, int first_level,
                       const PatchChoice& choice, bool adjoint) const {
  PatchLaunch launch = describe_patches(input, first_level, choice, adjoint);
  const Tensor coarse = add_coarse_levels(launch, input, first_level, choice.levels, adjoint);
  set_output(launch, output());
  const int multiprocessors = device_properties(device).multiprocessors;
  // Kernels of groups and on tensor cores read their input before they wait.
  const bool reads_at_once = choice.group > 0 || choice.tensor_cores;
  launch.early = started && (input.at_once || !reads_at_once);
  launch.reads_at_once = input.at_once;
  launched(launch_patch_operator(launch, input.dtype, multiprocessors, stream));
}

int Call::launch_levels(const Plane& input, int first_level, bool adjoint) const {
  const Device& properties = device_properties(device);
  const Problem problem = this->problem(input, first_level, adjoint);
  const int levels = choose_patch(problem, properties).levels;
  return levels > 0 ? levels : choose_tile(problem, properties).levels;
}

void Call::run_operator(const Plane& input, const Output& output, int first_level,
                        bool adjoint) const {
  const Device& properties = device_properties(device);
  const Problem problem = this->problem(input, first_level, adjoint);
  const PatchChoice choice = choose_patch(problem, properties);
  if (choice.levels > 0) return run_patches(input, output, first_level, choice, adjoint);
  const TileShape shape = choose_tile(problem, properties);
  check_shared_memory(shape.shared_bytes, properties, shape.kernel_size);
  TileLaunch launch = describe(input, first_level, shape, adjoint);
  const Tensor coarse = add_coarse_levels(launch, input, first_level, shape.levels, adjoint);
  launch.output = output().view;
  // Blocks that keep the weights of small planes over several batch items read them once.
  if (shape.plane) launch.batch_per_block = share_of_batch(launch, properties.multiprocessors);
  launched(launch_forward(launch, input.dtype, stream));
}

}  // namespace wtconv::cuda
