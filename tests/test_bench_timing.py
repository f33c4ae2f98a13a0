"""The GPU clock: spin, flush, start, call, end; what the clock must not include."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from clocks import CountingTimer, FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cuda_timing import (
    LONGEST_HEAD_START,
    ColdTimer,
    copy_speed,
    head_start,
    interleaved_medians,
    tf32,
    with_tf32,
)


@given(st.floats(0, 100), st.floats(0, 100))
@settings(max_examples=50, deadline=None)
def test_head_start_is_longer_than_the_host_time_up_to_its_cap(first: float, second: float) -> None:
    assert head_start(first) > first or head_start(first) == LONGEST_HEAD_START
    assert head_start(first) <= LONGEST_HEAD_START
    assert (head_start(first) <= head_start(second)) or first > second


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_flush_is_the_last_work_before_the_start_and_the_spin_before_it(gpu: FakeGpu) -> None:
    sampler = ColdTimer(torch.device("cuda")).prepare(gpu.call, "events")
    assert gpu.sampled(sampler) == ["spin", "flush", "event", "call", "event"]


def test_spin_outlasts_the_measured_host_time(gpu: FakeGpu) -> None:
    gpu.host_ms = 2.0
    sampler = ColdTimer(torch.device("cuda")).prepare(gpu.call, "events")
    sampler()
    assert gpu.spins[-1] == pytest.approx(head_start(2.0))


def test_sample_in_which_the_device_waited_for_the_host_is_repeated(gpu: FakeGpu) -> None:
    sampler = ColdTimer(torch.device("cuda")).prepare(gpu.call, "events")
    first = head_start(0.0)
    gpu.too_short = 3 * first
    assert gpu.sampled(sampler).count("call") == 3
    assert gpu.spins[-3:] == pytest.approx([first, 2 * first, 4 * first], rel=1e-5)
    assert gpu.sampled(sampler).count("call") == 1  # the next begins with what was found
    gpu.too_short = 1e9
    assert gpu.sampled(sampler)[-1] == "event"
    assert gpu.spins[-1] == pytest.approx(LONGEST_HEAD_START)


def test_flushes_stand_in_for_a_missing_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, sleep=False)
    gpu.spins, gpu.host_ms = [1.0], 3.0
    sampler = ColdTimer(torch.device("cuda")).prepare(gpu.call, "events")
    # A flush takes 1 ms on this device.
    assert gpu.sampled(sampler) == ["flush"] * 5 + ["flush", "event", "call", "event"]


def test_eager_is_the_wall_time_on_an_idle_device_with_a_cold_cache(gpu: FakeGpu) -> None:
    gpu.host_ms = 2.5
    sampler = ColdTimer(torch.device("cuda")).prepare(gpu.call, "eager")
    assert gpu.sampled(sampler) == ["call", "flush", "wait", "call", "wait"]
    assert sampler() == pytest.approx(2.5)


def test_unknown_method_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match="method must be one of events, graph, eager, got wall"):
        ColdTimer(torch.device("cuda")).prepare(gpu.call, "wall")


def test_rounds_are_interleaved_and_the_median_is_taken() -> None:
    order: list[str] = []

    def sampler(name: str, values: list[float]) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return values.pop()

        return sample

    samplers = {("a",): sampler("a", [1.0, 9.0, 2.0]), ("b",): sampler("b", [5.0, 4.0, 3.0])}
    assert interleaved_medians(samplers, 3) == {("a",): 2.0, ("b",): 4.0}
    assert order == ["a", "b"] * 3


def test_copy_speed_counts_bytes_read_and_written() -> None:
    # 11 samples of 1 to 11 ms: a median of 6 ms.
    speed = copy_speed(CountingTimer(), torch.device("cpu"), elements=1000)
    assert speed == pytest.approx(2 * 4 * 1000 / 6e-3 / 1e9)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_set_within_and_restored_after(
    before: bool, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    with tf32(allowed):
        assert torch.backends.cudnn.allow_tf32 is allowed
        assert with_tf32(lambda: torch.backends.cudnn.allow_tf32)() is True
        assert torch.backends.cudnn.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is before
