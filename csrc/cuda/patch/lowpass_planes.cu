// The levels past the first two, where their planes fit a tile: the operator without base path on
// the low-pass band of x two levels down, which the kernel forms itself.
//
//   x in pieces of 16 bytes -> LL, dense -> level 1 in its cells -> as in planes.cu -> store
//
// A block reads 16 times its planes, so x sets the pace: four blocks of a multiprocessor, with
// kPieces of each thread under way. A block has one tile: while those that are done reading filter,
// the others have the bandwidth. LL never reaches memory, and what is written, a float32 for 16
// pixels, mostly stays in L2 for the kernel that adds it. 8x64x256x256, K=5, L=5, on an H200: 51 us
// in float32 and 35 us in float16, where reading x at the speed of a copy takes 32 and 16 us.
#include <cstring>

#include "../launch.cuh"
#include "planes_levels.cuh"

namespace wtconv::cuda {
namespace {

constexpr int kPieces = 16, kSize = 1 << kLowpassDown;
using Piece = Vector<uint32_t, 4>;

// The pieces that make LL of batch items `first` on, in columns of kSize below each other,
// [item][row][col]. A thread takes every kPatchThreads-th column, so that small planes keep as many
// under way, and divides only before the first.
template <class T, int G>
class PieceColumns {
 public:
  __device__ __forceinline__ PieceColumns(const LowpassPlanesLaunch& p, int channel, int first) {
    const View& view = p.planes.input;
    constexpr int kElement = int(sizeof(T)), kUnit = int(sizeof(Piece)) / kElement;
    items_ = min(G * G, p.planes.batch - first), rows_ = p.planes.height;
    cols_ = p.input_width / kUnit;
    at_ = index(threadIdx.x), step_ = index(kPatchThreads);
    left_ = p.input_height - at_.row * kSize;
    stride_y_ = view.stride_y * kElement;
    row_end_ = kSize * stride_y_ - cols_ * int(sizeof(Piece));
    item_end_ = view.stride_b * kElement - rows_ * kSize * stride_y_;
    const auto offset = [&](const Index& i) {
      return i.item * view.stride_b * kElement + i.row * kSize * stride_y_ +
             i.col * int(sizeof(Piece));
    };
    from_ = static_cast<const char*>(view.data) +
            (channel * view.stride_c + first * view.stride_b) * kElement + offset(at_);
    advance_ = offset(step_);
  }

  // Starts to load the next column; where its coefficients go, [row][col] of the tile, or -1 where
  // none is left. Pieces past the last row of x are zero.
  __device__ __forceinline__ int load(Piece (&piece)[kSize]) {
    if (at_.item >= items_) return -1;
    if (left_ >= kSize) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) piece[i] = load_once<Piece>(from_ + i * stride_y_);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        piece[i] = Piece{};
        if (i < left_) piece[i] = load_once<Piece>(from_ + i * stride_y_);
      }
    }
    constexpr int kCell = kPatchTile / G;
    const int to = (at_.item / G * kCell + at_.row) * kPatchTile + at_.item % G * kCell +
                   at_.col * (int(sizeof(Piece) / sizeof(T)) / kSize);
    from_ += advance_, left_ -= step_.row * kSize;
    at_.item += step_.item, at_.row += step_.row, at_.col += step_.col;
    if (at_.col >= cols_) at_.col -= cols_, ++at_.row, from_ += row_end_, left_ -= kSize;
    if (at_.row >= rows_) at_.row -= rows_, ++at_.item, from_ += item_end_, left_ += rows_ * kSize;
    return to;
  }

 private:
  struct Index {
    int item, row, col;
  };
  __device__ __forceinline__ Index index(int column) const {
    const int row = column / cols_;
    return {row / rows_, row % rows_, column % cols_};
  }

  const char* from_;
  int64_t stride_y_, advance_, row_end_, item_end_;  // in bytes
  int items_, rows_, cols_;
  int left_;  // rows of x from the next column on: counted, since a constant would be read anew
  Index at_, step_;
};

// LL below a column: a quarter of the sum of kSize x kSize pixels.
template <class T>
__device__ __forceinline__ void store_lowpass(const Piece (&piece)[kSize], float* to) {
  constexpr int kUnit = int(sizeof(Piece) / sizeof(T)), kOut = kUnit / kSize;
  Vector<T, kUnit> row[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) memcpy(&row[i], &piece[i], sizeof(Piece));
  Vector<float, kOut> out;
#pragma unroll
  for (int u = 0; u < kOut; ++u) {
    out.lane[u] = lowpass_of<kLowpassDown, float>(
        [&](int i, int s) { return widen<float>(row[i].lane[u * kSize + s]); });
  }
  *reinterpret_cast<Vector<float, kOut>*>(to) = out;
}

// LL of the block's planes, [row][col] of the tile. `meanwhile` runs while the first pieces are
// under way.
template <class T, int G, class F>
__device__ __forceinline__ void form_band(const LowpassPlanesLaunch& p, int channel, int first,
                                          float* band, F meanwhile) {
  constexpr int kColumns = kPieces / kSize;
  PieceColumns<T, G> columns(p, channel, first);
  Piece piece[kColumns][kSize];
  int to[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) to[n] = columns.load(piece[n]);
  meanwhile();
  // A column is loaded where one has been summed: the others stay under way.
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (to[n] < 0) return;
      store_lowpass<T>(piece[n], band + to[n]);
      to[n] = columns.load(piece[n]);
    }
  }
}

// Level 1 of the band; the zeros between its cells stay.
template <class W>
__device__ __forceinline__ void analyse_band(const float* band, float* bands) {
  constexpr int kSide = W::own(1);
  for_each_position<kSide, kSide>([&](int row, int col) {
    const float* p = band + 2 * row * kPatchTile + 2 * col;
    const auto top = *reinterpret_cast<const Vector<float, 2>*>(p);
    const auto bottom = *reinterpret_cast<const Vector<float, 2>*>(p + kPatchTile);
    float value[kSubbands];
    haar_butterfly<float>(top.lane[0], top.lane[1], bottom.lane[0], bottom.lane[1], value);
#pragma unroll
    for (int b = 0; b < kSubbands; ++b) bands[W::stored(1, b, row, col)] = value[b];
  });
}

template <class T, int K, int G>
__global__ void __launch_bounds__(kPatchThreads, LowpassPlanesMemory<K, G>::kBlocks)
    lowpass_planes_kernel(const __grid_constant__ LowpassPlanesLaunch launch) {
  using M = LowpassPlanesMemory<K, G>;
  using P = typename M::P;
  using W = typename P::W;
  using Own = typename W::ThreadPatch;
  const PatchLaunch& p = launch.planes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* dense = reinterpret_cast<float*>(shared);
  float* bands = reinterpret_cast<float*>(shared + M::kBands);
  float* weights = reinterpret_cast<float*>(shared + M::kWeights);

  const int channel = blockIdx.x % p.channels, first = blockIdx.x / p.channels * G * G;
  const auto prepare = [&] {
    clear(shared, M::kWeights);
    load_taps<K, P::kLevels>(p.params, channel, p.levels, weights);
  };
  form_band<T, G>(launch, channel, first, dense, prepare);
  __syncthreads();
  // Blocks of the kernel that adds the result copy and filter their first windows while the last
  // ones here filter; not while they read (8x128x256x256 float16, L=5: 0.28 against 0.20 ms).
  let_next_grid_start();
  analyse_band<W>(dense, bands);
  __syncthreads();
  PatchLevel1<Own> low = {};
  PatchPixels<Own> sum = {};
  if (p.levels > 1) filter_deep_levels<P, K>(bands, dense, weights, p.levels, low);

  const int py = patch_row<Own>(), px = patch_col<Own>();
  const int y = py % W::cell(0), x = px % W::cell(0);
  const int item = first + py / W::cell(0) * G + px / W::cell(0);
  if (item < p.batch && y < p.height && x < p.width) {
    add_level1<W, K>(bands, weights, low, sum);
    float* out = static_cast<float*>(p.output.data) + item * p.output.stride_b +
                 channel * p.output.stride_c + y * p.output.stride_y + x;
    store_patch<float>(p, out, p.height - y, p.width - x, sum);
  }
}

template <class T, int K, int G>
const char* launch(const LowpassPlanesLaunch& p, cudaStream_t stream) {
  return launch_kernel(&lowpass_planes_kernel<T, K, G>, p,
                       int64_t(p.planes.channels) * p.planes.tiles, kPatchThreads,
                       LowpassPlanesMemory<K, G>::kBytes, stream, false, kAllShared);
}

}  // namespace

const char* launch_lowpass_planes(const LowpassPlanesLaunch& p, cudaStream_t stream) {
  return dispatch_float(p.dtype, [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.planes.kernel_size, [&](auto k) {
      return with_constant(LowpassCells(), p.planes.cells,
                           [&](auto g) { return launch<decltype(t), k(), g()>(p, stream); });
    });
  });
}

}  // namespace wtconv::cuda
