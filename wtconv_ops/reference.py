"""WTConv in plain PyTorch, written to be read: the oracle of the tests and the plain path.

Every function follows the paper literally, one line of Algorithm 1 at a time, on any device, in
any floating dtype, for any kernel size, size and number of levels. All of them are compositions
of PyTorch operations, so they can be differentiated any number of times and work under
``torch.func``, ``torch.compile`` and ``torch.export``. Nothing here looks at the parity of a size:
a map is padded by one row and one column, and an even size never reads them.

Subbands LL, LH, HL, HH have the indices 0 to 3, and subband s of channel c is convolution channel
``4 * c + s``. Level 1 is the finest.

Source: the WTConv paper, eq. butterfly (Haar analysis), Algorithm 1 (the operator) and
eq. synthesis_closed_form (bit-indexed synthesis).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ._arguments import require_int

__all__ = ["analysis_conv", "haar_analysis", "haar_synthesis", "synthesis", "wtconv2d"]


def haar_analysis(input: Tensor) -> Tensor:
    """Split each 2x2 block a b / c d into LL, LH, HL, HH = ½(a±b±c±d).

    Args:
        input: [B, C, H, W], any floating dtype, H, W >= 1. Odd sizes are extended by a zero row
            below and a zero column on the right.

    Returns:
        [B, C, 4, h, w] with h = ceil(H/2), w = ceil(W/2): the subbands LL, LH, HL, HH.

    Source: eq. butterfly. The half is applied first, so that no sum exceeds the result's range.
    """
    padded = F.pad(0.5 * input, (0, 1, 0, 1))
    a, b = padded[:, :, :-1:2, :-1:2], padded[:, :, :-1:2, 1::2]
    c, d = padded[:, :, 1::2, :-1:2], padded[:, :, 1::2, 1::2]
    return torch.stack([a + b + c + d, a + b - c - d, a - b + c - d, a - b - c + d], dim=2)


def haar_synthesis(coefficients: Tensor, size: Sequence[int]) -> Tensor:
    """Invert :func:`haar_analysis`: a = ½(LL+LH+HL+HH), b = ½(LL+LH−HL−HH), and so on.

    The Haar butterfly is its own inverse and its own transpose, so the same signs serve both ways.
    Cropping to ``size`` is the transpose of the zero padding.

    Args:
        coefficients: [B, C, 4, h, w], any floating dtype.
        size: (H, W) with ceil(H/2) = h and ceil(W/2) = w.

    Returns:
        [B, C, H, W].

    Source: eq. butterfly; the paper's proposition that Haar analysis is its own inverse.
    """
    batch, channels, _, height, width = coefficients.shape
    ll, lh, hl, hh = (0.5 * coefficients).unbind(2)
    top = torch.stack([ll + lh + hl + hh, ll + lh - hl - hh], dim=-1)
    bottom = torch.stack([ll - lh + hl - hh, ll - lh - hl + hh], dim=-1)
    blocks = torch.stack([top, bottom], dim=3)  # [B, C, h, 2, w, 2]
    pixels = blocks.reshape(batch, channels, 2 * height, 2 * width)
    # A fresh tensor, whose strides follow from its sizes: a view would have strides that depend
    # on the parity, and compiled code would hold for one parity only.
    return pixels[:, :, : size[0], : size[1]].clone(memory_format=torch.contiguous_format)


def wtconv2d(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    stride: int = 1,
) -> Tensor:
    """Y = s0 * (X conv W0 + b) + R1: Algorithm 1 of the paper, line by line.

    Args:
        input: X, [B, C, H, W], any floating dtype, B >= 0 and H, W >= 1.
        base_weight: W0, [C, 1, k, k], k >= 1.
        base_bias: b, [C], or None.
        base_scale: s0, [1, C, 1, 1].
        wavelet_weights: W1 to WL, each [4*C, 1, k, k]; none for the base path alone.
        wavelet_scales: s1 to sL, each [1, 4*C, 1, 1].
        stride: Keep every stride-th row and column of the result, 1 to 2**31 - 1.

    Returns:
        [B, C, ceil(H/stride), ceil(W/stride)] in the dtype that the operations promote to.

    Source: Algorithm 1. Even kernels pad (k-1)//2 on the left and top, k//2 on the right and
    bottom, as PyTorch's ``padding='same'`` does.
    """
    lowpass, sizes, filtered = input, [], []
    for weight, scale in zip(wavelet_weights, wavelet_scales, strict=True):
        sizes.append(lowpass.shape[2:])
        bands = haar_analysis(lowpass)
        convolved = scale * _depthwise_conv(bands.flatten(1, 2), weight)
        filtered.append(_by_channel(convolved))
        lowpass = bands[:, :, 0]  # the raw band, not the filtered one

    output = base_scale * _depthwise_conv(input, base_weight, base_bias)
    reconstruction: Tensor | None = None
    for bands, size in zip(reversed(filtered), reversed(sizes), strict=True):
        if reconstruction is not None:
            low = bands[:, :, :1] + reconstruction.unsqueeze(2)
            bands = torch.cat([low, bands[:, :, 1:]], dim=2)
        reconstruction = haar_synthesis(bands, size)
    if reconstruction is not None:
        output = output + reconstruction
    stride = require_int("wtconv2d", "stride", stride, 1)
    return output if stride == 1 else output[:, :, ::stride, ::stride]


def analysis_conv(input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Z = s * (analysis(X) conv W): one level on the way down.

    Args:
        input: X, [B, C, H, W], any floating dtype.
        weight: W, [4*C, 1, k, k].
        scale: s, [1, 4*C, 1, 1].

    Returns:
        The coefficients Z, [B, 4*C, h, w], and the raw lowpass band, [B, C, h, w], with
        h = ceil(H/2) and w = ceil(W/2).

    Source: Algorithm 1, the loop over analysis levels.
    """
    bands = haar_analysis(input)
    return scale * _depthwise_conv(bands.flatten(1, 2), weight), bands[:, :, 0].clone()


def synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """Y[y, x] = base[y, x] + sum over l of 2^-l (LL + sy LH + sx HL + sy sx HH).

    Pixel (y, x) reads the coefficients of level l at (y >> l, x >> l); bit l-1 of y and of x gives
    the signs sy and sx. No lowpass band is passed from level to level.

    Args:
        base: [B, C, H, W], any floating dtype.
        coefficients: Per level l = 1, 2, ... [B, 4*C, ceil(H/2^l), ceil(W/2^l)].

    Returns:
        [B, C, H, W].

    Source: eq. synthesis_closed_form.
    """
    height, width = base.shape[2:]
    y = torch.arange(height, device=base.device)
    x = torch.arange(width, device=base.device)
    output = base
    for level, packed in enumerate(coefficients, start=1):
        sign_y = _sign_of_bit(y, level - 1, base.dtype)[:, None]
        sign_x = _sign_of_bit(x, level - 1, base.dtype)
        bands = 2.0**-level * _by_channel(packed)
        ll, lh, hl, hh = bands[:, :, :, y >> level][..., x >> level].unbind(2)
        output = output + (ll + sign_y * lh + sign_x * hl + sign_y * sign_x * hh)
    return output


def _by_channel(bands: Tensor) -> Tensor:
    """[B, 4*C, h, w] seen as [B, C, 4, h, w]."""
    batch, packed, height, width = bands.shape
    return bands.reshape(batch, packed // 4, 4, height, width)


def _sign_of_bit(coordinate: Tensor, bit: int, dtype: torch.dtype) -> Tensor:
    """+1 where the bit of the coordinate is 0, −1 where it is 1."""
    return (1 - 2 * ((coordinate >> bit) & 1)).to(dtype)


def _depthwise_conv(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One k x k kernel for each channel, zero-padded to keep the size."""
    kernel_size = weight.shape[-1]
    before, after = (kernel_size - 1) // 2, kernel_size // 2
    # Compiled code saves the input for backward, and Inductor cannot order the symbolic strides of
    # a view such as the stacked bands: there the input is padded into a tensor of its own.
    if before == after and not torch.compiler.is_compiling():
        return F.conv2d(input, weight, bias, padding=before, groups=weight.shape[0])
    padded = F.pad(input, (before, after, before, after))
    return F.conv2d(padded, weight, bias, groups=weight.shape[0])
