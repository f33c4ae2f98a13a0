"""Which step is running, shown while a person is watching and not otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def watched_steps(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each of ``total`` steps as it begins.

    A progress bar appears on stderr if stderr is a terminal; else nothing is written.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("", total=total)
        started = 0

        def begin(name: str) -> None:
            nonlocal started
            progress.update(task, completed=started, description=name)
            started += 1

        yield begin
