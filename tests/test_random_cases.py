"""Random shapes, dtypes, layouts and strides: outputs and gradients equal the reference.

The examples are the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import embed
from rounding import assert_rounded, magnitudes, output_and_gradients
from samples import DTYPES, Arguments, Sample, flatten, unflatten
from torch import Tensor

pytestmark = pytest.mark.usefixtures("ops", "poisoned")


@dataclass(frozen=True)
class Place:
    """Where the values of a tensor lie in memory."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    margin: int
    shared: bool  # one batch item stands for all

    def put(self, values: Tensor) -> Tensor:
        if not self.shared:
            return embed(values, self.order, self.steps, self.margin)
        one = embed(values[:1], self.order, self.steps, self.margin)
        return one.expand(values.shape[0], -1, -1, -1)


@dataclass(frozen=True)
class Case:
    sample: Sample
    dtype: torch.dtype
    parameters: torch.dtype
    places: tuple[Place, Place]
    parameters_step: int
    seed: int

    def make(self) -> tuple[Arguments, Tensor]:
        """Arguments of fused_forward and a grad_output."""
        x, *parameters = self.sample.make(dtype=self.parameters, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed + 1)
        grad_output = torch.randn(self.sample.input_shape, generator=generator).to(self.dtype)
        placed = unflatten(
            [None if t is None else self.spread(t) for t in flatten([x, *parameters])]
        )
        x = self.places[0].put(x.to(self.dtype))
        return (x, *placed[1:]), self.places[1].put(grad_output)

    def spread(self, parameter: Tensor) -> Tensor:
        """A parameter with NaN around, and between its elements if the step is 2."""
        return embed(parameter.flatten(), steps=[self.parameters_step]).view(parameter.shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def place(batch: int) -> Place:
        order = draw(st.sampled_from([(0, 1, 2, 3), (0, 2, 3, 1)]) | st.permutations(range(4)))
        steps = draw(st.just((1, 1, 1, 1)) | st.tuples(*[st.integers(1, 3)] * 4))
        shared = batch > 1 and draw(st.integers(0, 7)) == 0
        return Place(tuple(order), steps, draw(st.integers(0, 3)), shared)

    small = st.integers(1, 9)
    kernel_size = draw(small | st.integers(1, 31))
    sample = Sample(
        height=draw(small | st.integers(1, 40)),
        width=draw(small | st.integers(1, 40)),
        levels=draw(st.integers(1, 4) | st.sampled_from([6, 32])),
        kernel_size=kernel_size,
        channels=draw(small | st.integers(1, 37)) if kernel_size < 10 else draw(st.integers(1, 5)),
        batch=draw(st.integers(0, 4)),
        bias=draw(st.booleans()),
    )
    dtype = draw(st.sampled_from(DTYPES))
    mixed = dtype in (torch.float16, torch.bfloat16) and draw(st.booleans())
    return Case(
        sample,
        dtype,
        torch.float32 if mixed else dtype,
        (place(sample.batch), place(sample.batch)),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.integers(0, 2**16)),
    )


def ours(arguments: Arguments, grad_output: Tensor) -> list[Any]:
    """Output, then gradients in the order of output_mask, None for a missing bias."""
    levels = len(arguments[4])
    mask = [arguments[2] is not None or i != 2 for i in range(4 + 2 * levels)]
    output = torch.ops.wtconv._fused_forward(*arguments)
    grads = torch.ops.wtconv.fused_backward(grad_output, *arguments, mask)
    bias = grads[2] if arguments[2] is not None else None
    return [output, *grads[:2], bias, grads[3], *grads[4], *grads[5]]


@given(case=cases())
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_every_result_is_a_few_roundings_from_the_reference(case: Case) -> None:
    arguments, grad_output = case.make()
    found = ours(arguments, grad_output)
    exact = output_and_gradients(arguments, grad_output)
    sizes = magnitudes(arguments, grad_output)
    for i, (result, value, size) in enumerate(zip(found, exact, sizes, strict=True)):
        if value is None or size is None:
            assert result is None
            continue
        dtype = case.dtype if i < 2 else case.parameters
        assert result.dtype == dtype
        assert_rounded(result, value, size, f"result {i}")
