"""Random calls of the operator, of the sizes, layouts and alignments that kernels treat apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from memory import embed
from samples import Arguments, Sample, flatten, unflatten
from torch import Tensor

__all__ = ["Case", "random_case"]


@dataclass(frozen=True)
class Limits:
    """What a case may be at most."""

    products: int  # taps times elements
    kernel_size: int = 31
    batch: int = 2**10
    channels: int = 2**10


# What the float64 reference takes a fraction of a second for; the emulator runs block by block.
LIMITS = {
    "cpu": Limits(2**24),
    "cuda": Limits(2**27),
    "emulator": Limits(2**21, kernel_size=9, batch=9, channels=16),
}


@dataclass(frozen=True)
class Place:
    """Where the values of a tensor lie in memory, amid NaN (memory.py)."""

    order: tuple[int, ...]
    steps: tuple[int, ...]
    margins: tuple[int, ...]
    shared: bool  # one batch item stands for all

    def put(self, values: Tensor) -> Tensor:
        if not self.shared:
            return embed(values, self.order, self.steps, self.margins)
        one = embed(values[:1], self.order, self.steps, self.margins)
        return one.expand(values.shape[0], -1, -1, -1)


@dataclass(frozen=True)
class Case:
    sample: Sample
    dtype: torch.dtype
    parameters: torch.dtype
    places: tuple[Place, Place]  # of the input and of grad_output
    parameters_step: int
    seed: int

    def make(self, device: str) -> tuple[Arguments, Tensor]:
        """Arguments of fused_forward and a grad_output, drawn on the device."""
        generator = torch.Generator(device).manual_seed(self.seed)
        x, *parameters = self.sample.make(device, self.parameters, generator=generator)
        grad_output = torch.randn(self.sample.input_shape, generator=generator, device=device)
        placed = [None if t is None else self.spread(t) for t in flatten([x, *parameters])[1:]]
        x, grad_output = (
            place.put(values.to(self.dtype))
            for place, values in zip(self.places, (x, grad_output), strict=True)
        )
        return unflatten([x, *placed]), grad_output

    def spread(self, parameter: Tensor) -> Tensor:
        """A parameter with NaN around, and between its elements if the step is 2."""
        return embed(parameter.flatten(), steps=[self.parameters_step]).view(parameter.shape)


# Batch, height and width.
Shape = tuple[int, int, int]


def small_planes(rng: Random) -> Shape:
    height, width = (rng.randint(1, rng.choice([9, 40])) for _ in range(2))
    return rng.randint(0, 4), height, width


def planes_of_a_tile(rng: Random) -> Shape:
    """A power of two fits each side of a tile of 64 pixels; up to two tiles and a plane."""
    longest = rng.randint(5, 64)
    sides = longest, rng.randint((longest + 1) // 2, longest)
    across = 1 << (64 // longest).bit_length() - 1
    return rng.randint(1, 2 * across**2 + 1), *rng.sample(sides, 2)


def tiles_of_a_plane(rng: Random) -> Shape:
    """Past 32 pixels a plane has a tile, past 64 several; rows of 8 n pixels may be aligned."""
    height, width = (rng.choice([rng.randint(33, 152), 8 * rng.randint(5, 19)]) for _ in range(2))
    return rng.randint(1, 3), height, width


def narrow_planes(rng: Random) -> Shape:
    return rng.randint(1, 3), *rng.sample([rng.randint(1, 32), rng.randint(65, 152)], 2)


def huge_planes(rng: Random) -> Shape:
    """Their low-pass bands are large planes again."""
    return rng.randint(1, 2), rng.randint(129, 300), rng.randint(129, 300)


KINDS: dict[str, list[Callable[[Random], Shape]]] = {
    "cpu": [small_planes],
    "cuda": [small_planes] * 3
    + [planes_of_a_tile] * 6
    + [tiles_of_a_plane] * 9
    + [narrow_planes, huge_planes],
}
KINDS["emulator"] = KINDS["cuda"]  # of the CUDA code on the CPU


def random_sample(rng: Random, shape: Shape, limits: Limits) -> Sample:
    batch, height, width = shape
    batch = min(batch, limits.batch)
    common = rng.sample([3, 5, 7], 2)
    kernel_size = rng.choice([*common, rng.randint(1, 9), rng.randint(1, limits.kernel_size)])
    # Registers, and groups of channels, have 4, 8, 16 or 32 of them.
    channels = rng.choice([rng.randint(1, 9), rng.randint(1, 37), 4 * rng.randint(1, 10)])
    taps = max(kernel_size**2, 128)  # the rest of the reference takes time, too
    most = min(limits.products // (max(batch, 1) * height * width * taps), limits.channels)
    return Sample(
        height=height,
        width=width,
        levels=rng.choice([1, 2, 3, 4, 5] * 4 + [6, 32]),
        kernel_size=kernel_size,
        channels=min(channels, max(most, 1)),
        batch=batch,
        bias=rng.choice([False, True]),
    )


def random_place(rng: Random, sample: Sample) -> Place:
    order = rng.choice([(0, 1, 2, 3), (0, 2, 3, 1)] * 2 + [tuple(rng.sample(range(4), 4))])
    # Room that leaves aligned rows, or pixels, aligned; or as much on all sides.
    aligned = tuple(8 if d == order[-1] else int(d > 0) for d in range(4))
    around = (rng.randint(1, 3),) * 4
    steps = (1, 1, 1, 1)
    if sample.batch * sample.channels * sample.height * sample.width < 2**14:
        steps = rng.choice([steps, steps, tuple(rng.randint(1, 3) for _ in range(4))])
    margins = rng.choice([(0, 0, 0, 0), aligned, around])
    # Of more equal items a sum would add the same rounding error every time.
    shared = 1 < sample.batch <= 4 and rng.randrange(6) == 0
    return Place(order, steps, margins, shared)


def random_case(device: str, dtype: torch.dtype, n: int) -> Case:
    """The n-th case; the kinds of shapes take turns."""
    rng = Random(f"{dtype} {n}")
    kinds = KINDS[device]
    sample = random_sample(rng, kinds[n % len(kinds)](rng), LIMITS[device])
    place = random_place(rng, sample)
    return Case(
        sample,
        dtype,
        rng.choice([dtype, torch.float32]) if dtype.itemsize == 2 else dtype,
        (place, rng.choice([place, random_place(rng, sample)])),
        rng.choice([1, 1, 2]),
        seed=n,
    )
