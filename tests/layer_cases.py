"""Layers whose parameters are all away from their initial values, and the reference on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from budget import assert_within_budget, relative_error
from torch import Tensor, nn

import wtconv_ops
from wtconv_ops import WTConv2d

# (height, width, levels): odd sizes, odd sizes at an inner level only, more levels than pixels.
SHAPES = [
    (1, 1, 3),
    (1, 7, 3),
    (3, 5, 1),
    (7, 7, 5),
    (13, 10, 1),
    (13, 10, 3),
    (12, 9, 2),
    (2, 2, 5),
    (7, 7, 2),
    (14, 14, 3),
    (28, 28, 4),
    (56, 56, 5),
]

# Relative error in float32 against float64 of the output and of a gradient.
FORWARD_BAR, GRADIENT_BAR = 1e-6, 5e-6

# Base weight, bias or None, base scale, wavelet weights, wavelet scales; modules are untyped.
Parameters = tuple[Tensor, Any, Tensor, list[Tensor], list[Tensor]]


class Block(nn.Module):
    """The block of a WTConvNeXt."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = WTConv2d(channels, channels, 3, wt_levels=2)
        self.norm = nn.LayerNorm(channels)
        self.widen, self.narrow = (
            nn.Linear(channels, 2 * channels),
            nn.Linear(2 * channels, channels),
        )
        self.gamma = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.narrow(nn.functional.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


def randomize(module: nn.Module, seed: int = 0) -> Any:
    """Draw every trainable parameter anew: scales in ±[0.5, 1.5], biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "scale" in name:
            values = torch.sign(values) * (0.5 + torch.rand(values.shape, generator=generator))
        elif name.endswith("bias"):
            values = values + 0.5 * torch.sign(values)
        else:
            values = values / parameter.shape[-1]
        with torch.no_grad():
            parameter.copy_(values)
    return module


def make_layer(channels: int = 4, kernel_size: int = 5, *, seed: int = 0, **options: Any) -> Any:
    """A layer with random parameters; ``options`` as the constructor's."""
    layer = WTConv2d(channels, channels, kernel_size, **options)
    randomize(layer, seed)
    return layer


def make_input(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random values with a mean of 0.7, so that a wrong padding shows."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.7).to(dtype)


def arguments(layer: Any) -> Parameters:
    """Parameters of a layer in the order of ``wtconv2d``; also of the original layer."""
    return (
        layer.base_conv.weight,
        layer.base_conv.bias,
        layer.base_scale.weight,
        [conv.weight for conv in layer.wavelet_convs],
        [scale.weight for scale in layer.wavelet_scale],
    )


def reference_run(layer: nn.Module, input: Tensor, stride: int = 1) -> Tensor:
    """The plain reference on the parameters of ``layer``."""
    return wtconv_ops.reference.wtconv2d(input, *arguments(layer), stride)


def gradients(
    layer: nn.Module, input: Tensor, run: Callable[[nn.Module, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Output and all gradients of a run, by name; the cotangent is fixed and random."""
    input = input.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = run(layer, input)
    cotangent = make_input(*output.shape, dtype=output.dtype, seed=2)
    named = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(output, [input, *named.values()], cotangent)
    names = ["output", "input", *named]
    return dict(zip(names, [output.detach(), *found], strict=True))


def assert_layer_follows_reference(layer: Any, input: Tensor) -> None:
    """Output and every gradient of ``layer`` equal those of the reference.

    In float64 to 1e-11 of the largest value. In other dtypes all of them stay within the error
    budget, in float32 also within the relative error of the bars. The budget needs at least eight
    numbers in a tensor: of fewer, the reference may round every one right by luck.
    """
    stride = layer.stride
    ours = gradients(layer, input, lambda module, x: module(x))
    same = gradients(layer, input, lambda module, x: reference_run(module, x, stride))
    exact_layer = copy.deepcopy(layer).double()
    exact = gradients(exact_layer, input.double(), lambda m, x: reference_run(m, x, stride))
    assert ours.keys() == exact.keys()
    for name, value in ours.items():
        if input.dtype == torch.float64:
            tolerance = 1e-11 * float(exact[name].abs().max())
            torch.testing.assert_close(value, exact[name], rtol=0.0, atol=tolerance)
            continue
        assert_within_budget(value, same[name], exact[name], name)
        if input.dtype == torch.float32:
            bar = FORWARD_BAR if name == "output" else GRADIENT_BAR
            assert relative_error(value, exact[name]) <= bar, name
