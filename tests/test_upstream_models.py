"""convert and the backend on the original layers, where WTCONV_UPSTREAM names a checkout."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch
from layer_cases import make_input, randomize
from torch import nn

from wtconv_ops import convert

CHECKOUT = os.environ.get("WTCONV_UPSTREAM", "")

if not CHECKOUT:
    pytest.skip(
        "WTCONV_UPSTREAM does not name a checkout of the original implementation",
        allow_module_level=True,
    )


def original(module: str) -> Any:
    """A layer class of the original implementation."""
    pytest.importorskip("pywt", reason="the original implementation needs PyWavelets")
    sys.path.insert(0, CHECKOUT)
    try:
        return importlib.import_module(module).WTConv2d
    finally:
        sys.path.remove(CHECKOUT)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_original_layers_are_swapped(levels: int, stride: int) -> None:
    layer = randomize(original("wtconv.wtconv2d")(4, 4, 5, stride, wt_levels=levels)).double()
    input = make_input(2, 4, 13, 10, dtype=torch.float64)
    expected = layer(input)
    report = convert(layer)
    assert report.swapped[0].proven
    torch.testing.assert_close(report.model(input), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"wt_levels": 1}, {"wt_levels": 3, "stride": 2}])
@pytest.mark.parametrize("bias", [True, False])
def test_original_fused_layers_are_swapped(bias: bool, options: dict[str, int]) -> None:
    fused = randomize(original("fast_wtconv.wtconv_cuda")(4, 4, 5, bias=bias, **options))
    layer = original("wtconv.wtconv2d")(4, 4, 5, bias=bias, **options)
    state = fused.state_dict()
    model = nn.Sequential(fused)
    report = convert(model)
    assert report.swapped[0].proven
    renamed = {report.renamed[f"0.{key}"].removeprefix("0."): v for key, v in state.items()}
    layer.load_state_dict(renamed, strict=False)
    input = make_input(2, 4, 13, 10)
    torch.testing.assert_close(model(input), layer(input), rtol=1e-4, atol=1e-4)


def test_original_layer_of_another_wavelet_is_left_alone() -> None:
    (entry,) = convert(original("wtconv.wtconv2d")(4, 4, wt_type="db2")).left
    assert "wt_filter must be the Haar filters [4*C, 1, 2, 2]" in entry.reason


@pytest.mark.usefixtures("ops", "fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
def test_backend_replaces_original_layers(dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    layers = [original("wtconv.wtconv2d")(4, 4, 5, s, wt_levels=n) for n, s in ((3, 1), (1, 2))]
    model = randomize(nn.Sequential(*layers))
    compiled = torch.compile(model, backend="wtconv", fullgraph=True, dynamic=dynamic)
    with caplog.at_level("INFO", "wtconv_ops"):
        for height, width in ((13, 10), (16, 16), (7, 14)):
            input = make_input(2, 4, height, width)
            torch.testing.assert_close(compiled(input), model(input), rtol=1e-4, atol=1e-4)
    assert all("replaced 2 by wtconv::fused_forward" in text for text in caplog.messages)
