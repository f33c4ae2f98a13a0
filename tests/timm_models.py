"""Small WTConvNeXt models for the tests; skips the file that imports it where timm is missing."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from layer_cases import make_input
from torch import Tensor, nn

from wtconv_ops.demo.network import randomise

try:
    timm: Any = importlib.import_module("timm")
    models: Any = importlib.import_module("wtconv_ops.timm")
except Exception as error:  # not installed, or its torchvision does not fit this torch
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

VARIANTS = ("tiny", "small", "base")
SMALL = {"depths": (1, 2, 1, 1), "dims": (8, 16, 24, 32), "num_classes": 10}


def small_model(seed: int = 0, **options: Any) -> Any:
    """WTConvNeXt-T with few and narrow blocks, every parameter away from its initial value."""
    model = timm.create_model("wtconvnext_tiny", **{**SMALL, **options})
    randomise(model, seed)
    return model


def gradients_of(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Output and gradients of every parameter, by name; the cotangent is fixed and random."""
    model.zero_grad()
    output = model(image)
    (output * make_input(*output.shape, dtype=output.dtype, seed=2)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **{n: g.clone() for n, g in found.items()}}
