"""Derivatives of any order of fused_forward and fused_backward.

With x the input, W the weights and bias, S the scales and g a cotangent, the layer is

    F(x; W, S) = S0 * (W0 (*) x + b) + sum_l synthesis_l(S_l * (W_l (*) analysis_l(x)))

and phi(g, x, W, S) = <g, F(x; W, S)> is linear in each of its four arguments (in x once the bias
is left out). fused_backward is B(g, x, W, S) = (dphi/dx, dphi/dW, dphi/dS). Hence

    jvp of F:  F(dx; W, S) + F(x; dW, S) + F(x; W, dS)                    (no bias in the first)
    vjp of B with cotangents (hx, hW, hS): the gradients of
               phi(g, hx, W, S) + phi(g, x, hW, S) + phi(g, x, W, hS)     (no bias in the first)
    jvp of B:  B(dg, x, W, S) + B(g, dx, W, S) + B(g, x, dW, S) + B(g, x, W, dS), where each of
               the last three gives only the outputs that its argument is not the derivative of,

each of which is again F and B: the two operators are closed under differentiation. Saved for
backward are the input and the parameters, nothing else.

This module binds the operators, so it is imported only once they are defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from ._errors import reraise

FORWARD = torch.ops.wtconv.fused_forward.default
MIXED_FORWARD = torch.ops.wtconv._fused_forward.default
BACKWARD = torch.ops.wtconv.fused_backward.default

below_autograd = torch._C._AutoDispatchBelowAutograd
_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled

# Parameters in the order of the schema: base_weight, base_bias, base_scale, wavelet_weights of
# every level, wavelet_scales of every level.
Parameters = Sequence[Tensor | None]


def call_forward(op: Any, input: Tensor, parameters: Parameters) -> Tensor:
    """Call one of the forward operators with a flat list of parameters."""
    weight, bias, scale, *levels = parameters
    half = len(levels) // 2
    output: Tensor = op(input, weight, bias, scale, levels[:half], levels[half:])
    return output


def call_backward(
    grad_output: Tensor, input: Tensor, parameters: Parameters, mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Call fused_backward with a flat list of parameters; six outputs."""
    weight, bias, scale, *levels = parameters
    half = len(levels) // 2
    try:
        outputs: tuple[Tensor, ...] = BACKWARD(
            grad_output, input, weight, bias, scale, levels[:half], levels[half:], mask
        )
    except RuntimeError as error:
        reraise(error)
    return outputs


def flatten_gradients(outputs: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    """One gradient for each input of fused_forward from the six outputs of fused_backward.

    Args:
        outputs: What fused_backward returned for ``mask``.
        mask: 4 + 2 * levels flags.

    Returns:
        4 + 2 * levels entries, None where ``mask`` is False.
    """
    levels = (len(mask) - 4) // 2
    gradients: list[Tensor | None] = list(outputs[:4])
    # With create_graph the gradients may be modified in place, which unbind's views forbid.
    split = _select_all if _is_grad_enabled() else torch.unbind
    for stack, flags in ((outputs[4], mask[4 : 4 + levels]), (outputs[5], mask[4 + levels :])):
        gradients.extend(split(stack) if True in flags else [None] * levels)
    if all(mask):
        return gradients
    return [gradient if asked else None for gradient, asked in zip(gradients, mask, strict=True)]


def _select_all(stack: Tensor) -> list[Tensor]:
    """The levels of a stack, each a view of its own."""
    return [stack.select(0, level) for level in range(stack.shape[0])]


def _add(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term


def _or_zeros(directions: Parameters, parameters: Parameters) -> list[Tensor | None]:
    """Directions with zeros like the parameter where one is missing."""
    return [
        torch.zeros_like(parameter) if direction is None and parameter is not None else direction
        for direction, parameter in zip(directions, parameters, strict=True)
    ]


def _weights_direction(directions: Parameters, parameters: Parameters) -> Parameters | None:
    """Parameters with weights and bias replaced by their directions; None if all are missing."""
    end = 3 + (len(parameters) - 3) // 2
    weights, bias = [directions[0], *directions[3:end]], directions[1]
    if bias is None and all(weight is None for weight in weights):
        return None
    weights = _or_zeros(weights, [parameters[0], *parameters[3:end]])
    return [weights[0], bias, parameters[2], *weights[1:], *parameters[end:]]


def _scales_direction(directions: Parameters, parameters: Parameters) -> Parameters | None:
    """Parameters with the scales replaced by their directions; None if all are missing."""
    end = 3 + (len(parameters) - 3) // 2
    scales = [directions[2], *directions[end:]]
    if all(scale is None for scale in scales):
        return None
    scales = _or_zeros(scales, [parameters[2], *parameters[end:]])
    return [parameters[0], parameters[1], scales[0], *parameters[3:end], *scales[1:]]


def _without_bias(parameters: Parameters) -> Parameters:
    return [parameters[0], None, *parameters[2:]]


def _keep(
    mask: Sequence[bool],
    *,
    input: bool = False,
    weights: bool = False,
    bias: bool = False,
    scales: bool = False,
) -> list[bool]:
    """``mask`` with the flags of the groups that are not kept set to False."""
    levels = (len(mask) - 4) // 2
    kept = [input, weights, bias, scales, *[weights] * levels, *[scales] * levels]
    return [asked and keep for asked, keep in zip(mask, kept, strict=True)]


class FusedForward(Function):
    """fused_forward(input, *parameters) for plain autograd and forward-mode AD."""

    operator = FORWARD

    @classmethod
    def run(cls, input: Tensor, parameters: Parameters) -> Tensor:
        """Call the kernel below autograd."""
        weight, bias, scale, *levels = parameters
        half = len(levels) // 2
        with below_autograd():
            output: Tensor = cls.operator(input, weight, bias, scale, levels[:half], levels[half:])
        return output

    @classmethod
    def call(
        cls,
        base: tuple[Any, ...],
        weights: Sequence[Tensor],
        scales: Sequence[Tensor],
    ) -> Tensor:
        """The operator, differentiable where something asks for it; the arguments are its own.

        Args:
            base: input, base_weight, base_bias and base_scale.
            weights: wavelet_weights.
            scales: wavelet_scales, as many.
        """
        tensors = (*base, *weights, *scales)
        if needs_derivative(tensors):
            return cls.apply(*tensors)  # type: ignore[no-any-return]
        with below_autograd():
            output: Tensor = cls.operator(*base, weights, scales)
        return output

    @staticmethod
    def forward(ctx: Any, input: Tensor, *parameters: Tensor | None) -> Tensor:
        """Run the kernel; save the input and the parameters."""
        save_inputs(ctx, (input, *parameters))
        return FusedForward.run(input, parameters)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> Any:
        """Gradients of the inputs that need one, None for the others."""
        mask = ctx.needs_input_grad
        if grad_output is None or True not in mask:
            return (None,) * len(mask)
        input, *parameters = ctx.saved_tensors
        if _is_grad_enabled() or forward_ad._current_level >= 0 or _transforms_active():
            outputs = call_backward(grad_output, input, parameters, mask)
            return tuple(flatten_gradients(outputs, mask))
        with below_autograd():
            outputs = call_backward(grad_output, input, parameters, mask)
            return tuple(flatten_gradients(outputs, mask))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        """Directional derivative: up to three calls of the forward operator."""
        input, *parameters = ctx.saved_tensors
        output: Tensor | None = None
        if tangents[0] is not None:
            output = call_forward(MIXED_FORWARD, tangents[0], _without_bias(parameters))
        for direction in (_weights_direction, _scales_direction):
            turned = direction(tangents[1:], parameters)
            if turned is not None:
                output = _add(output, call_forward(MIXED_FORWARD, input, turned))
        return output


class MixedFusedForward(FusedForward):
    """_fused_forward(input, *parameters): the parameters may have a dtype of their own."""

    operator = MIXED_FORWARD

    @staticmethod
    def forward(ctx: Any, input: Tensor, *parameters: Tensor | None) -> Tensor:
        """Run the kernel; save the input and the parameters."""
        save_inputs(ctx, (input, *parameters))
        return MixedFusedForward.run(input, parameters)


class FusedBackward(Function):
    """fused_backward(mask, grad_output, input, *parameters) and its derivatives."""

    @staticmethod
    def run(
        mask: Sequence[bool], grad_output: Tensor, input: Tensor, parameters: Parameters
    ) -> tuple[Tensor, ...]:
        """Call the kernel below autograd."""
        with below_autograd():
            return call_backward(grad_output, input, parameters, mask)

    @staticmethod
    def forward(
        ctx: Any, mask: Sequence[bool], grad_output: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Run the kernel; save grad_output, the input and the parameters."""
        ctx.mask = mask
        save_inputs(ctx, (grad_output, *inputs))
        input, *parameters = inputs
        assert input is not None
        return FusedBackward.run(mask, grad_output, input, parameters)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Gradients of grad_output, input and parameters through three terms of phi."""
        mask, (grad_output, input, *parameters) = ctx.mask, ctx.saved_tensors
        needs = ctx.needs_input_grad
        asked = needs[2:]
        directions = _masked_directions(cotangents, mask)
        terms: list[tuple[Tensor, Parameters, list[bool]]] = []
        if directions[0] is not None:
            kept = _keep(asked, weights=True, scales=True)
            terms.append((directions[0], _without_bias(parameters), kept))
        turned = _weights_direction(directions[1:], parameters)
        if turned is not None:
            terms.append((input, turned, _keep(asked, input=True, scales=True)))
        turned = _scales_direction(directions[1:], parameters)
        if turned is not None:
            kept = _keep(asked, input=True, weights=True, bias=True)
            terms.append((input, turned, kept))

        totals: list[Tensor | None] = [None] * (1 + len(asked))
        for term_input, term_parameters, term_mask in terms:
            if needs[1]:
                term = call_forward(MIXED_FORWARD, term_input, term_parameters)
                totals[0] = _add(totals[0], term)
            if any(term_mask):
                outputs = call_backward(grad_output, term_input, term_parameters, term_mask)
                for i, gradient in enumerate(flatten_gradients(outputs, term_mask)):
                    if gradient is not None:
                        totals[1 + i] = _add(totals[1 + i], gradient)
        return (None, *totals)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """Directional derivative: up to four calls of fused_backward."""
        mask, (grad_output, input, *parameters) = ctx.mask, ctx.saved_tensors
        _, grad_direction, input_direction, *directions = tangents
        terms: list[tuple[Tensor, Tensor, Parameters, Sequence[bool]]] = []
        if grad_direction is not None:
            terms.append((grad_direction, input, parameters, mask))
        if input_direction is not None:
            kept = _keep(mask, weights=True, scales=True)
            terms.append((grad_output, input_direction, _without_bias(parameters), kept))
        turned = _weights_direction(directions, parameters)
        if turned is not None:
            terms.append((grad_output, input, turned, _keep(mask, input=True, scales=True)))
        turned = _scales_direction(directions, parameters)
        if turned is not None:
            kept = _keep(mask, input=True, weights=True, bias=True)
            terms.append((grad_output, input, turned, kept))

        totals: list[Tensor | None] = [None] * 6
        for term_grad, term_input, term_parameters, term_mask in terms:
            if any(term_mask):
                outputs = call_backward(term_grad, term_input, term_parameters, term_mask)
                for i, output in enumerate(outputs):
                    if _is_live(i, term_mask):
                        totals[i] = _add(totals[i], output)
        return tuple(
            _zero_output(i, mask, input, parameters) if total is None else total
            for i, total in enumerate(totals)
        )


def _zero_output(
    output: int, mask: Sequence[bool], input: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """Zeros like output 0..5 of fused_backward for ``mask``."""
    levels = (len(mask) - 4) // 2
    like = (input, *parameters)[output if output < 5 else 4 + levels]
    if not _is_live(output, mask):
        return input.new_zeros(0) if output == 0 else parameters[0].new_zeros(0)
    if output < 4:
        return torch.zeros_like(like)
    return like.new_zeros(levels, *like.shape)


def _is_live(output: int, mask: Sequence[bool]) -> bool:
    """Whether output 0..5 of fused_backward is computed for ``mask``."""
    if output < 4:
        return mask[output]
    levels = (len(mask) - 4) // 2
    return any(mask[4 : 4 + levels] if output == 4 else mask[4 + levels :])


def _masked_directions(
    cotangents: Sequence[Tensor | None], mask: Sequence[bool]
) -> list[Tensor | None]:
    """Cotangents of the six outputs, one entry per input; None where nothing was computed."""
    levels = (len(mask) - 4) // 2
    directions = list(cotangents[:4])
    for stack in cotangents[4:]:
        directions.extend([None] * levels if stack is None or stack.dim() == 1 else stack.unbind(0))
    return [direction if asked else None for direction, asked in zip(directions, mask, strict=True)]


def save_inputs(ctx: Any, tensors: tuple[Tensor | None, ...]) -> None:
    """Save tensors for backward, and for jvp where forward-mode AD is on."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0 or _transforms_active():
        ctx.save_for_forward(*tensors)


def needs_derivative(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd or forward-mode AD may ask for a derivative of a call."""
    if forward_ad._current_level >= 0:
        return True
    if not _is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
