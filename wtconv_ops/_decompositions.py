"""The operators as aten operations, for graphs that must not carry the operators.

Analysis and synthesis are depthwise convolutions with the Haar filters, as in the original layer:
every exporter knows them. Inside an operator each level has one row and one column of zeros more
than it needs. They stay zero in every lowpass band, and what a filter makes of them is cropped.
torch.export keeps whatever a trace asks about a symbolic size, and with these zeros the answer is
the same for every size: no side is 1, and every crop removes something, whatever the parity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import _autocast, _checks, _layout, _library

__all__ = ["decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Map every operator of the library to a function of aten operations only.

    The table serves whatever takes one: ``ExportedProgram.run_decompositions``, and with its
    result ``torch.onnx.export`` and ``torch._inductor.aoti_compile_and_package``, whose files then
    need no library; ``make_fx(decomposition_table=...)``. The functions take the arguments and
    return the shapes, dtypes and layouts of the operators, for any size [B, C, H, W], odd or even,
    fixed or symbolic; float16 and bfloat16 are computed in float32, as the kernels compute them.
    They make many passes over memory where the kernels make one or two, and their convolutions
    on CUDA obey ``torch.backends.cudnn.allow_tf32``.

    Returns:
        ``{operator overload: function}`` for ``fused_forward``, ``fused_backward``,
        ``analysis_conv``, ``synthesis`` and the forms of them that autocast and compiled graphs
        call.
        Empty where there is no operator library: no graph contains an operator then.

    Equivalent to:
        >>> {torch.ops.wtconv.fused_forward.default: wtconv_ops.reference.wtconv2d, ...}

    Source: the WTConv paper, Algorithm 1 and its adjoint.
    """
    if not _library.ops_defined():
        return {}
    ops = torch.ops.wtconv
    return {
        ops.fused_forward.default: _fused_forward,
        ops._fused_forward.default: _fused_forward,
        ops.fused_backward.default: _fused_backward,
        ops.analysis_conv.default: _analysis_conv,
        ops.synthesis.default: _synthesis,
        ops._graph_forward.default: _graph_forward,
        ops._graph_backward.default: _fused_backward,
    }


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that the kernels accumulate in."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _like(output: Tensor, input: Tensor) -> Tensor:
    """``output`` in the dtype of ``input`` and in the layout that the kernels derive from it."""
    return _layout.laid_out(output.to(input.dtype), _layout.is_channels_last(input))


def _haar_filters(channels: int, like: Tensor) -> Tensor:
    """½ [±1 ±1; ±1 ±1] of LL, LH, HL, HH for each channel, [4*C, 1, 2, 2].

    Computed, because a decomposition may hold no tensor of its own.
    """
    plus = torch.ones(2, dtype=like.dtype, device=like.device)
    minus = torch.cat([plus[:1], -plus[:1]])
    rows = torch.stack([plus, minus, plus, minus]).unsqueeze(2)
    columns = torch.stack([plus, plus, minus, minus]).unsqueeze(1)
    return (0.5 * rows * columns).unsqueeze(1).repeat(channels, 1, 1, 1)


def _lowpass(bands: Tensor) -> Tensor:
    """LL [B, C, h, w] of bands, or of filters, [B, 4*C, h, w]."""
    return bands[:, ::4]


def _analysis(input: Tensor, haar: Tensor) -> Tensor:
    """Bands [B, 4*C, h + 1, w + 1] of ``input`` [B, C, H, W]; the last row and column are zero."""
    return F.conv2d(F.pad(input, (0, 3, 0, 3)), haar, stride=2, groups=input.shape[1])


def _cropped(input: Tensor, size: Sequence[Any]) -> Tensor:
    """The first rows and columns of [B, C, h, w], as many as ``size`` (height, width) says."""
    return input[:, :, : size[0], : size[1]]


def _reconstruct(pyramid: Sequence[Tensor], sizes: Sequence[Sequence[Any]], haar: Tensor) -> Tensor:
    """Sum over l of synthesis_l(Z_l), from the coarsest level to the finest.

    Args:
        pyramid: Z_l of level l = 1, 2, ..., each [B, 4*C, n_l, m_l].
        sizes: (height, width) of the map that each level splits: (H, W), (n_1, m_1), ...
        haar: [4*C, 1, 2, 2].

    Returns:
        [B, C, H, W].
    """
    channels = haar.shape[0] // 4
    output: Tensor | None = None
    for bands, size in zip(reversed(pyramid), reversed(sizes), strict=True):
        pixels = F.conv_transpose2d(bands, haar, stride=2, groups=channels)
        if output is not None:
            pixels = pixels + F.conv_transpose2d(output, haar[::4], stride=2, groups=channels)
        output = _cropped(pixels, size)
    assert output is not None
    return output


def _depthwise_conv(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One k x k kernel for each channel, zero-padded to keep the size."""
    return F.conv2d(F.pad(input, _same(weight)), weight, bias, groups=weight.shape[0])


def _same(weight: Tensor) -> tuple[int, int, int, int]:
    """Padding (left, right, top, bottom) that keeps the size; the smaller half comes first."""
    kernel_size = weight.shape[-1]
    before, after = (kernel_size - 1) // 2, kernel_size // 2
    return before, after, before, after


def _fused_forward(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Tensor:
    """[B, C, H, W] of fused_forward, whose parameters may have a dtype of their own."""
    dtype = _compute_dtype(input, base_weight)
    with _autocast.excluded():
        x = input.to(dtype)
        bias = None if base_bias is None else base_bias.to(dtype)
        output = base_scale.to(dtype) * _depthwise_conv(x, base_weight.to(dtype), bias)
        haar = _haar_filters(base_weight.shape[0], x)
        pyramid, sizes = [], []
        for weight, scale in zip(wavelet_weights, wavelet_scales, strict=True):
            sizes.append(x.shape[2:])
            bands = _analysis(x, haar)
            pyramid.append(scale.to(dtype) * _depthwise_conv(bands, weight.to(dtype)))
            x = _lowpass(bands)
        output = output + _reconstruct(pyramid, sizes, haar)
    return _like(output, input)


def _graph_forward(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    channels_last: bool,
) -> Tensor:
    """[B, C, H, W] of fused_forward in the layout that the caller names."""
    output = _fused_forward(
        input, base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return output.contiguous(memory_format=layout)


def _analysis_conv(input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients [B, 4*C, h, w] and lowpass band [B, C, h, w] of analysis_conv."""
    dtype = _compute_dtype(input)
    size = [_checks.next_size(side) for side in input.shape[2:]]
    with _autocast.excluded():
        x = input.to(dtype)
        bands = _cropped(_analysis(x, _haar_filters(weight.shape[0] // 4, x)), size)
        coefficients = scale.to(dtype) * _depthwise_conv(bands, weight.to(dtype))
    return _like(coefficients, input), _like(_lowpass(bands), input)


def _synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """[B, C, H, W] of synthesis."""
    dtype = _compute_dtype(base)
    with _autocast.excluded():
        output = base.to(dtype)
        haar = _haar_filters(coefficients[0].shape[1] // 4, output)
        pyramid = [F.pad(level.to(dtype), (0, 1, 0, 1)) for level in coefficients]
        sizes = [base.shape[2:], *(level.shape[2:] for level in pyramid[:-1])]
        output = output + _reconstruct(pyramid, sizes, haar)
    return _like(output, base)


def _fused_backward(
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    """The six gradients of fused_backward; those not asked for have shape [0].

    In a stack, a level that is not asked for is zero where another one is.

    Analysis and synthesis are each other's adjoint: the cotangent of the coefficients is the
    analysis of ``grad_output``, and the gradient of the input is the synthesis of the gradients
    of the bands.
    """
    dtype = _compute_dtype(input, base_weight)
    x, g = input.to(dtype), grad_output.to(dtype)
    grad_input, grad_weight, grad_scale = _scaled_conv_backward(g, x, base_weight, base_scale)
    sums = g.sum((0, 2, 3), keepdim=True)
    grad_bias = (base_scale.to(dtype) * sums).flatten()
    if base_bias is not None:  # the scale multiplies the bias too
        grad_scale = grad_scale + base_bias.to(dtype).reshape(1, -1, 1, 1) * sums
    from_levels, grad_weights, grad_scales = _levels_backward(g, x, wavelet_weights, wavelet_scales)

    def parameter(asked: bool, gradient: Tensor) -> Tensor:
        return gradient.to(base_weight.dtype) if asked else base_weight.new_empty((0,))

    def stack(asked: Sequence[bool], gradients: Sequence[Tensor]) -> Tensor:
        levels = [
            gradient if flag else torch.zeros_like(gradient)
            for flag, gradient in zip(asked, gradients, strict=True)
        ]
        return parameter(any(asked), torch.stack(levels))

    levels = len(grad_weights)
    return (
        _like(grad_input + from_levels, input) if output_mask[0] else input.new_empty((0,)),
        parameter(output_mask[1], grad_weight),
        parameter(output_mask[2], grad_bias),
        parameter(output_mask[3], grad_scale),
        stack(output_mask[4 : 4 + levels], grad_weights),
        stack(output_mask[4 + levels :], grad_scales),
    )


def _levels_backward(
    grad: Tensor, input: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Gradients of the wavelet path.

    Args:
        grad: Gradient of its output, [B, C, H, W], in the dtype that is computed in.
        input: [B, C, H, W], in the same.
        weights: Per level [4*C, 1, k, k], any floating dtype.
        scales: Per level [1, 4*C, 1, 1], any floating dtype.

    Returns:
        With respect to the input [B, C, H, W], and per level to the weight and to the scale.
    """
    haar = _haar_filters(weights[0].shape[0] // 4, input)
    pyramid: list[Tensor] = []
    sizes: list[Sequence[Any]] = []
    grad_weights: list[Tensor] = []
    grad_scales: list[Tensor] = []
    for weight, scale in zip(weights, scales, strict=True):
        sizes.append(input.shape[2:])
        bands, cotangents = _analysis(input, haar), _analysis(grad, haar)
        gradients = _scaled_conv_backward(cotangents, bands, weight, scale)
        for found, gradient in zip((pyramid, grad_weights, grad_scales), gradients, strict=True):
            found.append(gradient)
        input, grad = _lowpass(bands), _lowpass(cotangents)
    return _reconstruct(pyramid, sizes, haar), grad_weights, grad_scales


def _scaled_conv_backward(
    grad: Tensor, input: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``scale * (input conv weight)`` with respect to input, weight and scale.

    Args:
        grad: [B, n, h, w], in the dtype that is computed in.
        input: [B, n, h, w], in the same.
        weight: [n, 1, k, k], any floating dtype.
        scale: [1, n, 1, 1], any floating dtype.

    Returns:
        [B, n, h, w], [n, 1, k, k] and [1, n, 1, 1], in the dtype of ``grad``.
    """
    weight, scale = weight.to(grad.dtype), scale.to(grad.dtype)
    padded = F.pad(input, _same(weight))
    convolved = F.conv2d(padded, weight, groups=weight.shape[0])
    grad_scale = (grad * convolved).sum((0, 2, 3), keepdim=True)
    grad_padded, grad_weight, _ = torch.ops.aten.convolution_backward(
        scale * grad,
        padded,
        weight,
        bias_sizes=None,
        stride=[1, 1],
        padding=[0, 0],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=weight.shape[0],
        output_mask=[True, True, False],
    )
    return F.pad(grad_padded, [-side for side in _same(weight)]), grad_weight, grad_scale
