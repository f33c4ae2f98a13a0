// Device code of the tensor-core kernels: windows in shared memory, products, polyphase taps.
#pragma once

#include "device.cuh"
#include "mma_layout.h"

namespace wtconv::cuda {

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// Copies the columns of a window from piece kFirst on, as many at once as divide the threads.
// `corner` is the first pixel of the window, in row y and column x of a plane.
template <class W, int kBytes, bool kCached, int kFirst, class T, class Launch>
__device__ __forceinline__ void fill_pieces(const T* corner, const View& view, const Launch& p,
                                            int y, int x, T* pixels) {
  constexpr int kPiece = kBytes / 2, kLeft = W::cols(0) / kPiece - kFirst;
  constexpr int kColumns = kLeft >= 16 ? 16 : kLeft >= 8 ? 8 : kLeft >= 4 ? 4 : 2;
  constexpr int kStep = kPatchThreads / kColumns;
  static_assert(kStep % W::cell(0) == 0 && kLeft % 2 == 0, "steps keep the row of the cell");
  const int col = (kFirst + threadIdx.x % kColumns) * kPiece, row = threadIdx.x / kColumns;
  const bool inside = unsigned(x + col) < unsigned(p.width);
  const int64_t step = kStep * view.stride_y;
  const T* from = corner + row * view.stride_y + col;
  T* to = pixels + W::slot(0, row) * W::pitch(0) + col;
#pragma unroll
  for (int r = 0; r < W::rows(0); r += kStep) {
    if (r + kStep <= W::rows(0) || r + row < W::rows(0)) {
      copy_async<kBytes, kCached>(to + r / W::cell(0) * W::pitch(0), from,
                                  inside && unsigned(y + row + r) < unsigned(p.height));
    }
    from += step;
  }
  if constexpr (kLeft > kColumns)
    fill_pieces<W, kBytes, kCached, kFirst + kColumns>(corner, view, p, y, x, pixels);
}

// Starts to copy the window of a tile, zero outside the plane, in pieces of kBytes where the tensor
// is aligned to them.
template <class W, int kBytes, bool kCached, class T, class Launch>
__device__ __forceinline__ void fill_mma_window(const View& view, bool aligned, const Launch& p,
                                                const TileIndex& at, T* pixels) {
  const int y = at.y - W::halo(0), x = at.x - W::lead(0);
  const T* corner = static_cast<const T*>(view.data) + at.item * view.stride_b +
                    at.channel * view.stride_c + y * view.stride_y + x * view.stride_x;
  if (aligned) return fill_pieces<W, kBytes, kCached, 0>(corner, view, p, y, x, pixels);
  for (int i = threadIdx.x; i < W::rows(0) * W::cols(0); i += kPatchThreads) {
    const int row = i / W::cols(0), col = i % W::cols(0);
    const bool inside =
        unsigned(y + row) < unsigned(p.height) && unsigned(x + col) < unsigned(p.width);
    pixels[W::slot(0, row) * W::pitch(0) + col] =
        inside ? corner[row * view.stride_y + col * view.stride_x] : narrow<T>(0.0f);
  }
}

// 16 rows of 16 columns as the first operand of a product; row(r) points to the first of row r.
template <bool kAligned, class Row>
__device__ __forceinline__ void load_rows(Row row, uint32_t (&a)[4]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kAligned) {
    load_matrices(row(lane % 16) + lane / 16 * 8, a);
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* p = row(lane / 4 + 8 * h) + lane % 4 * 2;
      a[h] = load_pair(p), a[2 + h] = load_pair(p + 8);
    }
  }
}

// The matrix that adds neighbouring columns, times `factor`, as the second operand of a product.
template <class T>
struct ColumnSums {
  uint32_t b0, b1;

  __device__ __forceinline__ explicit ColumnSums(float factor) {
    const int lane = threadIdx.x % 32;
    const uint32_t add = pack<T>(factor, factor);
    b0 = lane / 4 == lane % 4 ? add : 0, b1 = lane / 4 == lane % 4 + 4 ? add : 0;
  }
  // sum += those of a.
  __device__ __forceinline__ void add(float (&sum)[4], const uint32_t (&a)[4]) const {
    multiply<T>(sum, a, b0, b1);
  }
};

// The low-pass band of level kLevel + 1 from that of kLevel (0: the pixels), `factor` times the sum
// of four values. Row r comes from rows 2r and 2r + 1, column c from columns 2c and 2c + 1: 16 rows
// and 8 columns are two products with the matrix that adds neighbouring columns.
template <class W, int kLevel, class T>
__device__ __forceinline__ void form_lowpass(const T* fine, float factor, T* lowpass) {
  constexpr int kNext = kLevel + 1, kCells = W::cells(kNext), kRows = W::cell(kNext) * kCells;
  constexpr int kColumns = W::cols(kNext) / 8, kProducts = (kRows + 15) / 16 * kColumns;
  static_assert(W::cells(kLevel) == kCells && W::lead(kLevel) == 2 * W::lead(kNext), "one frame");
  const int lane = threadIdx.x % 32;
  const ColumnSums<T> columns(factor);
#pragma unroll 2
  for (int i = threadIdx.x / 32; i < kProducts; i += kPatchThreads / 32) {
    const int row = i / kColumns * 16, col = i % kColumns * 8;
    // Stored row: the finer ones are at twice its position in the cell, and at the next.
    const auto even = [&](int r) {
      const int slot = min(row + r, kRows - 1);
      return fine + (slot + slot / kCells * kCells) * W::pitch(kLevel) + W::shift(kLevel) + 2 * col;
    };
    const auto odd = [&](int r) { return even(r) + kCells * W::pitch(kLevel); };
    uint32_t top[4], bottom[4];
    load_rows<W::shift(kLevel) % 8 == 0>(even, top);
    load_rows<W::shift(kLevel) % 8 == 0>(odd, bottom);
    float sum[4] = {};
    columns.add(sum, top);
    columns.add(sum, bottom);
    T* to = lowpass + (row + lane / 4) * W::pitch(kNext) + W::shift(kNext) + col + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + lane / 4 + 8 * h < kRows) {
        *reinterpret_cast<uint32_t*>(to + 8 * h * W::pitch(kNext)) =
            pack<T>(sum[2 * h], sum[2 * h + 1]);
      }
    }
  }
}

// Scaled taps of a channel, [slot][tap].
template <int K, int L, class P>
__device__ __forceinline__ void read_scaled(const RawParameters& p, int channel, float* taps) {
  constexpr int kTaps = K * K, kAll = slot_count(L) * kTaps;
#pragma unroll
  for (int first = 0; first < kAll; first += kPatchThreads) {
    const int n = first + threadIdx.x, slot = n / kTaps, tap = n % kTaps;
    if (n >= kAll) break;
    const int level = (slot + kSubbands - 1) / kSubbands;
    const int64_t group =
        level == 0 ? channel : kSubbands * int64_t(channel) + (slot - 1) % kSubbands;
    const P *weight = static_cast<const P*>(p.weight[level]),
            *scale = static_cast<const P*>(p.scale[level]);
    taps[n] = weight ? widen<float>(scale[group]) *
                           widen<float>(weight[group * kTaps + (p.rotate ? kTaps - 1 - tap : tap)])
                     : 0.0f;
  }
}

// The taps of a channel, with the bands crossed: with S and its adjoint S^T of one level,
// S^T (w * S x) at a pixel is 1/4 sum_s (+-) w_s x over the pixels of every coefficient, the sign
// from the parities of both pixels. That is a butterfly of the four taps.
template <int K, int L>
__device__ void read_taps(const RawParameters& p, int channel, ChannelTaps<K, L>& taps) {
  constexpr int kTaps = K * K;
  static_assert(kTaps <= kPatchThreads, "a thread crosses a tap of each level");
  // All threads read at once: one tap after the other would wait for memory as often (8xCxHxW
  // float16 on an H100, as in mma_layout.h, K = 5, L = 1: 0.070 ms for 0.073).
  with_type(p.dtype, [&](auto t) { read_scaled<K, L, decltype(t)>(p, channel, taps.base); });
  if (threadIdx.x == 0) {
    taps.bias =
        p.bias ? read<float>(p.scale[0], p.dtype, channel) * read<float>(p.bias, p.dtype, channel)
               : 0.0f;
  }
  __syncthreads();
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
  for (int l = 0; l < L; ++l)
    taps.largest[l][threadIdx.x / 32] = __reduce_max_sync(~0u, __float_as_uint(largest[l]));
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

// Polyphase taps of level `kLevel` + 1 (with the base path at level 0) as fragments. They are
// divided by a power of two before they are rounded, so that the largest lie between 1 and 4
// whatever the weights.
template <class W, class T, int K, int L, int kLevel>
__device__ void form_fragments(ChannelTaps<K, L>& taps, uint32_t* fragments) {
  constexpr int kGroups = W::kGroups, kProducts = tap_products(kLevel), R = K / 2;
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kPatchThreads / 32; ++w) largest = max(largest, taps.largest[kLevel][w]);
  const int exponent = min(max(int(largest >> 23), 27), 227);  // its inverse is finite, too
  const float inverse = __uint_as_float((254 - exponent) << 23);
  if (threadIdx.x == 0) taps.factor[kLevel] = __uint_as_float(exponent << 23);
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int e = threadIdx.x / 32; e < W::kRows * kProducts * kGroups; e += kPatchThreads / 32) {
    const int group = e % kGroups, product = e / kGroups % kProducts, i = e / (kProducts * kGroups);
    const OutputColumn out = output_column<kLevel>(product, lane / 4);
    float value[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = 8 * group + lane % 4 * 2 + h - W::kLead;  // from the outputs' first column
      const int tap_col = (c >> 1) - (out.pixel >> 1) + R;
      const int parity = ((i ^ out.row) & 1) * 2 + ((c ^ out.pixel) & 1);
      value[h] = unsigned(tap_col) < unsigned(K)
                     ? taps.wavelet[kLevel][parity][(i >> 1) * K + tap_col]
                     : 0;
      if (kLevel == 0) {
        const int base_row = i - R - out.row, base_col = c - out.pixel + R;
        if (unsigned(base_row) < unsigned(K) && unsigned(base_col) < unsigned(K))
          value[h] += taps.base[base_row * K + base_col];
      }
    }
    uint32_t* to = group < 2 ? fragments + ((i * 32 + lane) * kProducts + product) * 2 + group
                             : fragments + (W::kRows * 32) * 4 + (i * 32 + lane) * 2 + product;
    *to = pack<T>(value[0] * inverse, value[1] * inverse);
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
