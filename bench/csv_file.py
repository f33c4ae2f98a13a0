"""Measurements as a CSV file: one line for each, columns as the fields of their dataclass."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def csv_sink(path: Path, header: str = "") -> Iterator[Callable[[Sequence[Any]], None]]:
    """A function that writes rows, instances of one dataclass, below ``header`` as a comment.

    The first row makes the file, and what was written is in it at once: a run that is cut short
    keeps its rows, and one without any leaves an earlier file alone. None is an empty cell; floats
    have 6 significant digits.
    """
    with ExitStack() as stack:
        file: TextIO | None = None

        def write(rows: Sequence[Any]) -> None:
            nonlocal file
            if not rows:
                return
            names = [field.name for field in fields(rows[0])]
            if file is None:
                file = stack.enter_context(path.open("w", newline=""))
                if header:
                    file.write(f"# {header}\n")
                csv.DictWriter(file, names, lineterminator="\n").writeheader()
            writer = csv.DictWriter(file, names, lineterminator="\n")
            for row in rows:
                values = asdict(row)
                for name, value in values.items():
                    if isinstance(value, float):
                        values[name] = f"{value:.6g}"
                writer.writerow(values)
            file.flush()

        yield write
