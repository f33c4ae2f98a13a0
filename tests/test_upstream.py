"""Parity with the original layer, where WTCONV_UPSTREAM names a checkout of its repository."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from layer_cases import SHAPES, gradients, make_input, make_layer, randomize
from torch import nn

from wtconv_ops import WTConv2d

CHECKOUT = os.environ.get("WTCONV_UPSTREAM", "")

if not CHECKOUT:
    pytest.skip(
        "WTCONV_UPSTREAM does not name a checkout of the original implementation",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def original() -> Any:
    """The original layer class."""
    pytest.importorskip("pywt", reason="the original implementation needs PyWavelets")
    sys.path.insert(0, CHECKOUT)
    try:
        return importlib.import_module("wtconv.wtconv2d").WTConv2d
    finally:
        sys.path.remove(CHECKOUT)


def call(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = module(input)
    return output


def exact(theirs: Any) -> Any:
    """The original layer in float64 with filters of exactly ±½ instead of ±0.49999997."""
    theirs = copy.deepcopy(theirs).double()
    for filters in (theirs.wt_filter, theirs.iwt_filter):
        filters.data = 0.5 * filters.data.sign()
    return theirs


def test_calls_by_keyword_are_those_of_the_original(original: Any) -> None:
    for name in ("__init__", "forward"):
        theirs, ours = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (original, WTConv2d)
        )
        assert ours[: len(theirs)] == theirs  # ours may take more: device, dtype


@pytest.mark.parametrize("options", [{}, {"stride": 2, "wt_levels": 3}, {"bias": False}])
def test_checkpoints_load_strictly_both_ways(original: Any, options: dict[str, Any]) -> None:
    theirs, ours = randomize(original(4, 4, **options)), make_layer(4, seed=5, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    input = make_input(2, 4, 13, 10)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(input), theirs(input))
    other = original(4, 4, **options)
    other.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(other(input), ours(input))


@pytest.mark.parametrize("wavelet", ["db2", "sym3"])
def test_checkpoints_of_other_wavelets_are_refused(original: Any, wavelet: str) -> None:
    theirs = original(4, 4, wt_type=wavelet)
    with pytest.raises(RuntimeError, match="wt_filter must be the Haar filters"):
        WTConv2d(4, 4).load_state_dict(theirs.state_dict())


def test_one_seed_gives_one_initialisation(original: Any) -> None:
    torch.manual_seed(3)
    theirs = original(4, 4, wt_levels=2)
    torch.manual_seed(3)
    ours = WTConv2d(4, 4, wt_levels=2)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=0.0, atol=0.0)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel_size", [2, 5])
@pytest.mark.parametrize(("height", "width", "levels"), SHAPES)
def test_outputs_and_gradients_are_the_same(
    original: Any, height: int, width: int, levels: int, kernel_size: int
) -> None:
    theirs = randomize(original(3, 3, kernel_size, wt_levels=levels))
    ours = WTConv2d(3, 3, kernel_size, wt_levels=levels)
    ours.load_state_dict(theirs.state_dict())
    input = make_input(2, 3, height, width)
    expected = gradients(exact(theirs), input.double(), call)
    found = gradients(ours.double(), input.double(), call)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        tolerance = 1e-11 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_results_are_within_the_error_budget_of_the_original(
    original: Any, levels: int, dtype: torch.dtype
) -> None:
    theirs = randomize(original(17, 17, wt_levels=levels).to(dtype))
    ours = WTConv2d(17, 17, wt_levels=levels, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    input = make_input(2, 17, 13, 10, dtype=dtype)
    same, found = gradients(theirs, input, call), gradients(ours, input, call)
    expected = gradients(exact(theirs), input.double(), call)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_within_budget(value, same[name], expected[name], name)
