"""Gaps between the kernels of a graph, from the events of a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench import graph_trace
from bench.graph_trace import Work, device_work, largest_gap_us


def event(launch: int, start: float, end: float, **changes: Any) -> Any:
    values = {
        "id": launch,
        "time_range": SimpleNamespace(start=start, end=end),
        "device_type": DeviceType.CUDA,
        "is_user_annotation": False,
    }
    return SimpleNamespace(**{**values, **changes})


def test_work_is_what_the_device_does() -> None:
    events = [
        event(3, 1.0, 2.0),
        event(3, 0.0, 9.0, device_type=DeviceType.CPU),
        event(3, 0.0, 9.0, is_user_annotation=True),
    ]
    assert device_work(events) == [Work(3, 1.0, 2.0)]


@pytest.mark.parametrize(
    ("spans", "gap"),
    [
        ([(1, 0, 2), (1, 3, 5), (1, 5.5, 6)], 1.0),
        ([(1, 3, 5), (1, 0, 2.5)], 0.5),  # the order of the events does not matter
        ([(1, 0, 9), (1, 1, 2), (1, 10, 11)], 1.0),  # one kernel runs beside a longer one
        ([(1, 0, 3), (1, 2, 4)], 0.0),
        ([(1, 0, 2), (2, 50, 51), (2, 51.25, 52)], 0.25),  # between launches there is no gap
        ([(1, 0, 2), (2, 50, 51)], None),  # kernels that were launched one by one
        ([], None),
    ],
)
def test_gap_is_the_longest_time_without_work_of_one_launch(
    spans: list[tuple[int, float, float]], gap: float | None
) -> None:
    assert largest_gap_us([Work(*span) for span in spans]) == gap


def test_gap_of_a_call_is_the_median_of_its_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = iter([0.5, 7.0, 1.5])

    class Profile:
        def __init__(self, activities: Any) -> None:
            self.gap = next(gaps)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> Any:
            return [event(1, 0.0, 2.0), event(1, 2.0 + self.gap, 9.0)]

    calls: list[int] = []
    monkeypatch.setattr(graph_trace, "profile", Profile)
    monkeypatch.setattr(graph_trace.torch.cuda, "synchronize", lambda device: None)
    found = graph_trace.replay_gap_us(lambda: calls.append(1), "cuda", replays=3)  # type: ignore
    assert (found, len(calls)) == (1.5, 3)
