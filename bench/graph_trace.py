"""Idle time between the kernels of a replayed CUDA graph, from the trace of the profiler.

    launch of a graph |--- kernel ---|  gap  |-- kernel --|--- kernel ---| ...

The kernels of a graph are those that one launch started, which the trace says of each; what lies
between two launches is the host's time and no gap of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.cuda_timing import Call


@dataclass(frozen=True)
class Work:
    """A kernel on the GPU, or a copy or fill by the driver; times in µs."""

    launch: int  # the same for all work of one launch of a graph
    start: float
    end: float


def device_work(events: Iterable[Any]) -> list[Work]:
    """The work of a GPU among the events of a profile; ranges that only mark it are left out."""
    return [
        Work(event.id, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def largest_gap_us(work: Sequence[Work]) -> float | None:
    """Longest time in µs in which a graph that was launched had no work running.

    Returns:
        0 where all work of a graph overlaps; None if no launch started two kernels.
    """
    gaps: list[float] = []
    for launch in dict.fromkeys(one.launch for one in work):
        chain = sorted((one for one in work if one.launch == launch), key=lambda one: one.start)
        end = chain[0].end
        for one in chain[1:]:
            gaps.append(max(0.0, one.start - end))
            end = max(end, one.end)
    return max(gaps, default=None)


def replay_gap_us(call: Call, device: torch.device, replays: int = 11) -> float | None:
    """Median over ``replays`` traces of :func:`largest_gap_us` of one call.

    Args:
        call: Replays graphs; has run before.
        device: Where it runs.
        replays: Number of calls, each in a trace of its own.

    Returns:
        µs; None if ``call`` replays no graph of two kernels or more.
    """
    found = []
    for _ in range(replays):
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize(device)
        found.append(largest_gap_us(device_work(profiled.events() or [])))
    gaps = [gap for gap in found if gap is not None]
    return median(gaps) if gaps else None
