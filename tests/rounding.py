"""Rounding of a sum: how large an error the terms of each result explain.

Every output and every gradient is a sum of products. ``magnitudes`` gives, for each of them, the
sum of the absolute values of its terms; the error of a sensible evaluation is a few roundings of
that, however much the terms cancel. A law for random inputs, where the error budget (whose
reference may be exact by luck) and relative errors (which cancellation inflates) say little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from samples import flatten, unflatten
from torch import Tensor

from wtconv_ops import reference

__all__ = ["assert_rounded", "magnitudes", "output_and_gradients"]


# In units of eps * magnitude. Float32 and float64 sums err by a few roundings; a half type is
# accumulated in float32 and rounded once, by half a unit in the last place.
ROUNDINGS = {torch.float32: 4.0, torch.float64: 4.0, torch.float16: 0.75, torch.bfloat16: 0.75}


def output_and_gradients(
    arguments: Sequence[object], grad_output: Tensor, function: object = reference.wtconv2d
) -> list[Tensor | None]:
    """Float64 output of ``function``, then gradients in the order of output_mask."""
    flat = [
        tensor.detach().double().clone().requires_grad_() if isinstance(tensor, Tensor) else None
        for tensor in flatten(arguments)
    ]
    output = function(*unflatten(flat))  # type: ignore[operator]
    present = [tensor for tensor in flat if tensor is not None]
    found = iter(torch.autograd.grad(output, present, grad_output.double()))
    return [output.detach(), *(None if tensor is None else next(found) for tensor in flat)]


def magnitudes(arguments: Sequence[object], grad_output: Tensor) -> list[Tensor | None]:
    """Sums of absolute terms, in the order of :func:`output_and_gradients`."""
    absolute = [t.abs() if isinstance(t, Tensor) else None for t in flatten(arguments)]
    return output_and_gradients(unflatten(absolute), grad_output.abs(), _without_signs)


def assert_rounded(ours: Tensor, exact: Tensor, magnitude: Tensor, name: str) -> None:
    """Every element of ``ours`` is within a few roundings of its terms of the exact value.

    Args:
        ours: The result, any floating dtype.
        exact: The same in float64 from the same inputs.
        magnitude: From :func:`magnitudes`.
        name: What is compared; opens the message.
    """
    assert ours.shape == exact.shape, f"{name}: shape {list(ours.shape)}, not {list(exact.shape)}"
    info, roundings = torch.finfo(ours.dtype), ROUNDINGS[ours.dtype]
    allowed = roundings * (info.eps * magnitude + info.smallest_normal * info.eps)
    excess = (ours.double() - exact).abs() / allowed
    assert bool((excess <= 1.0).all()), (  # also false for NaN
        f"{name}: error is {float(excess.max()) * roundings:.2f} roundings, more than {roundings}"
    )


def _without_signs(
    x: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    weights: Sequence[Tensor],
    scales: Sequence[Tensor],
) -> Tensor:
    """The operator with every Haar sign positive, on tensors that are nowhere negative."""
    output = reference.wtconv2d(x, base_weight, base_bias, base_scale, [], [])
    batch, channels = x.shape[:2]
    lowpass, filtered = x, []
    for weight, scale in zip(weights, scales, strict=True):
        lowpass = reference.haar_analysis(lowpass)[:, :, 0]  # all four bands are alike
        bands = lowpass.repeat_interleave(4, 1)
        filtered.append(reference.wtconv2d(bands, weight, None, scale, [], []))
    above = torch.zeros_like(lowpass)
    sizes = [x.shape[2:]] + [f.shape[2:] for f in filtered]
    for level, size in zip(reversed(filtered), reversed(sizes[:-1]), strict=True):
        height, width = level.shape[2:]
        total = level.view(batch, channels, 4, height, width).sum(2) + above
        above = 0.5 * total.repeat_interleave(2, 2).repeat_interleave(2, 3)
        above = above[:, :, : size[0], : size[1]]
    return output + above
