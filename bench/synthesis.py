"""``python -m bench synthesis``: the two lowerings of synthesis, between neighbours that fuse.

    relu(synthesis(sin(base), coefficients)) + base

With ``WTCONV_INDUCTOR_SYNTHESIS=extern`` Inductor calls the kernel between two loops, with
``pointwise`` all of it is one loop. Traffic per element of base in reads and writes of its dtype:
extern reads base twice and the coefficients once and writes sin, synthesis and result; pointwise
reads base and the coefficients and writes the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.cuda_run import DTYPES
from bench.cuda_timing import ColdTimer, Timer, interleaved_medians
from bench.environment import gpu_line
from bench.shapes import Size
from bench.timing import WallClock, threads
from wtconv_ops.demo.timing import processor_name

OPTION = "WTCONV_INDUCTOR_SYNTHESIS"
LOWERINGS = ("extern", "pointwise")
EAGER = "eager"
#: Relative error against fp64 that a variant may have.
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class SynthesisSettings:
    """What to time."""

    device: str
    sizes: tuple[Size, ...]
    levels: tuple[int, ...] = (1, 3)
    dtypes: tuple[str, ...] = ("float32",)
    rounds: int = 11
    threads: int = 2


@dataclass(frozen=True)
class SynthesisRow:
    """One variant of one case; the columns of the CSV file."""

    machine: str
    shape: str
    levels: int
    dtype: str
    variant: str
    ms: float
    error: float


class WrongSynthesisError(Exception):
    """A variant is too far from fp64."""


def between_neighbours(base: Tensor, *coefficients: Tensor) -> Tensor:
    """relu(synthesis(sin(base), coefficients)) + base."""
    y: Tensor = torch.ops.wtconv.synthesis(base.sin(), list(coefficients))
    return y.relu() + base


def run(settings: SynthesisSettings, progress: Callable[[str], None]) -> list[SynthesisRow]:
    """Check every variant against fp64, then time them in turn.

    Raises:
        WrongSynthesisError: a variant is too far from fp64.
    """
    device = torch.device(settings.device)
    cuda = device.type == "cuda"
    clock: Timer = ColdTimer(device) if cuda else WallClock()
    machine = gpu_line(device) if cuda else f"{processor_name()}; torch {torch.__version__}"
    rows = []
    with threads(settings.threads), torch.no_grad():
        for size in settings.sizes:
            for levels in settings.levels:
                for dtype in settings.dtypes:
                    progress(f"synthesis {size} L{levels} {dtype}")
                    tensors = make_tensors(size, levels, DTYPES[dtype], device)
                    errors, times = _measure(tensors, clock, settings.rounds, cuda)
                    rows += [
                        SynthesisRow(
                            machine, str(size), levels, dtype, name, times[name,], errors[name]
                        )
                        for name in errors
                    ]
    return rows


def make_tensors(size: Size, levels: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Base [B, C, H, W] and the coefficients [B, 4C, h, w] of each level, finest first."""
    generator = torch.Generator().manual_seed(1)
    height, width = size.height, size.width
    shapes = [(size.batch, size.channels, height, width)]
    for _ in range(levels):
        height, width = (height + 1) // 2, (width + 1) // 2
        shapes.append((size.batch, 4 * size.channels, height, width))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _measure(
    tensors: list[Tensor], clock: Timer, rounds: int, cuda: bool
) -> tuple[dict[str, float], dict[tuple[str, ...], float]]:
    """Relative error and median ms of each variant."""
    exact = between_neighbours(*(tensor.double() for tensor in tensors))
    torch.compiler.reset()
    functions = {
        EAGER: between_neighbours,
        **{name: _compiled(name, tensors) for name in LOWERINGS},
    }
    errors, samplers = {}, {}
    for name, function in functions.items():
        error = float((function(*tensors).double() - exact).norm() / exact.norm())
        if not error <= LIMITS[tensors[0].dtype]:  # also for NaN
            raise WrongSynthesisError(f"synthesis, {name}: relative error {error:.2e} to fp64")
        errors[name] = error
        call = _bound(function, tensors)
        samplers[name,] = clock.prepare(call, "events" if cuda else "eager")
    return errors, interleaved_medians(samplers, rounds)


def _bound(function: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Tensor]:
    return lambda: function(*tensors)


def _compiled(lowering: str, tensors: list[Tensor]) -> Callable[..., Tensor]:
    """The function compiled with a lowering; Dynamo keeps what it compiles by the code object."""
    code = between_neighbours.__code__.replace(co_name=f"with_{lowering}")
    function = FunctionType(code, globals())
    compiled: Callable[..., Tensor] = torch.compile(function, fullgraph=True, dynamic=False)
    with _option(lowering):
        compiled(*tensors)
    return compiled


@contextmanager
def _option(lowering: str) -> Iterator[None]:
    """The environment variable within the block."""
    before = os.environ.get(OPTION)
    os.environ[OPTION] = lowering
    try:
        yield
    finally:
        if before is None:
            del os.environ[OPTION]
        else:
            os.environ[OPTION] = before


def print_synthesis(rows: Sequence[SynthesisRow], console: Console) -> None:
    """Print one line for each case."""
    table = Table(title="relu(synthesis(sin(base), coefficients)) + base, ms")
    for name in ("shape", "levels", "dtype"):
        table.add_column(name, no_wrap=True)
    for name in (EAGER, *LOWERINGS, "extern / pointwise"):
        table.add_column(name, justify="right")
    for case in dict.fromkeys((r.shape, r.levels, r.dtype) for r in rows):
        ms = {r.variant: r.ms for r in rows if (r.shape, r.levels, r.dtype) == case}
        values = [*ms.values(), ms["extern"] / ms["pointwise"]]
        table.add_row(case[0], str(case[1]), case[2], *(f"{value:.4g}" for value in values))
    console.print(table)
    console.print(rows[0].machine, highlight=False)
