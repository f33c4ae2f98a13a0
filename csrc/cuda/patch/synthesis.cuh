// Device code that the forward patch kernels share: taps, base path, synthesis of a patch, store.
#pragma once

#include "device.cuh"

namespace wtconv::cuda {

// Scaled taps of a channel, [slot][tap_floats], then the bias.
template <int K, int kMostLevels>
__device__ __forceinline__ void load_taps(const RawParameters& p, int channel, int levels,
                                          float* weights) {
  read_scaled<K, kMostLevels>(p, channel, levels, [&](int slot, int tap, float value) {
    const int level = slot < slot_count(levels) ? (slot + kSubbands - 1) / kSubbands : 0;
    const float factor = __uint_as_float(unsigned(127 - level) << 23);  // 2^-level
    weights[slot * tap_floats(K) + tap] = value * factor;
  });
}

// What a thread has of each level, for its patch of pixels.
template <class P>
using PatchPixels = float[P::kRows][P::kCols];
template <class P>
using PatchLevel1 = float[P::kRows / 2][P::kCols / 2];
template <class P>
using PatchLevel2 = float[P::kRows / 4][P::kCols / 4];

template <int kRows, int kCols>
__device__ __forceinline__ void set_all(float (&values)[kRows][kCols], float value) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int u = 0; u < kCols; ++u) values[r][u] = value;
  }
}

template <class W, class T, int K>
__device__ __forceinline__ void base_path(const T* pixels, const float* weights,
                                          PatchPixels<typename W::ThreadPatch>& sum) {
  using P = typename W::ThreadPatch;
  const T* first = pixels + W::stored_pixel(patch_row<P>(), patch_col<P>()) - K / 2 * W::pitch(0);
  convolve<K, P::kRows, P::kCols>(
      weights,
      [&](int r, float (&row)[P::kCols + K - 1]) {
        load_pixels<W, -(K / 2)>(first + r * W::pitch(0), row);
      },
      sum);
}

template <int kPitch>
__device__ __forceinline__ void write_filtered(float* band, int row, int col,
                                               const float (&sum)[2][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    *reinterpret_cast<Vector<float, 4>*>(band + (row + r) * kPitch +
                                         col) = {{sum[r][0], sum[r][1], sum[r][2], sum[r][3]}};
  }
}

// A coefficient of a level from those of the next coarser one that cover it: its row and column of
// the 2 x 2 are second where odd.
__device__ __forceinline__ float synthesise(float ll, float lh, float hl, float hh, bool odd_row,
                                            bool odd_col) {
  const float low = odd_row ? ll - lh : ll + lh, high = odd_row ? hl - hh : hl + hh;
  return odd_col ? low - high : low + high;
}

// The reconstruction at this thread's coefficients of level 1 from the filtered bands of level 2,
// [band][row] of a pitch; `low2` belongs to its LL.
template <class P, int kPitch>
__device__ __forceinline__ void synthesise_level2(const float* filtered, const PatchLevel2<P>& low2,
                                                  PatchLevel1<P>& low) {
  constexpr int kRows = P::kRows / 4, kCols = P::kCols / 4, kSide = kPatchTile / 4;
  const float* from = filtered + patch_row<P>() / 4 * kPitch + patch_col<P>() / 4;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Vector<float, kCols> f[kSubbands];
#pragma unroll
    for (int b = 0; b < kSubbands; ++b)
      f[b] = *reinterpret_cast<const Vector<float, kCols>*>(from + (b * kSide + r) * kPitch);
#pragma unroll
    for (int u = 0; u < kCols; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[2 * r + i / 2][2 * u + i % 2] =
            synthesise(f[0].lane[u] + low2[r][u], f[1].lane[u], f[2].lane[u], f[3].lane[u],
                       i / 2 == 1, i % 2 == 1);
      }
    }
  }
}

// sum += the synthesis of level 1, with `low` added to its low-pass band.
template <class W, int K>
__device__ __forceinline__ void add_level1(const float* bands, const float* weights,
                                           PatchLevel1<typename W::ThreadPatch>& low,
                                           PatchPixels<typename W::ThreadPatch>& sum) {
  using P = typename W::ThreadPatch;
  const int row = patch_row<P>() / 2, col = patch_col<P>() / 2;
#pragma unroll 1
  for (int band = 0; band < kSubbands; ++band) {
    filter<W, K, 1>(bands, band, weights + (1 + band) * tap_floats(K), row, col, low);
    const float row_sign = band & 1 ? -1.0f : 1.0f, col_sign = band & 2 ? -1.0f : 1.0f;
#pragma unroll
    for (int r = 0; r < P::kRows / 2; ++r) {
#pragma unroll
      for (int u = 0; u < P::kCols / 2; ++u) {
        const float value = low[r][u];
        sum[2 * r][2 * u] += value;
        sum[2 * r][2 * u + 1] += col_sign * value;
        sum[2 * r + 1][2 * u] += row_sign * value;
        sum[2 * r + 1][2 * u + 1] += row_sign * col_sign * value;
        low[r][u] = 0;
      }
    }
  }
}

// Stores a patch in pieces of kBytes. `rows` and `cols`: those of the plane from the patch's first
// pixel, `out`, on.
template <int kBytes, class T, class Launch>
__device__ __forceinline__ void store_pieces(const Launch& p, T* out, int rows, int cols,
                                             const PatchPixels<Patch<sizeof(T)>>& sum) {
  using P = Patch<sizeof(T)>;
  constexpr int kPiece = kBytes / int(sizeof(T));
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
#pragma unroll
    for (int u = 0; u < P::kCols; u += kPiece) {
      if constexpr (kPiece == 1) {
        if (r < rows && u < cols) out[u * p.output.stride_x] = narrow<T>(sum[r][u]);
      } else {
        Vector<T, kPiece> value;
#pragma unroll
        for (int j = 0; j < kPiece; ++j) value.lane[j] = narrow<T>(sum[r][u + j]);
        if (r < rows && u < cols) store_whole(out + u, value);
      }
    }
    out += p.output.stride_y;
  }
}

// The same in pieces that the output is aligned to.
template <class T, class Launch>
__device__ __forceinline__ void store_patch(const Launch& p, T* out, int rows, int cols,
                                            const PatchPixels<Patch<sizeof(T)>>& sum) {
  if (cols <= 0) return;
  if (p.output_bytes == 16) return store_pieces<16>(p, out, rows, cols, sum);
  if (p.output_bytes == 8) return store_pieces<8>(p, out, rows, cols, sum);
  if constexpr (sizeof(T) < 4) {
    if (p.output_bytes == 4) return store_pieces<4>(p, out, rows, cols, sum);
  }
  store_pieces<sizeof(T)>(p, out, rows, cols, sum);
}

}  // namespace wtconv::cuda
