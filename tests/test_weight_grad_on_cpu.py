"""The weight-gradient and low-pass kernels, run on the CPU (emulator.py), against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import emulator
import pytest
import torch
from budget import relative_error
from emulator import Emulator, View
from emulator_inputs import BF16, F16, F32, FORWARD_TOLERANCE, Parameters, Placed, apply, sizes
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
    early: bool = False
    aligned: bool = False  # rows begin at 16 bytes whatever they are accessed by
    bulk_copies: bool = True
    mma: bool = False  # tensor cores for several planes of a tile

    @property
    def tensor_cores(self) -> bool:
        of_group = self.group == 8 and min(self.shape[2:]) > 32
        return self.dtype != F32 and (of_group or self.cells == 0 or self.mma)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        cells = f"C{self.group}" if self.group else f"G{self.cells}"
        form = f"k{self.kernel}-L{self.levels}-{cells}{'-mma' * self.mma}"
        copies = "bulk" if self.bulk_copies else "pieces"
        return f"{dtype}-{size}-{form}-{self.splits}x{self.parts}-{copies}"


GRADIENTS = [
    Gradient((65, 1, 7, 7), 5, F32, 8),
    Gradient((130, 2, 8, 8), 3, F32, 8, 16, 8, splits=2, early=True),
    Gradient((66, 2, 7, 8), 7, F16, 8, 16, 2),
    Gradient((17, 2, 14, 14), 5, F32, 4, 8, 4, splits=2, last=True),
    Gradient((20, 1, 13, 16), 3, BF16, 4, 8, 16, parts=2),
    Gradient((5, 1, 28, 28), 5, F32, 2, 16, 16, low=False),
    Gradient((5, 2, 25, 31), 7, F16, 2),
    Gradient((2, 1, 56, 56), 5, F32, 1, 16, 16, parts=2, base=False),
    Gradient((2, 1, 61, 36), 3, F16, 1, 8, 4, level=False),
    Gradient((1, 1, 72, 80), 5, F32, 0, 16, 16, parts=3),
    Gradient((2, 2, 67, 75), 3, F32, 0, splits=3, parts=2, early=True),
    Gradient((1, 1, 130, 68), 7, F32, 0, 16, 4, splits=2, last=True),
    Gradient((1, 1, 72, 80), 5, F16, 0, 16, 16, parts=3),
    Gradient((2, 2, 67, 75), 5, F16, 0, splits=3, parts=2, early=True),
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
    Gradient((2, 1, 67, 74), 5, F16, 0, 4, 4, splits=2, levels=2),
    Gradient((1, 2, 66, 76), 7, BF16, 0, 4, 8, parts=2, levels=2),
    Gradient((2, 2, 67, 75), 5, F16, 0, splits=3, parts=2, levels=2),
    Gradient((2, 1, 65, 80), 5, BF16, 0, 8, 16, splits=2, last=True, low=False, levels=2),
    Gradient((2, 1, 69, 74), 3, F16, 0, 2, 2, splits=2, levels=2),
    Gradient((1, 1, 72, 136), 3, BF16, 0, 16, 16, parts=2, levels=2, early=True),
    Gradient((1, 1, 66, 72), 7, F16, 0, 8, 8, base=False, levels=2),
    Gradient((1, 2, 40, 136), 7, BF16, 0, 16, 16, splits=2, levels=2),
]
# Whole planes, several levels at once: of odd sizes at every level, in every number of cells.
GRADIENTS += [
    Gradient((2, 1, 56, 56), 5, F32, 1, 16, 16, parts=2, levels=5),
    Gradient((3, 2, 45, 37), 3, F32, 1, splits=2, levels=5, early=True),
    Gradient((2, 1, 64, 61), 5, BF16, 1, 2, 2, levels=3, base=False),
    Gradient((9, 1, 28, 28), 5, F32, 2, 16, 16, splits=2, levels=4),
    Gradient((5, 2, 25, 31), 3, F16, 2, levels=5, low=False),
    Gradient((17, 2, 14, 14), 5, F32, 4, 8, 4, splits=2, levels=3, last=True),
    Gradient((33, 1, 9, 13), 5, F16, 4, 2, 2, levels=4, level=False),
    Gradient((130, 2, 7, 7), 5, F32, 8, 4, 4, splits=2, parts=2, levels=3),
    Gradient((66, 1, 8, 5), 3, BF16, 8, levels=2, early=True),
]
# Several planes of a tile on tensor cores: full and partial groups, every width of access.
GRADIENTS += [
    Gradient((17, 2, 28, 28), 5, F16, 2, 8, 8, splits=2, parts=2, levels=2, mma=True),
    Gradient((5, 1, 32, 32), 5, BF16, 2, 16, 16, parts=2, levels=2, early=True, mma=True),
    Gradient((7, 2, 31, 17), 3, F16, 2, 2, 2, last=True, levels=2, mma=True),
    Gradient((4, 1, 18, 30), 5, F16, 2, 4, 4, base=False, mma=True),
    Gradient((6, 1, 25, 24), 3, BF16, 2, 16, 8, levels=2, low=False, mma=True),
    Gradient((40, 2, 14, 14), 5, F16, 4, 2, 4, splits=3, levels=2, last_input=True, mma=True),
    Gradient((33, 1, 16, 16), 5, F16, 4, 16, 16, parts=3, levels=2, mma=True),
    Gradient((17, 1, 9, 13), 3, BF16, 4, 2, 2, levels=2, mma=True),
    Gradient((5, 3, 15, 12), 3, F16, 4, 8, 4, low=False, mma=True),
    Gradient((5, 1, 28, 30), 7, BF16, 2, 4, 4, levels=2, mma=True),
    Gradient((20, 1, 15, 16), 7, F16, 4, 16, 2, splits=2, levels=2, level=False, mma=True),
]
# Two levels of the smallest planes of a group of channels.
GRADIENTS += [
    Gradient((5, 32, 7, 7), 5, F32, 1, 16, 16, 2, 1, True, 32, True, low=False, levels=2),
    Gradient((3, 36, 8, 5), 3, F16, 1, 8, 4, 1, 2, True, 32, True, low=False, levels=2),
    Gradient((2, 33, 3, 6), 7, BF16, 1, 2, 2, 1, 1, True, 32, True, low=False, levels=2),
    Gradient((2, 32, 1, 8), 5, F32, 1, 4, 4, 1, 1, True, 32, False, low=False, levels=2),
]
# Groups of channels on tensor cores: planes up to what fits, odd sizes, channels that are missing.
GRADIENTS += [
    Gradient((3, 8, 56, 56), 5, F16, 1, 16, 16, 1, 2, True, 8, True, levels=2),
    Gradient((2, 8, 33, 59), 5, BF16, 1, 16, 16, 2, 1, True, 8, True, levels=2),
    Gradient((5, 13, 37, 41), 3, F16, 1, 2, 2, 2, 2, True, 8, True, levels=2),
    Gradient((2, 12, 35, 46), 5, F16, 1, 8, 8, 1, 2, True, 8, True, levels=2, low=False),
    Gradient((3, 8, 43, 34), 5, F16, 1, 2, 16, 1, 1, True, 8, False, levels=2, base=False),
    Gradient((3, 16, 56, 47), 5, BF16, 1, 16, 16, 2, 1, True, 8, True),
    Gradient((3, 5, 45, 36), 3, F16, 1, 2, 2, 1, 2, True, 8, True, low=False),
]
# Large float32 planes by bulk copies: of rows that end within a piece, of every kernel size. What
# runs where the hardware has none, of these and of groups on tensor cores.
GRADIENTS += [
    Gradient((2, 2, 67, 75), 5, F32, splits=2, parts=2, aligned=True),
    Gradient((2, 1, 131, 66), 3, F32, aligned=True, early=True),
    Gradient((1, 3, 70, 132), 7, F32, 0, 16, 16, splits=3),
    *(
        replace(case, bulk_copies=False)
        for case in GRADIENTS
        if case.bytes == 16 and ((case.dtype == F32 and case.cells == 0) or case.group == 8)
    ),
]


def grad_launch(
    x: Tensor, g: Tensor, kernel: int, levels: int, cells: int = 0, group: int = 0
) -> emulator.PatchGradLaunch:
    """Everything wanted in one part, element by element; without partial sums and bands."""
    return emulator.PatchGradLaunch(
        input=View.of(x),
        grad_output=View.of(g),
        **sizes(x.shape, kernel, levels, cells, group),
        input_bytes=x.itemsize,
        grad_bytes=x.itemsize,
        splits=1,
        together=1,
        parts=1,
        base_wanted=True,
        level_wanted=True,
        bias_wanted=True,
    )


class LowpassBands:
    """Room for the low-pass bands that a launch leaves: on tensor cores those of its last level."""

    def __init__(self, case: Gradient) -> None:
        self.case = case
        self.tensor_cores = case.tensor_cores
        self.levels = case.levels if self.tensor_cores else 1
        self.dtype = case.dtype if self.tensor_cores else F32
        shape = (*case.shape[:2], *(-(-side // 2**self.levels) for side in case.shape[2:]))
        planes = not case.group or (case.kernel <= 5 and case.group < 32)
        order = torch.contiguous_format if planes else torch.channels_last
        self.input, self.grad, self.exact_grad = (
            torch.full(shape, torch.nan, dtype=dtype).to(memory_format=order)
            for dtype in (self.dtype, self.dtype, F32)
        )

    def give(self, launch: emulator.PatchGradLaunch) -> None:
        launch.low_input, launch.low_grad = self.input.data_ptr(), self.grad.data_ptr()
        launch.exact_low_grad = self.exact_grad.data_ptr() if self.tensor_cores else None

    def check(self, kernels: Emulator, x: Tensor, g: Tensor) -> None:
        if not self.case.low:
            assert bool(self.input.isnan().all())
            assert bool(self.grad.isnan().all())
            return
        low_input, low_grad = (lowpass(kernels, t, self.levels, wide=False) for t in (x, g))
        if self.tensor_cores:
            assert torch.equal(self.exact_grad, low_grad)
            low_input = x  # averages, each level from the rounded one before
            for _ in range(self.levels):
                low_input = (lowpass(kernels, low_input, 1, wide=False) / 2).to(self.dtype)
        assert torch.equal(self.input, low_input.to(self.dtype))
        assert torch.equal(self.grad, low_grad.to(self.dtype))


def first_sums(kernel: int, levels: int) -> list[int]:
    """Where the sums of the base path and of each level begin among those of a launch."""
    return [0, *((4 * level - 3) * kernel**2 for level in range(1, levels + 1))]


def finish(
    kernels: Emulator,
    params: Parameters,
    sums: list[emulator.LevelSums],
    dtype: torch.dtype,
    base: bool = True,
    level: bool = True,
    sums_ready: bool = False,
) -> list[Tensor]:
    """The gradients of `params.leaves()` from the partial sums of each level; NaN: not wanted."""
    levels = len(sums) - 1
    result = [torch.full(leaf.shape, torch.nan) for leaf in params.leaves()]
    weight, bias, scale, *of_levels = (tensor.data_ptr() for tensor in result)
    launch = emulator.FinishLaunch(
        params=params.raw(),
        channels=result[0].shape[0],
        kernel_size=result[0].shape[-1],
        levels=levels,
        grad_bias=bias if base else None,
        early=True,
        sums_ready=sums_ready,
    )
    launch.sums[: levels + 1] = sums
    if base:
        launch.gradients[0] = emulator.LevelGradient(weight, scale)
    if level:
        for n in range(levels):
            launch.gradients[1 + n] = emulator.LevelGradient(of_levels[n], of_levels[levels + n])
    kernels.run("finish", launch, dtype)
    return result


def place(case: Gradient) -> tuple[Placed, Placed, emulator.PatchGradLaunch, torch.Tensor]:
    """The input, grad_output and the launch of a case, and room for its partial sums."""
    size = case.dtype.itemsize
    grad_bytes = size if case.last and not case.group else max(case.grad_bytes, size)
    units = [16 // size if case.aligned else max(1, n // size) for n in (case.bytes, grad_bytes)]
    x = Placed(torch.randn(case.shape) + 0.5, case.dtype, units[0], case.last_input)
    g = Placed(torch.randn(case.shape) + 0.25, case.dtype, units[1], case.last)
    launch = grad_launch(x.tensor, g.tensor, case.kernel, case.levels, case.cells, case.group)
    slots = (1 + 4 * case.levels) * case.kernel**2 + 1
    partials = torch.full((case.shape[1], case.splits * case.parts, slots), torch.nan)
    launch.partials = partials.data_ptr()
    launch.tensor_cores = case.tensor_cores
    launch.input_bytes, launch.grad_bytes = max(case.bytes, size), grad_bytes
    launch.splits, launch.parts = case.splits, case.parts
    launch.together = min(case.splits, 2)
    return x, g, launch, partials


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_weight_gradients_are_the_adjoint(kernels: Emulator, case: Gradient) -> None:
    torch.manual_seed(0)
    levels = case.levels
    params = Parameters(case.shape[1], case.kernel, levels, F32, case.base)
    x, g, launch, partials = place(case)
    low = LowpassBands(case)
    if case.low:
        low.give(launch)
    launch.base_wanted = launch.bias_wanted = case.base
    launch.level_wanted = case.level
    launch.early = launch.lets_next_start = case.early
    if case.early:
        kernels.write_late(x.storage)
    kernels.run("weight_grad", launch, case.dtype, case.bulk_copies)

    # The sums of the first level stand for four times as much.
    factors = [1, 4] + [1] * (levels - 1)
    sums = [
        emulator.LevelSums(partials.data_ptr(), *partials.shape[1:], first, factor)
        for first, factor in zip(first_sums(case.kernel, levels), factors, strict=True)
    ]
    kernels.write_late(partials)
    ours = finish(kernels, params, sums, case.dtype, case.base, case.level)
    again = finish(kernels, params, sums, case.dtype, case.base, case.level, sums_ready=True)
    torch.testing.assert_close(again, ours, rtol=0, atol=0, equal_nan=True)
    leaves = params.leaves()
    output = apply(x.tensor.double(), leaves, case.base)
    expected = torch.autograd.grad(output, leaves, g.tensor.double(), allow_unused=True)
    deep = FORWARD_TOLERANCE[case.dtype] if low.tensor_cores else GRAD_TOLERANCE
    tolerances = [GRAD_TOLERANCE, GRAD_TOLERANCE] + [deep] * (levels - 1)
    level_of = [0, 0, 0, *range(1, levels + 1), *range(1, levels + 1)]
    for result, exact, level in zip(ours, expected, level_of, strict=True):
        if case.level if level else case.base:
            assert exact is not None
            assert relative_error(result, factors[level] * exact) < tolerances[level]
        else:
            assert bool(result.isnan().all())
    low.check(kernels, x.tensor, g.tensor)


@pytest.mark.parametrize(
    "case",
    [c for c in GRADIENTS if not (c.group or c.tensor_cores) and c.base and c.level],
    ids=str,
)
def test_input_gradient_comes_with_them(kernels: Emulator, case: Gradient) -> None:
    if not kernels.gives_input_grad(case.dtype, case.kernel, case.cells):
        pytest.skip("a launch of its own gives it: fewer blocks of both would run together")
    torch.manual_seed(0)
    size = case.dtype.itemsize
    params = Parameters(case.shape[1], case.kernel, case.levels, F32)
    x, g, launch, alone = place(case)
    kernels.run("weight_grad", launch, case.dtype, case.bulk_copies)
    out = Placed(torch.full(case.shape, torch.nan), case.dtype, max(1, case.bytes // size))
    partials = torch.full_like(alone, torch.nan)
    launch.partials = partials.data_ptr()
    launch.input_wanted = True
    launch.input_grad.params = params.raw(rotate=True, bias=False)
    launch.input_grad.output = View.of(out.tensor)
    launch.input_grad.output_bytes = max(case.bytes, size)
    kernels.run("weight_grad", launch, case.dtype, case.bulk_copies)
    assert torch.equal(partials, alone)
    leaf = x.tensor.double().requires_grad_()
    (expected,) = torch.autograd.grad(apply(leaf, params.leaves()), leaf, g.tensor.double())
    assert relative_error(out.tensor, expected) < FORWARD_TOLERANCE[case.dtype]
    out.assert_nothing_else_written()


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
    second = grad_launch(bands[0], bands[1], kernel, 2)
    first.low_input, first.low_grad = bands[0].data_ptr(), bands[1].data_ptr()
    for launch, row in ((first, 0), (second, 1)):
        launch.tensor_cores = True
        launch.partials = partials[row].data_ptr()
        kernels.run("weight_grad", launch, dtype)

    base, level1, level2 = first_sums(kernel, 2)
    finer, coarser = (partials[row].data_ptr() for row in (0, 1))
    ours = finish(
        kernels,
        params,
        [
            emulator.LevelSums(finer, 1, sums, base, 1),
            emulator.LevelSums(finer, 1, sums, level1, 1),
            emulator.LevelSums(finer, 1, sums, level2, 1),
            emulator.LevelSums(coarser, 1, sums, level1, step),
            emulator.LevelSums(coarser, 1, sums, level2, step),
        ],
        dtype,
    )
    leaves = params.leaves()
    expected = torch.autograd.grad(apply(x.double(), leaves), leaves, g.double())
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
