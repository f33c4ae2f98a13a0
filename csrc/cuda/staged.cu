// The paper's staged form: analysis on chip + depthwise convolution + folded scale of one level
// (sec. 3.1, 3.3), writing filtered coefficients and the raw low-pass band; and the bit-indexed
// synthesis of all levels in one pass with the base add in its store (eq. synthesis_closed_form).
#include "launch.cuh"
#include "tile/device.cuh"

namespace wtconv::cuda {
namespace {

// Writes band `band` of the block's channels to channel step * c + band of `out`.
template <class T, class A>
__device__ void store_band(const TileLaunch& p, const View& out, int64_t item, const BlockIndex& at,
                           int band, int step, bool raw, const A* memory) {
  const TileLevel& v = p.shape.level[1];
  const int rows = min(v.own_rows, (p.height - at.y + 1) / 2),
            cols = min(v.own_cols, (p.width - at.x + 1) / 2);
  const Positions positions(p.shape.group, rows, cols, p.channels_fast);
  for (int n = threadIdx.x; n < positions.count; n += blockDim.x) {
    int c, row, col;
    positions.decode(n, c, row, col);
    if (at.channel + c >= p.channels) continue;
    const A* base = memory + c * p.shape.channel_stride + v.offset + band * v.band_stride;
    const A value =
        raw ? base[stored(v, row, col)] : base[row * v.pitch + col];  // filtered in place
    T* to = static_cast<T*>(out.data) + item * out.stride_b +
            (step * (at.channel + c) + band) * out.stride_c;
    to[(at.y / 2 + row) * out.stride_y + (at.x / 2 + col) * out.stride_x] = narrow<T>(value);
  }
}

template <class T, class A, int K>
__global__ void __launch_bounds__(128)
    analysis_conv_kernel(const __grid_constant__ AnalysisLaunch p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const TileLaunch& t = p.tile;
  const TileShape& s = t.shape;
  A* memory = reinterpret_cast<A*>(shared);
  A* weights = memory + s.group * s.channel_stride;
  A* biases = weights + s.group * (1 + kSubbands) * s.kernel_size * s.kernel_size;
  const BlockIndex at(t);
  load_parameters<A>(t, at.channel, weights, biases);
  for (int64_t item = at.first; item < at.last; ++item) {
    load_window<T, A>(t, t.input, s, item, at.channel, at.y, at.x, memory);
    __syncthreads();
    analyse<A>(s, 1, t.channels_fast, memory);
    __syncthreads();
    store_band<T, A>(t, p.lowpass, item, at, 0, 1, true, memory);
    __syncthreads();
    filter_bands<A, K>(t, 1, weights, memory);
    __syncthreads();
    for (int band = 0; band < kSubbands; ++band) {
      store_band<T, A>(t, t.output, item, at, band, kSubbands, false, memory);
    }
    __syncthreads();
  }
}

template <class T, class A>
__global__ void __launch_bounds__(256) synthesis_kernel(const __grid_constant__ SynthesisLaunch p) {
  const int64_t total = p.batch * p.channels * p.height * p.width;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < total;
       i += int64_t(gridDim.x) * blockDim.x) {
    const PixelIndex index(i, p.channels, p.height, p.width, p.channels_fast);
    const int c = index.channel, y = index.row, x = index.col;
    const int64_t q = index.item;
    const auto at = [&](const View& v, int channel, int row, int col) {
      return widen<A>(static_cast<const T*>(
          v.data)[q * v.stride_b + channel * v.stride_c + row * v.stride_y + col * v.stride_x]);
    };
    A value = 0, factor = 1;
    for (int l = 1; l <= p.levels; ++l) {
      const View& v = p.coefficients[l - 1];
      factor *= A(0.5);
      const int row = y >> min(l, 31), col = x >> min(l, 31);
      const A sign_y = (y >> (l - 1)) & 1 ? A(-1) : A(1),
              sign_x = (x >> (l - 1)) & 1 ? A(-1) : A(1);
      value +=
          factor * (at(v, 4 * c, row, col) + sign_y * at(v, 4 * c + 1, row, col) +
                    sign_x * (at(v, 4 * c + 2, row, col) + sign_y * at(v, 4 * c + 3, row, col)));
    }
    const View& o = p.output;
    static_cast<T*>(o.data)[q * o.stride_b + c * o.stride_c + y * o.stride_y + x * o.stride_x] =
        narrow<T>(at(p.base, c, y, x) + value);
  }
}

template <class T, class A>
const char* launch_analysis(const AnalysisLaunch& p, cudaStream_t stream) {
  const TileLaunch& t = p.tile;
  const int64_t blocks = int64_t(t.groups) * t.tiles_x * t.tiles_y * t.batch;
  const TileShape& s = t.shape;
  if constexpr (sizeof(A) == 4) {
    if (s.kernel_size == 5) {
      return launch_kernel(&analysis_conv_kernel<T, A, 5>, p, blocks, s.threads, s.shared_bytes,
                           stream);
    }
  }
  return launch_kernel(&analysis_conv_kernel<T, A, 0>, p, blocks, s.threads, s.shared_bytes,
                       stream);
}

template <class T, class A>
const char* launch_synthesis_of(const SynthesisLaunch& p, cudaStream_t stream) {
  const int64_t blocks = p.batch * p.channels * p.height * p.width / 256 + 1;
  return launch_kernel(&synthesis_kernel<T, A>, p, blocks < (1 << 20) ? blocks : 1 << 20, 256, 0,
                       stream);
}

}  // namespace

const char* launch_analysis_conv(const AnalysisLaunch& p, DType dtype, cudaStream_t stream) {
  return dispatch(
      dtype, [&](auto t, auto a) { return launch_analysis<decltype(t), decltype(a)>(p, stream); });
}

const char* launch_synthesis(const SynthesisLaunch& p, DType dtype, cudaStream_t stream) {
  return dispatch(dtype, [&](auto t, auto a) {
    return launch_synthesis_of<decltype(t), decltype(a)>(p, stream);
  });
}

}  // namespace wtconv::cuda
