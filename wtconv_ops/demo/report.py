"""What the demonstration found, and the one table it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from wtconv_ops.demo.budget import Verdict

_LEGEND = (
    "max error: max |y - y64| against the reference in fp64\n"
    "budget: twice the max error of the reference in fp32, plus eps * max |y64|"
)


@dataclass(frozen=True)
class Row:
    """One way of running the network."""

    name: str
    size: tuple[int, int]
    graphs: int | None = None
    graph_breaks: int | None = None
    verdict: Verdict | None = None
    milliseconds: float | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Ran, in one graph if it was traced, and inside the error budget."""
        whole = self.graphs in (None, 1) and self.graph_breaks in (None, 0)
        return self.failure is None and whole and (self.verdict is None or self.verdict.within)


@dataclass(frozen=True)
class Report:
    """All rows, and the lines that say what they were measured on."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Whether every row passed."""
        return all(row.passed for row in self.rows)


def report_console() -> Console:
    """Console on stdout, wide enough for the table whatever the terminal says."""
    console = Console()
    console.width = max(console.width, 96)
    return console


def print_report(report: Report, console: Console) -> None:
    """Print the header, the table and, where a row failed, one line on why."""
    for line in report.header:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("network", no_wrap=True)
    for heading in ("size", "graphs", "graph\nbreaks", "max error", "budget", "ms"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("result")
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    console.print(_LEGEND, highlight=False, markup=False, soft_wrap=True)
    for row in report.rows:
        if not row.passed:
            line = f"{row.name}: {_reason(row)}"
            console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)


def one_line(error: BaseException) -> str:
    """Type and first line of the text of ``error``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _cells(row: Row) -> Sequence[str]:
    height, width = row.size
    verdict = row.verdict
    return (
        row.name,
        f"{height}x{width}",
        "" if row.graphs is None else str(row.graphs),
        "" if row.graph_breaks is None else str(row.graph_breaks),
        "" if verdict is None else f"{verdict.max_error:.2e}",
        "" if verdict is None else f"{verdict.max_allowed:.2e}",
        "" if row.milliseconds is None else f"{row.milliseconds:.1f}",
        "[green]equal[/green]" if row.passed else "[red]differs[/red]",
    )


def _reason(row: Row) -> str:
    if row.failure is not None:
        return row.failure
    if row.graphs not in (None, 1) or row.graph_breaks not in (None, 0):
        return f"{row.graphs} graphs, {row.graph_breaks} graph breaks"
    return "did not run" if row.verdict is None else str(row.verdict)
