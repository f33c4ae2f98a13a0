"""Fixtures: the operators (skip without the library) and the devices that have kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
import torch._dynamo
from emulator import Emulator
from memory import poisoned_memory

import wtconv_ops
from wtconv_ops import _library


def pytest_configure() -> None:
    """Parallel test processes share the cores instead of each starting a thread for every core."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def why_no_kernels(device: str) -> str | None:
    """Reason why a test on ``device`` cannot run; None if it can."""
    if _library.library() is None:
        return f"no operator library: {_library.problem()}"
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False"
    try:
        wtconv_ops.can_run(device, torch.float32, 5, 1, raise_error=True)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def ops() -> Any:
    """``torch.ops.wtconv``; skips where the library is missing."""
    reason = why_no_kernels("cpu")
    if reason is not None:
        pytest.skip(reason)
    return torch.ops.wtconv


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The CUDA kernels on the CPU; skips where there is nothing to build them with."""
    return Emulator(emulator.shared_folder(tmp_path_factory))


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that has kernels; of a device without, one skip per file says why."""
    return str(request.param)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the tests on a device without kernels, keep one in each file and skip it."""
    without: dict[str, str | None] = {device: why_no_kernels(device) for device in ("cpu", "cuda")}
    kept: dict[tuple[Path, str], pytest.Item] = {}
    counts: dict[tuple[Path, str], int] = {}
    chosen = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        device = "" if callspec is None else str(callspec.params.get("device", ""))
        if without.get(device) is None:
            chosen.append(item)
            continue
        key = (item.path, device)
        counts[key] = counts.get(key, 0) + 1
        if key not in kept:
            kept[key] = item
            chosen.append(item)
    for (path, device), item in kept.items():
        number = counts[path, device]
        item.add_marker(pytest.mark.skip(f"{number} tests on {device}: {without[device]}"))
    items[:] = chosen


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts with the same seed and the same number of threads."""
    torch.manual_seed(0)
    number = torch.get_num_threads()
    yield
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler without graphs, counters or sizes of another test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN, in bytes 255, while the test runs."""
    with poisoned_memory():
        yield
