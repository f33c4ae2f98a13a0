// Device code of the tensor-core kernels: windows in shared memory, products, polyphase taps.
#pragma once

#include "device.cuh"
#include "mma_layout.h"

namespace wtconv::cuda {

// The tile after `at`.
template <class Launch>
__device__ __forceinline__ void advance(const Launch& p, TileIndex& at) {
  if ((at.x += kPatchTile) < p.width) return;
  at.x = 0;
  if ((at.y += kPatchTile) < p.height) return;
  at.y = 0;
  ++at.item;
}

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
__device__ __forceinline__ void start_window(const View& view, bool aligned, const Launch& p,
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

// Reads the taps of a channel, a thread each, and crosses the bands: with S and its adjoint S^T of
// one level, S^T (w * S x) at a pixel is 1/4 sum_s (+-) w_s x over the pixels of every coefficient,
// the sign from the parities of both pixels. That is a butterfly of the four taps.
template <int K, int L>
__device__ void read_taps(const RawParameters& p, int channel, ChannelTaps<K, L>& taps) {
  constexpr int kTaps = K * K;
  static_assert(kTaps <= kPatchThreads, "a thread reads a tap of each band");
  const int tap = threadIdx.x, from = p.rotate ? kTaps - 1 - tap : tap;
  const auto scaled = [&](int level, int64_t group) {
    return p.weight[level] ? read<float>(p.scale[level], p.dtype, group) *
                                 read<float>(p.weight[level], p.dtype, group * kTaps + from)
                           : 0.0f;
  };
  float largest[L] = {};
  if (tap < kTaps) {
    taps.base[tap] = scaled(0, channel);
    largest[0] = fabsf(taps.base[tap]);
#pragma unroll
    for (int l = 0; l < L; ++l) {
      const int64_t group = kSubbands * int64_t(channel);
      float crossed[4];
      haar_butterfly<float>(0.5f * scaled(l + 1, group), 0.5f * scaled(l + 1, group + 1),
                            0.5f * scaled(l + 1, group + 2), 0.5f * scaled(l + 1, group + 3),
                            crossed);
#pragma unroll
      for (int parity = 0; parity < 4; ++parity) {
        taps.wavelet[l][parity][tap] = crossed[parity];
        largest[l] = fmaxf(largest[l], fabsf(crossed[parity]));
      }
    }
  }
#pragma unroll
  for (int l = 0; l < L; ++l)
    taps.largest[l][threadIdx.x / 32] = __reduce_max_sync(~0u, __float_as_uint(largest[l]));
  if (threadIdx.x == 0) {
    taps.bias =
        p.bias ? read<float>(p.scale[0], p.dtype, channel) * read<float>(p.bias, p.dtype, channel)
               : 0.0f;
  }
}

// Polyphase taps of level `kLevel` + 1 (with the base path at level 0) as fragments. Output column
// n of a product is pixel n; at level 1 it is coefficient 4 (n % 2) + n / 2: then the lane that
// holds outputs 2t and 2t + 1 holds the coefficients t and t + 4 of the pixels 2t, 2t + 1 and those
// eight further.
//
// The taps are divided by a power of two before they are rounded, so that the largest lie between 1
// and 4 whatever the weights.
template <class W, class T, int K, int L, int kLevel>
__device__ void form_fragments(ChannelTaps<K, L>& taps, uint32_t* fragments) {
  constexpr int kGroups = W::kGroups, R = K / 2;
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kPatchThreads / 32; ++w) largest = max(largest, taps.largest[kLevel][w]);
  const int exponent = min(max(int(largest >> 23), 27), 227);  // its inverse is finite, too
  const float inverse = __uint_as_float((254 - exponent) << 23);
  if (threadIdx.x == 0) taps.factor[kLevel] = __uint_as_float(exponent << 23);
  const int lane = threadIdx.x % 32, n = lane / 4, out = kLevel == 0 ? n : n % 2 * 4 + n / 2;
#pragma unroll 2
  for (int e = threadIdx.x / 32; e < W::kRows * 2 * kGroups; e += kPatchThreads / 32) {
    const int group = e % kGroups, p = e / kGroups % 2, i = e / (2 * kGroups);
    float value[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = 8 * group + lane % 4 * 2 + h - W::kLead;  // from the outputs' first column
      const int tap_col = (c >> 1) - (out >> 1) + R, parity = ((i ^ p) & 1) * 2 + ((c ^ out) & 1);
      value[h] = unsigned(tap_col) < unsigned(K)
                     ? taps.wavelet[kLevel][parity][(i >> 1) * K + tap_col]
                     : 0;
      if (kLevel == 0) {
        const int base_row = i - R - p, base_col = c - out + R;
        if (unsigned(base_row) < unsigned(K) && unsigned(base_col) < unsigned(K))
          value[h] += taps.base[base_row * K + base_col];
      }
    }
    uint32_t* to = group < 2 ? fragments + (i * 32 + lane) * 4 + p * 2 + group
                             : fragments + (W::kRows * 32) * 4 + (i * 32 + lane) * 2 + p;
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
