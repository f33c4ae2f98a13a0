"""What the tests of kernels on the CPU (emulator.py) share: tensors amid NaN, parameters, sizes."""

from __future__ import annotations

import emulator
import torch
from emulator import DTYPES
from torch import Tensor

from wtconv_ops import reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TILE = 64
FORWARD_TOLERANCE = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}


class Placed:
    """Values amid NaN, rows in aligned pieces of `unit` elements; or pixels, channels fastest.

    The last piece of a row may have fewer values.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype, unit: int, last: bool = False) -> None:
        channels, height, width = values.shape[1:]
        if last:
            assert channels % unit == 0
            pixel = channels + unit
            strides = [height * width * pixel + 3 * unit, 1, width * pixel, pixel]
        else:
            pitch = -(-width // unit) * unit + unit
            plane = height * pitch + unit
            strides = [channels * plane + unit, plane, pitch, 1]
        size = 2 * unit + values.shape[0] * strides[0]
        self.storage = torch.full((size,), torch.nan, dtype=dtype)
        self.tensor = self.storage.as_strided(values.shape, strides, unit)
        self.tensor.copy_(values)
        self.written = torch.zeros_like(self.storage, dtype=torch.bool)
        self.written.as_strided(values.shape, strides, unit).fill_(True)

    def assert_nothing_else_written(self) -> None:
        assert bool(self.storage[~self.written].isnan().all()), "written outside of the tensor"


def empty(shape: tuple[int, ...], dtype: torch.dtype, unit: int = 1, last: bool = False) -> Placed:
    return Placed(torch.full(shape, torch.nan), dtype, unit, last)


class Parameters:
    """Weights and scales away from their initial values; float64 values that `dtype` holds."""

    def __init__(
        self, channels: int, kernel: int, levels: int, dtype: torch.dtype, base: bool = True
    ) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(dtype)

        groups = [channels] + [4 * channels] * levels
        self.dtype, self.base = dtype, base
        self.weights = [draw(g, 1, kernel, kernel) / kernel for g in groups]
        self.scales = [draw(1, g, 1, 1) + 0.25 for g in groups]
        self.bias = draw(channels)

    def raw(self, rotate: bool = False, bias: bool = True) -> emulator.RawParameters:
        result = emulator.RawParameters(dtype=DTYPES[self.dtype], rotate=rotate)
        for level in range(0 if self.base else 1, len(self.weights)):
            result.weight[level] = self.weights[level].data_ptr()
            result.scale[level] = self.scales[level].data_ptr()
        result.bias = self.bias.data_ptr() if bias and self.base else None
        return result

    def leaves(self) -> list[Tensor]:
        """Base weight, bias and scale, then weights and scales of the levels, in float64."""
        flat = [self.weights[0], self.bias, self.scales[0], *self.weights[1:], *self.scales[1:]]
        return [tensor.double().requires_grad_() for tensor in flat]


def apply(input: Tensor, leaves: list[Tensor], base: bool = True, bias: bool = True) -> Tensor:
    levels = (len(leaves) - 3) // 2
    weight, offset, scale = leaves[:3]
    if not base:
        weight, offset = torch.zeros_like(weight), torch.zeros_like(offset)
    return reference.wtconv2d(
        input, weight, offset if bias else None, scale, leaves[3 : 3 + levels], leaves[3 + levels :]
    )


def sizes(
    shape: tuple[int, ...], kernel: int, levels: int, cells: int, group: int
) -> dict[str, int]:
    """The fields of a launch that follow from the sizes of its problem."""
    batch, channels, height, width = shape
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    return {
        "batch": batch,
        "channels": channels,
        "height": height,
        "width": width,
        "kernel_size": kernel,
        "levels": levels,
        "cells": cells,
        "group": group,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        "tiles": -(-batch // cells**2) if cells else batch * tiles_y * tiles_x,
    }
