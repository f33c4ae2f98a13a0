"""What is timed, on how many threads, and the mean that sums it up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

#: What is timed of a layer.
MODES = ("forward", "training")


def forward_call(layer: nn.Module, image: Tensor) -> Callable[[], Tensor]:
    """Inference: one forward pass without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = layer(image)
        return result

    return call


def training_call(
    layer: nn.Module, image: Tensor, grad_output: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Training step: forward, then the gradients of the input and of every parameter."""
    image = image.detach().requires_grad_()
    leaves = [image, *(p for p in layer.parameters() if p.requires_grad)]

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(image), leaves, grad_output)

    return call


class WallClock:
    """Wall time of one call in ms, for the CPU: a `bench.cuda_timing.Timer`."""

    def prepare(self, call: Callable[[], object], method: str) -> Callable[[], float]:
        """Returns a function that times ``call`` once; there is one ``method`` only."""

        def sample() -> float:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

        return sample


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Intra-op threads within the block; restored after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def geometric_mean(values: Iterable[float]) -> float:
    """(x_1 * ... * x_n)^(1/n).

    Raises:
        ValueError: no values, or one that is not positive.
    """
    numbers = list(values)
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"geometric_mean: values must be positive and at least one, got {numbers}")
    return math.exp(sum(math.log(number) for number in numbers) / len(numbers))
