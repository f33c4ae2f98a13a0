"""Numbers of a WTConv layer against fp64, at the size and in the launches that are timed.

The layer runs on the whole batch, with gradients and without. Its outputs and input gradient are
compared on the first and the last item; grad_output is zero on all others, so that the parameter
gradients of the whole batch are those of the two items, which fp64 can afford.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.cuda_providers import ordered_parameters

#: Relative error ||y - y64|| / ||y64|| that an output and a gradient may have. Gradients are sums
#: over the batch and the plane, of products that the reference rounds to its dtype.
LIMITS = {
    torch.float32: (1e-6, 2e-5),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (1.6e-2, 8e-2),
}
#: The same for float32 under TF32, whose mantissa is that of float16.
TF32_LIMITS = LIMITS[torch.float16]


class NumbersDifferError(Exception):
    """A provider is too far from fp64; it was not timed."""


@dataclass(frozen=True)
class Exact:
    """fp64 results on ``items``; the gradients in the order of `ordered_parameters`."""

    items: tuple[int, ...]
    grad_output: Tensor  # [B, C, H, W], zero outside the items
    output: list[Tensor]
    grad_input: list[Tensor]
    gradients: list[Tensor]


def exact_results(reference: nn.Module, image: Tensor, grad_output: Tensor) -> Exact:
    """Run ``reference`` in fp64 on the first and the last item of ``image`` [B, C, H, W]."""
    double = copy.deepcopy(reference).double()
    parameters = ordered_parameters(double)
    items = tuple(sorted({0, image.shape[0] - 1}))
    masked = torch.zeros_like(grad_output)
    outputs, grad_inputs = [], []
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for item in items:
        masked[item] = grad_output[item]
        leaf = image[item : item + 1].double().contiguous().requires_grad_()
        output = double(leaf)
        cotangent = grad_output[item : item + 1].double().contiguous()
        grads = torch.autograd.grad(output, [leaf, *parameters], cotangent)
        outputs.append(output.detach()[0])
        grad_inputs.append(grads[0][0])
        for total, grad in zip(sums, grads[1:], strict=True):
            total += grad
    return Exact(items, masked, outputs, grad_inputs, sums)


def check(
    name: str,
    layer: nn.Module,
    image: Tensor,
    exact: Exact,
    limits: tuple[float, float] | None = None,
) -> float:
    """Compare ``layer`` with ``exact``; returns the largest relative error.

    Raises:
        NumbersDifferError: an output or a gradient is off by more than ``limits``, by default
            those of `LIMITS`.
    """
    leaf = image.detach().requires_grad_()
    with torch.no_grad():
        inference = layer(image)  # where other kernels may run than with gradients
    output = layer(leaf)
    leaves = [leaf, *ordered_parameters(layer)]
    grad_input, *gradients = torch.autograd.grad(output, leaves, exact.grad_output)
    allowed_output, allowed_gradient = limits or LIMITS[image.dtype]
    errors = []
    for index, item in enumerate(exact.items):
        errors.append(("output", inference[item], exact.output[index], allowed_output))
        training = output.detach()[item]
        errors.append(("training output", training, exact.output[index], allowed_output))
        errors.append(("grad_input", grad_input[item], exact.grad_input[index], allowed_gradient))
    for index, (ours, true) in enumerate(zip(gradients, exact.gradients, strict=True)):
        errors.append((f"gradient {index}", ours.reshape(true.shape), true, allowed_gradient))
    largest = 0.0
    for label, result, true, allowed in errors:
        error = float((result.double() - true).norm() / true.norm())
        if not error <= allowed:  # also for NaN
            raise NumbersDifferError(
                f"{name}: {label} has relative error {error:.2e} against fp64, it may have "
                f"{allowed:.0e}"
            )
        largest = max(largest, error)
    return largest
