"""The functional form of WTConv: the fused operator, or plain PyTorch where it has no kernel."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _autocast, _checks, _layout, _library, reference
from ._arguments import require_int
from ._capability import can_run
from ._direct import begins_at_autograd
from ._errors import reraise

__all__ = ["wtconv2d"]

_OP = "fused_forward"
_served: dict[tuple[object, ...], bool] = {}
_warned: set[str] = set()


def wtconv2d(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    stride: int = 1,
) -> Tensor:
    """Y = s0 * (W0 conv X + b) + sum over levels of synthesis(s_l * (W_l conv analysis(X))).

    Runs ``torch.ops.wtconv.fused_forward`` where :func:`wtconv_ops.can_run` says that there is a
    kernel, the plain PyTorch form elsewhere (with one warning per device type). Without wavelet
    levels it is the depthwise base convolution.

    Args:
        input: [B, C, H, W], float32, float64, float16 or bfloat16; B >= 0, H, W >= 1; any
            strides, which the kernels read as they are.
        base_weight: [C, 1, k, k], 1 <= k <= 31, odd or even.
        base_bias: [C] or None.
        base_scale: [1, C, 1, 1].
        wavelet_weights: 0 to 32 levels, the finest first, each [4*C, 1, k, k]; subband s (LL, LH,
            HL, HH) of channel c is 4*c + s.
        wavelet_scales: As many, each [1, 4*C, 1, 1].
        stride: Keep every stride-th row and column of the result, 1 to 2**31 - 1.

    Returns:
        [B, C, ceil(H/stride), ceil(W/stride)] in the dtype and layout of ``input``; under
        autocast in the autocast dtype, as ``conv2d`` gives (float64 takes no part in autocast).

    Raises:
        RuntimeError: A shape, dtype or device that does not fit; the sentence names the argument.
        TypeError: ``input`` is not a tensor, or ``stride`` is not an int.
        ValueError: ``stride`` is out of range.

    Equivalent to:
        >>> wtconv_ops.reference.wtconv2d(input, base_weight, base_bias, base_scale,
        ...                               wavelet_weights, wavelet_scales, stride)

    Source: the WTConv paper, Algorithm 1.
    """
    if not isinstance(input, Tensor):
        raise TypeError(f"wtconv2d: input must be a Tensor, got {type(input).__name__}")
    if type(stride) is not int or stride != 1:
        stride = require_int("wtconv2d", "stride", stride, 1)
    weights, scales = list(wavelet_weights), list(wavelet_scales)
    if weights and _kernels_serve(input, base_weight, len(weights)):
        output = _kernel(input, base_weight, base_bias, base_scale, weights, scales)
    else:
        output = _plain(input, _Parameters(base_weight, base_bias, base_scale, weights, scales))
    if stride == 1:
        return output
    return _layout.laid_out(output, _layout.is_channels_last(output), stride)


class _Parameters(NamedTuple):
    """The parameters of the operator in the order of its schema."""

    base_weight: Tensor  # [C, 1, k, k]
    base_bias: Tensor | None  # [C]
    base_scale: Tensor  # [1, C, 1, 1]
    wavelet_weights: list[Tensor]  # [4*C, 1, k, k] per level
    wavelet_scales: list[Tensor]  # [1, 4*C, 1, 1] per level

    def to(self, dtype: torch.dtype) -> _Parameters:
        return _Parameters(
            self.base_weight.to(dtype),
            None if self.base_bias is None else self.base_bias.to(dtype),
            self.base_scale.to(dtype),
            [weight.to(dtype) for weight in self.wavelet_weights],
            [scale.to(dtype) for scale in self.wavelet_scales],
        )


def _kernel(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
) -> Tensor:
    """The operator; in inference mode no Python kernel of it gives a failed allocation its type."""
    base = (input, base_weight, base_bias, base_scale)
    if torch.compiler.is_compiling():
        return torch.ops.wtconv.fused_forward.default(*base, weights, scales)  # type: ignore[no-any-return]
    try:
        if len(weights) == len(scales) and begins_at_autograd((*base, *weights, *scales)):
            return _differentiable()(base, weights, scales)
        return torch.ops.wtconv.fused_forward.default(*base, weights, scales)  # type: ignore[no-any-return]
    except RuntimeError as error:
        reraise(error)


@functools.cache
def _differentiable() -> Callable[[tuple[Any, ...], list[Tensor], list[Tensor]], Tensor]:
    """What the operator does for autograd, from a module that needs the operators."""
    from ._autograd import FusedForward

    return FusedForward.call


def _kernels_serve(input: Tensor, base_weight: Tensor, levels: int) -> bool:
    """Whether the operator runs this call; asks :func:`can_run` once per kind of call."""
    kernel_size: Any = base_weight.shape[-1] if base_weight.dim() else 0
    if type(kernel_size) is not int:
        kernel_size = _checks.untraced(kernel_size)
    if torch.compiler.is_compiling():
        kernel_size = operator.index(kernel_size)  # of a weight that is an input of the graph
        served: bool = _compiled_kernels_serve(input.device, input.dtype, kernel_size, levels)
        return served
    if type(kernel_size) is not int:  # a SymInt has no hash
        return can_run(input.device, input.dtype, kernel_size, levels)
    key = (id(_library.library()), input.device, input.dtype, kernel_size, levels)
    known = _served.get(key)
    if known is None:
        known = _served[key] = can_run(input.device, input.dtype, kernel_size, levels)
    if not known:
        _warn_once(input.device)
    return known


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiled_kernels_serve(
    device: torch.device, dtype: torch.dtype, kernel_size: int, levels: int
) -> bool:
    """:func:`can_run` while a graph is traced: what it reads shall not become guards of a call."""
    return can_run(device, dtype, kernel_size, levels)


def _warn_once(device: torch.device) -> None:
    """Say once per device type that a library without kernels for it leaves the plain path."""
    if device.type in _warned or _library.library() is None:  # loading has warned already
        return
    try:
        can_run(device, torch.float32, 1, 1, raise_error=True)
    except RuntimeError as error:
        _warned.add(device.type)
        warnings.warn(
            f"{error}; WTConv runs plain PyTorch operations there", RuntimeWarning, stacklevel=4
        )


def _plain(input: Tensor, parameters: _Parameters) -> Tensor:
    """The operator in PyTorch operations, with the checks, dtypes and layout of the kernels.

    float16 and bfloat16 are computed in float32, as the kernels do, so that a lowpass band
    (which doubles at each level) cannot overflow where the result fits. Without levels there is
    no such band, and the convolution of PyTorch runs in the dtype of the input.
    """
    cast = _autocast.is_enabled(input) and input.dtype != torch.float64
    if cast:
        parameters = _Parameters(*_autocast.cast_fused(input, *parameters)[1:])
        input = _autocast.cast(input, torch.get_autocast_dtype(input.device.type))
    _check(input, parameters, mixed=cast)
    dtype = input.dtype
    if parameters.wavelet_weights:
        dtype = torch.promote_types(dtype, parameters.base_weight.dtype)
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    with torch.autocast(input.device.type, enabled=False) if cast else nullcontext():
        output = reference.wtconv2d(input.to(dtype), *parameters.to(dtype)).to(input.dtype)
    return _layout.laid_out(output, _layout.is_channels_last(input))


def _check(input: Tensor, parameters: _Parameters, mixed: bool) -> None:
    """Refuse what the operator refuses, in its words; here zero levels are allowed."""
    if parameters.wavelet_weights or parameters.wavelet_scales:
        _checks.check_fused(_OP, input, *parameters, mixed=mixed)
        return
    _checks._check_map(_OP, "input", input)
    weight, bias, scale = parameters[:3]
    _checks._check_base(_OP, input.shape[1], weight, bias, scale)
    owner, like, hint = ("base_weight", weight, "") if mixed else ("input", input, _checks._CONVERT)
    for name, parameter in _checks._parameters(weight, bias, scale, [], []):
        _checks._check_same_dtype(_OP, owner, like, name, parameter, hint)
        _checks._check_same_device(_OP, "input", input, name, parameter)
