// Taps of the tensor-core kernels: polyphase, as operands of products.
#pragma once

#include <cstddef>

#include "mma.cuh"

namespace wtconv::cuda {

// The taps of a channel with the bands crossed, in place: with S and its adjoint S^T of one level,
// S^T (w * S x) at a pixel is 1/4 sum_s (+-) w_s x over the pixels of every coefficient, the sign
// from the parities of both pixels. That is a butterfly of the four taps.
template <int K, int L>
__device__ __forceinline__ void cross_bands(ChannelTaps<K, L>& taps) {
  constexpr int kTaps = K * K;
  static_assert(kTaps <= kPatchThreads, "a thread crosses a tap of each level");
  const int tap = threadIdx.x;
  float largest[L] = {};
  if (tap < kTaps) {
    largest[0] = fabsf(taps.base[tap]);
#pragma unroll
    for (int l = 0; l < L; ++l) {
      float crossed[4];
      auto& bands = taps.wavelet[l];
      haar_butterfly<float>(0.5f * bands[0][tap], 0.5f * bands[1][tap], 0.5f * bands[2][tap],
                            0.5f * bands[3][tap], crossed);
#pragma unroll
      for (int parity = 0; parity < 4; ++parity) {
        bands[parity][tap] = crossed[parity];
        largest[l] = fmaxf(largest[l], fabsf(crossed[parity]));
      }
    }
  }
#pragma unroll
  for (int l = 0; l < L; ++l) {
    const uint32_t most = __reduce_max_sync(~0u, __float_as_uint(largest[l]));
    if (threadIdx.x % 32 == 0) taps.largest[l][threadIdx.x / 32] = most;
  }
}

// The taps of a channel, scaled and crossed, from the loads of them all.
template <int K, int L, class Loads>
__device__ __forceinline__ void finish_taps(const Loads& loads, const RawParameters& p,
                                            ChannelTaps<K, L>& taps) {
  using Taps = ChannelTaps<K, L>;
  static_assert(offsetof(Taps, bias) == slot_count(L) * K * K * sizeof(float));
  loads.finish(p, L, threadIdx.x,
               [&](int slot, int tap, float value) { taps.base[slot * K * K + tap] = value; });
  __syncthreads();
  cross_bands(taps);
}

// Row and pixel of output column n of a product of a level. At level 0 they are pixels 0 to 7 of
// one row, and a lane holds pixels 2t, 2t + 1 and those eight further. So that it holds what these
// need of the coarser levels, too, the coefficients of level 1 are t and t + 4, those of level 2
// t / 2 and t / 2 + 2, of row t % 2.
struct OutputColumn {
  int row, pixel;
};
template <int kLevel>
__device__ __forceinline__ OutputColumn output_column(int product, int n) {
  if (kLevel == 0) return {product, n};
  if (kLevel == 1) return {product, n % 2 * 4 + n / 2};
  return {n / 2 % 2, n % 2 * 2 + n / 4};
}

// Two neighbouring polyphase taps of an output column at level kLevel + 1 (with the base path at
// level 0): of row i behind the outputs, and of columns `first` and first + 1, counted from their
// first.
template <int kLevel, int K, int L>
__device__ __forceinline__ void polyphase_taps(const ChannelTaps<K, L>& taps, int i, int first,
                                               OutputColumn out, float (&value)[2]) {
  constexpr int R = K / 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int c = first + h, tap_col = (c >> 1) - (out.pixel >> 1) + R;
    const int parity = ((i ^ out.row) & 1) * 2 + ((c ^ out.pixel) & 1);
    value[h] =
        unsigned(tap_col) < unsigned(K) ? taps.wavelet[kLevel][parity][(i >> 1) * K + tap_col] : 0;
    if (kLevel == 0) {
      const int base_row = i - R - out.row, base_col = c - out.pixel + R;
      if (unsigned(base_row) < unsigned(K) && unsigned(base_col) < unsigned(K))
        value[h] += taps.base[base_row * K + base_col];
    }
  }
}

// The power of two that taps of a level are divided by before they are rounded, so that the largest
// lie between 1 and 4 whatever the weights: keeps it, and returns its inverse.
template <int kLevel, int K, int L>
__device__ __forceinline__ float settle_factor(ChannelTaps<K, L>& taps) {
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kPatchThreads / 32; ++w) largest = max(largest, taps.largest[kLevel][w]);
  const int exponent = min(max(int(largest >> 23), 27), 227);  // its inverse is finite, too
  if (threadIdx.x == 0) taps.factor[kLevel] = __uint_as_float(exponent << 23);
  return __uint_as_float((254 - exponent) << 23);
}

// The taps of a level as fragments: what each lane wants of each row.
template <class W, class T, int K, int L, int kLevel>
__device__ void form_fragments(ChannelTaps<K, L>& taps, uint32_t* fragments) {
  constexpr int kGroups = W::kGroups, kProducts = tap_products(kLevel);
  const float inverse = settle_factor<kLevel>(taps);
  const int lane = threadIdx.x % 32;
  // A lane's rows are of one parity: what depends on the column is the same in all.
#pragma unroll 1
  for (int e = threadIdx.x / 32; e < 2 * kProducts * kGroups; e += kPatchThreads / 32) {
    const int odd = e % 2, group = e / 2 % kGroups, product = e / 2 / kGroups;
    const int of_lane = group < 2 ? 2 * kProducts : 2,
              at = group < 2 ? 2 * product + group : W::kRows * 32 * 4 + product;
#pragma unroll
    for (int i = 0; i < W::kRows; i += 2) {
      float value[2];
      polyphase_taps<kLevel>(taps, i + odd, 8 * group + lane % 4 * 2 - W::kLead,
                             output_column<kLevel>(product, lane / 4), value);
      fragments[at + ((i + odd) * 32 + lane) * of_lane] =
          pack<T>(value[0] * inverse, value[1] * inverse);
    }
  }
}

// As form_fragments(), without repeats, for two groups of columns: fragments of lanes are equal
// whose columns lie as far from their output's pair, where both outputs are even or both odd. Lanes
// that read at the same time touch different banks.
template <int kLevel>
__device__ __forceinline__ int tap_entry(int pixel, int t) {
  const int apart = t - pixel / 2 + 3;
  return kLevel == 0 ? 2 * apart + pixel % 2 : 7 * (pixel % 2) + apart;
}
template <class W, class T, int kLevel, int K, int L>
__device__ void form_tap_table(ChannelTaps<K, L>& taps, uint32_t* table) {
  static_assert(W::kGroups == 2 && kLevel < 2 && kTapEntries == 14);
  const float inverse = settle_factor<kLevel>(taps);
  // Threads have a word of every second row.
  constexpr int kOfRow = 4 * kTapEntries;
  static_assert(2 * kOfRow <= kPatchThreads);
  const int row = threadIdx.x / kOfRow, word = threadIdx.x % kOfRow;
  if (row >= 2) return;
  const int group = word % 2, product = word / 2 % 2, entry = word / 4;
  const int odd = kLevel == 0 ? entry % 2 : entry / 7,
            apart = (kLevel == 0 ? entry / 2 : entry % 7) - 3;
#pragma unroll
  for (int i = 0; i < W::kRows; i += 2) {
    float value[2];
    polyphase_taps<kLevel>(taps, i + row, 8 * group + 2 * max(apart, 0) - W::kLead,
                           {product, 2 * max(-apart, 0) + odd}, value);
    table[(i + row) * kOfRow + word] = pack<T>(value[0] * inverse, value[1] * inverse);
  }
}

// Either, as has_tap_table() says.
template <int kLevel, class W, class T, int K, int L>
__device__ __forceinline__ void form_level_taps(ChannelTaps<K, L>& taps, uint32_t* to) {
  if constexpr (has_tap_table<W>(kLevel)) {
    form_tap_table<W, T, kLevel>(taps, to);
  } else {
    form_fragments<W, T, K, L, kLevel>(taps, to);
  }
}

// Operands of the products of one row behind the outputs, of two groups of 8 columns or three:
// inputs, and the taps of both output rows.
template <int kGroups>
struct InputRow {
  uint32_t first[4], rest[2];
};
template <int kGroups>
struct TapRow {
  Vector<uint32_t, 4> first;
  Vector<uint32_t, 2> rest;

  template <int kRows>
  __device__ __forceinline__ void load(const uint32_t* fragments, int i) {
    const int at = i * 32 + threadIdx.x % 32;
    first = reinterpret_cast<const Vector<uint32_t, 4>*>(fragments)[at];
    if constexpr (kGroups > 2)
      rest = reinterpret_cast<const Vector<uint32_t, 2>*>(fragments + kRows * 32 * 4)[at];
  }
  // sum += the inputs times the taps of output row p.
  template <class T>
  __device__ __forceinline__ void apply(float (&sum)[4], const InputRow<kGroups>& in, int p) const {
    multiply<T>(sum, in.first, first.lane[2 * p], first.lane[2 * p + 1]);
    if constexpr (kGroups > 2) multiply<T>(sum, in.rest, rest.lane[p]);
  }
};

}  // namespace wtconv::cuda
