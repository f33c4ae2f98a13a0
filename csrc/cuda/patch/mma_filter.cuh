// The filters of the tensor-core kernels that compute the operator: sums of products of a tile, in
// registers, and their way out through shared memory.
#pragma once

#include "mma_taps.cuh"

namespace wtconv::cuda {

// The taps of a level, row by row, as form_level_taps() has them: read from shared memory when they
// are wanted, or held in registers.
template <class W>
class FragmentTaps {
  const uint32_t* fragments_;

 public:
  __device__ __forceinline__ explicit FragmentTaps(const uint32_t* fragments)
      : fragments_(fragments) {}
  __device__ __forceinline__ TapRow<W::kGroups> row(int i) const {
    TapRow<W::kGroups> taps;
    taps.template load<W::kRows>(fragments_, i);
    return taps;
  }
};
template <int kLevel>
class TableTaps {
  const Vector<uint32_t, 4>* entry_;

 public:
  __device__ __forceinline__ explicit TableTaps(const uint32_t* table) {
    const int lane = threadIdx.x % 32;
    entry_ = reinterpret_cast<const Vector<uint32_t, 4>*>(table) +
             tap_entry<kLevel>(output_column<kLevel>(0, lane / 4).pixel, lane % 4);
  }
  __device__ __forceinline__ TapRow<2> row(int i) const { return {entry_[i * kTapEntries], {}}; }
};
template <class W, int kLevel>
using SharedTaps = std::conditional_t<has_tap_table<W>(kLevel), TableTaps<kLevel>, FragmentTaps<W>>;
template <class W, int kLevel>
class HeldTaps {
  TapRow<W::kGroups> rows_[W::kRows];

 public:
  __device__ __forceinline__ explicit HeldTaps(const uint32_t* shared) {
    const SharedTaps<W, kLevel> taps(shared);
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) rows_[i] = taps.row(i);
  }
  __device__ __forceinline__ const TapRow<W::kGroups>& row(int i) const { return rows_[i]; }
};
template <class W, int kLevel, bool kHeld>
using TapsOf = std::conditional_t<kHeld, HeldTaps<W, kLevel>, SharedTaps<W, kLevel>>;

// sum[f] += rows f of the cells of this warp's columns: elements 0, 1 of the lane's pixels 2t and
// 2t + 1, elements 2, 3 of the pixels 8 further.
template <class W, class T, class Taps>
__device__ __forceinline__ void filter_pixels(const T* pixels, const Taps& taps,
                                              float (&sum)[8][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* corner = pixels + W::first_col(0) + W::template col_at<0>(warp * kWarpCols);
  const int cell = W::template cell_at<0>(W::kGroups == 2 ? lane / 4 : lane % 8);
  InputRow<W::kGroups> in[W::kRows + 6];
  // Matrices (g, g + 8) x (first, second group) of a product are groups 0, 1, 1, 2 of a row of x.
  const auto load = [&](int i) {
    const T* row = corner + W::template row_at<0>(W::first_row(0) + i);
    if constexpr (W::kGroups == 2) {  // not aligned to 16 bytes
#pragma unroll
      for (int m = 0; m < 4; ++m)
        in[i].first[m] = load_pair(row + cell + lane % 4 * 2 + (m + 1) / 2 * 8);
    } else {
      row += cell;
      load_matrices(row + (lane / 8 + 1) / 2 * 8, in[i].first);
      load_matrices(row + (2 + lane / 8 % 2) * 8, in[i].rest);
    }
  };
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    load(parity), load(parity + 2), load(parity + 4);
#pragma unroll
    for (int i = parity; i < W::kRows; i += 2) {
      load(i + 6);
      const TapRow<W::kGroups> tap_row = taps.row(i);
#pragma unroll
      for (int f = 0; f < 8; ++f) tap_row.template apply<T>(sum[f], in[i + f / 2 * 2], f % 2);
    }
  }
}

// sum[p][2 b + h] += row 4 g + 2 b + p of level 1 of this lane, column t + 4 h of this warp.
template <class W, class T, class Taps>
__device__ __forceinline__ void filter_level1(const T* lowpass, const Taps& taps,
                                              float (&sum)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Two rows of a cell at once: matrices (first, second row) x (first, second group).
  constexpr int kFirst = W::first_row(1), kPairs = W::kRows / 2 + 1;
  static_assert(kFirst % 2 == 0 && W::kRows % 2 == 0, "no pair of rows crosses two cells");
  const T* corner = lowpass + W::template cell_at<1>(lane % 8) + lane / 8 % 2 * W::group(1) +
                    W::first_col(1) + W::template col_at<1>(warp * kWarpCols / 2);
  uint32_t first[kPairs][4], rest[kPairs][2] = {};
  const auto load = [&](int pair) {
    const T* rows = corner + W::template row_at<1>(kFirst + 2 * pair);
    load_matrices(rows + lane / 16 * 8, first[pair]);
    if constexpr (W::kGroups > 2) load_matrices(rows + 16, rest[pair]);
  };
  load(0);
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const int n = i / 2, odd = i % 2;
    if (!odd) load(n + 1);
    // Rows g + 8 of a product are two rows below rows g.
    const InputRow<W::kGroups> in{
        {first[n][odd], first[n + 1][odd], first[n][odd + 2], first[n + 1][odd + 2]},
        {rest[n][odd], rest[n + 1][odd]}};
    const TapRow<W::kGroups> tap_row = taps.row(i);
#pragma unroll
    for (int p = 0; p < 2; ++p) tap_row.template apply<T>(sum[p], in, p);
  }
}

// sum[p][h] += row 2 g + p of level 2 of this lane, column t / 2 + 2 h of this warp. A warp has
// four columns, which see no more than twelve: rows of both parities are one product. Its other
// eight rows stay empty, which costs less than an exchange between warps.
template <class W, class T>
__device__ __forceinline__ void filter_level2(const T* lowpass, const uint32_t* fragments,
                                              float (&sum)[2][2]) {
  static_assert(W::kGroups == 2, "the inputs of four columns are twelve");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const T* cell = lowpass + lane / 4 * W::pitch(2) + W::first_col(2) + warp * kWarpCols / 4 + 2 * t;
  const int further = 8 - t / 2 * 4;  // no column past the twelfth
  float product[2][4] = {};
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const T* row = cell + W::template row_at<2>(W::first_row(2) + i);
    const uint32_t in[4] = {load_pair(row), 0, load_pair(row + further), 0};
    const auto taps = reinterpret_cast<const Vector<uint32_t, 2>*>(fragments)[i * 32 + lane];
    multiply<T>(product[i % 2], in, taps.lane[0], taps.lane[1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mine = product[0][h] + product[1][h], other = __shfl_xor_sync(~0u, mine, 1);
    sum[0][h] = t % 2 == 0 ? mine : other;
    sum[1][h] = t % 2 == 0 ? other : mine;
  }
}

// What the parts of an output are multiplied by; the bias is added.
struct OutputFactors {
  float bias, pixels, level2, level3;
};

// The outputs of this lane, in place of the sums of its pixels: `low1` and `low2` are those of
// levels 2 and 3.
template <int L>
__device__ __forceinline__ void combine(const OutputFactors& factor, const float (&low1)[2][4],
                                        const float (&low2)[2][2], float (&sum)[8][4]) {
#pragma unroll
  for (int f = 0; f < 8; ++f) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float rest = factor.bias;
      if (L > 1) rest += factor.level2 * low1[f / 2 % 2][f / 4 * 2 + c / 2];
      if (L > 2) rest += factor.level3 * low2[f / 4][c / 2];
      sum[f][c] = factor.pixels * sum[f][c] + rest;
    }
  }
}
// Adds what the levels past L do, in one operation on each finished sum: nothing is left that could
// be computed from `coarse` earlier, where it would wait for memory.
template <int L>
__device__ __forceinline__ void add_coarse(float factor, const float (&coarse)[8 >> L][2],
                                           float (&sum)[8][4]) {
#pragma unroll
  for (int f = 0; f < 8; ++f) {
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[f][c] = fmaf(factor, coarse[f >> L][c / 2], sum[f][c]);
  }
}

// Outputs pass through shared memory, to be stored in whole lines. There row f of cell g is row
// 8 f + g, and its pieces of 16 bytes change places with g so that the writes of a warp touch
// different banks.
__device__ __forceinline__ int staged_at(int row, int piece) {
  return (row % 8 * 8 + row / 8) * kPatchTile + (piece ^ (row / 8)) * 8;
}

template <class T>
__device__ __forceinline__ void stage_outputs(const float (&value)[8][4], T* staged) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int f = 0; f < 8; ++f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      T* to = staged + staged_at(lane / 4 * 8 + f, 2 * warp + h) + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(to) = pack<T>(value[f][2 * h], value[f][2 * h + 1]);
    }
  }
}

}  // namespace wtconv::cuda
