"""GPU time of one call: cold L2, device events, CUDA-graph replay; the speed of a copy.

Work of a sample of ``events``, on the one stream of the device:

    spin | flush of L2 | start | kernels of the call | end
    ^ the host has enqueued all of it before the spin is over

The spin is longer than the host's time to enqueue the call, so the kernels follow one another
without gaps of the host between them, and the flush stays the last work before the start.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import torch

Call = Callable[[], object]
Sampler = Callable[[], float]

#: ``events``: device time alone. ``graph``: the same of the replay of a captured call. ``eager``:
#: wall time from the call to the end of its work on an idle device, so with the host's time; the
#: same call comes before it, as in a loop, or the host would begin with cold caches.
METHODS = ("events", "graph", "eager")

#: Longest spin in ms; a call whose enqueueing takes longer is timed with the rest of it.
LONGEST_HEAD_START = 20.0
_CALIBRATION_CYCLES = 4_000_000  # about 2 ms


class Timer(Protocol):
    """What the run needs of a clock; tests bring their own."""

    def prepare(self, call: Call, method: str) -> Sampler:
        """Warm ``call`` up; returns a function that times it once by ``method``, in ms."""
        ...


def head_start(host_ms: float) -> float:
    """Spin in ms for a call that the host enqueues in ``host_ms``: 1.5 times that and 0.05."""
    return min(1.5 * host_ms + 0.05, LONGEST_HEAD_START)


class ColdTimer:
    """Times one call after a buffer of twice the L2 cache was overwritten.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._last_graph: Callable[[], Any] = lambda: None
        # Of torch's own tests, undocumented; where it is missing, repeated flushes stand in.
        self._sleep: Callable[[int], object] | None = getattr(torch.cuda, "_sleep", None)
        if self._sleep is None:
            self._unit_ms = min(self._elapsed(self._buffer.zero_) for _ in range(5))
        else:
            sleep = self._sleep
            # The shortest: clocks that have not risen yet would make every spin too short.
            self._unit_ms = min(self._elapsed(lambda: sleep(_CALIBRATION_CYCLES)) for _ in range(5))

    def prepare(self, call: Call, method: str) -> Sampler:
        """Warm ``call`` up; returns a function that times it once by ``method``, in ms.

        Raises:
            ValueError: ``method`` is not one of `METHODS`.
            RuntimeError: ``call`` fails, or cannot be captured.
        """
        if method not in METHODS:
            raise ValueError(f"prepare: method must be one of {', '.join(METHODS)}, got {method}")
        if method == "graph":
            call = self._capture(call)
        call()  # the first call may allocate, plan or compile
        if method == "eager":
            return lambda: self._wall_time(call)
        spin_ms = head_start(max(self._host_time(call) for _ in range(3)))

        def sample() -> float:
            nonlocal spin_ms
            while True:
                self._spin(spin_ms)
                self._buffer.zero_()
                self._start.record()
                call()
                self._end.record()
                late = self._start.query()  # the device got here before the host was done
                self._end.synchronize()
                if not late or spin_ms >= LONGEST_HEAD_START:
                    elapsed: float = self._start.elapsed_time(self._end)
                    return elapsed
                spin_ms = min(2 * spin_ms, LONGEST_HEAD_START)

        return sample

    def _spin(self, milliseconds: float) -> None:
        """Keep the device busy for about that long."""
        if self._sleep is not None:
            self._sleep(round(milliseconds / self._unit_ms * _CALIBRATION_CYCLES))
            return
        for _ in range(math.ceil(milliseconds / self._unit_ms)):
            self._buffer.zero_()

    def _elapsed(self, work: Call) -> float:
        """Device time of ``work`` in ms, the host's included."""
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        elapsed: float = self._start.elapsed_time(self._end)
        return elapsed

    def _host_time(self, call: Call) -> float:
        """Wall time in ms until ``call`` returns, on an idle device."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        elapsed = (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        return elapsed

    def _wall_time(self, call: Call) -> float:
        """Wall time in ms until the work of ``call`` is done, on an idle device with a cold L2."""
        call()  # other calls came before
        self._buffer.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def _capture(self, call: Call) -> Call:
        """Capture ``call`` in a CUDA graph, after two warm-up calls on a side stream.

        Graphs that live at the same time share their memory: one runs after the other, and nobody
        reads their outputs.
        """
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        last = self._last_graph()
        try:
            with torch.cuda.graph(graph, pool=None if last is None else last.pool()):
                call()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails does not go back by itself
        self._last_graph = weakref.ref(graph)
        return graph.replay


def interleaved_medians(
    samplers: Mapping[tuple[str, ...], Sampler], rounds: int
) -> dict[tuple[str, ...], float]:
    """Median ms of each sampler; every round takes one sample of each, so drift hits all alike."""
    samples: dict[tuple[str, ...], list[float]] = {key: [] for key in samplers}
    for _ in range(rounds):
        for key, sample in samplers.items():
            samples[key].append(sample())
    return {key: median(values) for key, values in samples.items()}


def copy_speed(timer: Timer, device: torch.device, elements: int = 2**28) -> float:
    """Device-to-device copy speed in GB/s (1e9 bytes, read + written), median of 11 copies.

    Args:
        timer: the clock of the run.
        device: where to copy.
        elements: float32 elements of the source; 1 GiB by default.
    """
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    sampler = timer.prepare(lambda: target.copy_(source), "events")
    milliseconds = interleaved_medians({("copy",): sampler}, 11)
    return 2 * source.numel() * source.element_size() / milliseconds["copy",] / 1e6


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether cuDNN may use TF32 in float32 convolutions within the block; restored after it."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def with_tf32(call: Call) -> Call:
    """``call`` with TF32 allowed while it runs."""

    def allowed() -> object:
        with tf32(True):
            return call()

    return allowed
