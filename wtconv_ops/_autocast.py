"""Autocast rules of the operators.

fused_forward casts its input only: the kernel takes half-precision activations with float32
parameters, folds the scales in float32 and returns the autocast dtype, as aten's conv2d does.
Casting 3 + 2 * levels parameters one by one would cost more than the layer. float64 stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import DispatchKey, Tensor

from ._checks import DTYPES

_KEYS = torch._C.DispatchKeySet(DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    DispatchKey.AutocastCUDA
)
AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def excluded() -> Any:
    """Context in which the operators are called without autocast."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def is_enabled(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of ``tensor``."""
    device_type = tensor.device.type
    return device_type in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` in ``dtype``; float64 and what the operators refuse stay as they are."""
    return tensor.to(dtype) if tensor.dtype in _CASTABLE and tensor.dtype != dtype else tensor


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in DTYPES else tensor


def cast_fused(
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, list[Tensor], list[Tensor]]:
    """Arguments of _fused_forward for those of fused_forward under autocast.

    Returns:
        The input in the autocast dtype and the parameters as they are; all of them in float32
        if their dtypes differ. A dtype that the operator refuses stays, and it says why.
    """
    input = cast(input, torch.get_autocast_dtype(input.device.type))
    weights, scales = list(wavelet_weights), list(wavelet_scales)
    parameters = [base_weight, base_scale, *weights, *scales]
    if base_bias is not None:
        parameters.append(base_bias)
    if any(parameter.dtype != base_weight.dtype for parameter in parameters):
        base_weight, base_scale = _to_float32(base_weight), _to_float32(base_scale)
        base_bias = None if base_bias is None else _to_float32(base_bias)
        weights = [_to_float32(weight) for weight in weights]
        scales = [_to_float32(scale) for scale in scales]
    return input, base_weight, base_bias, base_scale, weights, scales


def cast_analysis_conv(
    input: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of analysis_conv in the autocast dtype, as aten's conv2d casts them."""
    dtype = torch.get_autocast_dtype(input.device.type)
    return cast(input, dtype), cast(weight, dtype), cast(scale, dtype)


def cast_synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Arguments of synthesis in their widest dtype, as aten's additions promote them."""
    dtype = base.dtype
    if any(tensor.dtype not in DTYPES for tensor in (base, *coefficients)):
        return base, list(coefficients)  # the operator says which one it refuses
    for level in coefficients:
        dtype = torch.promote_types(dtype, level.dtype)
    return base.to(dtype), [level.to(dtype) for level in coefficients]
