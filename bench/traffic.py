"""``python -m bench traffic``: bytes that the kernels move, by ncu, beside the I/O model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from rich.console import Console
from rich.table import Table

from bench import ncu
from bench.cuda_run import DTYPES
from bench.environment import gpu_line, output_of
from bench.io_model import (
    Plane,
    Stage,
    backward_stages,
    forward_stages,
    fused_stages,
    reference_stages,
    tiles_of,
    total,
)
from bench.shapes import Size
from bench.traffic_target import DIRECTIONS, Case


@dataclass(frozen=True)
class TrafficSettings:
    """What to profile: every combination."""

    sizes: tuple[Size, ...]
    levels: tuple[int, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    directions: tuple[str, ...] = DIRECTIONS
    kernel_size: int = 5


@dataclass(frozen=True)
class TrafficRow:
    """One kernel launch; the columns of the CSV file."""

    shape: str
    kernel_size: int
    levels: int
    dtype: str
    layout: str
    direction: str
    launch: int  # from 0, in the order of the launches
    kernel: str
    read_bytes: float
    written_bytes: float
    read_n: float  # in units of N: bytes / (elements of the input * bytes of an element)
    written_n: float


Profile = Callable[[Sequence[str]], list[ncu.KernelTraffic]]


def find_ncu() -> str:
    """The path of ncu.

    Raises:
        FileNotFoundError: ncu is not on PATH.
    """
    path = shutil.which("ncu")
    if path is None:
        raise FileNotFoundError(
            "traffic needs Nsight Compute: ncu is not on PATH; it comes with the CUDA toolkit"
        )
    return path


def run(
    settings: TrafficSettings, profile: Profile, progress: Callable[[str], None]
) -> Iterator[list[TrafficRow]]:
    """Profile input by input, each direction in a process of its own.

    Args:
        settings: what to profile.
        profile: gives the kernels of a command, as `bench.ncu.profile` does.
        progress: told what comes next.

    Yields:
        The rows of one input.

    Raises:
        bench.ncu.NcuError: the profiler failed.
    """
    inputs = product(settings.sizes, settings.levels, settings.dtypes, settings.layouts)
    for size, levels, dtype, layout in inputs:
        rows: list[TrafficRow] = []
        for direction in settings.directions:
            case = Case(size, settings.kernel_size, levels, dtype, layout, direction)
            progress(f"{size} L{levels} {dtype} {layout} {direction}")
            target = [sys.executable, "-m", "bench.traffic_target", *case.arguments()]
            rows += rows_of(case, profile(target))
        yield rows


def rows_of(case: Case, kernels: Sequence[ncu.KernelTraffic]) -> list[TrafficRow]:
    """The launches of ``case`` with their traffic in units of N."""
    unit = case.size.elements * DTYPES[case.dtype].itemsize
    return [
        TrafficRow(
            shape=str(case.size),
            kernel_size=case.kernel_size,
            levels=case.levels,
            dtype=case.dtype,
            layout=case.layout,
            direction=case.direction,
            launch=launch,
            kernel=kernel.kernel,
            read_bytes=kernel.read_bytes,
            written_bytes=kernel.written_bytes,
            read_n=kernel.read_bytes / unit,
            written_n=kernel.written_bytes / unit,
        )
        for launch, kernel in enumerate(kernels)
    ]


def models(
    direction: str, size: Size, levels: int, dtype: str, layout: str
) -> dict[str, list[Stage]]:
    """The I/O models of a pass; of the backward pass there is only that of this package."""
    side = max(size.height, size.width)  # the models are of square planes
    tiles = tiles_of(size.batch, size.channels, side)
    plane = Plane(side, DTYPES[dtype].itemsize, layout == "channels_last", tiles=tiles)
    if direction == "backward":
        return {"csrc/cuda": backward_stages(plane, levels)}
    return {
        "reference": reference_stages(levels),
        "paper's fused form": fused_stages(levels),
        "csrc/cuda": forward_stages(plane, levels),
    }


def print_traffic(rows: Sequence[TrafficRow], console: Console) -> None:
    """Print one table for each input: the kernels of each direction, their sum, the models."""
    cases = dict.fromkeys((r.shape, r.levels, r.dtype, r.layout) for r in rows)
    for shape, levels, dtype, layout in cases:
        table = Table(
            title=f"{shape} L{levels} {dtype} {layout}: device memory traffic, units of N"
        )
        table.add_column("direction")
        table.add_column("kernel")
        for name in ("read", "written", "both"):
            table.add_column(name, justify="right")
        for direction in dict.fromkeys(r.direction for r in rows):
            chosen = [
                r
                for r in rows
                if (r.shape, r.levels, r.dtype, r.layout, r.direction)
                == (shape, levels, dtype, layout, direction)
            ]
            for r in chosen:
                table.add_row(direction, r.kernel, *_cells(r.read_n, r.written_n))
            read, written = sum(r.read_n for r in chosen), sum(r.written_n for r in chosen)
            table.add_row(direction, "all kernels", *_cells(read, written), style="bold")
            for name, stages in models(direction, Size.parse(shape), levels, dtype, layout).items():
                both = f"{float(total(stages)):.3f}"
                table.add_row(direction, f"model: {name}", "", "", both)
            table.add_section()
        console.print(table)


def _cells(read: float, written: float) -> tuple[str, str, str]:
    return f"{read:.3f}", f"{written:.3f}", f"{read + written:.3f}"


def header(settings: TrafficSettings, path: str) -> str:
    """Card, software and method, in one line."""
    lines = (output_of([path, "--version"]) or "").splitlines()
    version = lines[-1] if lines else "version unknown"
    return (
        f"{gpu_line(torch.device('cuda'))}; ncu {version}; k = {settings.kernel_size}; "
        f"{ncu.READ} and {ncu.WRITTEN}, caches flushed before each kernel"
    )
