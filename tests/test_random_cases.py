"""Random shapes, dtypes, layouts and strides: outputs and gradients equal the reference.

The cases are the same on every run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory import poisoned_memory
from random_cases import Case, random_case
from rounding import assert_follows_reference
from samples import DTYPES, Arguments, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("ops")
CASES = {"cpu": 300, "cuda": 2000}  # of all dtypes together
PARTS = 5  # of the cases of a dtype, which run and fail apart


def ours(arguments: Arguments, grad_output: Tensor) -> list[Any]:
    """Output, then gradients in the order of output_mask, None for a missing bias."""
    levels = len(arguments[4])
    mask = [arguments[2] is not None or i != 2 for i in range(4 + 2 * levels)]
    output = torch.ops.wtconv._fused_forward(*arguments)
    grads = torch.ops.wtconv.fused_backward(grad_output, *arguments, mask)
    bias = grads[2] if arguments[2] is not None else None
    return [output, *grads[:2], bias, grads[3], *grads[4], *grads[5]]


def check(case: Case, device: str) -> None:
    arguments, grad_output = case.make(device)
    with poisoned_memory():
        found = ours(arguments, grad_output)
    for i, result in enumerate(found):
        assert result is None or result.dtype == (case.dtype if i < 2 else case.parameters)
    assert_follows_reference(found, arguments, grad_output)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_result_is_a_few_roundings_from_the_reference(
    device: str, dtype: torch.dtype, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reference sums term by term, not as cuDNN may choose to for one channel.
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    for n in range(part, CASES[device] // len(DTYPES), PARTS):
        case = random_case(device, dtype, n)
        try:
            check(case, device)
        except Exception as error:
            raise AssertionError(f"case {n}: {case}") from error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lost_tap_or_row_of_pixels_is_found(device: str, dtype: torch.dtype) -> None:
    """The law is not too wide."""
    sample = Sample(80, 72, 2, kernel_size=5)
    x, weight, bias, scale, weights, scales = arguments = sample.make(device, dtype)
    grad_output = torch.randn(sample.input_shape, generator=torch.Generator().manual_seed(1))
    grad_output = grad_output.to(device, dtype)
    rows, taps, deep_taps = x.clone(), weight.clone(), weights[1].clone()
    rows[:, :, 40] = taps[:, :, 1, 3] = deep_taps[:, :, 1, 3] = 0
    right = ours(arguments, grad_output)
    assert_follows_reference(right, arguments, grad_output)
    for changed, affected in [
        ((x, taps, bias, scale, weights, scales), [0, 1]),
        ((x, weight, bias, scale, [weights[0], deep_taps], scales), [0, 1]),
        ((rows, weight, bias, scale, weights, scales), [2, 4, 5, 6, 7]),
    ]:
        wrong = ours(changed, grad_output)
        for i in affected:
            found = [wrong[i] if j == i else result for j, result in enumerate(right)]
            with pytest.raises(AssertionError, match=f"result {i}: "):
                assert_follows_reference(found, arguments, grad_output)
