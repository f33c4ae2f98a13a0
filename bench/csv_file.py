"""Measurements as a CSV file: one line for each, columns as the fields of their dataclass."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


@contextmanager
def csv_sink(path: Path, header: str = "") -> Iterator[Callable[[Sequence[Any]], None]]:
    """A function that writes rows, instances of one dataclass, below ``header`` as a comment.

    What it has written is in the file at once: a run that is cut short keeps it. None is an empty
    cell; floats have 6 significant digits.
    """
    with path.open("w", newline="") as file:
        if header:
            file.write(f"# {header}\n")
        writer: csv.DictWriter[str] | None = None

        def write(rows: Sequence[Any]) -> None:
            nonlocal writer
            for row in rows:
                if writer is None:
                    names = [field.name for field in fields(row)]
                    writer = csv.DictWriter(file, names, lineterminator="\n")
                    writer.writeheader()
                values = asdict(row)
                for name, value in values.items():
                    if isinstance(value, float):
                        values[name] = f"{value:.6g}"
                writer.writerow(values)
            file.flush()

        yield write
