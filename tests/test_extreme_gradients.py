"""Gradients that are sums of very many terms, and gradients of very small numbers.

On a GPU a weight's gradient has 2^24 terms, on the CPU, where the reference takes minutes, fewer.
Small gradients of float16 are those that a loss without a scaler leaves, of which many are
subnormal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from budget import assert_within_budget, relative_error
from layer_cases import GRADIENT_BAR
from samples import Sample, fused, lay_out, leaves, plain
from test_accuracy import HALVES, results

pytestmark = pytest.mark.usefixtures("ops")

TERMS = {"cuda": 2**24, "cpu": 2**18}
# One of each kind of kernel: tiles of large planes, planes of a tile, several to a tile.
LARGE, PLANES = Sample(512, 512, 3, kernel_size=5, channels=1), Sample(56, 56, 5, kernel_size=5)
SAMPLES = [
    LARGE,
    replace(PLANES, channels=8, layout="channels_last"),
    replace(PLANES, channels=4),
    Sample(28, 28, 4, kernel_size=5, channels=8, layout="channels_last"),
    Sample(14, 14, 3, kernel_size=5, channels=4),
    Sample(7, 7, 2, kernel_size=5, channels=32, layout="channels_last"),
]


def assert_gradients(sample: Sample, device: str, dtype: torch.dtype, size: float) -> None:
    """Of grad_output of that size, against float64."""
    arguments = sample.make(device, dtype, requires_grad=True)
    generator = torch.Generator().manual_seed(7)
    grad_output = (size * torch.randn(sample.input_shape, generator=generator)).to(device, dtype)
    ours = results(fused, arguments, lay_out(grad_output, sample.layout))[1:]
    exact = results(plain, leaves(arguments, torch.float64), grad_output)[1:]
    if dtype == torch.float32:
        assert max(relative_error(a, b) for a, b in zip(ours, exact, strict=True)) <= GRADIENT_BAR
        return
    same = results(plain, leaves(arguments, dtype), grad_output)[1:]
    for i, (a, b, c) in enumerate(zip(ours, same, exact, strict=True)):
        assert_within_budget(a, b, c, f"gradient {i}")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("sample", SAMPLES[:3], ids=str)
def test_sums_of_very_many_terms(device: str, sample: Sample, dtype: torch.dtype) -> None:
    pixels = sample.height * sample.width
    assert_gradients(replace(sample, batch=-(-TERMS[device] // pixels)), device, dtype, 1.0)


@pytest.mark.parametrize("size", [1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_small_gradients(device: str, sample: Sample, dtype: torch.dtype, size: float) -> None:
    batch = 2 if sample.height == LARGE.height else 32
    assert_gradients(replace(sample, batch=batch), device, dtype, size)
