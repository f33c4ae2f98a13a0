// The weight gradients of half types on tensor cores: products of two operands' windows, and what
// the taps get of their sums.
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
// The rows y of a product are 4m + f (of LL 2m + f), m < 16: a row set of x, loaded once, serves
// all f whose taps reach it. A warp takes the taps' rows i of one parity, or the rows y of one
// parity, so that its sums fit its registers. Low-pass bands for further levels come from the same
// windows, in the type of the tensors; that of grad_output in float32 as well, for the input
// gradient. Partial sums are stored rotated by 180 degrees, as finish.cu expects of weight_grad.cu,
// too, and added there in a fixed order. Source: the adjoint law.
//
// A channel has a team of kPatchThreads threads, of which threadIdx.x counts. M, a memory of
// mma_layout.h, mma_planes_layout.h or mma_group_layout.h, says what of its products a warp takes.
#pragma once

#include "mma.cuh"

namespace wtconv::cuda {

constexpr float kLowScale = 2;  // LL of x is divided by it

// Sums of a thread over tiles, of a level. Product n has row 2n or 2n + 1 of the taps. Of 24
// columns x', the last 8 of two such rows are the halves of one product.
template <class M>
struct GradSums {
  static constexpr bool kRest = M::WX::kGroups > 2;
  // x' < 16: elements 0 and 1 are of row lane / 4, 2 and 3 of row lane / 4 + 8.
  float first[M::kRows][M::kParities][M::kKernelSize][4];
  float rest[M::kRows][M::kParities][kRest ? (M::kKernelSize + 1) / 2 : 1][4];
};

// What a warp takes of a tile, of the first of both where it takes both.
template <class M>
struct WarpShare {
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
template <class M, int kLevel, bool kBias, class T>
__device__ __forceinline__ void add_products(const T* input, const T* grad, GradSums<M>& sum,
                                             float (&bias)[4]) {
  using WX = typename M::WX;
  using WG = typename M::WG;
  constexpr int K = M::kKernelSize;
  constexpr bool kRest = GradSums<M>::kRest;
  constexpr int kColumns = WX::own(kLevel) / M::kShares;
  constexpr int kPairs = WX::cell(kLevel) / 2;  // rows f = 2 h + p of the cells, h < kPairs
  constexpr int kSets = K + kPairs - 1, kOperands = kPairs * M::kParities;
  constexpr int kFirst = WX::halo(kLevel) - K / 2 * 2;  // even
  // Rows 2 set + row of the taps, row = 0, 1, in shared memory.
  const auto set_at = [](int set) { return WX::template row_at<kLevel>(2 * set + kFirst); };
  constexpr int kNextRow = WX::group(kLevel);
  const WarpShare<M> share;
  const int lane = threadIdx.x % 32, column = share.columns * kColumns;
  // Matrices of x: rows (m, m + 8) x columns (0, 8); past them rows (m, m + 8) x two sets. Those of
  // grad_output: rows (m, m + 8) x the f of two operands.
  const int x_row = lane % 8 + lane / 16 * 8, next = lane / 8 % 2;
  const T* x = input + share.row * WX::group(kLevel) + WX::template cell_at<kLevel>(x_row) +
               WX::lead(kLevel) - WX::kLead + WX::template col_at<kLevel>(column);
  const T* x_rest[2] = {x + 16 + next * (set_at(1) - set_at(0)),
                        x + 16 + next * (set_at(2) - set_at(1))};
  x += next * 8;
  constexpr int kSecond = kOperands == 1 ? 0 : M::kParities == 2 ? 1 : 2;
  const int f = share.parity + lane / 16 * kSecond;
  const T* g = grad + f * WG::group(kLevel) + lane % 16 * WG::pitch(kLevel) + column;
  constexpr int kUnrolled = M::kUnrolls ? kColumns / 8 : 1;
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
    int further = 8;
    if constexpr (WX::kGap > 0) further += (c + 8) % WX::plane(kLevel) == 0 ? WX::kGap : 0;
    x += further, x_rest[0] += further, x_rest[1] += further, g += 8;
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
template <class M>
__device__ __forceinline__ float sum_diagonal(const float* exchange, int p, int q, int i, int j) {
  constexpr int kShift = M::WX::kLead - M::kKernelSize / 2 * 2;
  float sum = 0;
#pragma unroll
  for (int columns = 0; columns < M::kShares; ++columns) {
    const int warp = WarpShare<M>::warp(i, p, columns);
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
template <class M, int kLevel, class Sync>
__device__ __forceinline__ void sum_filter(const GradSums<M>& sum, float* exchanges, float* filter,
                                           Sync sync) {
  constexpr int K = M::kKernelSize, kSide = 2 * K, kFirst = M::kRows * M::kParities;
  static_assert(8 * kSide <= kPatchThreads, "a thread sums one diagonal");
  const int id = threadIdx.x, q = id % 2, j = id / 2 % kSide, p = id / (2 * kSide) % 2;
#pragma unroll
  for (int n = 0; n < K; ++n) {
    float* exchange = exchanges + (kLevel * K + n) % 2 * M::kExchange;
#pragma unroll
    for (int m = 0; m < kFirst; ++m) {
      const int row = m / M::kParities, parity = m % M::kParities;
      exchange_product<M>(sum.first[row][parity][n], exchange, m);
      if constexpr (GradSums<M>::kRest)
        exchange_product<M>(sum.rest[row][parity][n / 2], exchange, kFirst + m);
    }
    sync();
    const int i = 2 * n + id / (4 * kSide);
    if (id < 8 * kSide)
      filter[((p * 2 + q) * kSide + i) * kSide + j] = sum_diagonal<M>(exchange, p, q, i, j);
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

// Partial sums of a channel, [slot][tap] rotated by 180 degrees, and the bias, from products or
// from the sum of a thread's low-pass coefficients. The threads that `sync` waits for are past
// their last use of `shared`, M::kScratch bytes.
template <class M, class Sync>
__device__ __forceinline__ void write_partials(const GradSums<M> (&sum)[M::kLevels],
                                               const float (&bias)[4], float low_sum, float* shared,
                                               float* out, Sync sync) {
  constexpr int K = M::kKernelSize, L = M::kLevels, kTaps = K * K, kWarps = kPatchThreads / 32;
  float* filters = shared + 2 * M::kExchange;
  float* biases = filters + L * 4 * M::kFilter;
  // Every row of the product with ones is the sums of its columns.
  float value = bias[0] + bias[1];
  value += __shfl_xor_sync(~0u, value, 1);
  value += __shfl_xor_sync(~0u, value, 2);
  value += (1 << L) * warp_sum(low_sum);  // 2^L times the coefficients are the pixels
  if (threadIdx.x % 32 == 0) biases[threadIdx.x / 32] = value;
  sum_filter<M, 0>(sum[0], shared, filters, sync);
  if constexpr (L > 1) sum_filter<M, 1>(sum[1], shared, filters + 4 * M::kFilter, sync);
  sync();
  write_taps<K>(filters, 1, out, out + slot_of(1, 0) * kTaps);
  if constexpr (L > 1)
    write_taps<K>(filters + 4 * M::kFilter, kLowScale, nullptr, out + slot_of(2, 0) * kTaps);
  if (threadIdx.x > 0) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += biases[w];
  out[sum_count(K, L) - 1] = total;
}

// The coefficient of the low-pass band L levels down that begins at `from` in that of kLevel.
template <class W, int L, int kLevel, class T>
__device__ __forceinline__ float lowpass_at(const T* from) {
  constexpr int kSize = 1 << (L - kLevel);
  Vector<T, kSize> row[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j)
    row[j] = *reinterpret_cast<const Vector<T, kSize>*>(from + j * W::group(kLevel));
  return lowpass_of<L - kLevel, float>([&](int j, int k) { return widen<float>(row[j].lane[k]); });
}

// The tile's own coefficients of the low-pass band L levels down to dense planes, from that of
// kLevel (0: the pixels): times `factor` in the type of the pixels, and in float32, each where it
// is not null. Returns the sum of those of this thread, unscaled.
template <class W, int L, int kLevel, class T>
__device__ __forceinline__ float store_lowpass(const T* fine, const PatchGradLaunch& p,
                                               const TileIndex& at, float factor, void* low,
                                               float* exact) {
  constexpr int kSide = kPatchTile >> L, kStep = kPatchThreads / kSide;
  constexpr int kSize = 1 << (L - kLevel);
  static_assert(W::halo(kLevel) % kSize == 0, "the rows of a coefficient lie in one cell");
  static_assert(kSide % kStep == 0, "a thread's last row is one of the tile");
  const int rows = ceil_div(p.height, 1 << L), cols = ceil_div(p.width, 1 << L);
  const int first = threadIdx.x / kSide, col = threadIdx.x % kSide, x = (at.x >> L) + col;
  const int last = x < cols ? rows - (at.y >> L) : 0;  // those past it are zeros, as the pixels are
  const int64_t corner =
      ((int64_t(at.item) * p.channels + at.channel) * rows + (at.y >> L)) * cols + x;
  float sum = 0;
#pragma unroll 2
  for (int i = 0; i < kSide; i += kStep) {
    const int r = first + i;
    const T* from = fine + W::template row_at<kLevel>(r * kSize + W::halo(kLevel)) +
                    W::lead(kLevel) + col * kSize;
    const float value = lowpass_at<W, L, kLevel>(from);
    const int64_t to = corner + r * cols;
    if (low && r < last) static_cast<T*>(low)[to] = narrow<T>(factor * value);
    if (exact && r < last) exact[to] = value;
    sum += value;
  }
  return sum;
}

}  // namespace wtconv::cuda
