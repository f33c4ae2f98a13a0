"""Every bit pattern of the half types goes through the kernels as torch converts it.

With k = 1, base weight 1 and wavelet scales near 0 the operator is the identity, so that only the
conversions on load and store are left. Scales of 2^-40 instead of 0 keep infinities (0 * inf is
NaN) and vanish in every float32 sum; images of one pixel keep neighbours apart.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("ops")
HALVES = [torch.float16, torch.bfloat16]
TINY = 2.0**-40
# (channels, pixels along x): the kernels read and write blocks of channels and runs of pixels.
SHAPES = [(64, 1), (1, 64), (37, 5), (3, 3)]


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns as values."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def ties_and_neighbours(dtype: torch.dtype) -> Tensor:
    """Float32 values halfway between neighbouring halves, and the next values on both sides."""
    values = every_pattern(dtype).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2  # exact: one bit more
    largest = torch.finfo(dtype).max
    above = torch.tensor([largest + 0.5 * (largest - float(values[-2]))])  # rounds to infinity
    middle = torch.cat([middle, above, -above])
    below, beyond = (torch.nextafter(middle, torch.tensor(side)) for side in (-1e39, 1e39))
    return torch.cat([middle, below, beyond])


def assert_same_values(ours: Tensor, expected: Tensor) -> None:
    """Equal, infinities too; NaN where NaN is expected."""
    assert ours.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours[~nan], expected[~nan])


def images(values: Tensor, channels: int, width: int) -> tuple[Tensor, int]:
    """The values in a batch [B, C, 1, W], the last ones repeated; and how many there are."""
    per_item = channels * width
    count = values.numel()
    padding = values[-1:].expand(-count % per_item)
    return torch.cat([values, padding]).view(-1, channels, 1, width), count


def identity(x: Tensor, dtype: torch.dtype, wavelet_scale: float) -> Tensor:
    """``x`` through the operator with parameters of ``dtype``."""
    channels = x.shape[1]

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=x.device)

    output: Tensor = torch.ops.wtconv._fused_forward(
        x,
        filled(1.0, channels, 1, 1, 1),
        None,
        filled(1.0, 1, channels, 1, 1),
        [filled(1.0, 4 * channels, 1, 1, 1)],
        [filled(wavelet_scale, 1, 4 * channels, 1, 1)],
    )
    return output


def scaled_ones(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights times an input of ones of ``dtype``: rounded on store."""
    channels = weight.numel()
    ones = torch.ones(1, channels, 1, 1, dtype=weight.dtype, device=weight.device)
    fours = ones.repeat(1, 4, 1, 1)
    output: Tensor = torch.ops.wtconv._fused_forward(
        ones.to(dtype),
        weight.view(-1, 1, 1, 1),
        None,
        ones,
        [fours.view(-1, 1, 1, 1)],
        [torch.zeros_like(fours)],
    )
    return output.flatten()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_passes_through_alone(device: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype).to(device)
    x, count = images(values, 64, 1)
    assert_same_values(identity(x, torch.float32, TINY).flatten()[:count], values)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("channels", "width"), SHAPES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_finite_pattern_passes_through_with_neighbours(
    device: str, dtype: torch.dtype, channels: int, width: int, layout: torch.memory_format
) -> None:
    values = every_pattern(dtype).to(device)
    values = values[values.float().abs() < 2.0**126]  # sums of a 2x2 block fit float32
    x, count = images(values, channels, width)
    output = identity(x.contiguous(memory_format=layout), dtype, 0.0)
    assert_same_values(output.flatten()[:count], values)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_of_a_parameter_is_read_right(device: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype).to(device)
    assert_same_values(scaled_ones(values, dtype), values)
    assert_same_values(scaled_ones(values, torch.float32), values.float())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_float32_is_rounded_to_the_nearest_half_and_ties_to_even(
    device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator, dtype=torch.int64)
    values = torch.cat([ties_and_neighbours(dtype), bits.to(torch.int32).view(torch.float32)])
    values = values.to(device)
    assert_same_values(scaled_ones(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_rounded_as_torch_rounds(device: str, dtype: torch.dtype) -> None:
    values = ties_and_neighbours(dtype).to(device)
    values = values[values.abs() < torch.finfo(torch.float32).max]
    channels = values.numel()
    ones = torch.ones(1, channels, 1, 1, device=device)
    fours = ones.repeat(1, 4, 1, 1)
    grads = torch.ops.wtconv.fused_backward(
        ones.to(dtype),
        ones.to(dtype),
        values.view(-1, 1, 1, 1),
        None,
        ones,
        [fours.view(-1, 1, 1, 1)],
        [torch.zeros_like(fours)],
        [True, False, False, True, False, False],
    )
    assert_same_values(grads[0].flatten(), values.to(dtype))
    assert_same_values(grads[3].flatten(), values)  # grad_base_scale = weight, in float32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_rounds_the_input_as_torch_does(device: str, dtype: torch.dtype) -> None:
    values = ties_and_neighbours(dtype).to(device)
    values = values[values.abs() < torch.finfo(dtype).max]
    x, count = images(values, 64, 1)
    ones = torch.ones(64, 1, 1, 1, device=device)
    fours = ones.repeat(4, 1, 1, 1)
    with torch.autocast(device, dtype):
        output = torch.ops.wtconv.fused_forward(
            x, ones, None, ones.view(1, -1, 1, 1), [fours], [0 * fours.view(1, -1, 1, 1)]
        )
    assert_same_values(output.flatten()[:count], values.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_building_blocks_convert_alike(device: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype).to(device)
    x, count = images(values, 64, 1)
    zeros = torch.zeros(x.shape[0], 4 * 64, 1, 1, dtype=dtype, device=device)
    assert_same_values(torch.ops.wtconv.synthesis(x, [zeros]).flatten()[:count], values)
    weight = torch.ones(4 * 64, 1, 1, 1, dtype=dtype, device=device)
    scale = weight.view(1, -1, 1, 1)
    bands, low = torch.ops.wtconv.analysis_conv(x, weight, scale)
    halved = (values.float() / 2).to(dtype)  # one pixel of the block: all four bands are x / 2
    assert_same_values(low.flatten()[:count], halved)
    each = bands.view(-1, 64, 4).permute(2, 0, 1).reshape(4, -1)[:, :count]
    assert_same_values(each, halved.expand(4, -1))
