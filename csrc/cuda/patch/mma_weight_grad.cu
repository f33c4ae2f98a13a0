// The weight gradients of large planes of half types, on tensor cores: the base path and one level
// or two in one pass over both tensors.
//
// Base path and level are together one filter of 2K x 2K taps per parity of the output pixel (see
// mma_forward.cu). The gradient of that filter is
//
//   C_pq[i][j] = sum over batch, r, c of g[2r+p][2c+q] x[2r-2R+i][2c-2R+j],     R = K/2, i, j < 2K
//
// and the filter is linear in the taps, which get, by the adjoint of that map,
//
//   base path  B[a][b]   = sum_pq C_pq[a+R+p][b+R+q]
//   band s     D_s[a][b] = 1/4 sum_pq (+-) sum_ij (+-) C_pq[i][j],  i/2 = a, j/2 = b rounded down
//
// with the signs of the Haar basis at (p, q) and at (i, j): no coefficients are formed, and nothing
// is rounded. Level 2 is the same on LL of both tensors, which is rounded to their type, and
// without B. For each p and i, the product P[x', x] = sum over y of x[y-p-2R+i][x'] g[y][x], of 16
// x 8 columns over 16 rows y of parity p, holds the sums in its diagonals: C_pq[i][j] is the sum of
// P where x = 2c + q, x' = 2c - 2R + j. At K = 5 the 16 columns x' are exactly those that the
// pixels of 8 columns x see. Other products, past these taps, are computed and left out.
//
//   copy the windows of g and of x (with halo), the next ones meanwhile -> L = 2: LL of both into
//   shared memory -> products, whose sums stay in registers over many tiles -> diagonals by way of
//   shared memory -> B and D -> partial sums
//
// The rows y of a product are 4m + f (of LL 2m + f), m < 16: a row set of x, loaded once, serves
// all f whose taps reach it. A warp takes the taps' rows i of one parity, so that the sums of both
// levels fit its registers. Low-pass bands for the levels past these come from the same windows,
// in the type of the tensors; that of grad_output in float32 as well, for the input gradient. Both
// tensors are read once (halos hit L1 or L2). Partial sums are stored rotated by 180 degrees, as
// finish.cu expects of weight_grad.cu, too, and added there in a fixed order. Source: the adjoint
// law.
#include "../launch.cuh"
#include "mma.cuh"

namespace wtconv::cuda {
namespace {

constexpr float kLowScale = 2;  // LL of x is divided by it

// Sums of a thread over tiles, of a level. Product n has row 2n or 2n + 1 of the taps. Of 24
// columns x', the last 8 of two such rows are the halves of one product.
template <int K, int L>
struct GradSums {
  using M = MmaGradMemory<K, L>;
  static constexpr bool kRest = M::WX::kGroups > 2;
  // x' < 16: elements 0 and 1 are of row lane / 4, 2 and 3 of row lane / 4 + 8.
  float first[M::kRows][M::kParities][K][4];
  float rest[M::kRows][M::kParities][kRest ? (K + 1) / 2 : 1][4];
};

// What a warp takes of a tile, of the first of both where it takes both.
template <int K, int L>
struct WarpShare {
  using M = MmaGradMemory<K, L>;
  static constexpr int kWarpRows = 2 / M::kRows, kWarpParities = 2 / M::kParities;
  int row = threadIdx.x / 32 % kWarpRows;
  int parity = threadIdx.x / 32 / kWarpRows % kWarpParities;
  int columns = threadIdx.x / 32 / (kWarpRows * kWarpParities);

  // The warp that takes all this.
  static constexpr int warp(int row, int parity, int columns) {
    return row % kWarpRows + kWarpRows * (parity % kWarpParities + kWarpParities * columns);
  }
};

// Adds the products of a tile at level kLevel + 1, 8 columns at a time; where kBias, the sums of g
// to `bias`.
template <int K, int L, int kLevel, bool kBias, class T>
__device__ __forceinline__ void add_products(const T* input, const T* grad, GradSums<K, L>& sum,
                                             float (&bias)[4]) {
  using M = MmaGradMemory<K, L>;
  using WX = typename M::WX;
  using WG = typename M::WG;
  constexpr bool kRest = GradSums<K, L>::kRest;
  constexpr int kPitch = WX::pitch(kLevel), kColumns = WX::own(kLevel) / M::kShares;
  constexpr int kPairs = WX::cell(kLevel) / 2;  // rows f = 2 h + p of the cells, h < kPairs
  constexpr int kSets = K + kPairs - 1, kOperands = kPairs * M::kParities;
  constexpr int kFirst = WX::halo(kLevel) - K / 2 * 2;  // even
  // Rows 2 set + row of the taps, row = 0, 1, in shared memory.
  const auto set_at = [](int set) { return WX::template row_at<kLevel>(2 * set + kFirst); };
  constexpr int kNextRow = WX::group(kLevel);
  const WarpShare<K, L> share;
  const int lane = threadIdx.x % 32, column = share.columns * kColumns;
  // Matrices of x: rows (m, m + 8) x columns (0, 8); past them rows (m, m + 8) x two sets. Those of
  // grad_output: rows (m, m + 8) x the f of two operands.
  const int x_row = lane % 8 + lane / 16 * 8, next = lane / 8 % 2;
  const T* x = input + share.row * WX::group(kLevel) + x_row * kPitch + WX::lead(kLevel) -
               WX::kLead + column;
  const T* x_rest[2] = {x + 16 + next * (set_at(1) - set_at(0)),
                        x + 16 + next * (set_at(2) - set_at(1))};
  x += next * 8;
  constexpr int kSecond = kOperands == 1 ? 0 : M::kParities == 2 ? 1 : 2;
  const int f = share.parity + lane / 16 * kSecond;
  const T* g = grad + f * WG::group(kLevel) + lane % 16 * WG::pitch(kLevel) + column;
  // At two levels all steps at once: a step's loads overlap the products before. On an H200,
  // float16, in ms, and step by step: 8x64x512x512 K = 5 0.291 and 0.300, 8x64x256x256 K = 7 0.175
  // and 0.185; at one level, where registers spill, 8x64x512x512 K = 5 0.197 and 0.189.
  constexpr int kUnrolled = L == 1 ? 1 : kColumns / 8;
#pragma unroll kUnrolled
  for (int c = 0; c < kColumns; c += 8) {
    uint32_t out[kOperands][4];  // every second: two operands
#pragma unroll
    for (int o = 0; o < kOperands; o += 2) load_transposed(g + o * WG::group(kLevel), out[o]);
    const auto multiply_operand = [&](int o, float (&to)[4], const uint32_t (&a)[4]) {
      multiply<T>(to, a, out[o / 2 * 2][o % 2 * 2], out[o / 2 * 2][o % 2 * 2 + 1]);
    };
    uint32_t in[kSets * M::kRows][4];
    const auto load = [&](int i) {
      load_transposed(x + set_at(i / M::kRows) + i % M::kRows * kNextRow, in[i]);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < kSets * M::kRows; ++i) {
      if (i + 1 < kSets * M::kRows) load(i + 1);
      const int set = i / M::kRows, row = i % M::kRows;
      uint32_t in_rest[4];
      if (kRest && (kPairs > 1 || set % 2 == 0))
        load_transposed(x_rest[set % 2] + set_at(set) + row * kNextRow, in_rest);
#pragma unroll
      for (int h = 0; h < kPairs; ++h) {
        const int n = set - h;
        if (n < 0 || n >= K) continue;
#pragma unroll
        for (int p = 0; p < M::kParities; ++p) {
          multiply_operand(h * M::kParities + p, sum.first[row][p][n], in[i]);
          if (kRest && n % 2 == 0)
            multiply_operand(h * M::kParities + p, sum.rest[row][p][n / 2], in_rest);
        }
      }
    }
    // Warps that share their columns take turns.
    if (kBias && (M::kRows == 2 || c / 8 % 2 == share.row)) {
      const uint32_t one = pack<T>(1.0f, 1.0f), ones[4] = {one, one, one, one};
#pragma unroll
      for (int o = 0; o < kOperands; ++o) multiply_operand(o, bias, ones);
    }
    x += 8, x_rest[0] += 8, x_rest[1] += 8, g += 8;
  }
}

// Product `n` of a warp's exchange: [element][lane], each element 33 floats after the one before,
// so that the diagonals' elements lie in different banks.
template <class M>
__device__ __forceinline__ void exchange_product(const float (&value)[4], float* exchange, int n) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* to = exchange + (warp * M::kProducts + n) * M::kProduct + lane;
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e * 33] = value[e];
}

// C_pq[i][j] of all warps, where the exchange holds the products of rows i and i ^ 1 of the taps.
// Element q of a lane is column 2t + q, which tap j meets in row x' = 2t + j - 2R of the window.
template <int K, int L>
__device__ __forceinline__ float sum_diagonal(const float* exchange, int p, int q, int i, int j) {
  using M = MmaGradMemory<K, L>;
  constexpr int kShift = M::WX::kLead - K / 2 * 2;
  float sum = 0;
#pragma unroll
  for (int columns = 0; columns < M::kShares; ++columns) {
    const int warp = WarpShare<K, L>::warp(i, p, columns);
    const float* products = exchange + warp * M::kProducts * M::kProduct;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      int row = 2 * t + j + kShift, product = i % M::kRows * M::kParities + p % M::kParities;
      if (M::WX::kGroups > 2 && row >= 16) {
        row += i / 2 % 2 * 8 - 16;
        product += M::kRows * M::kParities;
      }
      sum += products[product * M::kProduct + (row / 8 * 2 + q) * 33 + row % 8 * 4 + t];
    }
  }
  return sum;
}

// The gradient of the filter of a level, [p][q][i][j].
template <int K, int L, int kLevel>
__device__ __forceinline__ void sum_filter(const GradSums<K, L>& sum, float* exchanges,
                                           float* filter) {
  using M = MmaGradMemory<K, L>;
  constexpr int kSide = 2 * K, kFirst = M::kRows * M::kParities;
  static_assert(8 * kSide <= kPatchThreads, "a thread sums one diagonal");
  const int id = threadIdx.x, q = id % 2, j = id / 2 % kSide, p = id / (2 * kSide) % 2;
#pragma unroll
  for (int n = 0; n < K; ++n) {
    float* exchange = exchanges + (kLevel * K + n) % 2 * M::kExchange;
#pragma unroll
    for (int m = 0; m < kFirst; ++m) {
      const int row = m / M::kParities, parity = m % M::kParities;
      exchange_product<M>(sum.first[row][parity][n], exchange, m);
      if constexpr (GradSums<K, L>::kRest)
        exchange_product<M>(sum.rest[row][parity][n / 2], exchange, kFirst + m);
    }
    __syncthreads();
    const int i = 2 * n + id / (4 * kSide);
    if (id < 8 * kSide)
      filter[((p * 2 + q) * kSide + i) * kSide + j] = sum_diagonal<K, L>(exchange, p, q, i, j);
  }
}

// The taps' gradients, a thread each, from those of a filter: of the base path, and of the bands
// with the sums over LL `scale` times too small.
template <int K>
__device__ __forceinline__ void write_taps(const float* filter, float scale, float* base,
                                           float* bands) {
  constexpr int kTaps = K * K, kSide = 2 * K;
  if (threadIdx.x >= kTaps) return;
  const int a = threadIdx.x / K, b = threadIdx.x % K, to = kTaps - 1 - threadIdx.x;
  float total = 0, crossed[4][kSubbands];
#pragma unroll
  for (int parity = 0; parity < 4; ++parity) {
    const float* c = filter + parity * kSide * kSide;
    total += c[(a + K / 2 + parity / 2) * kSide + b + K / 2 + parity % 2];
    c += 2 * a * kSide + 2 * b;
    haar_butterfly<float>(c[0], c[1], c[kSide], c[kSide + 1], crossed[parity]);
  }
  if (base) base[to] = total;
#pragma unroll
  for (int s = 0; s < kSubbands; ++s) {
    float band[kSubbands];
    haar_butterfly<float>(crossed[0][s], crossed[1][s], crossed[2][s], crossed[3][s], band);
    bands[s * kTaps + to] = scale * band[s];
  }
}

// Partial sums of the block, [slot][tap] rotated by 180 degrees, and the bias, from products or
// from the sum of a thread's low-pass coefficients. All threads are past their last use of
// `shared`.
template <int K, int L>
__device__ __forceinline__ void write_partials(const GradSums<K, L> (&sum)[L],
                                               const float (&bias)[4], float low_sum, float* shared,
                                               float* out) {
  using M = MmaGradMemory<K, L>;
  constexpr int kTaps = K * K, kWarps = kPatchThreads / 32;
  float* filters = shared + 2 * M::kExchange;
  float* biases = filters + L * 4 * M::kFilter;
  // Every row of the product with ones is the sums of its columns.
  float value = bias[0] + bias[1];
  value += __shfl_xor_sync(~0u, value, 1);
  value += __shfl_xor_sync(~0u, value, 2);
  value += (1 << L) * warp_sum(low_sum);  // 2^L times the coefficients are the pixels
  if (threadIdx.x % 32 == 0) biases[threadIdx.x / 32] = value;
  sum_filter<K, L, 0>(sum[0], shared, filters);
  if constexpr (L > 1) sum_filter<K, L, 1>(sum[1], shared, filters + 4 * M::kFilter);
  __syncthreads();
  write_taps<K>(filters, 1, out, out + slot_of(1, 0) * kTaps);
  if constexpr (L > 1)
    write_taps<K>(filters + 4 * M::kFilter, kLowScale, nullptr, out + slot_of(2, 0) * kTaps);
  if (threadIdx.x > 0) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += biases[w];
  out[sum_count(K, L) - 1] = total;
}

// The tile's own coefficients of the low-pass band L levels down to dense planes, from that of
// kLevel (0: the pixels): times `factor` in the type of the pixels, and in float32 where `exact` is
// not null. Returns the sum of those of this thread, unscaled.
template <class W, int L, int kLevel, class T>
__device__ __forceinline__ float store_lowpass(const T* fine, const PatchGradLaunch& p,
                                               const TileIndex& at, float factor, void* low,
                                               float* exact) {
  constexpr int kSide = kPatchTile >> L, kStep = kPatchThreads / kSide;
  constexpr int kDown = L - kLevel, kSize = 1 << kDown;
  static_assert(W::halo(kLevel) % kSize == 0, "the rows of a coefficient lie in one cell");
  const int rows = ceil_div(p.height, 1 << L), cols = ceil_div(p.width, 1 << L);
  const int first = threadIdx.x / kSide, col = threadIdx.x % kSide, x = (at.x >> L) + col;
  if (x >= cols) return 0;
  float sum = 0;
  const int64_t corner =
      ((int64_t(at.item) * p.channels + at.channel) * rows + (at.y >> L)) * cols + x;
  const int last = min(kSide, rows - (at.y >> L));
#pragma unroll 2
  for (int r = first; r < last; r += kStep) {
    const T* from = fine + W::template row_at<kLevel>(r * kSize + W::halo(kLevel)) +
                    W::lead(kLevel) + col * kSize;
    Vector<T, kSize> row[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      row[i] = *reinterpret_cast<const Vector<T, kSize>*>(from + i * W::group(kLevel));
    const float value =
        lowpass_of<kDown, float>([&](int i, int j) { return widen<float>(row[i].lane[j]); });
    static_cast<T*>(low)[corner + r * cols] = narrow<T>(factor * value);
    if (exact) exact[corner + r * cols] = value;
    sum += value;
  }
  return sum;
}

template <class T, int K, int L>
__global__ void __launch_bounds__(kPatchThreads, MmaGradMemory<K, L>::kBlocks)
    mma_weight_grad_kernel(const __grid_constant__ PatchGradLaunch p) {
  using M = MmaGradMemory<K, L>;
  using WX = typename M::WX;
  using WG = typename M::WG;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto input = [&](int n) { return reinterpret_cast<T*>(shared + n % 2 * M::kWindow); };
  const auto grad = [&](int n) { return input(n) + M::kInput / 2; };
  T* low_input = reinterpret_cast<T*>(shared + 2 * M::kWindow);
  T* low_grad = low_input + M::kLowInput / 2;

  const BlockTiles tiles = BlockTiles::contiguous(p);
  const TileIndex step(p, tiles.channel, tiles.step);
  TileIndex at(p, tiles.channel, tiles.first), next = at;
  const auto start = [&](int n) {
    fill_mma_window<WX, WX::kPiece, true>(p.input, p.input_bytes, p, next, input(n));
    fill_mma_window<WG, WG::kPiece, false>(p.grad_output, p.grad_bytes, p, next, grad(n));
  };
  const FormLowpassIf<(L > 1), WX, 0> form_input(shared + M::kFormInput);
  const FormLowpassIf<(L > 1), WG, 0> form_grad(shared + M::kFormGrad);
  wait_for_previous_grid();
  if (p.lets_next_start) let_next_grid_start();
  start(0);
  int n = 0;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    GradSums<K, L> sum[L] = {};
    float bias[4] = {}, low_sum = 0;
#pragma unroll 1
    for (const int end = int(int64_t(tiles.count) * (part + 1) / p.parts); n < end; ++n) {
      wait_for_copies();
      __syncthreads();
      at = next;
      if (n + 1 < tiles.count) {
        next.advance(p, step);
        start(n + 1);
      }
      if constexpr (L > 1) {
        form_input(input(n), 0.5f / kLowScale, low_input);
        form_grad(grad(n), 0.5f, low_grad);
      }
      if (p.low_grad)
        low_sum += store_lowpass<WG, L, 0>(grad(n), p, at, 1, p.low_grad, p.exact_low_grad);
      // Where the low-pass band is formed, its coefficients give the bias.
      if (p.bias_wanted && !p.low_grad) {
        add_products<K, L, 0, true>(input(n), grad(n), sum[0], bias);
      } else {
        add_products<K, L, 0, false>(input(n), grad(n), sum[0], bias);
      }
      if constexpr (L > 1) __syncthreads();
      // Averages, which cannot overflow; sums of gradients shall not underflow.
      if (p.low_input) {
        store_lowpass<WX, L, L - 1>(L > 1 ? low_input : input(n), p, at, 0.5f, p.low_input,
                                    nullptr);
      }
      if constexpr (L > 1) add_products<K, L, 1, false>(low_input, low_grad, sum[1], bias);
    }
    // A part has a tile, whose windows are free behind this barrier.
    __syncthreads();
    if (n == tiles.count) let_next_grid_start();
    const int64_t block = int64_t(tiles.channel) * p.splits + blockIdx.x / p.channels;
    write_partials<K, L>(sum, bias, low_sum, reinterpret_cast<float*>(input(n - 1)),
                         p.partials + (block * p.parts + part) * sum_count(K, L));
  }
}

template <class T, int K, int L>
const char* launch(const PatchGradLaunch& p, cudaStream_t stream) {
  return launch_kernel(&mma_weight_grad_kernel<T, K, L>, p, int64_t(p.channels) * p.splits,
                       kPatchThreads, MmaGradMemory<K, L>::kBytes, stream, p.early);
}

}  // namespace

const char* launch_mma_weight_grad(const PatchGradLaunch& p, DType activations,
                                   cudaStream_t stream) {
  const auto run = [&](auto t) {
    return with_constant(PlaneKernelSizes(), p.kernel_size, [&](auto k) {
      return with_constant(MmaGradLevels(), p.levels,
                           [&](auto l) { return launch<decltype(t), k(), l()>(p, stream); });
    });
  };
  return activations == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace wtconv::cuda
