"""Rounding of a sum: how large an error the terms of each result explain.

Every output and every gradient is a sum of products. ``magnitudes`` gives, for each of them, the
sum of the absolute values of its terms. A sensible evaluation errs by a few roundings of that in
the type it accumulates in, however much the terms cancel, and by one rounding of the result. A law
for random inputs, where the error budget (whose reference may be exact by luck) and relative errors
(which cancellation inflates) say little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from budget import relative_error
from samples import flatten, unflatten
from torch import Tensor

from wtconv_ops import reference

__all__ = [
    "Law",
    "assert_follows_reference",
    "assert_rounded",
    "laws",
    "magnitudes",
    "output_and_gradients",
]

HALVES = (torch.float16, torch.bfloat16)
# Of a sum, in units of eps of its accumulator. Of float64 the reference errs as much.
ROUNDINGS = {torch.float32: 4.0, torch.float64: 8.0}
CUTS = 16.0  # the same on tensor cores, which cut off where others round
# What these take (csrc/cuda/patch/choose.cpp): planes with a longer side, and kernel sizes, of
# tiles of large planes one more; of channels_last planes those of a tile, of at most so many pixels
# (by levels and kernel size, of gradients) and no fewer channels; of the operator so many on each
# side of a tile, of at most so many levels. Gradients of several planes to a tile where each
# multiprocessor has so many tiles, by levels.
SIDE, KERNEL_SIZES, TILE_KERNEL_SIZES = 8, (3, 5, 7), (3, 5, 7, 9)
TILE, GROUP_CHANNELS = 64, 4
GROUP_LEVELS, GROUP_KERNEL_SIZES = {1: 5, 2: 5, 4: 4}, (3, 5)
GROUP_PIXELS = {1: {3: TILE**2, 5: TILE**2}, 2: {3: 3728, 5: 3512}}
LEAST_TILES = {1: 3, 2: 3, 3: 8}


@dataclass(frozen=True)
class Law:
    """What a result may err by, beyond half a unit in the last place of each element.

    Args:
        share: Of the magnitude of each element.
        noise: Of each element, absolute.
        relative: In the 2-norm of the whole tensor, relative to it.
    """

    share: float
    noise: Tensor | float = 0.0
    relative: float = math.inf


def laws(arguments: Sequence[Any], grad_output: Tensor) -> list[Law]:
    """The law of each result, in the order of :func:`output_and_gradients`.

    Tensor cores sum in float32, too, but of operands rounded to the half type, by eps / 2 at most:

    * The operator: the taps and, for the second and third level of a launch, the low-pass band,
      each formed from the rounded one before. Up to three roundings meet in a product where three
      levels of a plane of several tiles are all and k is 3 or 5, else two: with the final one,
      2 eps of the magnitude at worst. They are independent, so that each adds no more than some
      0.2 eps to the relative error in the 2-norm.
    * The gradients of a level past the first: the low-pass bands of both tensors. In sums over all
      pixels a share of the magnitude would hide the loss of a row of them.
    """
    x, weight, *_, scales = arguments
    levels, kernel_size = len(scales), weight.shape[-1]
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    eps, sums = torch.finfo(x.dtype).eps, torch.finfo(accumulator).eps
    exact = Law(ROUNDINGS[accumulator] * sums)
    in_nchw = any(_in_nchw(tensor) for tensor in (x, grad_output))
    halves = gpu_multiprocessors(x) > 0 and x.dtype in HALVES
    of_operator = halves and operator_on_tensor_cores(x.shape, kernel_size, levels, in_nchw)
    rounded = _rounded_bands(x, kernel_size, levels, in_nchw) if halves else None
    of_tiles = max(x.shape[2:]) > TILE
    met = 3 if levels == 3 and kernel_size <= 5 and of_tiles else min(levels, 2)
    operator = Law(CUTS * sums + eps / 2 * met, relative=eps)
    outputs = [operator if of_operator else exact] * 2
    if rounded is None:
        return outputs + [exact] * (3 + 2 * levels)
    of_weights, of_scales = _noise_of_bands(arguments, grad_output, rounded)
    noise = [0.0] * 3 + of_weights[:levels] + of_scales[:levels]
    return outputs + [Law(CUTS * sums, tensor) for tensor in noise]


def gpu_multiprocessors(x: Tensor) -> int:
    """Multiprocessors of the GPU that computes on ``x``, 0 where a CPU does."""
    if not x.is_cuda:
        return 0
    count: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return count


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


def assert_rounded(ours: Tensor, exact: Tensor, magnitude: Tensor, law: Law, name: str) -> None:
    """The error of ``ours`` is what the law explains.

    Args:
        ours: The result, any floating dtype.
        exact: The same in float64 from the same inputs.
        magnitude: From :func:`magnitudes`.
        law: From :func:`laws`.
        name: What is compared; opens the message.
    """
    assert ours.shape == exact.shape, f"{name}: shape {list(ours.shape)}, not {list(exact.shape)}"
    info = torch.finfo(ours.dtype)
    allowed = info.eps / 2 * exact.abs() + law.share * magnitude + law.noise
    allowed = allowed + info.smallest_normal * info.eps
    excess = (ours.double() - exact).abs() / allowed
    assert bool((excess <= 1.0).all()), (  # also false for NaN
        f"{name}: error is {float(excess.max()):.3g} times what its terms explain"
    )
    if law.relative < math.inf:
        error = relative_error(ours, exact)
        assert error <= law.relative, (
            f"{name}: relative error {error:.3e} exceeds {law.relative:.3e}"
        )


def assert_follows_reference(
    ours: Sequence[Tensor | None], arguments: Sequence[object], grad_output: Tensor
) -> None:
    """Output and gradients, in the order of output_mask, are the reference's; false for NaN."""
    exact = output_and_gradients(arguments, grad_output)
    sizes = magnitudes(arguments, grad_output)
    explained = laws(arguments, grad_output)
    for i, (result, value, size, law) in enumerate(zip(ours, exact, sizes, explained, strict=True)):
        if value is None or size is None:
            continue
        assert result is not None, f"result {i} is missing"
        assert_rounded(result, value, size, law, f"result {i}")


def _in_nchw(tensor: Tensor) -> bool:
    return tensor.shape[1] == 1 or tensor.stride(1) != 1 or tensor.shape[2:].numel() == 1


def _is_channelwise(shape: Sequence[int], in_nchw: bool) -> bool:
    """Whether kernels of one channel take a plane: in channels_last where others would idle."""
    longest = max(shape[2:])
    group = 4 if longest > 32 else 8 if longest > 16 else 16 if 8 < longest <= 14 else 32
    return in_nchw or 2 * shape[1] < group


def _group_on_tensor_cores(shape: Sequence[int], levels: int, most: int, cells: int = 1) -> bool:
    """Whether channels_last planes of up to ``most`` pixels may be computed there."""
    sides, pixels, side = shape[2:], shape[2] * shape[3], TILE // cells
    fits = 2 * min(sides) > side and max(sides) <= side and pixels <= most
    return fits and levels <= GROUP_LEVELS[cells] and shape[1] >= GROUP_CHANNELS


def operator_on_tensor_cores(
    shape: Sequence[int], kernel_size: int, levels: int, in_nchw: bool
) -> bool:
    """Whether outputs may come from there."""
    shortest, longest = min(shape[2:]), max(shape[2:])
    large = in_nchw and 2 * shortest > TILE and kernel_size in TILE_KERNEL_SIZES
    if longest > TILE or large:
        return large
    if _is_channelwise(shape, in_nchw):
        return longest > SIDE and kernel_size in KERNEL_SIZES
    if kernel_size not in GROUP_KERNEL_SIZES:
        return False
    return any(_group_on_tensor_cores(shape, levels, TILE**2, cells) for cells in GROUP_LEVELS)


def gradients_on_tensor_cores(
    shape: Sequence[int], kernel_size: int, levels: int, in_nchw: bool, multiprocessors: int
) -> bool:
    """Whether the weight gradients of a launch may come from there."""
    shortest, longest = min(shape[2:]), max(shape[2:])
    if kernel_size not in KERNEL_SIZES:
        return False
    if in_nchw and 2 * shortest > TILE:
        return True
    if _is_channelwise(shape, in_nchw):
        across = 4 if 4 * longest <= TILE else 2
        tiles = math.ceil(shape[0] / across**2) * shape[1]
        several = longest > SIDE and 2 * longest <= TILE and shape[3] % 2 == 0
        return in_nchw and several and tiles >= LEAST_TILES[min(levels, 3)] * multiprocessors
    most = GROUP_PIXELS[min(levels, 2)].get(kernel_size, 0)
    return _group_on_tensor_cores(shape, levels, most)


def _rounded_bands(x: Tensor, kernel_size: int, levels: int, in_nchw: bool) -> set[int] | None:
    """The levels whose gradients come from a band that is rounded anew; None: not tensor cores'.

    Those of a launch take the second level from a rounded band and hand a rounded one on.
    """
    multiprocessors = gpu_multiprocessors(x)
    batch, channels, height, width = x.shape
    rounded: set[int] = set()
    done = 0
    while done < levels and gradients_on_tensor_cores(
        (batch, channels, height, width), kernel_size, levels - done, in_nchw, multiprocessors
    ):
        rounded |= {done + 2, done + 3}
        height, width = -(-height // 4), -(-width // 4)
        done, in_nchw = done + 2, True
    return rounded if done > 0 else None


def _noise_of_bands(
    arguments: Sequence[Any], grad_output: Tensor, rounded: set[int]
) -> tuple[list[Tensor | float], list[Tensor | float]]:
    """What rounded low-pass bands explain in each level's gradients, of its weight and its scale.

    Seven times the standard deviation. The error of a band that is ``rounded`` stays in all deeper
    ones. The sums of a scale's taps may err alike.
    """
    x, *_, weights, scales = arguments
    rounding = 0.29 * torch.finfo(x.dtype).eps
    bands = [
        _Noisy(tensor.double(), torch.zeros_like(tensor).double()) for tensor in (x, grad_output)
    ]
    of_weights: list[Tensor | float] = [0.0]
    of_scales: list[Tensor | float] = [0.0]
    for level, (weight, scale) in enumerate(zip(weights[1:], scales[1:], strict=True), start=2):
        bands = [band.lowpass(rounding if level in rounded else 0.0) for band in bands]
        noise = 7 * _deviation(*bands, weight.shape)
        of_weights.append(scale.double().abs().view(-1, 1, 1, 1) * noise)
        of_scales.append((weight.double().abs() * noise).sum((1, 2, 3)).view_as(scale))
    return of_weights, of_scales


@dataclass(frozen=True)
class _Noisy:
    """A low-pass band, [B, C, H, W], and the variance of its error."""

    exact: Tensor
    variance: Tensor

    def subbands(self) -> tuple[Tensor, Tensor]:
        """The four of the next level and the variance of their errors, [B, 4*C, ...]."""
        alike = 0.5 * reference.haar_analysis(self.variance)[:, :, :1].expand(-1, -1, 4, -1, -1)
        return reference.haar_analysis(self.exact).flatten(1, 2), alike.flatten(1, 2)

    def lowpass(self, rounding: float) -> _Noisy:
        """The band of the next level, rounded with a standard deviation relative to its values."""
        exact, variance = (part[:, ::4] for part in self.subbands())
        return _Noisy(exact, variance + (rounding * exact).square())


def _deviation(x: _Noisy, grad_output: _Noisy, shape: Sequence[int]) -> Tensor:
    """Standard deviation of a level's sums of products, whose weight has ``shape``, k odd."""
    (x_bands, x_noise), (grad_bands, grad_noise) = x.subbands(), grad_output.subbands()
    pairs = (
        (x_noise, grad_bands.square()),
        (x_bands.square(), grad_noise),
        (x_noise, grad_noise),
    )
    padding, groups = shape[-1] // 2, shape[0]
    variance = sum(
        torch.nn.grad.conv2d_weight(a, shape, b, padding=padding, groups=groups) for a, b in pairs
    )
    return torch.as_tensor(variance).sqrt()


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
