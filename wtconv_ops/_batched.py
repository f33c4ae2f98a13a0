"""Batch rules for the vmap inside ``torch.autograd`` (not torch.func).

``torch.autograd.grad(is_grads_batched=True)`` and ``torch.autograd.functional.jacobian(
vectorize=True)`` map with an older mechanism of their own: its dispatch key is Batched, one level
at a time. The rules are those of _vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._autograd import FORWARD, MIXED_FORWARD
from ._vmap import backward_rule, forward_rule


def _level() -> int:
    """Number of the innermost mapped level.

    The backward pass of CUDA tensors runs on a thread of its own, which counts no levels; it is
    then the first, the only one that torch.autograd uses.
    """
    torch._C._vmapmode_increment_nesting()
    level: int = torch._C._vmapmode_decrement_nesting()
    return max(1, level)


def _unwrap(
    tensors: Sequence[Tensor | None], level: int
) -> tuple[int, list[int | None], list[Tensor | None]]:
    """Mapped size, mapped dimensions (0 or None) and plain tensors of a level."""
    batched_key = torch._C._dispatch_key_parse("Batched")
    size: int | None = None
    dims: list[int | None] = []
    values: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or not torch._C._dispatch_keys(tensor).has(batched_key):
            dims.append(None)
            values.append(tensor)
            continue
        value = torch._remove_batch_dim(tensor, level, 1, 0)
        size = value.shape[0]
        dims.append(0)
        values.append(value)
    return 1 if size is None else size, dims, values


def _batched_forward(op: Any, flat: Sequence[Tensor | None]) -> Tensor:
    level = _level()
    size, dims, (input, *parameters) = _unwrap(flat, level)
    assert input is not None
    output, dim = forward_rule(op, size, dims, input, parameters)
    return _rewrap(output, dim, level)


def _rewrap(output: Tensor, dim: int, level: int) -> Tensor:
    """Mapped tensor; its mapped dimension is the outermost in memory, as as_strided demands."""
    return torch._add_batch_dim(output.movedim(dim, 0).contiguous(), 0, level)


def _forward(operator: Any) -> Callable[..., Tensor]:
    """Batch rule of a forward operator."""

    def rule(
        keyset: Any,
        input: Tensor,
        base_weight: Tensor,
        base_bias: Tensor | None,
        base_scale: Tensor,
        wavelet_weights: Sequence[Tensor],
        wavelet_scales: Sequence[Tensor],
    ) -> Tensor:
        _checks.check_same_length("fused_forward", wavelet_weights, wavelet_scales)
        flat = (input, base_weight, base_bias, base_scale, *wavelet_weights, *wavelet_scales)
        return _batched_forward(operator, flat)

    return rule


fused_forward = _forward(FORWARD)
mixed_fused_forward = _forward(MIXED_FORWARD)


def fused_backward(
    keyset: Any,
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Batch rule of fused_backward."""
    _checks.check_same_length("fused_backward", wavelet_weights, wavelet_scales)
    level = _level()
    flat = (
        grad_output,
        input,
        base_weight,
        base_bias,
        base_scale,
        *wavelet_weights,
        *wavelet_scales,
    )
    size, dims, (plain_grad, plain_input, *parameters) = _unwrap(flat, level)
    assert plain_grad is not None
    assert plain_input is not None
    outputs, out_dims = backward_rule(
        size, dims, list(output_mask), plain_grad, plain_input, parameters
    )
    return tuple(
        output if dim is None else _rewrap(output, dim, level)
        for output, dim in zip(outputs, out_dims, strict=True)
    )
