"""Python kernels of the fused operators, one for each dispatch key and operator.

Autograd: differentiate where something asks for it, else call the kernel below. The front key of
torch.func transforms: the same with vmap rules. Autocast: cast the input, then call
_fused_forward, which takes parameters of another dtype.

This module binds the operators, so it is imported only once they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _autocast, _checks
from ._autograd import (
    BACKWARD,
    FORWARD,
    MIXED_FORWARD,
    FusedBackward,
    FusedForward,
    MixedFusedForward,
    below_autograd,
    needs_derivative,
)
from ._errors import reraise, with_memory_errors
from ._vmap import FuncFusedBackward, FuncFusedForward, FuncMixedFusedForward


def _forward_kernel(function: Any) -> Callable[..., Tensor]:
    """Autograd kernel of the operator whose derivatives are those of ``function``."""

    def kernel(
        keyset: Any,
        input: Tensor,
        base_weight: Tensor,
        base_bias: Tensor | None,
        base_scale: Tensor,
        wavelet_weights: list[Tensor],
        wavelet_scales: list[Tensor],
    ) -> Tensor:
        base = (input, base_weight, base_bias, base_scale)
        output: Tensor
        try:
            if len(wavelet_weights) == len(wavelet_scales):
                output = function.call(base, wavelet_weights, wavelet_scales)
            else:
                with below_autograd():  # which refuses them
                    output = function.operator(*base, wavelet_weights, wavelet_scales)
        except RuntimeError as error:
            reraise(error)
        return output

    return kernel


forward_kernel = _forward_kernel(FusedForward)
mixed_forward_kernel = _forward_kernel(MixedFusedForward)


def backward_kernel(
    keyset: Any,
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: list[Tensor],
    wavelet_scales: list[Tensor],
    output_mask: list[bool],
) -> tuple[Tensor, ...]:
    """Autograd kernel of fused_backward."""
    parameters = (base_weight, base_bias, base_scale, *wavelet_weights, *wavelet_scales)
    try:
        if len(wavelet_weights) == len(wavelet_scales) and needs_derivative(
            (grad_output, input, *parameters)
        ):
            return FusedBackward.apply(  # type: ignore[no-any-return]
                tuple(output_mask), grad_output, input, *parameters
            )
        with below_autograd():
            outputs: tuple[Tensor, ...] = BACKWARD(
                grad_output,
                input,
                base_weight,
                base_bias,
                base_scale,
                wavelet_weights,
                wavelet_scales,
                output_mask,
            )
    except RuntimeError as error:
        reraise(error)
    return outputs


@with_memory_errors
def front_forward_kernel(
    keyset: Any,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Any:
    """fused_forward under torch.func transforms."""
    arguments = (input, base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales)
    _checks.check_same_length("fused_forward", wavelet_weights, wavelet_scales)
    function: Any = FuncFusedForward
    if _autocast.is_enabled(input) and input.dtype != torch.float64:
        arguments = _autocast.cast_fused(*arguments)
        function = FuncMixedFusedForward
    *base, weights, scales = arguments
    return function.apply(*base, *weights, *scales)


@with_memory_errors
def front_mixed_forward_kernel(
    keyset: Any,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Any:
    """_fused_forward under torch.func transforms."""
    _checks.check_same_length("fused_forward", wavelet_weights, wavelet_scales)
    return FuncMixedFusedForward.apply(
        input, base_weight, base_bias, base_scale, *wavelet_weights, *wavelet_scales
    )


@with_memory_errors
def front_backward_kernel(
    keyset: Any,
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    output_mask: Sequence[bool],
) -> Any:
    """fused_backward under torch.func transforms."""
    _checks.check_same_length("fused_backward", wavelet_weights, wavelet_scales)
    return FuncFusedBackward.apply(
        tuple(output_mask),
        grad_output,
        input,
        base_weight,
        base_bias,
        base_scale,
        *wavelet_weights,
        *wavelet_scales,
    )


def autocast_forward_kernel(
    keyset: Any,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Any:
    """Autocast kernel of fused_forward."""
    arguments = (input, base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales)
    operator = FORWARD
    if _autocast.is_enabled(input) and input.dtype != torch.float64:
        arguments = _autocast.cast_fused(*arguments)
        operator = MIXED_FORWARD
    with _autocast.excluded():
        return operator(*arguments)
