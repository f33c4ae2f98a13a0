"""Errors against fp64 over the registry: forward and every gradient, in each dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from budget import assert_within_budget, relative_error
from layer_cases import FORWARD_BAR, GRADIENT_BAR
from samples import (
    SAMPLES,
    Arguments,
    Sample,
    flatten,
    fused,
    lay_out,
    leaves,
    plain,
    present,
    with_grad,
)
from torch import Tensor

pytestmark = pytest.mark.usefixtures("ops")
HALVES = [torch.float16, torch.bfloat16]
# Channels for a whole vector of every instruction set and a part of one; of few numbers the
# reference may round every one right by luck.
WIDE = [replace(sample, channels=max(17, sample.channels)) for sample in SAMPLES]


def results(
    function: Callable[..., Tensor], arguments: Arguments, grad_output: Tensor
) -> list[Tensor]:
    """Output, then the gradients of every tensor."""
    output = function(*flatten(arguments))
    grads = torch.autograd.grad(output, present(arguments), grad_output.to(output.dtype))
    return [output.detach(), *grads]


def ours_same_exact(
    sample: Sample, device: str, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Results of the operator, of the reference in the same dtype, and in float64."""
    sample = with_grad(sample)
    arguments = sample.make(device, dtype, requires_grad=True)
    generator = torch.Generator().manual_seed(9)
    grad_output = torch.randn(sample.input_shape, generator=generator).to(device, dtype)
    return (
        results(fused, arguments, lay_out(grad_output, sample.layout)),
        results(plain, leaves(arguments, dtype), grad_output),
        results(plain, leaves(arguments, torch.float64), grad_output),
    )


@pytest.mark.parametrize("sample", WIDE, ids=str)
def test_float32_is_within_the_budget_and_the_bars(device: str, sample: Sample) -> None:
    for i, (ours, same, exact) in enumerate(
        zip(*ours_same_exact(sample, device, torch.float32), strict=True)
    ):
        assert_within_budget(ours, same, exact, f"result {i}")
        assert relative_error(ours, exact) <= (GRADIENT_BAR if i else FORWARD_BAR), f"result {i}"


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_float32_is_within_the_bars_for_any_number_of_channels(device: str, sample: Sample) -> None:
    ours, _, exact = ours_same_exact(sample, device, torch.float32)
    errors = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert errors[0] <= FORWARD_BAR
    assert max(errors[1:]) <= GRADIENT_BAR


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_float64_is_exact_to_rounding(device: str, sample: Sample) -> None:
    ours, _, exact = ours_same_exact(sample, device, torch.float64)
    assert max(relative_error(a, b) for a, b in zip(ours, exact, strict=True)) <= 1e-14


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sample", WIDE, ids=str)
def test_half_types_are_within_the_budget(device: str, sample: Sample, dtype: torch.dtype) -> None:
    for i, (ours, same, exact) in enumerate(
        zip(*ours_same_exact(sample, device, dtype), strict=True)
    ):
        assert_within_budget(ours, same, exact, f"result {i}")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_layout_does_not_change_the_numbers_beyond_rounding(
    device: str, dtype: torch.dtype
) -> None:
    sample = Sample(13, 10, 3, channels=5, kernel_size=5)
    arguments = sample.make(device, dtype)
    exact = plain(*flatten(leaves(arguments, torch.float64))).detach()
    same = plain(*flatten(arguments))
    for layout in ("channels_last", "sliced", "sliced_channels_last", "offset", "permuted"):
        moved = (lay_out(arguments[0], layout), *arguments[1:])
        assert_within_budget(fused(*flatten(moved)), same, exact, layout)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_intermediate_overflow(device: str, dtype: torch.dtype) -> None:
    """LL doubles per level: 3000 at level 5 is 96,000, beyond float16."""
    sample = Sample(32, 32, 5, kernel_size=1)
    x, weight, _, scale, weights, scales = sample.make(device, dtype)
    x = torch.full_like(x, 3000.0)
    weights = [torch.ones_like(tensor) for tensor in weights]
    scales = [torch.full_like(tensor, 0.5) for tensor in scales]
    weight, scale = torch.ones_like(weight), torch.ones_like(scale)
    flat = [x, weight, None, scale, *weights, *scales]
    exact = plain(*[None if tensor is None else tensor.double() for tensor in flat])
    ours = fused(*flat).double()
    assert exact.abs().max() < 65504
    assert relative_error(ours, exact) <= torch.finfo(dtype).eps
