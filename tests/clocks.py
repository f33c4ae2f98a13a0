"""A clock that counts, and a device whose queue can be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import cuda_timing
from bench.cuda_timing import Call, Sampler


class CountingTimer:
    """Runs the call and says 1 ms for the first sample, 2 ms for the next, and so on."""

    def __init__(self) -> None:
        self.samples = 0

    def prepare(self, call: Call, method: str) -> Sampler:
        def sample() -> float:
            call()
            self.samples += 1
            return float(self.samples)

        return sample


class FakeGpu:
    """A device whose queue is a list of names; the host takes ``host_ms`` for each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sleep: bool = True) -> None:
        self.queue: list[str] = []
        self.host_ms = 0.0
        self.now = 0.0
        self.spins: list[float] = []
        self.too_short = 0.0  # spins up to this end before the host is done
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.queue.append("event")

            def query(self) -> bool:
                return gpu.spins[-1] <= gpu.too_short

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return 1.0

        class Buffer:
            def zero_(self) -> None:
                gpu.queue.append("flush")

        def spin(cycles: int) -> None:
            gpu.queue.append("spin")
            gpu.spins.append(cycles / cuda_timing._CALIBRATION_CYCLES)

        properties = type("Properties", (), {"L2_cache_size": 8})
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.queue.append("wait"))
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: Buffer())
        monkeypatch.setattr(cuda_timing.time, "perf_counter", lambda: self.now)
        if sleep:
            monkeypatch.setattr(torch.cuda, "_sleep", spin, raising=False)
        else:
            monkeypatch.delattr(torch.cuda, "_sleep", raising=False)

    def call(self) -> None:
        self.queue.append("call")
        self.now += self.host_ms * 1e-3

    def sampled(self, sampler: Callable[[], float]) -> list[str]:
        """The queue of one sample."""
        self.queue.clear()
        assert sampler() > 0
        return list(self.queue)
