"""Measurements as a CSV file: one line for each, columns as the fields of their dataclass."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[Any], path: Path, header: str = "") -> None:
    """Write ``rows``, instances of one dataclass and at least one, after ``header`` as a comment.

    None is an empty cell; floats have 6 significant digits.
    """
    with path.open("w", newline="") as file:
        if header:
            file.write(f"# {header}\n")
        names = [field.name for field in fields(rows[0])]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = asdict(row)
            for name, value in values.items():
                if isinstance(value, float):
                    values[name] = f"{value:.6g}"
            writer.writerow(values)
