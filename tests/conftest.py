"""Fixtures: the operators (skip without the library) and the devices that have kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

import wtconv_ops
from wtconv_ops import _library


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


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that has kernels; skips say why one has none."""
    reason = why_no_kernels(request.param)
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """A compiler without graphs, counters or sizes of another test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
