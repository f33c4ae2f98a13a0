"""torch.compile(backend="wtconv") where Inductor fails on what the backend leaves alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from layer_cases import make_input
from test_convert import gradients_of
from torch import nn
from upstream_layers import reference_layer

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")
SIZES = [(9, 6), (8, 8), (7, 13)]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "wtconv_ops"):
        yield caplog


def model_with_other_filters() -> Any:
    """Two layers, of which the first has other filters than Haar's."""
    model = nn.Sequential(reference_layer(3, wt_levels=2), reference_layer(3, wt_levels=1))
    model[0].wt_filter.data.mul_(2)
    return model


def assert_trains_like_eager(run: Any, model: nn.Module) -> None:
    for height, width in SIZES:
        input = make_input(2, 3, height, width)
        for found, want in zip(gradients_of(run, input), gradients_of(model, input), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_other_filters_train_with_sizes_left_open(log: Any) -> None:
    """Inductor fails on the graph of the reference layer here, with or without the backend."""
    model = model_with_other_filters()
    assert_trains_like_eager(torch.compile(model, backend="wtconv", dynamic=True), model)
    assert any("left 2 alone that look like WTConv: its filter" in text for text in log.messages)


def test_a_graph_that_dynamo_captures_anew_is_compiled(log: Any) -> None:
    """Inductor asks for it to make a constant of a number, as of the momentum of BatchNorm2d."""
    model = nn.Sequential(model_with_other_filters(), nn.BatchNorm2d(3))
    run = torch.compile(model, backend="wtconv", dynamic=True)
    with torch.no_grad():
        run(make_input(2, 3, *SIZES[0]))
    assert torch._dynamo.utils.counters["inductor"]
    assert not [text for text in log.messages if "Inductor cannot compile" in text]


def refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("no truth value\nand more lines")


@pytest.mark.parametrize("changed", [False, True], ids=["as compiled", "filters changed later"])
def test_a_graph_that_inductor_refuses_runs_uncompiled_and_says_so(
    log: Any, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", refuse)
    model = model_with_other_filters()
    run = torch.compile(model, backend="wtconv", dynamic=True)
    run(make_input(2, 3, *SIZES[0]))
    if changed:  # of the layer that was replaced
        model[1].iwt_filter.mul_(3)
    assert_trains_like_eager(run, model)
    said = [text for text in log.messages if "Inductor cannot compile" in text]
    assert said[0] == (
        "backend wtconv: Inductor cannot compile what was left alone for sizes that change "
        "(TypeError: no truth value); the graph runs without compilation; "
        "torch.compile(..., dynamic=False) compiles it"
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_failures_of_inductor_are_raised(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool
) -> None:
    """With sizes that are fixed, or with nothing left alone."""
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", refuse)
    model = reference_layer(3) if dynamic else model_with_other_filters()
    with pytest.raises(Exception, match="no truth value"):
        torch.compile(model, backend="wtconv", dynamic=dynamic)(make_input(2, 3, 9, 6))
