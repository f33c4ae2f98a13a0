"""FLOP formulas for ``torch.utils.flop_counter.FlopCounterMode``.

Counted are the depthwise convolutions, the base path and four bands per level, exactly as
FlopCounterMode counts ``aten.convolution`` and its backward in the plain-PyTorch form. The Haar
steps (additions and a power of two) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, flop_registry, register_flop_formula

from ._checks import next_size

_Shape = Sequence[Any]


def _convolutions(
    input: _Shape, base_weight: _Shape, wavelet_weights: Sequence[_Shape]
) -> Iterator[tuple[_Shape, _Shape]]:
    """Shapes (map, weight) of every depthwise convolution, base path first."""
    batch, channels, height, width = input
    yield input, base_weight
    for weight in wavelet_weights:
        height, width = next_size(height), next_size(width)
        yield (batch, 4 * channels, height, width), weight


def _forward_flops(
    input: _Shape,
    base_weight: _Shape,
    base_bias: _Shape | None,
    base_scale: _Shape,
    wavelet_weights: Sequence[_Shape],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """FLOPs of fused_forward."""
    return sum(
        conv_flop_count(list(shape), list(weight), list(shape))
        for shape, weight in _convolutions(input, base_weight, wavelet_weights)
    )


def _backward_flops(
    grad_output: _Shape,
    input: _Shape,
    base_weight: _Shape,
    base_bias: _Shape | None,
    base_scale: _Shape,
    wavelet_weights: Sequence[_Shape],
    wavelet_scales: Sequence[_Shape],
    output_mask: Sequence[bool],
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """FLOPs of fused_backward for the gradients that ``output_mask`` asks for."""
    asked = [output_mask[1], *output_mask[4 : 4 + len(wavelet_weights)]]
    flops = 0
    for i, (shape, weight) in enumerate(_convolutions(input, base_weight, wavelet_weights)):
        flops += _convolution_backward_flops(shape, weight, bool(output_mask[0]), bool(asked[i]))
    return flops


def _convolution_backward_flops(
    shape: _Shape, weight: _Shape, asks_input: bool, asks_weight: bool
) -> int:
    """FLOPs that FlopCounterMode counts for aten.convolution_backward of one convolution."""
    flops = 0
    if asks_input:
        flops += conv_flop_count(list(shape), list(weight), list(shape), transposed=True)
    if asks_weight:
        swapped = [shape[1], shape[0], *shape[2:]]
        flops += conv_flop_count(swapped, swapped, [weight[1], weight[0], *weight[2:]])
    return flops


def _analysis_conv_flops(
    input: _Shape, weight: _Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """FLOPs of analysis_conv: its depthwise convolution."""
    batch, channels, height, width = input
    shape = [batch, 4 * channels, next_size(height), next_size(width)]
    return conv_flop_count(shape, list(weight), shape)


def _no_flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """FLOPs of synthesis: none are counted."""
    return 0


def register() -> None:
    """Register the formulas for the operators."""
    ops = torch.ops.wtconv
    formulas: dict[Any, Callable[..., int]] = {
        ops.fused_forward: _forward_flops,
        ops._fused_forward: _forward_flops,
        ops.fused_backward: _backward_flops,
        ops.analysis_conv: _analysis_conv_flops,
        ops.synthesis: _no_flops,
    }
    for name, formula in (("_graph_forward", _forward_flops), ("_graph_backward", _backward_flops)):
        if hasattr(ops, name):
            formulas[getattr(ops, name)] = formula
    for op, formula in formulas.items():
        if op not in flop_registry:
            register_flop_formula(op)(formula)
