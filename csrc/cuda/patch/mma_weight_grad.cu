// The weight gradients of large planes of half types, on tensor cores: the base path and one level
// in one pass over both tensors.
//
// Base path and level are together one filter of 2K x 2K taps per parity of the output pixel (see
// mma_forward.cu). The gradient of that filter is
//
//   C_pq[i][j] = sum over batch, r, c of g[2r+p][2c+q] x[2r-2R+i][2c-2R+j],     R = K/2, i, j < 2K
//
// and the filter is linear in the taps, which get, by the adjoint of that map,
//
//   base path  B[a][b]   = sum_pq C_pq[a+R+p][b+R+q]
//   band s     D_s[a][b] = 1/4 sum_pq (+-) sum (+-) C_pq[i][j] over i in {2a, 2a+1}, j in {2b,
//   2b+1}
//
// with the signs of the Haar basis at (p, q) and at (i, j): no coefficients are formed, and nothing
// is rounded. For each p and i, the product P[x', x] = sum over y of x[y-p-2R+i][x'] g[y][x], of 16
// x 8 columns over 16 rows y of parity p, holds the sums in its diagonals: C_pq[i][j] is the sum of
// P where x = 2c + q, x' = 2c - 2R + j. At K = 5 the 16 columns x' are exactly those that the
// pixels of 8 columns x see. Other products, past these taps, are computed and left out.
//
//   copy the windows of g and of x (with halo), the next ones meanwhile -> products, whose sums
//   stay in registers over many tiles -> diagonals by way of shared memory -> B and D -> partial
//   sums
//
// The rows y of a product are 4m + f, m < 16: a row set of x, loaded once, serves all f whose taps
// reach it. Low-pass bands for the levels past this one come from the same windows. Both tensors
// are read once (halos hit L1 or L2). Partial sums are stored rotated by 180 degrees, as finish.cu
// expects of weight_grad.cu, too, and added there in a fixed order. Source: the adjoint law.
#include "../launch.cuh"
#include "mma.cuh"

namespace wtconv::cuda {
namespace {

// Sums of a thread over tiles. Of a product of 24 columns x', the last 8 of two rows of taps i are
// the halves of one product.
template <int K>
struct GradSums {
  static constexpr int kParities = MmaGradShared<K>::kParities;
  static constexpr bool kRest = MmaGradWindow<K, true>::kGroups > 2;
  float first[kParities][2 * K][4];  // x' < 16: elements 0, 1 of row lane / 4; 2, 3 of that + 8
  float rest[kParities][kRest ? K : 1][4];
  float bias[4];
};

// Adds the products of a tile. A warp takes every column of 8 pixels of its share of the tile, and
// rows of both parities, or of one where the sums of both do not fit its registers.
template <int K, class T>
__device__ __forceinline__ void add_products(const T* input, const T* grad, bool bias_wanted,
                                             GradSums<K>& sum) {
  using WX = MmaGradWindow<K, true>;
  using WG = MmaGradWindow<K, false>;
  constexpr int kParities = GradSums<K>::kParities, kSets = 2 * K + 2;
  constexpr int kColumns = kPatchTile / (kPatchThreads / 32) * (2 / kParities);  // of a warp
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = warp * kParities / 2 * kColumns, parity = kParities == 2 ? 0 : warp % 2;
  // Matrices of x: rows (m, m + 8) x columns (0, 8); past them rows (m, m + 8) x sets (i, i + 1).
  // Those of grad_output: sets (f, f + 2) x rows (m, m + 8).
  const int x_row = lane % 8 + lane / 16 * 8, next = lane / 8 % 2;
  const T* x = input + x_row * WX::pitch() + next * 8 + share;
  const T* x_rest = input + (x_row + next * WX::cells()) * WX::pitch() + 16 + share;
  const T* g = grad + (lane % 16 + (lane / 16 * 2 + parity) * WG::cells()) * WG::pitch() + share;
#pragma unroll 1
  for (int column = 0; column < kColumns; column += 8) {
    uint32_t out[kParities][4];
#pragma unroll
    for (int p = 0; p < kParities; ++p) load_transposed(g + p * WG::cells() * WG::pitch(), out[p]);
    uint32_t in[kSets][4];
    const auto load = [&](int set) {
      load_transposed(x + WX::slot(0, set) * WX::pitch(), in[set]);
    };
    load(0);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (set + 1 < kSets) load(set + 1);
      uint32_t in_rest[4];
      const bool rest = GradSums<K>::kRest && set % 2 == 0;
      if (rest) load_transposed(x_rest + WX::slot(0, set) * WX::pitch(), in_rest);
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // f = 2 h + p
        const int i = set - 2 * h;
        if (i < 0 || i >= 2 * K) continue;
#pragma unroll
        for (int p = 0; p < kParities; ++p) {
          multiply<T>(sum.first[p][i], in[set], out[p][2 * h], out[p][2 * h + 1]);
          if (rest) multiply<T>(sum.rest[p][i / 2], in_rest, out[p][2 * h], out[p][2 * h + 1]);
        }
      }
    }
    if (bias_wanted) {
      const uint32_t one = pack<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
#pragma unroll
      for (int p = 0; p < kParities; ++p) {
        multiply<T>(sum.bias, ones, out[p][0], out[p][1]);
        multiply<T>(sum.bias, ones, out[p][2], out[p][3]);
      }
    }
    x += 8, x_rest += 8, g += 8;
  }
}

// Product `n` of a warp's exchange: [element][lane], each element 33 floats after the one before,
// so that the diagonals' elements lie in different banks.
template <int K>
__device__ __forceinline__ void exchange_product(const float (&value)[4], float* exchange, int n) {
  using S = MmaGradShared<K>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* to = exchange + (warp * S::kProducts + n) * S::kProduct + lane;
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e * 33] = value[e];
}

// C_pq[i][j] of all warps, where the exchange holds the products of rows i and i ^ 1 of the taps.
// Element q of a lane is column 2t + q, which tap j meets in row x' = 2t + j - 2R of the window.
template <int K>
__device__ __forceinline__ float sum_diagonal(const float* exchange, int p, int q, int i, int j) {
  using S = MmaGradShared<K>;
  constexpr int kShift = S::WX::lead() - S::WX::halo();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kPatchThreads / 32; w += 2 / S::kParities) {
    const int warp = S::kParities == 2 ? w : w + p;
    const float* products = exchange + warp * S::kProducts * S::kProduct;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      int row = 2 * t + j + kShift, product = (S::kParities == 2 ? p * 2 : 0) + i % 2;
      if (S::WX::kGroups > 2 && row >= 16) {
        row += i % 2 * 8 - 16;
        product = 2;
      }
      sum += products[product * S::kProduct + (row / 8 * 2 + q) * 33 + row % 8 * 4 + t];
    }
  }
  return sum;
}

// Partial sums of the block, [slot][tap] rotated by 180 degrees, and the bias. All threads are past
// their last use of `shared`.
template <int K>
__device__ __forceinline__ void write_partials(const GradSums<K>& sum, float* shared, float* out) {
  using S = MmaGradShared<K>;
  constexpr int kTaps = K * K, kSide = 2 * K, kWarps = kPatchThreads / 32;
  static_assert(8 * kSide <= kPatchThreads, "a thread sums one diagonal");
  float* filter = shared + 2 * S::kExchange;  // [p][q][i][j]
  float* bias = filter + 4 * S::kFilter;
  const int id = threadIdx.x, q = id % 2, j = id / 2 % kSide, p = id / (2 * kSide) % 2;
#pragma unroll
  for (int i = 0; i < kSide; i += 2) {
    float* exchange = shared + i / 2 % 2 * S::kExchange;
#pragma unroll
    for (int n = 0; n < S::kParities * 2; ++n)
      exchange_product<K>(sum.first[n / 2][i + n % 2], exchange, n);
    if constexpr (GradSums<K>::kRest) exchange_product<K>(sum.rest[0][i / 2], exchange, 2);
    if (i == 0) {
      // Every row of the product with ones is the sums of its columns.
      float value = sum.bias[0] + sum.bias[1];
      value += __shfl_xor_sync(~0u, value, 1);
      value += __shfl_xor_sync(~0u, value, 2);
      if (id % 32 == 0) bias[id / 32] = value;
    }
    __syncthreads();
    const int row = i + id / (4 * kSide);
    if (id < 8 * kSide)
      filter[((p * 2 + q) * kSide + row) * kSide + j] = sum_diagonal<K>(exchange, p, q, row, j);
  }
  __syncthreads();
  if (id == 0) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += bias[w];
    out[(1 + kSubbands) * kTaps] = total;
  }
  if (id >= kTaps) return;
  const int a = id / K, b = id % K;
  float base = 0, crossed[4][kSubbands];
#pragma unroll
  for (int parity = 0; parity < 4; ++parity) {
    const float* c = filter + parity * S::kFilter;
    base += c[(a + K / 2 + parity / 2) * kSide + b + K / 2 + parity % 2];
    c += 2 * a * kSide + 2 * b;
    haar_butterfly<float>(c[0], c[1], c[kSide], c[kSide + 1], crossed[parity]);
  }
  out += kTaps - 1 - id;
  out[0] = base;
#pragma unroll
  for (int s = 0; s < kSubbands; ++s) {
    float band[kSubbands];
    haar_butterfly<float>(crossed[0][s], crossed[1][s], crossed[2][s], crossed[3][s], band);
    out[(1 + s) * kTaps] = band[s];
  }
}

// The tile's own low-pass coefficients to dense planes [B, C, ceil(H / 2), ceil(W / 2)], a row of
// 32 per warp at once.
template <class W, class T>
__device__ __forceinline__ void store_lowpass(const T* pixels, const PatchGradLaunch& p,
                                              const TileIndex& at, float* low) {
  constexpr int kSide = kPatchTile / 2, kStep = kPatchThreads / 32;
  const int rows = (p.height + 1) / 2, cols = (p.width + 1) / 2;
  const int first = threadIdx.x / 32, x = at.x / 2 + threadIdx.x % 32;
  if (x >= cols) return;
  float* to = low + ((int64_t(at.item) * p.channels + at.channel) * rows + at.y / 2) * cols + x;
  const int last = min(kSide, rows - at.y / 2);
#pragma unroll 2
  for (int r = first; r < last; r += kStep) {
    const T* from =
        pixels + W::slot(0, 2 * r + W::halo()) * W::pitch() + W::lead() + threadIdx.x % 32 * 2;
    const auto top = *reinterpret_cast<const Vector<T, 2>*>(from);
    const auto bottom =
        *reinterpret_cast<const Vector<T, 2>*>(from + W::cells() * W::pitch());  // the next row
    float band[kSubbands];
    haar_butterfly<float>(widen<float>(top.lane[0]), widen<float>(top.lane[1]),
                          widen<float>(bottom.lane[0]), widen<float>(bottom.lane[1]), band);
    to[int64_t(r) * cols] = band[0];
  }
}

template <class T, int K>
__global__ void __launch_bounds__(kPatchThreads, MmaGradShared<K>::kBlocks)
    mma_weight_grad_kernel(const __grid_constant__ PatchGradLaunch p) {
  using S = MmaGradShared<K>;
  using WX = typename S::WX;
  using WG = typename S::WG;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto input = [&](int n) { return reinterpret_cast<T*>(shared + n % 2 * S::kWindow); };
  const auto grad = [&](int n) { return input(n) + WX::kBytes / 2; };

  const BlockTiles tiles = BlockTiles::contiguous(p);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const auto start = [&](int n) {
    start_window<WX, WX::kPiece, true>(p.input, p.input_bytes >= WX::kPiece, p, next, input(n));
    start_window<WG, WG::kPiece, false>(p.grad_output, p.grad_bytes == 16, p, next, grad(n));
  };
  start(0);
  int n = 0;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    GradSums<K> sum = {};
#pragma unroll 1
    for (const int end = tiles.count * (part + 1) / p.parts; n < end; ++n) {
      wait_for_copies();
      __syncthreads();
      at = next;
      if (n + 1 < tiles.count) {
        advance(p, next);
        start(n + 1);
      }
      if (p.low_input) store_lowpass<WX>(input(n), p, at, p.low_input);
      if (p.low_grad) store_lowpass<WG>(grad(n), p, at, p.low_grad);
      add_products<K>(input(n), grad(n), p.bias_wanted, sum);
    }
    // A part has a tile, whose windows are free behind this barrier.
    __syncthreads();
    const int64_t block = int64_t(tiles.channel) * p.splits + blockIdx.x / p.channels;
    write_partials<K>(sum, reinterpret_cast<float*>(input(n - 1)),
                      p.partials + (block * p.parts + part) * ((1 + kSubbands) * K * K + 1));
  }
}

template <class T, int K>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  return launch_kernel(&mma_weight_grad_kernel<T, K>, p, int64_t(p.channels) * p.splits,
                       kPatchThreads, MmaGradShared<K>::kTotal, stream);
}

}  // namespace

const char* launch_mma_weight_grad(const PatchGradLaunch& p, DType activations,
                                   cudaStream_t stream) {
  return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
    return activations == DType::kFloat16 ? launch<__half, k()>(p, stream)
                                          : launch<__nv_bfloat16, k()>(p, stream);
  });
}

}  // namespace wtconv::cuda
