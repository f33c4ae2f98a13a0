"""The patch kernels themselves, run on the CPU (emulator.py), against float64.

Inputs lie between NaN, shared memory and outputs are full of it: what a kernel must not read shows
in the result, and what it must not write shows around it.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import emulator
import pytest
import torch
from budget import relative_error
from emulator import DTYPES, Emulator, View
from torch import Tensor
from torch.nn import functional as F

from wtconv_ops import reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TILE = 64
FORWARD_TOLERANCE = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}
#: Parameters are float32, and half types are exact in the sums.
GRAD_TOLERANCE = 5e-6


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(emulator.shared_folder(tmp_path_factory))


class Placed:
    """Values amid NaN, rows in aligned pieces of `unit` elements; or pixels, channels fastest."""

    def __init__(self, values: Tensor, dtype: torch.dtype, unit: int, last: bool = False) -> None:
        channels, height, width = values.shape[1:]
        assert (channels if last else width) % unit == 0
        if last:
            pixel = channels + unit
            strides = [height * width * pixel + 3 * unit, 1, width * pixel, pixel]
        else:
            pitch = width + unit
            plane = height * pitch + unit
            strides = [channels * plane + unit, plane, pitch, 1]
        self.storage = torch.full((2 * unit + values.shape[0] * strides[0],), torch.nan).to(dtype)
        self.storage = torch.full_like(self.storage, torch.nan)
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


def raised(coarse: Tensor, height: int, width: int, levels: int) -> Tensor:
    """The synthesis of a low-pass band alone, `levels` levels up."""
    sizes = [(-(-height // 2**level), -(-width // 2**level)) for level in range(levels)]
    for size in reversed(sizes):
        bands = torch.stack([coarse, *[torch.zeros_like(coarse)] * 3], dim=2)
        coarse = reference.haar_synthesis(bands, size)
    return coarse


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
    half_parameters: bool = False
    base: bool = True

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        flags = [name for name in ("last", "coarse", "rotate", "base") if getattr(self, name)]
        dtype = str(self.dtype).removeprefix("torch.")
        cells = f"C{self.group}" if self.group else f"G{self.cells}"
        return f"{dtype}-{size}-k{self.kernel}-L{self.levels}-{cells}-{'-'.join(flags)}"


# Whole planes, G x G to a tile: full and partial groups, every width of access.
PLANES = [
    Forward((65, 1, 7, 7), 5, 3, F32, 8),
    Forward((70, 1, 8, 8), 3, 2, F32, 8, 16, multiprocessors=2),
    Forward((3, 2, 5, 6), 7, 1, F32, 8, 8),
    Forward((64, 1, 7, 7), 5, 3, F16, 8),
    Forward((130, 2, 8, 8), 3, 3, F16, 8, 16, rotate=True),
    Forward((5, 3, 7, 8), 5, 2, BF16, 8, 8, half_parameters=True),
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
    Forward((2, 1, 56, 56), 5, 6, F32, 1, 16),
    Forward((1, 2, 33, 64), 3, 1, F32, 1, 16, base=False),
    Forward((1, 1, 61, 40), 7, 5, F16, 1, 16, rotate=True),
    Forward((2, 1, 50, 37), 5, 4, BF16, 1),
    Forward((1, 1, 1, 1), 5, 3, F32, 1),
]
# Groups of channels: full and partial ones, every width of access, sizes and levels that are odd.
GROUPS = [
    Forward((5, 32, 7, 7), 5, 2, F32, 1, 16, True, 32, multiprocessors=2),
    Forward((2, 33, 8, 5), 3, 4, F16, 1, 0, True, 32, rotate=True),
    Forward((1, 36, 1, 1), 7, 3, BF16, 1, 8, True, 32),
    Forward((2, 40, 16, 15), 7, 2, F16, 1, 16, True, 32, half_parameters=True),
    Forward((9, 16, 14, 14), 5, 3, F32, 1, 16, True, 16),
    Forward((2, 20, 13, 9), 5, 5, F32, 1, 8, True, 16, rotate=True),
    Forward((3, 16, 14, 11), 3, 1, F16, 1, 16, True, 16),
    Forward((2, 16, 28, 28), 5, 4, F32, 1, 16, True, 8),
    Forward((2, 10, 17, 32), 7, 2, F16, 1, 4, True, 8),
    Forward((1, 8, 31, 18), 3, 3, BF16, 1, 16, True, 8, half_parameters=True),
    Forward((2, 4, 56, 56), 5, 5, F32, 1, 16, True, 4),
    Forward((1, 6, 33, 50), 3, 6, F16, 1, 4, True, 4),
    Forward((2, 4, 47, 64), 5, 2, F16, 1, 8, True, 4, base=False),
    Forward((1, 5, 61, 35), 7, 1, F32, 1, 0, True, 4, rotate=True),
    Forward((2, 3, 40, 36), 5, 3, F32, 1, 0, False, 4),
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
    Forward((1, 1, 72, 80), 3, 1, F16, 0, 16),
    Forward((2, 2, 67, 75), 5, 2, F16, coarse=True, rotate=True),
    Forward((3, 1, 72, 136), 5, 2, F16, 0, 16, coarse=True, multiprocessors=2),
    Forward((1, 1, 64, 64), 5, 1, BF16, 0, 16, half_parameters=True),
    Forward((1, 2, 66, 70), 3, 2, F16, last=True),
    Forward((1, 1, 72, 80), 7, 1, F16, 0, 16, rotate=True),
    Forward((1, 1, 65, 72), 7, 2, BF16, 0, 16, coarse=True),
    Forward((1, 1, 70, 72), 9, 1, F16, 0, 16, base=False),
    Forward((1, 1, 33, 35), 9, 2, F16, coarse=True),
]


@pytest.mark.parametrize("case", PLANES + GROUPS + TILES, ids=str)
def test_forward_is_the_operator(kernels: Emulator, case: Forward) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = case.shape
    unit = max(1, case.bytes // case.dtype.itemsize)
    params = Parameters(
        channels, case.kernel, case.levels, case.dtype if case.half_parameters else F32, case.base
    )
    x = Placed(torch.randn(case.shape) + 0.5, case.dtype, unit, case.last)
    y = empty(case.shape, case.dtype, unit, case.last)
    step = 2**case.levels
    coarse = torch.randn(batch, channels, -(-height // step), -(-width // step))
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    launch = emulator.PatchLaunch(
        params=params.raw(case.rotate, bias=not case.rotate),
        input=View.of(x.tensor),
        output=View.of(y.tensor),
        coarse=coarse.data_ptr() if case.coarse else None,
        coarse_rows=coarse.shape[2],
        coarse_cols=coarse.shape[3],
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        kernel_size=case.kernel,
        levels=case.levels,
        cells=case.cells,
        group=case.group,
        tiles_y=tiles_y,
        tiles_x=tiles_x,
        tiles=-(-batch // case.cells**2) if case.cells else batch * tiles_y * tiles_x,
        input_bytes=max(case.bytes, case.dtype.itemsize),
        wide_output=case.bytes == 16,
    )
    kernels.forward(launch, case.dtype, case.multiprocessors)
    given = x.tensor.double()
    if case.rotate:
        given.requires_grad_()
        output = apply(given, params.leaves(), case.base, bias=False)
        (expected,) = torch.autograd.grad(output, given, x.tensor.double())
    else:
        expected = apply(given, params.leaves(), case.base).detach()
    if case.coarse:
        expected = expected + raised(coarse.double(), height, width, case.levels)
    y.assert_nothing_else_written()
    assert relative_error(y.tensor, expected) < FORWARD_TOLERANCE[case.dtype]


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

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        cells = f"C{self.group}" if self.group else f"G{self.cells}"
        return f"{dtype}-{size}-k{self.kernel}-{cells}-{self.splits}x{self.parts}"


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
]


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_weight_gradients_are_the_adjoint(kernels: Emulator, case: Gradient) -> None:
    torch.manual_seed(0)
    batch, channels, height, width = case.shape
    size = case.dtype.itemsize
    params = Parameters(channels, case.kernel, 1, F32, case.base)
    unit = max(1, case.bytes // size)
    x = Placed(torch.randn(case.shape) + 0.5, case.dtype, unit, case.last_input)
    unit = 1 if case.last and not case.group else max(1, case.grad_bytes // size)
    g = Placed(torch.randn(case.shape) + 0.25, case.dtype, unit, case.last)
    band = (batch, channels, -(-height // 2), -(-width // 2))
    low_input, low_grad = torch.full((2, *band), torch.nan)
    if case.group:
        low_input, low_grad = torch.full((2, band[0], *band[2:], channels), torch.nan).permute(
            0, 1, 4, 2, 3
        )
    sums = 5 * case.kernel**2 + 1
    partials = torch.full((channels, case.splits * case.parts, sums), torch.nan)
    tiles_y, tiles_x = -(-height // TILE), -(-width // TILE)
    launch = emulator.PatchGradLaunch(
        input=View.of(x.tensor),
        grad_output=View.of(g.tensor),
        low_grad=low_grad.data_ptr() if case.low else None,
        low_input=low_input.data_ptr() if case.low else None,
        partials=partials.data_ptr(),
        batch=batch,
        channels=channels,
        height=height,
        width=width,
        kernel_size=case.kernel,
        cells=case.cells,
        group=case.group,
        tiles_y=tiles_y,
        tiles_x=tiles_x,
        tiles=-(-batch // case.cells**2) if case.cells else batch * tiles_y * tiles_x,
        input_bytes=max(case.bytes, size),
        grad_bytes=max(1 if case.last and not case.group else case.grad_bytes, size),
        splits=case.splits,
        parts=case.parts,
        base_wanted=case.base,
        level_wanted=case.level,
        bias_wanted=case.base,
    )
    kernels.run("weight_grad", launch, case.dtype)

    leaves = params.leaves()
    output = apply(x.tensor.double(), leaves, case.base)
    expected = torch.autograd.grad(output, leaves, g.tensor.double(), allow_unused=True)
    ours = [torch.full(leaf.shape, torch.nan) for leaf in leaves]
    weight, bias, scale, level_weight, level_scale = (result.data_ptr() for result in ours)
    finish = emulator.FinishLaunch(
        params=params.raw(),
        channels=channels,
        kernel_size=case.kernel,
        levels=1,
        num_partials=partials.shape[1],
        partials=partials.data_ptr(),
        grad_bias=bias if case.base else None,
    )
    if case.base:
        finish.gradients[0] = emulator.LevelGradient(weight, scale)
    if case.level:
        finish.gradients[1] = emulator.LevelGradient(level_weight, level_scale)
    kernels.run("finish", finish, case.dtype)
    wanted = [case.base] * 3 + [case.level] * 2
    for result, exact, want in zip(ours, expected, wanted, strict=True):
        if want:
            assert exact is not None
            assert relative_error(result, exact) < GRAD_TOLERANCE
        else:
            assert bool(result.isnan().all())
    for low, placed in ((low_input, x), (low_grad, g)):
        if case.low:
            exact = reference.haar_analysis(placed.tensor.double())[:, :, 0]
            assert relative_error(low, exact) < FORWARD_TOLERANCE[F32]
        else:
            assert bool(low.isnan().all())


@pytest.mark.parametrize(
    ("dtype", "levels", "unit", "width"),
    [(F32, 1, 4, 20), (F32, 2, 1, 21), (F32, 3, 4, 24), (F16, 2, 8, 40), (torch.float64, 1, 2, 6)],
)
def test_lowpass_is_the_mean_of_a_block(
    kernels: Emulator, dtype: torch.dtype, levels: int, unit: int, width: int
) -> None:
    torch.manual_seed(0)
    x = Placed(torch.randn(2, 3, 19, width), dtype, unit)
    rows, cols = -(-19 // 2**levels), -(-width // 2**levels)
    accumulator = torch.float64 if dtype == torch.float64 else F32
    low = torch.full((2, 3, rows, cols), torch.nan, dtype=accumulator)
    launch = emulator.LowpassLaunch(View.of(x.tensor), low.data_ptr(), 2, 3, 19, width, rows, cols)
    launch.levels, launch.wide = levels, unit * dtype.itemsize == 16
    kernels.run("lowpass", launch, dtype)
    padded = F.pad(x.tensor.double(), (0, cols * 2**levels - width, 0, rows * 2**levels - 19))
    assert relative_error(low, F.avg_pool2d(padded, 2**levels) * 2**levels) < 1e-6


#: In the order of driver.cpp, which has two more whose results hold NaN, and one without a fault.
FAULTS = [
    "access outside of the block's shared memory",
    "access to shared memory not aligned",
    "wrote outside of the block's shared memory",
    "threads wait at different barriers",
]


def test_faults_are_found(kernels: Emulator) -> None:
    for fault, words in enumerate(FAULTS):
        with pytest.raises(RuntimeError, match=words):
            kernels.faulty(fault)
    race, early = len(FAULTS), len(FAULTS) + 1
    assert bool(kernels.faulty(race).isnan().any())
    assert bool(kernels.faulty(early).isnan().all())
    assert kernels.faulty(early + 1).tolist() == [(i + 1) % 64 for i in range(64)]


def test_threads_of_a_block_do_not_race(tmp_path: Path) -> None:
    watch = ["-fsanitize=thread", "-g"]
    program, probe = tmp_path / "races", tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    command = emulator.compiler_command()
    built = subprocess.run([command[0], *watch, probe, "-o", program], capture_output=True)
    if built.returncode != 0 or subprocess.run([program], capture_output=True).returncode != 0:
        pytest.skip("needs a g++ with ThreadSanitizer")
    sources = {
        emulator.CUDA / "patch" / "forward.cu": watch,
        emulator.CUDA / "patch" / "mma_forward.cu": watch,
        emulator.CUDA / "patch" / "mma_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "group_forward.cu": watch,
        emulator.CUDA / "patch" / "group_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "choose.cpp": [],
        emulator.HOST / "races.cpp": watch,
        emulator.HOST / "cuda_on_cpu.cpp": [],
    }
    emulator.compile_and_link(program, watch, sources)
    clean = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert clean.returncode == 0, clean.stdout + clean.stderr[:4000]
    racing = subprocess.run([program, "racing"], capture_output=True, text=True, timeout=120)
    assert "data race" in racing.stderr
