"""The patch kernels themselves, run on the CPU (emulator.py), against float64.

Inputs lie between NaN, shared memory and outputs are full of it: what a kernel must not read shows
in the result, and what it must not write shows around it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import emulator
import pytest
import torch
from budget import relative_error
from emulator import Emulator, View
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
from torch import Tensor

from wtconv_ops import reference


def raised(coarse: Tensor, height: int, width: int, levels: int) -> Tensor:
    """The synthesis of a low-pass band alone, `levels` levels up."""
    sizes = [(-(-height // 2**level), -(-width // 2**level)) for level in range(levels)]
    for size in reversed(sizes):
        bands = torch.stack([coarse, *[torch.zeros_like(coarse)] * 3], dim=2)
        coarse = reference.haar_synthesis(bands, size)
    return coarse


FLAGS = ("last", "coarse", "rotate", "base", "aligned", "bulk_copies", "mma", "at_once")


@dataclass(frozen=True)
class Forward:
    shape: tuple[int, int, int, int]
    kernel: int
    levels: int
    dtype: torch.dtype
    cells: int = 0
    bytes: int = 0  # of an access to the input and output; 0: an element
    last: bool = False
    group: int = 0
    coarse: bool = False
    rotate: bool = False
    multiprocessors: int = 1
    parameters: torch.dtype = F32
    base: bool = True
    output_bytes: int | None = None  # of an access to the output, where others
    aligned: bool = False  # rows begin at 16 bytes whatever they are accessed by
    bulk_copies: bool = True
    mma: bool = False  # tensor cores for a group of channels; other half types take them or not
    at_once: bool = False  # a low-pass band that the kernel before did not write

    @property
    def tensor_cores(self) -> bool:
        return self.mma or (self.dtype != F32 and not self.group and self.cells < 8)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        flags = [name for name in FLAGS if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        cells = f"G{self.cells}" + (f"-C{self.group}" if self.group else "")
        return f"{dtype}-{size}-k{self.kernel}-L{self.levels}-{cells}-{'-'.join(flags)}"


# Whole planes, G x G to a tile: full and partial groups, every width of access. Half types take
# tensor cores, but for the smallest planes.
PLANES = [
    Forward((65, 1, 7, 7), 5, 3, F32, 8),
    Forward((70, 1, 8, 8), 3, 2, F32, 8, 16, multiprocessors=2),
    Forward((3, 2, 5, 6), 7, 1, F32, 8, 8),
    Forward((64, 1, 7, 7), 5, 3, F16, 8),
    Forward((130, 2, 8, 8), 3, 3, F16, 8, 16, rotate=True),
    Forward((5, 3, 7, 8), 5, 2, BF16, 8, 8, parameters=BF16),
    Forward((17, 1, 14, 14), 5, 4, F32, 4, 8),
    Forward((20, 1, 9, 13), 7, 2, F32, 4, rotate=True),
    Forward((16, 2, 16, 16), 3, 1, F32, 4, 16),
    Forward((17, 1, 14, 14), 5, 3, F16, 4, 4),
    Forward((5, 2, 13, 16), 7, 4, BF16, 4, 16),
    Forward((18, 3, 15, 11), 3, 2, F16, 4, last=True),
    Forward((5, 1, 28, 28), 5, 5, F32, 2, 16),
    Forward((3, 2, 25, 31), 3, 3, F32, 2, last=True, rotate=True),
    Forward((5, 1, 28, 28), 7, 4, F16, 2, 8),
    Forward((4, 1, 32, 17), 5, 2, BF16, 2),
    Forward((2, 1, 56, 56), 5, 5, F32, 1, 16),
    Forward((1, 2, 33, 64), 3, 1, F32, 1, 16, base=False),
    Forward((1, 1, 61, 40), 7, 5, F16, 1, 16, rotate=True),
    Forward((2, 1, 50, 37), 5, 4, BF16, 1),
    Forward((1, 1, 1, 1), 5, 3, F32, 1),
    Forward((3, 2, 56, 56), 5, 5, F16, 1, 16),
    Forward((2, 2, 55, 63), 5, 4, F16, 1, aligned=True, rotate=True),
    Forward((2, 1, 37, 64), 3, 3, BF16, 1, 16, bulk_copies=False, parameters=BF16),
    Forward((2, 1, 33, 41), 7, 5, F16, 1, rotate=True),
    Forward((1, 3, 64, 50), 7, 3, BF16, 1, last=True, base=False),
    Forward((5, 1, 28, 28), 5, 4, F16, 2, 8),
    Forward((9, 2, 32, 32), 5, 5, BF16, 2, 16, rotate=True, multiprocessors=2),
    Forward((4, 1, 31, 17), 3, 3, F16, 2, 0, last=True),
    Forward((6, 2, 18, 30), 5, 1, F16, 2, 4, rotate=True, output_bytes=0),
    Forward((3, 1, 25, 24), 3, 2, BF16, 2, 16, parameters=BF16, base=False),
    Forward((33, 1, 14, 14), 5, 3, F16, 4, 4, multiprocessors=2),
    Forward((16, 2, 16, 16), 5, 4, F16, 4, 16, rotate=True, output_bytes=8),
    Forward((17, 1, 9, 13), 3, 2, BF16, 4, 0, rotate=True),
    Forward((5, 3, 15, 12), 3, 4, F16, 4, 8, parameters=F16),
    Forward((20, 1, 11, 16), 5, 1, BF16, 4, 16, base=False),
    Forward((9, 1, 26, 32), 7, 2, F16, 2, 16, rotate=True),
]
# Groups of channels: full and partial ones, every width of access, sizes and levels that are odd.
GROUPS = [
    Forward((5, 32, 7, 7), 5, 2, F32, 1, 16, True, 32, multiprocessors=2),
    Forward((2, 33, 8, 5), 3, 4, F16, 1, 0, True, 32, rotate=True),
    Forward((1, 36, 1, 1), 7, 3, BF16, 1, 8, True, 32),
    Forward((2, 40, 16, 15), 7, 2, F16, 1, 16, True, 32, parameters=F16),
    Forward((3, 32, 15, 10), 3, 1, F32, 1, 16, True, 32),
    Forward((9, 16, 14, 14), 5, 3, F32, 1, 16, True, 16),
    Forward((2, 20, 13, 9), 5, 5, F32, 1, 8, True, 16, rotate=True),
    Forward((3, 16, 14, 11), 3, 1, F16, 1, 16, True, 16),
    Forward((2, 16, 28, 28), 5, 4, F32, 1, 16, True, 8),
    Forward((2, 10, 17, 32), 7, 2, F16, 1, 4, True, 8),
    Forward((1, 8, 31, 18), 3, 3, BF16, 1, 16, True, 8, parameters=BF16),
    Forward((2, 8, 56, 56), 5, 5, F32, 1, 16, True, 8),
    Forward((1, 13, 49, 55), 7, 3, F16, 1, 2, True, 8),
    Forward((2, 4, 56, 56), 5, 5, F32, 1, 16, True, 4),
    Forward((1, 6, 33, 50), 3, 6, F16, 1, 4, True, 4),
    Forward((2, 4, 47, 64), 5, 2, F16, 1, 8, True, 4, base=False),
    Forward((1, 5, 61, 35), 7, 1, F32, 1, 0, True, 4, rotate=True),
    Forward((2, 3, 40, 36), 5, 3, F32, 1, 0, False, 4),
    # Stored by four channels: of partial strips and partial groups, of other inputs.
    Forward((2, 36, 5, 7), 5, 2, F32, 1, 16, True, 32),
    Forward((1, 20, 13, 9), 5, 3, BF16, 1, 8, True, 16),
    Forward((2, 12, 27, 18), 3, 4, F32, 1, 4, True, 8, output_bytes=16),
    Forward((1, 8, 33, 51), 5, 5, F16, 1, 0, True, 4, output_bytes=8),
    Forward((1, 4, 64, 64), 7, 6, BF16, 1, 8, True, 4, output_bytes=4),
]
# The same on tensor cores, eight channels of planes of one tile; then G x G to a tile, of which a
# block computes 2 batch items at once (G = 2) or 8 (G = 4).
MMA_GROUPS = [
    Forward((3, 8, 56, 56), 5, 5, F16, 1, 16, True, 8, multiprocessors=2, mma=True),
    Forward((2, 13, 49, 55), 5, 4, BF16, 1, 0, True, 8, rotate=True, mma=True),
    Forward((1, 20, 33, 57), 3, 3, F16, 1, 8, True, 8, parameters=F16, mma=True),
    Forward((1, 12, 64, 64), 3, 2, BF16, 1, 8, True, 8, base=False, output_bytes=0, mma=True),
    Forward((1, 6, 40, 36), 5, 1, F16, 1, 4, True, 8, rotate=True, mma=True),
    Forward((2, 5, 35, 56), 5, 5, F16, 1, 0, False, 8, mma=True),
    Forward((4, 8, 28, 28), 5, 4, F16, 2, 16, True, 8, mma=True),
    Forward((3, 13, 17, 31), 5, 5, BF16, 2, 0, True, 8, rotate=True, mma=True),
    Forward((1, 12, 32, 32), 5, 5, F16, 2, 8, True, 8, parameters=F16, mma=True),
    Forward((2, 6, 31, 18), 5, 2, F16, 2, 4, True, 8, base=False, output_bytes=0, mma=True),
    Forward((3, 8, 26, 29), 5, 3, BF16, 2, 0, True, 8, output_bytes=16, mma=True),
    Forward((2, 16, 27, 32), 5, 1, F16, 2, 16, True, 8, output_bytes=8, mma=True),
    Forward((2, 5, 23, 25), 5, 3, F16, 2, 0, False, 8, mma=True),
    Forward((8, 8, 14, 14), 5, 3, F16, 4, 16, True, 8, mma=True),
    Forward((9, 13, 9, 13), 5, 4, BF16, 4, 0, True, 8, rotate=True, mma=True),
    Forward((3, 12, 16, 16), 5, 4, F16, 4, 8, True, 8, parameters=F16, mma=True),
    Forward((5, 6, 15, 11), 5, 2, F16, 4, 4, True, 8, base=False, output_bytes=2, mma=True),
    Forward((10, 8, 13, 16), 5, 1, BF16, 4, 16, True, 8, output_bytes=4, mma=True),
    Forward((7, 4, 12, 15), 5, 3, F16, 4, 0, True, 8, rotate=True, output_bytes=8, mma=True),
    Forward((9, 5, 11, 14), 5, 2, BF16, 4, 0, False, 8, mma=True),
    Forward((1, 8, 20, 21), 3, 5, F16, 2, 16, True, 8, mma=True),
    Forward((5, 12, 27, 30), 3, 1, BF16, 2, 8, True, 8, rotate=True, mma=True),
    Forward((11, 8, 14, 9), 3, 4, F16, 4, 16, True, 8, rotate=True, mma=True),
    Forward((1, 10, 10, 13), 3, 2, BF16, 4, 0, True, 8, parameters=BF16, mma=True),
]
# Multiprocessors such that blocks share the items of a group, or pass from one group to the next,
# also of columns that have not as many of them each.
MMA_COLUMNS = [
    Forward((6, 8, 19, 22), 5, 3, F16, 2, 16, True, 8, multiprocessors=2, mma=True),
    Forward((10, 12, 17, 20), 5, 3, F16, 2, 8, True, 8, multiprocessors=3, mma=True),
    Forward((3, 36, 18, 17), 5, 2, BF16, 2, 8, True, 8, multiprocessors=4, mma=True),
    Forward((17, 16, 10, 9), 5, 4, F16, 4, 16, True, 8, multiprocessors=16, mma=True),
    Forward((9, 20, 9, 10), 5, 3, F16, 4, 8, True, 8, rotate=True, multiprocessors=2, mma=True),
    Forward((9, 40, 11, 9), 5, 2, BF16, 4, 16, True, 8, multiprocessors=2, mma=True),
    Forward((2, 12, 33, 36), 5, 3, F16, 1, 8, True, 8, multiprocessors=4, mma=True),
    Forward((3, 12, 33, 34), 3, 2, BF16, 1, 8, True, 8, multiprocessors=3, mma=True),
]
# The same where the hardware has no bulk copies.
MMA_PIECES = [
    replace(case, bulk_copies=False) for case in MMA_GROUPS + MMA_COLUMNS if case.bytes == 16
]
# Tiles of large planes: borders within a tile and past one, in both directions.
TILES = [
    Forward((1, 1, 72, 80), 3, 1, F32, 0, 16),
    Forward((2, 1, 67, 75), 5, 2, F32, coarse=True),
    Forward((1, 2, 65, 132), 5, 1, F32, 0, 16, coarse=True, rotate=True),
    Forward((1, 1, 70, 72), 5, 3, F32, 0, 16, coarse=True),
    Forward((1, 1, 66, 70), 3, 3, F32, 0, last=True),
    Forward((1, 1, 130, 68), 7, 2, F32, 0, 16, coarse=True),
    Forward((1, 1, 37, 100), 9, 1, F32, 0, 16, rotate=True),
    Forward((1, 1, 90, 66), 9, 2, F32, coarse=True, base=False),
    Forward((1, 1, 72, 80), 5, 3, F32, 0, 16, base=False),
    Forward((2, 1, 67, 75), 5, 2, F32, base=False),
    Forward((1, 1, 72, 80), 3, 1, F16, 0, 16),
    Forward((2, 2, 67, 75), 5, 2, F16, coarse=True, rotate=True),
    Forward((3, 1, 72, 136), 5, 2, F16, 0, 16, coarse=True, multiprocessors=2),
    Forward((1, 1, 64, 64), 5, 1, BF16, 0, 16, parameters=BF16),
    Forward((1, 2, 66, 70), 3, 2, F16, last=True),
    Forward((1, 1, 72, 80), 7, 1, F16, 0, 16, rotate=True),
    Forward((1, 1, 65, 72), 7, 2, BF16, 0, 16, coarse=True),
    Forward((1, 1, 70, 72), 9, 1, F16, 0, 16, base=False),
    Forward((1, 1, 33, 35), 9, 2, F16, coarse=True),
    Forward((1, 2, 131, 136), 5, 3, F16, 0, 16, multiprocessors=2),
    Forward((2, 1, 67, 75), 5, 3, F16, rotate=True),
    Forward((1, 1, 130, 200), 3, 3, F16, 0, 16, parameters=F16),
    Forward((1, 1, 130, 72), 3, 2, BF16, 0, 16, coarse=True, parameters=BF16),
    Forward((1, 2, 36, 70), 3, 3, BF16, last=True, rotate=True),
    Forward((2, 1, 67, 78), 5, 2, F16, 0, 4, coarse=True),
    Forward((1, 2, 70, 134), 5, 3, BF16, 0, 4, rotate=True, multiprocessors=2),
    Forward((1, 1, 66, 76), 7, 1, F16, 0, 8, parameters=torch.float64),
    Forward((2, 1, 70, 72), 5, 3, BF16, 0, 16, base=False),
    # Blocks of a channel in groups that run after each other; two tiles in a block.
    Forward((23, 3, 33, 34), 5, 1, F16, 0, 4, rotate=True, multiprocessors=2),
    Forward((2, 2, 67, 75), 5, 2, F16, rotate=True, aligned=True),
]
# Tiles by bulk copies: of rows that end within a piece, of the input or the output alone, and what
# runs where the hardware has none.
BOXES = [
    Forward((2, 1, 67, 75), 5, 2, F32, coarse=True, aligned=True),
    Forward((1, 2, 70, 131), 3, 3, F32, rotate=True, aligned=True, multiprocessors=2),
    Forward((1, 2, 70, 131), 5, 3, F32, base=False, aligned=True),
    Forward((1, 3, 66, 66), 9, 1, F32, aligned=True),
    Forward((2, 1, 67, 75), 5, 2, F16, coarse=True, aligned=True),
    Forward((1, 2, 70, 131), 7, 1, BF16, rotate=True, aligned=True, multiprocessors=2),
    Forward((1, 1, 33, 75), 9, 2, F16, aligned=True),
    Forward((1, 1, 72, 80), 3, 1, F16, 0, 16, output_bytes=0),
    Forward((1, 1, 72, 80), 5, 2, BF16, output_bytes=16),
    *(replace(case, bulk_copies=False) for case in TILES if case.levels < 3 and case.bytes == 16),
]


def is_band(case: Forward) -> bool:
    return case.dtype == F32 and not case.base  # no operator has bands of a half type


# Bands that were there before the kernel before them began.
BANDS = [replace(case, at_once=True) for case in PLANES + GROUPS + TILES + BOXES if is_band(case)]


def run_forward(
    kernels: Emulator, case: Forward, params: Parameters, values: Tensor, coarse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Input and output of the kernel, after a look at what lies around the output."""
    size = case.dtype.itemsize
    output_bytes = case.bytes if case.output_bytes is None else case.output_bytes
    units = [16 // size if case.aligned else max(1, n // size) for n in (case.bytes, output_bytes)]
    x = Placed(values, case.dtype, units[0], case.last)
    y = empty(case.shape, case.dtype, units[1], case.last)
    band = is_band(case)
    at_once = case.at_once or not band
    launch = emulator.PatchLaunch(
        params=params.raw(case.rotate, bias=not case.rotate),
        input=View.of(x.tensor),
        output=View.of(y.tensor),
        coarse=None if coarse is None else coarse.data_ptr(),
        coarse_rows=0 if coarse is None else coarse.shape[2],
        coarse_cols=0 if coarse is None else coarse.shape[3],
        **sizes(case.shape, case.kernel, case.levels, case.cells, case.group),
        input_bytes=max(case.bytes, size),
        output_bytes=max(output_bytes, size),
        # Behind the coarse levels; an input gradient, behind weight gradients; a low-pass band, in
        # groups of channels, which read before they wait, only where the kernel before had it.
        early=(case.coarse or case.rotate or band) and (at_once or not case.group),
        reads_at_once=at_once,
        tensor_cores=case.tensor_cores,
    )
    if launch.early and coarse is not None:
        kernels.write_late(coarse)
    elif launch.early and not at_once:
        kernels.write_late(x.storage)
    elif launch.early:  # what it writes before it waits is lost
        kernels.write_late(y.storage)
    kernels.forward(launch, case.dtype, case.multiprocessors, case.bulk_copies)
    y.assert_nothing_else_written()
    return x.tensor, y.tensor


@pytest.mark.parametrize(
    "case",
    PLANES + GROUPS + MMA_GROUPS + MMA_COLUMNS + MMA_PIECES + TILES + BOXES + BANDS,
    ids=str,
)
def test_forward_is_the_operator(kernels: Emulator, case: Forward) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = case.shape
    params = Parameters(channels, case.kernel, case.levels, case.parameters, case.base)
    values, step = torch.randn(case.shape) + 0.5, 2**case.levels
    coarse = torch.randn(batch, channels, -(-height // step), -(-width // step))
    x, y = run_forward(kernels, case, params, values, coarse if case.coarse else None)
    given = x.double()
    if case.rotate:
        given.requires_grad_()
        output = apply(given, params.leaves(), case.base, bias=False)
        (expected,) = torch.autograd.grad(output, given, x.double())
    else:
        expected = apply(given, params.leaves(), case.base).detach()
    if case.coarse:
        expected = expected + raised(coarse.double(), height, width, case.levels)
    assert relative_error(y, expected) < FORWARD_TOLERANCE[case.dtype]


@pytest.mark.parametrize("levels", [1, 3])
def test_tensor_cores_read_deeper_levels_at_two_alone(kernels: Emulator, levels: int) -> None:
    case = Forward((1, 1, 66, 72), 5, levels, F16, 0, 16, coarse=True)
    coarse = torch.randn(1, 1, -(-66 >> levels), -(-72 >> levels))
    with pytest.raises(RuntimeError, match="no such patch kernel"):
        run_forward(kernels, case, Parameters(1, 5, levels, F32), torch.randn(case.shape), coarse)


def test_gradients_that_the_half_type_holds_do_not_overflow_at_one_level(kernels: Emulator) -> None:
    """The sum of four of them is past its range."""
    values = torch.zeros(1, 8, 40, 40)
    values[..., 20:22, 20:22] = 4e4
    case = Forward((1, 8, 40, 40), 5, 1, F16, 1, 16, True, 8, rotate=True, mma=True)
    params = Parameters(8, 5, 1, F32)
    for weight in params.weights:
        weight /= 64
    _, y = run_forward(kernels, case, params, values, None)
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("side", [16, 32])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_infinity_stays_in_its_plane_of_a_tile(kernels: Emulator, kernel: int, side: int) -> None:
    cells = 64 // side
    case = Forward((cells**2, 1, side, side), kernel, 4, F16, cells, 16)
    params, values = Parameters(1, kernel, 4, F32), torch.randn(case.shape)
    for item, row, col in ((0, side - 1, side - 1), (cells, 0, 0), (cells + 1, side // 2, 0)):
        ill = values.clone()
        ill[item, 0, row, col] = torch.inf
        _, y = run_forward(kernels, case, params, ill, None)
        assert not bool(torch.isfinite(y[item]).all())
        y[item] = 0
        assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("side", [9, 16, 17, 32])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_infinity_stays_in_its_plane_of_a_group(
    kernels: Emulator, levels: int, side: int, kernel: int
) -> None:
    """Of the items and channels of a window, of others, and of the block's next items."""
    cells, items = (2, 2) if side > 16 else (4, 8)
    case = Forward((2 * items, 8, side, side), kernel, levels, F16, cells, 16, True, 8, mma=True)
    params, values, end = Parameters(8, kernel, levels, F32), torch.randn(case.shape), side - 1
    for item, channel, row, col in ((0, 0, end, end), (1, 1, 0, 0), (items - 1, 6, 0, end)):
        ill = values.clone()
        ill[item, channel, row, col] = torch.inf
        _, y = run_forward(kernels, case, params, ill, None)
        assert not bool(torch.isfinite(y[item, channel, row, col]))
        y[item, channel] = 0
        assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("levels", [1, 2])
def test_infinity_reaches_few_columns_of_a_group_on_tensor_cores(
    kernels: Emulator, kernel: int, levels: int
) -> None:
    rows, cols = 2 * kernel * levels, 16 * levels
    values = torch.randn(1, 8, 50, 56)
    values[0, 3, 7, 23] = torch.inf
    case = Forward((1, 8, 50, 56), kernel, levels, F16, 1, 16, True, 8, mma=True)
    _, y = run_forward(kernels, case, Parameters(8, kernel, levels, F32), values, None)
    assert not bool(torch.isfinite(y[0, 3, 7, 23]))
    y[0, 3, max(0, 7 - rows) : 7 + rows + 1, max(0, 23 - cols) : 23 + cols + 1] = 0
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_infinity_reaches_few_columns_on_tensor_cores(
    kernels: Emulator, kernel: int, levels: int
) -> None:
    """The rows that taps meet, and the columns of the products behind 16 outputs per level."""
    rows, cols = 2 * kernel * levels, 16 * levels
    for row, col in ((64, 64), (71, 79), (63, 127), (96, 100)):
        values = torch.randn(1, 1, 136, 192)
        values[0, 0, row, col] = torch.inf
        case = Forward((1, 1, 136, 192), kernel, levels, F16, 0, 16)
        _, y = run_forward(kernels, case, Parameters(1, kernel, levels, F32), values, None)
        assert not bool(torch.isfinite(y[0, 0, row, col]))
        y[0, 0, max(0, row - rows) : row + rows + 1, max(0, col - cols) : col + cols + 1] = 0
        assert bool(torch.isfinite(y).all())
