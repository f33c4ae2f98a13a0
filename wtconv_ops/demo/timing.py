"""Interleaved timing: every round times each function once, so drift hits all alike."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from timeit import timeit

import torch


def interleaved_times(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    sample_ms: float,
    threads: int | None = None,
) -> dict[str, list[float]]:
    """Time each function ``rounds`` times in turn; returns ms per call, one value per round.

    Args:
        functions: by name; each is called without arguments.
        rounds: number of samples of each function, >= 1.
        sample_ms: a sample repeats a fast function until it takes about this long, in ms.
        threads: intra-op threads while timing; None keeps the current number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        repeats = {}
        for name, function in functions.items():
            function()  # the first call may allocate, plan or compile
            repeats[name] = max(1, min(1000, round(sample_ms / max(_time(function, 1), 1e-3))))
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                times[name].append(_time(function, repeats[name]))
    finally:
        torch.set_num_threads(before)
    return times


def _time(function: Callable[[], object], repeats: int) -> float:
    """Ms per call over ``repeats`` calls, by the benchmark timer of the standard library."""
    return timeit(function, number=repeats) * 1e3 / repeats


def median_times(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each function's samples, in ms."""
    return {name: median(samples) for name, samples in times.items()}


def processor_name() -> str:
    """Model name of the CPU, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
