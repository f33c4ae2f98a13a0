"""The weight-gradient and low-pass kernels, run on the CPU (emulator.py), against float64."""

from __future__ import annotations

from dataclasses import dataclass

import emulator
import pytest
import torch
from budget import relative_error
from emulator import Emulator, View
from test_cuda_on_cpu import BF16, F16, F32, FORWARD_TOLERANCE, TILE, Parameters, Placed, apply
from torch import Tensor
from torch.nn import functional as F

#: Parameters are float32, and half types are exact in the sums of the first level.
GRAD_TOLERANCE = 5e-6


@dataclass(frozen=True)
class Gradient:
    shape: tuple[int, int, int, int]
    kernel: int
    dtype: torch.dtype
    cells: int = 0
    bytes: int = 0  # of an access to the input
    grad_bytes: int = 0
    splits: int = 1
    parts: int = 1
    last: bool = False  # grad_output
    group: int = 0
    last_input: bool = False
    low: bool = True
    base: bool = True
    level: bool = True
    levels: int = 1

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        cells = f"C{self.group}" if self.group else f"G{self.cells}"
        form = f"k{self.kernel}-L{self.levels}-{cells}"
        return f"{dtype}-{size}-{form}-{self.splits}x{self.parts}"


GRADIENTS = [
    Gradient((65, 1, 7, 7), 5, F32, 8),
    Gradient((130, 2, 8, 8), 3, F32, 8, 16, 8, splits=2),
    Gradient((66, 2, 7, 8), 7, F16, 8, 16, 2),
    Gradient((17, 2, 14, 14), 5, F32, 4, 8, 4, splits=2, last=True),
    Gradient((20, 1, 13, 16), 3, BF16, 4, 8, 16, parts=2),
    Gradient((5, 1, 28, 28), 5, F32, 2, 16, 16, low=False),
    Gradient((5, 2, 25, 31), 7, F16, 2),
    Gradient((2, 1, 56, 56), 5, F32, 1, 16, 16, parts=2, base=False),
    Gradient((2, 1, 61, 36), 3, F16, 1, 8, 4, level=False),
    Gradient((1, 1, 72, 80), 5, F32, 0, 16, 16, parts=3),
    Gradient((2, 2, 67, 75), 3, F32, 0, splits=3, parts=2),
    Gradient((1, 1, 130, 68), 7, F32, 0, 16, 4, splits=2, last=True),
    Gradient((1, 1, 72, 80), 5, F16, 0, 16, 16, parts=3),
    Gradient((2, 2, 67, 75), 5, F16, 0, splits=3, parts=2),
    Gradient((2, 1, 65, 80), 5, BF16, 0, 8, 16, splits=2, last=True, low=False),
    Gradient((2, 1, 67, 75), 3, F16, 0, 2, 2, splits=2),
    Gradient((1, 1, 72, 136), 3, BF16, 0, 16, 16, parts=2),
    Gradient((1, 1, 66, 72), 7, F16, 0, 8, 8, base=False),
    Gradient((1, 2, 40, 136), 7, BF16, 0, 16, 16, splits=2),
    Gradient((5, 32, 7, 7), 5, F32, 1, 16, 16, 2, 1, True, 32, True),
    Gradient((3, 36, 7, 5), 3, F16, 1, 8, 4, 1, 2, True, 32, True, low=False),
    Gradient((2, 33, 16, 15), 5, BF16, 1, 2, 2, 1, 1, True, 32, True),
    Gradient((3, 16, 14, 14), 5, F32, 1, 16, 8, 2, 1, True, 16, True),
    Gradient((2, 20, 9, 13), 7, F16, 1, 8, 4, 1, 2, True, 16, True, base=False),
    Gradient((2, 16, 28, 28), 5, F16, 1, 16, 16, 1, 1, True, 8, True),
    Gradient((2, 10, 31, 18), 3, F32, 1, 8, 4, 1, 2, True, 8, True, level=False),
    Gradient((3, 4, 56, 56), 5, F32, 1, 16, 16, 1, 2, True, 4, True),
    Gradient((2, 7, 35, 61), 7, BF16, 1, 2, 2, 2, 1, True, 4, True),
    Gradient((2, 4, 40, 64), 5, F16, 1, 2, 8, 1, 1, True, 4, False),
    Gradient((1, 1, 72, 80), 5, F16, 0, 16, 16, parts=3, levels=2),
    Gradient((2, 2, 67, 75), 5, F16, 0, splits=3, parts=2, levels=2),
    Gradient((2, 1, 65, 80), 5, BF16, 0, 8, 16, splits=2, last=True, low=False, levels=2),
    Gradient((2, 1, 69, 74), 3, F16, 0, 2, 2, splits=2, levels=2),
    Gradient((1, 1, 72, 136), 3, BF16, 0, 16, 16, parts=2, levels=2),
    Gradient((1, 1, 66, 72), 7, F16, 0, 8, 8, base=False, levels=2),
    Gradient((1, 2, 40, 136), 7, BF16, 0, 16, 16, splits=2, levels=2),
]


def grad_launch(
    x: Tensor, g: Tensor, kernel: int, levels: int, cells: int = 0, group: int = 0
) -> emulator.PatchGradLaunch:
    """Everything wanted in one part, element by element; without partial sums and bands."""
    batch, channels, height, width = x.shape
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    return emulator.PatchGradLaunch(
        input=View.of(x),
        grad_output=View.of(g),
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        kernel_size=kernel,
        levels=levels,
        cells=cells,
        group=group,
        tiles_y=tiles_y,
        tiles_x=tiles_x,
        tiles=-(-batch // cells**2) if cells else batch * tiles_y * tiles_x,
        input_bytes=x.itemsize,
        grad_bytes=x.itemsize,
        splits=1,
        parts=1,
        base_wanted=True,
        level_wanted=True,
        bias_wanted=True,
    )


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_weight_gradients_are_the_adjoint(kernels: Emulator, case: Gradient) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = case.shape
    size = case.dtype.itemsize
    params = Parameters(channels, case.kernel, case.levels, F32, case.base)
    unit = max(1, case.bytes // size)
    x = Placed(torch.randn(case.shape) + 0.5, case.dtype, unit, case.last_input)
    unit = 1 if case.last and not case.group else max(1, case.grad_bytes // size)
    g = Placed(torch.randn(case.shape) + 0.25, case.dtype, unit, case.last)
    step = 2**case.levels
    band = (batch, channels, -(-height // step), -(-width // step))
    tensor_cores = case.dtype != F32 and case.cells == 0
    low_dtype = case.dtype if tensor_cores else F32
    low_input, low_grad, exact_low_grad = (
        torch.full(band, torch.nan, dtype=dtype) for dtype in (low_dtype, low_dtype, F32)
    )
    if case.group:
        low_input, low_grad = (
            low.to(memory_format=torch.channels_last) for low in (low_input, low_grad)
        )
    sums = (1 + 4 * case.levels) * case.kernel**2 + 1
    partials = torch.full((channels, case.splits * case.parts, sums), torch.nan)
    launch = grad_launch(x.tensor, g.tensor, case.kernel, case.levels, case.cells, case.group)
    launch.partials = partials.data_ptr()
    if case.low:
        launch.low_grad, launch.low_input = low_grad.data_ptr(), low_input.data_ptr()
        launch.exact_low_grad = exact_low_grad.data_ptr() if tensor_cores else None
    launch.input_bytes = max(case.bytes, size)
    launch.grad_bytes = max(1 if case.last and not case.group else case.grad_bytes, size)
    launch.splits, launch.parts = case.splits, case.parts
    launch.base_wanted = launch.bias_wanted = case.base
    launch.level_wanted = case.level
    kernels.run("weight_grad", launch, case.dtype)

    leaves = params.leaves()
    output = apply(x.tensor.double(), leaves, case.base)
    expected = torch.autograd.grad(output, leaves, g.tensor.double(), allow_unused=True)
    ours = [torch.full(leaf.shape, torch.nan) for leaf in leaves]
    weight, bias, scale, *of_levels = (result.data_ptr() for result in ours)
    finish = emulator.FinishLaunch(
        params=params.raw(),
        channels=channels,
        kernel_size=case.kernel,
        levels=case.levels,
        grad_bias=bias if case.base else None,
    )
    for level in range(case.levels + 1):
        first = (0 if level == 0 else 4 * level - 3) * case.kernel**2
        factor = 4 if level == 1 else 1
        finish.sums[level] = emulator.LevelSums(
            partials.data_ptr(), partials.shape[1], sums, first, factor
        )
    if case.base:
        finish.gradients[0] = emulator.LevelGradient(weight, scale)
    if case.level:
        for level in range(case.levels):
            finish.gradients[1 + level] = emulator.LevelGradient(
                of_levels[level], of_levels[case.levels + level]
            )
    kernels.run("finish", finish, case.dtype)
    level_tolerance = [GRAD_TOLERANCE, FORWARD_TOLERANCE[case.dtype]][: case.levels]
    # The sums of the first level stand for four times as much.
    expected = [e if n not in (3, 3 + case.levels) else 4 * e for n, e in enumerate(expected)]
    tolerances = [GRAD_TOLERANCE] * 3 + level_tolerance * 2
    wanted = [case.base] * 3 + [case.level] * 2 * case.levels
    for result, exact, want, tolerance in zip(ours, expected, wanted, tolerances, strict=True):
        if want:
            assert exact is not None
            assert relative_error(result, exact) < tolerance
        else:
            assert bool(result.isnan().all())
    if not case.low:
        assert bool(low_input.isnan().all())
        assert bool(low_grad.isnan().all())
        return
    bands = [lowpass(kernels, placed.tensor, case.levels, wide=False) for placed in (x, g)]
    if tensor_cores:
        assert torch.equal(exact_low_grad, bands[1])
        bands[0] = bands[0] / step  # an average
    assert torch.equal(low_input, bands[0].to(low_dtype))
    assert torch.equal(low_grad, bands[1].to(low_dtype))


def test_deep_levels_come_from_the_bands_of_the_first(kernels: Emulator) -> None:
    """Two launches of two levels, the second on the half-precision bands that the first leaves."""
    torch.manual_seed(0)
    kernel, levels, step, dtype = 3, 4, 4, F16
    params = Parameters(1, kernel, levels, F32)
    x, g = (torch.randn(2, 1, 150, 136).add(0.5).to(dtype) for _ in range(2))
    sums = (1 + 4 * 2) * kernel**2 + 1
    partials = torch.full((2, sums), torch.nan)
    bands = [torch.full((2, 1, -(-150 // step), 136 // step), torch.nan).to(dtype) for _ in "xg"]
    first = grad_launch(x, g, kernel, 2)
    first.low_input, first.low_grad = bands[0].data_ptr(), bands[1].data_ptr()
    for launch, row in ((first, 0), (grad_launch(bands[0], bands[1], kernel, 2), 1)):
        launch.partials = partials[row].data_ptr()
        kernels.run("weight_grad", launch, dtype)

    leaves = params.leaves()
    expected = torch.autograd.grad(apply(x.double(), leaves), leaves, g.double())
    ours = [torch.full(leaf.shape, torch.nan) for leaf in leaves]
    finish = emulator.FinishLaunch(
        params=params.raw(),
        channels=1,
        kernel_size=kernel,
        levels=levels,
        grad_bias=ours[1].data_ptr(),
    )
    finish.gradients[0] = emulator.LevelGradient(ours[0].data_ptr(), ours[2].data_ptr())
    finish.sums[0] = emulator.LevelSums(partials.data_ptr(), 1, sums, 0, 1)
    for level in range(1, levels + 1):
        row, slot = (level - 1) // 2, 1 + (level - 1) % 2 * 4
        finish.sums[level] = emulator.LevelSums(
            partials[row].data_ptr(), 1, sums, slot * kernel**2, step if row else 1
        )
        weight, scale = ours[2 + level], ours[2 + levels + level]
        finish.gradients[level] = emulator.LevelGradient(weight.data_ptr(), scale.data_ptr())
    kernels.run("finish", finish, dtype)
    for result, exact in zip(ours, expected, strict=True):
        assert relative_error(result, exact) < FORWARD_TOLERANCE[dtype]


def lowpass(kernels: Emulator, x: Tensor, levels: int, wide: bool) -> Tensor:
    batch, channels, height, width = x.shape
    rows, cols = -(-height // 2**levels), -(-width // 2**levels)
    accumulator = torch.float64 if x.dtype == torch.float64 else F32
    low = torch.full((batch, channels, rows, cols), torch.nan, dtype=accumulator)
    launch = emulator.LowpassLaunch(View.of(x), low.data_ptr(), *x.shape, rows, cols)
    launch.levels, launch.wide = levels, wide
    kernels.run("lowpass", launch, x.dtype)
    return low


@pytest.mark.parametrize(
    ("dtype", "levels", "unit", "width"),
    [(F32, 1, 4, 20), (F32, 2, 1, 21), (F32, 2, 4, 24), (F16, 2, 8, 40), (torch.float64, 1, 2, 6)],
)
def test_lowpass_is_the_mean_of_a_block(
    kernels: Emulator, dtype: torch.dtype, levels: int, unit: int, width: int
) -> None:
    torch.manual_seed(0)
    x = Placed(torch.randn(2, 3, 19, width), dtype, unit)
    low = lowpass(kernels, x.tensor, levels, unit * dtype.itemsize == 16)
    rows, cols = low.shape[2:]
    padded = F.pad(x.tensor.double(), (0, cols * 2**levels - width, 0, rows * 2**levels - 19))
    assert relative_error(low, F.avg_pool2d(padded, 2**levels) * 2**levels) < 1e-6


def test_lowpass_of_a_finer_band_is_the_same_bits(kernels: Emulator) -> None:
    torch.manual_seed(0)
    for dtype in (F32, F16):
        x = Placed(torch.randn(2, 3, 19, 40), dtype, 16 // dtype.itemsize).tensor
        direct = lowpass(kernels, x, 2, wide=True)
        assert torch.equal(direct, lowpass(kernels, x, 2, wide=False))
        assert torch.equal(direct, lowpass(kernels, lowpass(kernels, x, 1, True), 1, False))
