"""Names of checkpoints, brought to those of the original layer; timm is not needed."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer
from torch import Tensor

from wtconv_ops import WTConv2d
from wtconv_ops._checkpoint import original_name, original_state_dict

# Names of one layer by variant of the original repository; the filters are in none of them.
FUSED_CUDA = {
    "base_conv.weight": "base_weight",
    "base_conv.bias": "base_bias",
    "base_scale.weight": "base_scale",
    r"wavelet_convs\.(\d+)\.weight": r"wt_weights.\1",
    r"wavelet_scale\.(\d+)\.weight": r"wt_scales.\1",
}
FUSED_METAL = {
    "base_scale.weight": "base_scale",
    r"wavelet_scale\.(\d+)\.weight": r"wavelet_scales.\1",
}


def fused_names(state: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A state dict of ours as a fused variant would have saved it."""
    fused = {}
    for name, value in state.items():
        if name.endswith("wt_filter"):
            continue
        for ours, theirs in names.items():
            name = re.sub(rf"{ours}$", theirs, name)
        fused[name] = value
    return fused


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "module._orig_mod.module."])
@pytest.mark.parametrize("names", [{}, FUSED_CUDA, FUSED_METAL], ids=["own", "cuda", "metal"])
def test_layer_computes_the_same_after_its_names_came_back(
    wrapper: str, names: dict[str, str]
) -> None:
    layer, other = make_layer(4, seed=3, wt_levels=3), WTConv2d(4, 4, wt_levels=3)
    saved = {wrapper + n: v for n, v in fused_names(layer.state_dict(), names).items()}
    other.load_state_dict(original_state_dict(saved, bias_after_scale=False), strict=True)
    x = make_input(2, 4, 13, 10)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stages.0._orig_mod.blocks.1.wt_scales.10", "stages.0.blocks.1.wavelet_scale.10.weight"),
        ("a.base_scale.weight", "a.base_scale.weight"),
        ("a.my_base_weight", "a.my_base_weight"),
        ("a.base_weight.b", "a.base_weight.b"),
        ("a.wt_weights", "a.wt_weights"),
        ("modules.x", "modules.x"),
        ("head.fc.weight", "head.fc.weight"),
    ],
)
def test_only_whole_names_are_changed(name: str, expected: str) -> None:
    assert original_name(name) == expected


@pytest.mark.parametrize("twin", ["module.base_scale.weight", "base_scale"])
def test_two_names_of_one_parameter_are_refused(twin: str) -> None:
    state = {"base_scale.weight": torch.ones(1), twin: torch.ones(1)}
    with pytest.raises(RuntimeError, match=rf"base_scale\.weight and {re.escape(twin)} are both"):
        original_state_dict(state)


def bias_outside(layer: Any, x: Tensor) -> Tensor:
    """The layer with its base bias added after the base scale, as some fused variants do."""
    bias = layer.base_conv.bias.reshape(1, -1, 1, 1)
    result: Tensor = layer(x) + bias * (1 - layer.base_scale.weight)
    return result


@pytest.mark.parametrize("names", [FUSED_CUDA, FUSED_METAL], ids=["cuda", "metal"])
def test_bias_that_was_added_after_the_scale_keeps_its_effect(names: dict[str, str]) -> None:
    layer, other = make_layer(4, seed=3, wt_levels=2), WTConv2d(4, 4, wt_levels=2)
    saved = fused_names(layer.state_dict(), names)
    before = {name: value.clone() for name, value in saved.items()}
    other.load_state_dict(original_state_dict(saved, bias_after_scale=True))
    x = make_input(2, 4, 13, 10)
    torch.testing.assert_close(other(x), bias_outside(layer, x))
    assert all(torch.equal(saved[name], value) for name, value in before.items())


def test_bias_that_no_scale_can_restore_is_refused() -> None:
    layer = make_layer(4, seed=3)
    with torch.no_grad():
        layer.base_scale.weight[0, 2] = 0
    saved = fused_names(layer.state_dict(), FUSED_METAL)
    with pytest.raises(RuntimeError, match="base_scale must not be 0 where the bias is added"):
        original_state_dict(saved, bias_after_scale=True)
    saved["base_conv.bias"][2] = 0
    restored = original_state_dict(saved, bias_after_scale=True)
    assert torch.isfinite(restored["base_conv.bias"]).all()


def test_place_of_the_bias_is_asked_for_where_it_matters() -> None:
    layer = make_layer(4, seed=3)
    saved = fused_names(layer.state_dict(), FUSED_CUDA)
    with pytest.warns(UserWarning, match="pass bias_after_scale=True to load_checkpoint") as seen:
        original_state_dict({f"{i}.{n}": v for i in range(3) for n, v in saved.items()})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        original_state_dict(saved, bias_after_scale=False)
        original_state_dict(layer.state_dict())
        original_state_dict(fused_names(WTConv2d(4, 4).state_dict(), FUSED_CUDA))
        no_bias = make_layer(4, seed=3, bias=False)
        original_state_dict(fused_names(no_bias.state_dict(), FUSED_CUDA))


def test_models_without_timm_are_one_sentence_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[:2] == ["wtconv_ops", "timm"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r'needs timm.*: pip install "wtconv_ops\[timm\]"$'):
        importlib.import_module("wtconv_ops.timm")
