// The weight gradients of large planes: the base path and one level in one pass over both tensors.
//
//   copy the windows of grad_output (with halo) and of input (without), the next ones while the
//   bands are summed -> every thread sums the base path's taps over its patch, level 1 of both into
//   shared memory -> a warp sums the taps of a band -> after some tiles, partial sums to memory
//
// The low-pass bands, which the kernel has on chip, are written for the levels past this one. Sums
// come out rotated by 180 degrees because grad_output is the operand with the halo; the kernel of
// weight_grad.cu adds the partial sums in a fixed order. Source: the adjoint law.
#include "launch.cuh"
#include "patch_device.cuh"

namespace wtconv::cuda {
namespace {

// sum[i * K + j] += in[r][u] * g(r + i)[u + j].
template <int K, int kRows, int kCols, class LoadInput, class LoadGrad>
__device__ __forceinline__ void correlate(LoadInput load_input, LoadGrad load_grad,
                                          float (&sum)[K * K]) {
  float in[kRows][kCols];
#pragma unroll
  for (int r = 0; r < kRows; ++r) load_input(r, in[r]);
#pragma unroll
  for (int y = 0; y < kRows + K - 1; ++y) {
    float g[kCols + K - 1];
    load_grad(y, g);
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
#pragma unroll
      for (int i = 0; i < K; ++i) {
        const int r = y - i;
        if (r < 0 || r >= kRows) continue;
#pragma unroll
        for (int j = 0; j < K; ++j) sum[i * K + j] += in[r][u] * g[u + j];
      }
    }
  }
}

template <class W, class T, int kFirst, int N>
__device__ __forceinline__ void load_pixels(const T* pixels, int row, int col, float (&value)[N]) {
  constexpr int kShift = (W::lead(0) + kFirst) % W::kUnit;
  constexpr int kAccesses = (kShift + N + W::kUnit - 1) / W::kUnit;
  const int piece = (col + W::lead(0) + kFirst - kShift) / W::kUnit;
  load_inputs<W::kUnit, kAccesses, kShift>(
      pixels + row * W::pitch(0), [&](int a) { return W::piece(piece + a) * W::kUnit; }, value);
}

// The base path: the patch of a thread.
template <class WG, class WX, class T, int K>
__device__ __forceinline__ void correlate_pixels(const T* grad, const T* input,
                                                 float (&sum)[K * K]) {
  const int y = threadIdx.x / kPatchesX * kPatchRows, x = threadIdx.x % kPatchesX * kPatchCols;
  correlate<K, kPatchRows, kPatchCols>(
      [&](int r, float (&row)[kPatchCols]) { load_pixels<WX, T, 0>(input, y + r, x, row); },
      [&](int r, float (&row)[kPatchCols + K - 1]) {
        load_pixels<WG, T, -(K / 2)>(grad, y + WG::halo(0) - K / 2 + r, x, row);
      },
      sum);
}

// Level 1: a warp takes a band, a lane 8 x 4 coefficients in two halves.
template <class WG, class WX, int K>
__device__ __forceinline__ void correlate_band(const float* grad, const float* input,
                                               float (&sum)[K * K]) {
  const int band = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int y = lane / 8 * 8, x = lane % 8 * 4;
  const float* in = input + band * WX::band(1) + y * WX::pitch(1) + x;
  const float* g = grad + band * WG::band(1) + WG::stored(1, y - K / 2, x - K / 2) - WG::shift(1);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    correlate<K, 4, 4>(
        [&](int r, float (&row)[4]) {
          load_inputs<4, 1, 0>(in + (4 * half + r) * WX::pitch(1), [](int) { return 0; }, row);
        },
        [&](int r, float (&row)[4 + K - 1]) {
          load_inputs<4, WG::accesses(1), WG::shift(1)>(
              g + (4 * half + r) * WG::pitch(1), [](int a) { return a * 4; }, row);
        },
        sum);
  }
}

// The tile's own low-pass coefficients to a dense plane; returns the sum of those of this thread.
template <class W>
__device__ __forceinline__ float store_lowpass(const float* bands, float* plane, int rows, int cols,
                                               int y, int x) {
  float sum = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < W::own(1) * W::own(1) / 4; i += kPatchThreads) {
    const int row = i / (W::own(1) / 4), col = i % (W::own(1) / 4) * 4;
    const float* from = bands + W::stored(1, row, col);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      sum += from[u];
      if (plane && y + row < rows && x + col + u < cols)
        plane[int64_t(y + row) * cols + x + col + u] = from[u];
    }
  }
  return sum;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// Partial sums of the block, [slot][tap] and the bias; the threads' sums start again from zero.
template <int K>
__device__ void write_partials(float (&base)[K * K], float (&band)[K * K], float& bias,
                               float* exchange, float* out) {
  constexpr int kTaps = K * K, kWarps = kPatchThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    const float value = warp_sum(base[t]), tap = warp_sum(band[t]);
    base[t] = band[t] = 0;
    if (lane > 0) continue;
    exchange[warp * (kTaps + 1) + t] = value;
    out[(1 + warp) * kTaps + t] = tap;
  }
  const float value = warp_sum(bias);
  bias = 0;
  if (lane == 0) exchange[warp * (kTaps + 1) + kTaps] = value;
  __syncthreads();
  for (int t = threadIdx.x; t <= kTaps; t += kPatchThreads) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += exchange[w * (kTaps + 1) + t];
    // The sum of grad_output is twice that of its low-pass band.
    out[t < kTaps ? t : (1 + kSubbands) * kTaps] = t < kTaps ? total : 2 * total;
  }
}

template <class T, int K>
constexpr int kGradBytes =
    Window<T, K / 2, 1>::kPixelBytes + Window<T, 0, 1>::kPixelBytes +
    (Window<T, K / 2, 1>::kFloats + Window<T, 0, 1>::kFloats + kPatchThreads / 32 * (K * K + 1)) *
        int(sizeof(float));
template <class T, int K>
constexpr int kGradBlocks =
    228 * 1024 / (kGradBytes<T, K> + 1024) < 4 ? 228 * 1024 / (kGradBytes<T, K> + 1024) : 4;

template <class T, int K>
__global__ void __launch_bounds__(kPatchThreads, kGradBlocks<T, K>)
    patch_weight_grad_kernel(const __grid_constant__ PatchGradLaunch p) {
  using WG = Window<T, K / 2, 1>;
  using WX = Window<T, 0, 1>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* grad = reinterpret_cast<T*>(shared);
  T* input = reinterpret_cast<T*>(shared + WG::kPixelBytes);
  float* grad_bands = reinterpret_cast<float*>(shared + WG::kPixelBytes + WX::kPixelBytes);
  float* input_bands = grad_bands + WG::kFloats;
  float* exchange = input_bands + WX::kFloats;

  const int channel = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  const int tiles = p.batch * p.tiles_y * p.tiles_x, parts = p.splits * p.parts;
  const auto first_tile = [&](int part) { return int(int64_t(tiles) * part / parts); };
  const auto start = [&](int tile) {
    const TileIndex at(p, tile);
    const auto plane = [&](const View& v) {
      return static_cast<const T*>(v.data) + at.item * v.stride_b + channel * v.stride_c;
    };
    fill<WG, T>(plane(p.grad_output), p.grad_output, p.height, p.width, at.y, at.x, p.wide_grad,
                grad);
    fill<WX, T>(plane(p.input), p.input, p.height, p.width, at.y, at.x, p.wide_input, input);
  };

  const int rows = (p.height + 1) / 2, cols = (p.width + 1) / 2;
  const int last = first_tile((split + 1) * p.parts);
  int tile = first_tile(split * p.parts);
  if (tile < last) start(tile);
  float base[K * K] = {}, band[K * K] = {}, bias = 0;
#pragma unroll 1
  for (int part = split * p.parts; part < (split + 1) * p.parts; ++part) {
#pragma unroll 1
    for (const int end = first_tile(part + 1); tile < end; ++tile) {
      const TileIndex at(p, tile);
      wait_for_copies();
      __syncthreads();
      analyse_pixels<WG, T>(grad, grad_bands);
      analyse_pixels<WX, T>(input, input_bands);
      if (p.base_wanted) correlate_pixels<WG, WX, T, K>(grad, input, base);
      __syncthreads();
      if (tile + 1 < last) start(tile + 1);
      if (p.level_wanted) correlate_band<WG, WX, K>(grad_bands, input_bands, band);
      if (p.bias_wanted || p.low_grad) {
        const int64_t plane = (int64_t(at.item) * p.channels + channel) * rows * cols;
        bias += store_lowpass<WG>(grad_bands, p.low_grad ? p.low_grad + plane : nullptr, rows, cols,
                                  at.y / 2, at.x / 2);
        if (p.low_input)
          store_lowpass<WX>(input_bands, p.low_input + plane, rows, cols, at.y / 2, at.x / 2);
      }
    }
    write_partials<K>(
        base, band, bias, exchange,
        p.partials + (int64_t(channel) * parts + part) * ((1 + kSubbands) * K * K + 1));
    __syncthreads();
  }
}

template <class T, int K>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  return launch_kernel(&patch_weight_grad_kernel<T, K>, p, int64_t(p.channels) * p.splits,
                       kPatchThreads, kGradBytes<T, K>, stream);
}

template <class T>
const char* launch_size(const PatchGradLaunch& p, cudaStream_t stream) {
  switch (p.kernel_size) {
    case 3:
      return launch<T, 3>(p, stream);
    case 5:
      return launch<T, 5>(p, stream);
    default:
      return launch<T, 7>(p, stream);
  }
}

}  // namespace

const char* launch_patch_weight_grad(const PatchGradLaunch& p, DType activations,
                                     cudaStream_t stream) {
  switch (activations) {
    case DType::kFloat16:
      return launch_size<__half>(p, stream);
    case DType::kBFloat16:
      return launch_size<__nv_bfloat16>(p, stream);
    default:
      return launch_size<float>(p, stream);
  }
}

}  // namespace wtconv::cuda
