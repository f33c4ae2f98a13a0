// The orthonormal 2x2 Haar butterfly (eq. butterfly of the paper), its own inverse and adjoint:
//
//   a b   ->   LL = (a + b + c + d) / 2    LH = (a + b - c - d) / 2
//   c d        HL = (a - b + c - d) / 2    HH = (a - b - c + d) / 2
//
// The one place for subband order (LL, LH, HL, HH = 0..3), on every device. The closed form over
// levels (eq. synthesis_closed_form) takes the same signs from the bits of the coordinates.
#pragma once

#ifdef __CUDACC__
#define WTCONV_HOST_DEVICE __host__ __device__
#else
#define WTCONV_HOST_DEVICE
#endif

namespace wtconv {

constexpr int kSubbands = 4;

// V: a scalar or a SIMD vector; Scalar: the type of the factor 1/2.
template <class Scalar, class V>
WTCONV_HOST_DEVICE inline __attribute__((always_inline)) void haar_butterfly(V a, V b, V c, V d,
                                                                             V (&out)[kSubbands]) {
  const Scalar half = Scalar(0.5);  // first, so that no sum overflows where the result fits
  a *= half, b *= half, c *= half, d *= half;
  const V top = a + b, bottom = c + d, top_diff = a - b, bottom_diff = c - d;
  out[0] = top + bottom;
  out[1] = top - bottom;
  out[2] = top_diff + bottom_diff;
  out[3] = top_diff - bottom_diff;
}

}  // namespace wtconv
