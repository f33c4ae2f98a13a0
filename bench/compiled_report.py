"""The tables of ``python -m bench compile``: every variant, and ours beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.compiled import OURS, PEER, PEER_REPLAYED, REPLAYED, CompileRow

#: Variants whose time stands beside that of ours compiled; replays beside replays.
_SPEED = "reference eager", "reference compiled", "ours eager", PEER, PEER_REPLAYED


def print_compiled(rows: Sequence[CompileRow], machine: str, console: Console) -> None:
    """Print one table for each model, precision and layout, and one of ours beside the others."""
    columns = ("ms", "kernels", "copies", "graphs", "graph_breaks", "recompiles", "peak_mib")
    columns += ("gap_us", "cold_compile_s", "warm_compile_s")
    for key in dict.fromkeys((r.subject, r.shape, r.precision, r.layout) for r in rows):
        table = Table(title=" ".join(key))
        for name in ("mode", "variant", *columns):
            table.add_column(name.replace("_", " "), justify="left" if name in key else "right")
        for row in rows:
            if (row.subject, row.shape, row.precision, row.layout) == key:
                values = [getattr(row, name) for name in columns]
                table.add_row(row.mode, row.variant, *map(_shown, values))
        console.print(table)
    _print_ratios(rows, console)
    console.print(machine, highlight=False)


def ratios(rows: Sequence[CompileRow]) -> dict[str, float | None]:
    """How ours compiled compares with the other variants of one case and mode.

    Args:
        rows: The variants of one model in one precision, layout and mode.

    Returns:
        By the name of a variant how many times as fast as it ours compiled is (of a replayed one:
        ours replayed), and the peak memory over that of ours eager and the time of the cold
        compilation over the reference's. None: one of the two was not measured.
    """
    by_variant = {row.variant: row for row in rows}

    def over(name: str, column: str) -> float | None:
        other = getattr(by_variant.get(name), column, None)
        own = getattr(by_variant.get(REPLAYED if name == PEER_REPLAYED else OURS), column, None)
        return None if not other or own is None else own / other

    speed = {name: over(name, "ms") for name in _SPEED}
    return {
        **{name: None if value is None else 1 / value for name, value in speed.items()},
        "peak memory": over("ours eager", "peak_mib"),
        "cold compilation": over("reference compiled", "cold_compile_s"),
    }


def _print_ratios(rows: Sequence[CompileRow], console: Console) -> None:
    """Print a line of `ratios` for each case and mode."""
    title = f"{OURS}: times as fast as; peak memory over ours eager, cold compilation over the"
    table = Table(title=f"{title} reference's")
    for name in ("model", "precision", "layout", "mode"):
        table.add_column(name, no_wrap=True)
    for name in (*_SPEED, "peak memory", "cold compilation"):
        table.add_column(name, justify="right")
    cases = dict.fromkeys((r.subject, r.shape, r.precision, r.layout, r.mode) for r in rows)
    for case in cases:
        found = ratios(
            [r for r in rows if (r.subject, r.shape, r.precision, r.layout, r.mode) == case]
        )
        subject, shape, *rest = case
        shown = ("-" if value is None else f"{value:.3f}" for value in found.values())
        table.add_row(f"{subject} {shape}", *rest, *shown)
    console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
