"""Laws of the layer's state_dict, copies and meta-device construction."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer, reference_run
from torch import Tensor, nn

from wtconv_ops import WTConv2d


def test_state_dict_holds_exact_haar_filters_in_the_dtype_of_the_layer() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        state = WTConv2d(2, 2, dtype=dtype).state_dict()
        for name in ("wt_filter", "iwt_filter"):
            assert state[name].dtype == dtype
            signs = (2 * state[name]).reshape(2, 4, 4).tolist()
            assert signs == [[[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]] * 2


def test_state_dict_round_trip_restores_the_layer() -> None:
    layer, other = make_layer(3, wt_levels=2), make_layer(3, wt_levels=2, seed=9)
    other.load_state_dict(layer.state_dict())
    input = make_input(1, 3, 7, 6)
    torch.testing.assert_close(other(input), layer(input), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: f + 0.01, r"wt_filter must be within 0.001 of the Haar filters"),
        (lambda f: -f, "wt_filter must be within 0.001 of the Haar filters"),
        (lambda f: f * math.nan, "wt_filter must be within 0.001 of the Haar filters"),
        (lambda f: f.flip(0), "wt_filter must be within 0.001 of the Haar filters"),
        (lambda f: f.repeat(1, 1, 2, 2), r"wt_filter must be the Haar filters \[4\*C, 1, 2, 2\]"),
        (lambda f: f[:4], r"wt_filter must be the Haar filters .* = \[12, 1, 2, 2\], got \[4,"),
    ],
)
@pytest.mark.parametrize("name", ["wt_filter", "iwt_filter"])
@pytest.mark.parametrize("strict", [True, False])
def test_checkpoint_with_other_filters_is_refused(
    strict: bool, name: str, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    model = nn.Sequential(make_layer(3, wt_levels=1))
    state = model.state_dict()
    state[f"0.{name}"] = change(state[f"0.{name}"])
    with pytest.raises(RuntimeError, match=sentence):
        model.load_state_dict(state, strict=strict)


def test_checkpoint_with_filters_of_float32_products_is_taken() -> None:
    model = nn.Sequential(make_layer(3))
    state = model.state_dict()
    for name in ("0.wt_filter", "0.iwt_filter"):
        state[name] = state[name].sign() * 0.49999997
    model.load_state_dict(state, strict=True)
    assert bool((model.state_dict()["0.wt_filter"].abs() == 0.5).all())


def test_loading_leaves_the_checkpoint_as_it_is() -> None:
    layer = make_layer(3)
    state = layer.state_dict()
    names = list(state)
    layer.load_state_dict(state)
    assert list(state) == names


def test_assigning_other_filters_is_refused() -> None:
    layer = make_layer(3)
    layer.wt_filter = layer.wt_filter * 0.9999
    with pytest.raises(ValueError, match=r"wt_filter must be within 0.001 of the Haar filters"):
        layer.wt_filter = layer.wt_filter * 2
    with pytest.raises(ValueError, match=r"iwt_filter must be within 0.001 of the Haar filters"):
        layer.iwt_filter = -layer.iwt_filter


def torch_save_and_load(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), torch_save_and_load],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_equal_and_independent(
    make_copy: Callable[[nn.Module], nn.Module], used: bool, training: bool, stride: int
) -> None:
    layer = make_layer(3, wt_levels=2, stride=stride).train(training)
    input = make_input(2, 3, 9, 6)
    before = layer(input)
    if used:
        before.sum().backward()
    twin = make_copy(layer)
    assert twin.training == training
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(input), before, rtol=0.0, atol=0.0)
    assert torch.count_nonzero(layer(input)) == 0


def test_meta_layer_becomes_real_by_to_empty_and_reset() -> None:
    layer = WTConv2d(3, 3, wt_levels=2, device="meta")
    assert layer(torch.empty(2, 3, 9, 6, device="meta")).shape == (2, 3, 9, 6)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    input = make_input(1, 3, 9, 6)
    torch.testing.assert_close(layer(input), reference_run(layer, input))
    assert bool((layer.wt_filter.abs() == 0.5).all())


def test_skip_init_builds_the_layer() -> None:
    skip_init: Any = torch.nn.utils.skip_init
    layer = skip_init(WTConv2d, 3, 3, kernel_size=3, wt_levels=1)
    assert isinstance(layer, WTConv2d)
    layer.reset_parameters()
    assert layer(make_input(1, 3, 5, 5)).shape == (1, 3, 5, 5)


def test_meta_layer_saves_meta_filters_and_loads_real_ones() -> None:
    layer = WTConv2d(3, 3, wt_levels=2, device="meta")
    assert all(value.is_meta for value in layer.state_dict().values())
    trained = make_layer(3, wt_levels=2)
    layer.load_state_dict(trained.state_dict(), assign=True)
    input = make_input(1, 3, 9, 6)
    torch.testing.assert_close(layer(input), trained(input), rtol=0.0, atol=0.0)
