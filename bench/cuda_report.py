"""CSV file, tables and geometric means of a GPU run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cuda_providers import COMPILED, REFERENCE_TF32, STAGED, UPSTREAM, depthwise_name
from bench.cuda_run import DTYPES, Row
from bench.providers import DEPTHWISE, OURS, REFERENCE
from bench.timing import MODES, geometric_mean

_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_SHORT = {"nchw": "NCHW", "channels_last": "NHWC"}


def cells_of(row: Row) -> dict[str, Any]:
    """What a row has in each column of the CSV file."""
    return asdict(row) | {
        "layout": _SHORT[row.layout],
        "ms": f"{row.ms:.4g}",
        "gb_per_s": f"{row.gb_per_s:.0f}",
        "copy_percent": f"{row.copy_percent:.1f}",
        "error": "" if row.error is None else f"{row.error:.0e}".replace("e-0", "e-"),
        "peak_mib": "" if row.peak_mib is None else f"{row.peak_mib:.6g}",
    }


def _select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    return [r for r in rows if all(getattr(r, name) == value for name, value in wanted.items())]


def rivals(kernel_size: int) -> list[tuple[str, str]]:
    """Providers to compare with, each with its layout: "same", as ours, or "faster" of both."""
    sizes = dict.fromkeys([depthwise_name(kernel_size), DEPTHWISE])
    convolutions = [(name, layout) for name in sizes for layout in ("same", "faster")]
    names = (REFERENCE, REFERENCE_TF32, COMPILED, UPSTREAM, STAGED)
    layers = [(name, "same") for name in names]
    return layers + convolutions


def speed_up(ours: Sequence[Row], rows: Sequence[Row], provider: str, layout: str) -> float | None:
    """Geometric mean of time(provider) / time(ours); None where it was not timed on every shape.

    Args:
        ours: rows of this package, one for each shape.
        rows: all rows of the run.
        provider: the rival; a plain convolution has no levels.
        layout: "same" as that of ours, or the "faster" of the rival's layouts, shape by shape.
    """
    ratios = []
    for mine in ours:
        others = [
            r.ms
            for r in _select(
                rows,
                sweep=mine.sweep,
                shape=mine.shape,
                dtype=mine.dtype,
                mode=mine.mode,
                method=mine.method,
                provider=provider,
            )
            if r.levels in (None, mine.levels) and (layout == "faster" or r.layout == mine.layout)
        ]
        if not others:
            return None
        ratios.append(min(others) / mine.ms)
    return geometric_mean(ratios)


def _cases(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Rows of ours that go into one mean, with a title; the paper's sweep level by level."""
    ours = _select(rows, provider=OURS)
    keys = dict.fromkeys(
        (r.sweep, r.dtype, r.layout, r.mode, r.method, r.levels if r.sweep == "paper" else None)
        for r in ours
    )
    for sweep, dtype, layout, mode, method, levels in keys:
        chosen = _select(ours, sweep=sweep, dtype=dtype, layout=layout, mode=mode, method=method)
        if levels is not None:
            chosen = _select(chosen, levels=levels)
        title = f"{sweep} {dtype} {_SHORT[layout]} {mode} {'' if levels is None else f'L{levels} '}"
        yield title + _suffix(method), chosen


def _suffix(method: str) -> str:
    """What a title says about the method; events go without saying."""
    return "" if method == "events" else method


def print_means(rows: Sequence[Row], kernel_size: int, console: Console) -> None:
    """Print the geometric means of ours over every rival, and its share of the copy speed."""
    chosen = [rival for rival in rivals(kernel_size) if any(r.provider == rival[0] for r in rows)]
    table = Table(title="geometric mean speed-up of wtconv_ops over")
    table.add_column("case", no_wrap=True)
    for name, layout in chosen:
        suffix = ", faster layout" if layout == "faster" else ""
        table.add_column(f"{name}{suffix}", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("% of copy", justify="right")
    for title, ours in _cases(rows):
        values = (speed_up(ours, rows, name, layout) for name, layout in chosen)
        table.add_row(
            title.strip(),
            *("-" if value is None else f"{value:.2f}" for value in values),
            f"{geometric_mean(r.ms for r in ours):.4f}",
            f"{geometric_mean(r.copy_percent for r in ours):.1f}",
        )
    console.print(table)


def memory_ratios(ours: Row, rows: Sequence[Row]) -> tuple[float, float | None, float | None]:
    """Peak memory of ours over its tensors, over the depthwise 7x7 and over the reference.

    The tensors are input and output, in training their gradients, too; all have the input's size.
    The rivals run in the same layout; None for one that was not run.
    """
    if ours.peak_mib is None:
        raise ValueError("memory_ratios: ours has no peak")
    same = _select(rows, shape=ours.shape, dtype=ours.dtype, layout=ours.layout, mode=ours.mode)
    others = [
        next((r.peak_mib for r in _select(same, provider=name, levels=levels) if r.peak_mib), None)
        for name, levels in ((DEPTHWISE, None), (REFERENCE, ours.levels))
    ]
    batch, channels, height, width = (int(n) for n in ours.shape.split("x"))
    tensor = batch * channels * height * width * _ITEM_BYTES[ours.dtype] / 2**20
    depthwise, reference = (None if o is None else ours.peak_mib / o for o in others)
    tensors = 2 if ours.mode == "forward" else 4
    return ours.peak_mib / (tensors * tensor), depthwise, reference


def print_memory(rows: Sequence[Row], console: Console) -> None:
    """Print the largest `memory_ratios` over the shapes of each case, if any has a peak."""
    table = Table(title="peak memory of wtconv_ops over, largest of all shapes")
    for name in ("case", "tensors of the call", DEPTHWISE, REFERENCE):
        table.add_column(name, no_wrap=name == "case")
    for title, ours in _cases(rows):
        if any(r.peak_mib is None for r in ours):
            continue
        columns = zip(*(memory_ratios(r, rows) for r in ours), strict=True)
        largest = [max((v for v in column if v is not None), default=None) for column in columns]
        table.add_row(title.strip(), *("-" if v is None else f"{v:.2f}" for v in largest))
    if table.rows:
        console.print(table)


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print the median ms of every provider, one table for each sweep, dtype and mode.

    "-" is what was not timed: a provider that failed, or has no kernels for this.
    """
    keys = dict.fromkeys((r.sweep, r.dtype, mode) for r in rows for mode in MODES)
    for sweep, dtype, mode in keys:
        chosen = _select(rows, sweep=sweep, dtype=dtype, mode=mode)
        columns = list(
            dict.fromkeys(
                (r.provider, r.layout, r.method)
                for r in _select(rows, sweep=sweep, mode=mode)  # of any dtype
                if r.provider != REFERENCE_TF32 or dtype == "float32"
            )
        )
        table = Table(title=f"{sweep}, {dtype}, {mode}: median ms; for wtconv_ops also % of copy")
        table.add_column("shape", no_wrap=True)
        for name, layout, method in columns:
            title = f"{name} {_SHORT[layout]} {_suffix(method)}"
            table.add_column(title.strip(), justify="right")
        cells = {
            (r.shape, r.levels, r.provider, r.layout, r.method): f"{r.ms:.4f}"
            + (f" {r.copy_percent:.0f}%" if r.provider == OURS else "")
            for r in chosen
        }
        for shape, levels in dict.fromkeys((r.shape, r.levels) for r in chosen if r.levels):
            values = [
                cells.get((shape, levels, *column), cells.get((shape, None, *column), "-"))
                for column in columns
            ]
            table.add_row(f"{shape} L{levels}", *values)
        console.print(table)
