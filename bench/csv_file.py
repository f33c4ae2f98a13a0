"""Measurements as a CSV file: one line for each, columns as the fields of their dataclass."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

Row = TypeVar("Row")
Sink = Callable[[Sequence[Row]], None]


def cells_of(row: Any) -> dict[str, Any]:
    """The fields of a dataclass: None is an empty cell, floats have 6 significant digits."""
    return {
        name: f"{value:.6g}" if isinstance(value, float) else value
        for name, value in asdict(row).items()
    }


@contextmanager
def csv_sink(
    path: Path, header: str = "", cells: Callable[[Row], dict[str, Any]] = cells_of
) -> Iterator[Sink[Row]]:
    """A function that writes rows of one kind, below ``header`` as a comment.

    The first row makes the file, and what was written is in it at once: a run that is cut short
    keeps its rows, and one without any leaves an earlier file alone. The end prints that there is
    a file.

    Args:
        path: The file.
        header: Its first line.
        cells: What a row has in each column.
    """
    with ExitStack() as stack:
        writer: csv.DictWriter[str] | None = None
        file: TextIO

        def write(rows: Sequence[Row]) -> None:
            nonlocal writer, file
            for row in rows:
                values = cells(row)
                if writer is None:
                    file = stack.enter_context(path.open("w", newline=""))
                    stack.callback(print, f"wrote {path}")
                    if header:
                        file.write(f"# {header}\n")
                    writer = csv.DictWriter(file, list(values), lineterminator="\n")
                    writer.writeheader()
                writer.writerow(values)
            if rows:
                file.flush()

        yield write
