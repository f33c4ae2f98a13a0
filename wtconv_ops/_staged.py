"""Derivatives and autocast of the building blocks analysis_conv and synthesis.

Where a derivative or a torch.func transform may ask for it, a building block runs as plain
PyTorch operations (``reference``), which can be differentiated to any order; else as one kernel.

This module binds the operators, so it is imported only once they are defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _autocast, _checks, _layout, reference
from ._autograd import below_autograd, needs_derivative
from ._errors import with_memory_errors

ANALYSIS_CONV = torch.ops.wtconv.analysis_conv.default
SYNTHESIS = torch.ops.wtconv.synthesis.default


def _plain_analysis_conv(input: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """analysis_conv as plain PyTorch operations."""
    _checks.check_analysis_conv(input, weight, scale)
    with _autocast.excluded():
        coefficients, lowpass = reference.analysis_conv(*map(_widened, (input, weight, scale)))
    return coefficients.to(input.dtype), lowpass.to(input.dtype)


def _plain_synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> Tensor:
    """synthesis as plain PyTorch operations."""
    _checks.check_synthesis(base, coefficients)
    with _autocast.excluded():
        output = reference.synthesis(_widened(base), [_widened(level) for level in coefficients])
    return output.to(base.dtype)


def _widened(tensor: Tensor) -> Tensor:
    """Half types in float32, in which the kernels compute."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Output in the layout that the kernel gives it."""
    return _layout.laid_out(tensor, _layout.is_channels_last(like))


@with_memory_errors
def analysis_conv_kernel(
    keyset: Any, input: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Autograd kernel of analysis_conv."""
    if needs_derivative((input, weight, scale)):
        coefficients, lowpass = _plain_analysis_conv(input, weight, scale)
        return _laid_out(coefficients, input), _laid_out(lowpass, input)
    with below_autograd():
        outputs: tuple[Tensor, Tensor] = ANALYSIS_CONV(input, weight, scale)
    return outputs


@with_memory_errors
def synthesis_kernel(keyset: Any, base: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Autograd kernel of synthesis."""
    if needs_derivative((base, *coefficients)):
        return _laid_out(_plain_synthesis(base, coefficients), base)
    with below_autograd():
        output: Tensor = SYNTHESIS(base, coefficients)
    return output


def analysis_conv_front(
    keyset: Any, input: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """analysis_conv under torch.func transforms."""
    if _autocast.is_enabled(input):
        input, weight, scale = _autocast.cast_analysis_conv(input, weight, scale)
    return _plain_analysis_conv(input, weight, scale)


def synthesis_front(keyset: Any, base: Tensor, coefficients: list[Tensor]) -> Tensor:
    """synthesis under torch.func transforms."""
    if _autocast.is_enabled(base):
        base, coefficients = _autocast.cast_synthesis(base, coefficients)
    return _plain_synthesis(base, coefficients)


def analysis_conv_autocast(
    keyset: Any, input: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Autocast kernel of analysis_conv."""
    if _autocast.is_enabled(input):
        input, weight, scale = _autocast.cast_analysis_conv(input, weight, scale)
    with _autocast.excluded():
        outputs: tuple[Tensor, Tensor] = ANALYSIS_CONV(input, weight, scale)
    return outputs


def synthesis_autocast(keyset: Any, base: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Autocast kernel of synthesis."""
    if _autocast.is_enabled(base):
        base, coefficients = _autocast.cast_synthesis(base, coefficients)
    with _autocast.excluded():
        output: Tensor = SYNTHESIS(base, coefficients)
    return output
