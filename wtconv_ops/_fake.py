"""Fake impls: sizes, strides, dtypes and errors of the operators without their numbers.

Sizes may be symbolic: nothing here branches on a height, a width or a batch size beyond the
rules that the kernels check too, so one graph serves every parity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks, _inductor, _layout

_Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty_map(like: Tensor, shape: Sequence[Any]) -> Tensor:
    """Fresh dense map of ``shape`` in the dtype, device and layout of ``like``."""
    return torch.empty(
        shape,
        dtype=like.dtype,
        device=like.device,
        memory_format=_layout.memory_format_of(like),
    )


def fused_forward(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Tensor:
    """Output [B, C, H, W] of fused_forward, uninitialised."""
    _inductor.install()
    _checks.check_fused(
        "fused_forward",
        input,
        base_weight,
        base_bias,
        base_scale,
        wavelet_weights,
        wavelet_scales,
    )
    return _empty_map(input, input.shape)


def mixed_fused_forward(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Tensor:
    """Output [B, C, H, W] of _fused_forward, uninitialised."""
    _inductor.install()
    _checks.check_fused(
        "fused_forward",
        input,
        base_weight,
        base_bias,
        base_scale,
        wavelet_weights,
        wavelet_scales,
        mixed=True,
    )
    return _empty_map(input, input.shape)


def graph_forward(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    channels_last: bool,
) -> Tensor:
    """Output [B, C, H, W] of _graph_forward, uninitialised."""
    _checks.check_fused(
        "fused_forward",
        input,
        base_weight,
        base_bias,
        base_scale,
        wavelet_weights,
        wavelet_scales,
        mixed=True,
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=layout)


def fused_backward(
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    output_mask: Sequence[bool],
) -> _Six:
    """Six gradients of fused_backward, uninitialised; those not asked for have shape [0]."""
    _inductor.install()
    _checks.check_fused_backward(
        grad_output,
        input,
        base_weight,
        base_bias,
        base_scale,
        wavelet_weights,
        wavelet_scales,
        output_mask,
    )
    levels = len(wavelet_weights)
    channels, _, kernel_size, _ = base_weight.shape
    mask = list(output_mask)

    def parameter(asked: bool, *shape: Any) -> Tensor:
        return base_weight.new_empty(shape if asked else (0,))

    return (
        _empty_map(input, input.shape) if mask[0] else input.new_empty((0,)),
        parameter(mask[1], channels, 1, kernel_size, kernel_size),
        parameter(mask[2], channels),
        parameter(mask[3], 1, channels, 1, 1),
        parameter(any(mask[4 : 4 + levels]), levels, 4 * channels, 1, kernel_size, kernel_size),
        parameter(any(mask[4 + levels :]), levels, 1, 4 * channels, 1, 1),
    )


def analysis_conv(input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients [B, 4C, h, w] and low-pass [B, C, h, w] of analysis_conv, uninitialised."""
    _inductor.install()
    _checks.check_analysis_conv(input, weight, scale)
    batch, channels, height, width = input.shape
    half = (_checks.next_size(height), _checks.next_size(width))
    return (
        _empty_map(input, (batch, 4 * channels, *half)),
        _empty_map(input, (batch, channels, *half)),
    )


def synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """Output [B, C, H, W] of synthesis, uninitialised."""
    _inductor.install()
    _checks.check_synthesis(base, coefficients)
    return _empty_map(base, base.shape)
