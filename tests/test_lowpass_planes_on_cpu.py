"""Levels on the low-pass band, by the kernel that forms it, on the CPU (emulator.py)."""

from __future__ import annotations

import emulator
import pytest
import torch
from budget import relative_error
from emulator import DTYPES, Emulator, View
from emulator_inputs import (
    BF16,
    F16,
    F32,
    FORWARD_TOLERANCE,
    Parameters,
    Placed,
    apply,
    empty,
    sizes,
)

from wtconv_ops import reference

# Levels on the low-pass band two levels below x: shape of x, kernel, levels, dtype, cells, whether
# the taps are rotated.
# Bands of every size of cells, full and not, whose last row and column lie over the edge of x.
LOWPASS_PLANES = [
    ((1, 2, 250, 244), 5, 3, F32, 1, False),
    ((1, 1, 255, 256), 3, 1, F32, 1, True),
    ((5, 1, 105, 124), 5, 2, F32, 2, False),
    ((3, 2, 97, 68), 7, 4, F32, 1, False),
    ((17, 1, 62, 36), 3, 2, F32, 4, False),
    ((1, 1, 131, 248), 5, 5, F16, 1, True),
    ((4, 2, 127, 96), 3, 3, BF16, 2, False),
    ((18, 1, 57, 56), 5, 4, F16, 4, False),
    ((1, 2, 206, 248), 3, 2, F16, 1, False),
    ((5, 1, 103, 120), 7, 1, BF16, 2, True),
    ((16, 1, 51, 56), 5, 3, F16, 4, False),
]


@pytest.mark.parametrize(("shape", "kernel", "levels", "dtype", "cells", "rotate"), LOWPASS_PLANES)
def test_deep_levels_are_the_operator_on_the_lowpass_band(
    kernels: Emulator,
    shape: tuple[int, int, int, int],
    kernel: int,
    levels: int,
    dtype: torch.dtype,
    cells: int,
    rotate: bool,
) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = shape
    params = Parameters(channels, kernel, levels, F32, base=False)
    x = Placed(torch.randn(shape) + 0.5, dtype, 16 // dtype.itemsize)
    band = x.tensor.double()
    for _ in range(2):
        band = reference.haar_analysis(band)[:, :, 0]
    rows, cols = band.shape[2:]
    unit = next(n for n in (4, 2, 1) if cols % n == 0)
    y = empty((batch, channels, rows, cols), F32, unit)
    planes = emulator.PatchLaunch(
        params=params.raw(rotate),
        input=View.of(x.tensor),
        output=View.of(y.tensor),
        **sizes((batch, channels, rows, cols), kernel, levels, cells, group=0),
        output_bytes=4 * unit,
    )
    launch = emulator.LowpassPlanesLaunch(planes, DTYPES[dtype], height, width)
    kernels.run("lowpass_planes", launch, dtype)
    band.requires_grad_()
    expected = apply(band, params.leaves(), base=False)
    if rotate:
        (expected,) = torch.autograd.grad(expected, band, band.detach())
    y.assert_nothing_else_written()
    assert relative_error(y.tensor, expected.detach()) < FORWARD_TOLERANCE[F32]
