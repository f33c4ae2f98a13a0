"""GPU time of one call: cold L2, device events, CUDA-graph replay; the speed of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]


class Timer(Protocol):
    """What the run needs of a clock; tests bring their own."""

    def sample(self, call: Call) -> float:
        """Time of one call in ms."""
        ...

    def capture(self, call: Call) -> Call:
        """A function that replays the device work of ``call``."""
        ...


class ColdTimer:
    """Device events around one call, after a buffer of twice the L2 cache was overwritten.

    The clock starts when the overwriting ends, which the host runs ahead of; a call whose host
    work takes longer than its device work is timed with the gaps it has in eager execution.
    """

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(2 * cache, dtype=torch.uint8, device=device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(self, call: Call) -> float:
        """Time of one call in ms."""
        self._buffer.zero_()
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        elapsed: float = self._start.elapsed_time(self._end)
        return elapsed

    def capture(self, call: Call) -> Call:
        """Capture ``call`` in a CUDA graph, after two warm-up calls on a side stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def interleaved_medians(
    timer: Timer, calls: Mapping[tuple[str, ...], Call], rounds: int
) -> dict[tuple[str, ...], float]:
    """Median ms of each call; every round times each once, so drift hits all alike."""
    for call in calls.values():
        call()  # the first call may allocate, plan or compile
    samples: dict[tuple[str, ...], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            samples[key].append(timer.sample(call))
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
    milliseconds = interleaved_medians(timer, {("copy",): lambda: target.copy_(source)}, 11)
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
