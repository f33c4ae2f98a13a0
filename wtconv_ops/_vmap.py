"""torch.func transforms: the functions of _autograd with vmap rules.

A mapped dimension is folded away, so that one kernel call serves all of it: into the batch where
the weights are shared, else into the channels, which a depthwise operator treats independently
(per-sample gradients, ensembles). Group 4*c + s of copy n becomes 4*(n*C + c) + s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _checks
from ._autograd import (
    FORWARD,
    MIXED_FORWARD,
    FusedBackward,
    FusedForward,
    MixedFusedForward,
    Parameters,
    call_backward,
    call_forward,
    save_inputs,
)

Dims = Sequence[int | None]


def _spread(tensor: Tensor, dim: int | None, to: int, size: int) -> Tensor:
    """Tensor with the mapped dimension at ``to``; a tensor that is not mapped is expanded."""
    if dim is not None:
        return tensor.movedim(dim, to)
    return tensor.unsqueeze(to).expand(*tensor.shape[:to], size, *tensor.shape[to:])


def _into_batch(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[N, B, C, H, W] -> [N*B, C, H, W]."""
    tensor = _spread(tensor, dim, 0, size)
    return tensor.reshape(tensor.shape[0] * tensor.shape[1], *tensor.shape[2:])


def _into_channels(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """[B, N, C, H, W] -> [B, N*C, H, W]; the same for scales [1, N, n, 1, 1]."""
    tensor = _spread(tensor, dim, 1, size)
    return tensor.reshape(tensor.shape[0], tensor.shape[1] * tensor.shape[2], *tensor.shape[3:])


def _parameters_into_channels(parameters: Parameters, dims: Dims, size: int) -> Parameters:
    """Parameters of ``size`` copies side by side in the channels."""
    levels = (len(parameters) - 3) // 2
    folded: list[Tensor | None] = []
    for i, (parameter, dim) in enumerate(zip(parameters, dims, strict=True)):
        if parameter is None:
            folded.append(None)
        elif i == 2 or i >= 3 + levels:
            folded.append(_into_channels(parameter, dim, size))
        else:
            folded.append(_into_batch(parameter, dim, size))
    return folded


def _one_copy(tensors: Sequence[Tensor | None], dims: Dims) -> list[Tensor | None]:
    """Tensors of mapped size 0 with one item of zeros appended; they stay differentiable."""
    return [
        tensor
        if tensor is None or dim is None
        else torch.cat([tensor, torch.zeros_like(tensor.sum(dim, keepdim=True))], dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _items(tensors: Sequence[Tensor | None], dims: Dims) -> list[Any]:
    """The first of the mapped calls."""
    return [
        tensor if tensor is None or dim is None else tensor.select(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _nested(parameters: Sequence[Any]) -> tuple[Any, Any, Any, list[Any], list[Any]]:
    """base_weight, base_bias, base_scale and the lists of the levels."""
    weight, bias, scale, *levels = parameters
    half = len(levels) // 2
    return weight, bias, scale, levels[:half], levels[half:]


def forward_rule(
    op: Any, size: int, dims: Dims, input: Tensor, parameters: Parameters
) -> tuple[Tensor, int]:
    """vmap of fused_forward: output and its mapped dimension."""
    if size == 0:
        one_input, *one_parameters = _one_copy((input, *parameters), dims)
        assert one_input is not None
        output, dim = forward_rule(op, 1, dims, one_input, one_parameters)
        return output.narrow(dim, 0, 0), dim
    # Folded shapes would make a sentence that the caller cannot read.
    first, *rest = _items((input, *parameters), dims)
    _checks.check_fused("fused_forward", first, *_nested(rest), mixed=op is MIXED_FORWARD)
    if all(dim is None for dim in dims[1:]):
        output = call_forward(op, _into_batch(input, dims[0], size), parameters)
        return output.unflatten(0, (size, output.shape[0] // size)), 0
    folded = _parameters_into_channels(parameters, dims[1:], size)
    output = call_forward(op, _into_channels(input, dims[0], size), folded)
    return output.unflatten(1, (size, output.shape[1] // size)), 1


def backward_rule(
    size: int,
    dims: Dims,
    mask: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    parameters: Parameters,
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """vmap of fused_backward: six outputs and their mapped dimensions."""
    tensors = (grad_output, input, *parameters)
    if size == 0:
        one_grad, one_input, *one_parameters = _one_copy(tensors, dims)
        assert one_grad is not None
        assert one_input is not None
        results, out_dims = backward_rule(1, dims, mask, one_grad, one_input, one_parameters)
        return tuple(
            result if dim is None else result.narrow(dim, 0, 0)
            for result, dim in zip(results, out_dims, strict=True)
        ), out_dims
    first_grad, first, *rest = _items(tensors, dims)
    _checks.check_fused_backward(first_grad, first, *_nested(rest), mask)
    if not any(mask[1:]) and all(dim is None for dim in dims[2:]):
        outputs = call_backward(
            _into_batch(grad_output, dims[0], size),
            _into_batch(input, dims[1], size),
            parameters,
            mask,
        )
        folds: tuple[int, ...] = (0, 0, 0, 0, 0, 0)
    else:
        outputs = call_backward(
            _into_channels(grad_output, dims[0], size),
            _into_channels(input, dims[1], size),
            _parameters_into_channels(parameters, dims[2:], size),
            mask,
        )
        folds = (1, 0, 0, 1, 1, 2)
    levels = (len(mask) - 4) // 2
    live = [*mask[:4], any(mask[4 : 4 + levels]), any(mask[4 + levels :])]
    return tuple(
        output.unflatten(fold, (size, output.shape[fold] // size)) if asked else output
        for output, fold, asked in zip(outputs, folds, live, strict=True)
    ), tuple(fold if asked else None for fold, asked in zip(folds, live, strict=True))


class FuncFusedForward(FusedForward):
    """fused_forward(input, *parameters) under torch.func transforms."""

    @staticmethod
    def forward(input: Tensor, *parameters: Tensor | None) -> Tensor:  # type: ignore[override]
        """Run the kernel."""
        return FusedForward.run(input, parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the input and the parameters."""
        save_inputs(ctx, inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, input: Tensor, *parameters: Any) -> Any:
        """Fold the mapped dimension into the batch or the channels."""
        return forward_rule(FORWARD, info.batch_size, in_dims, input, parameters)


class FuncMixedFusedForward(FuncFusedForward):
    """_fused_forward(input, *parameters) under torch.func transforms."""

    @staticmethod
    def forward(input: Tensor, *parameters: Tensor | None) -> Tensor:  # type: ignore[override]
        """Run the kernel."""
        return MixedFusedForward.run(input, parameters)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, input: Tensor, *parameters: Any) -> Any:
        """Fold the mapped dimension into the batch or the channels."""
        return forward_rule(MIXED_FORWARD, info.batch_size, in_dims, input, parameters)


class FuncFusedBackward(FusedBackward):
    """fused_backward(mask, grad_output, input, *parameters) under torch.func transforms."""

    @staticmethod
    def forward(  # type: ignore[override]
        mask: Sequence[bool], grad_output: Tensor, input: Tensor, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the kernel."""
        return FusedBackward.run(mask, grad_output, input, parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save grad_output, the input and the parameters."""
        ctx.mask, *tensors = inputs
        save_inputs(ctx, tuple(tensors))

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        mask: Sequence[bool],
        grad_output: Tensor,
        input: Tensor,
        *parameters: Any,
    ) -> Any:
        """Fold the mapped dimension into the batch or the channels."""
        return backward_rule(info.batch_size, in_dims[1:], mask, grad_output, input, parameters)
