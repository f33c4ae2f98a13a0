"""Layers with the structures of the original implementation, without its code.

The reference layer is that of the demo. The fused ones hold parameters under the names of the
fused layers and run plain PyTorch operations, each with the peculiarities that its release has.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from layer_cases import randomize
from torch import Tensor, nn
from torch.nn import functional as F

from wtconv_ops import reference
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d


def unavailable(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("these kernels need a GPU")


KERNELS = types.SimpleNamespace(scaled_depthwise_conv=unavailable, wavelet_branch=unavailable)


class Parts(nn.Module):
    """The parts of a reference layer, for classes that do not extend its class."""

    def __init__(self, channels: int, kernel_size: int = 5, **options: Any) -> None:
        super().__init__()
        vars(self).update(vars(ReferenceWTConv2d(channels, channels, kernel_size, **options)))


class Strided(Parts):
    """The reference layer with the stride of the original one."""

    def __init__(self, channels: int, stride: int, **options: Any) -> None:
        super().__init__(channels, **options)
        self.stride = stride
        self.do_stride = nn.AvgPool2d(kernel_size=1, stride=stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]
        return y if self.do_stride is None else self.do_stride(y)


class Fused(nn.Module):
    """Names of the fused CUDA layer, which reaches its kernels through an attribute."""

    def __init__(self, channels: int, kernel_size: int = 5, levels: int = 2, bias: bool = True):
        super().__init__()
        self._haar: Any = KERNELS
        self.kernel_size, self.stride, self.do_stride = kernel_size, 1, None
        self.in_channels, self.wt_levels = channels, levels
        size = (kernel_size, kernel_size)
        self.base_weight = nn.Parameter(torch.empty(channels, 1, *size))
        self.base_scale = nn.Parameter(torch.empty(1, channels, 1, 1))
        self.register_parameter("base_bias", nn.Parameter(torch.empty(channels)) if bias else None)
        self.wt_weights = nn.ParameterList(
            nn.Parameter(torch.empty(4 * channels, 1, *size)) for _ in range(levels)
        )
        self.wt_scales = nn.ParameterList(
            nn.Parameter(torch.empty(1, 4 * channels, 1, 1)) for _ in range(levels)
        )

    def forward(self, x: Tensor) -> Tensor:
        kernels, size = self._haar, self.kernel_size
        base = kernels.scaled_depthwise_conv(
            x, self.base_weight, self.base_scale, size // 2, bias=self.base_bias
        )
        return kernels.wavelet_branch(x, base, list(self.wt_weights), list(self.wt_scales), size)


class BiasAfterScale(nn.Module):
    """Names of the Triton layer, which holds no kernels and adds the bias after the scale."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        vars(self).update(vars(Fused(*arguments, **options)))
        del self._haar

    def forward(self, x: Tensor) -> Tensor:
        y = reference.wtconv2d(
            x, self.base_weight, None, self.base_scale, [*self.wt_weights], [*self.wt_scales]
        )
        return y if self.base_bias is None else y + self.base_bias[:, None, None]


class EarlyFused(nn.Module):
    """Names of the first fused release; its kernels need a GPU."""

    def __init__(self, channels: int, kernel_size: int = 5, levels: int = 2) -> None:
        super().__init__()
        self.stride, self.do_stride = 1, None

        def conv(n: int, bias: bool) -> nn.Conv2d:
            return nn.Conv2d(n, n, kernel_size, padding="same", groups=n, bias=bias)

        self.base_conv = conv(channels, True)
        self.base_scale = nn.Parameter(torch.empty(1, channels, 1, 1))
        self.wavelet_convs = nn.ModuleList(conv(4 * channels, False) for _ in range(levels))
        self.wavelet_scales = nn.ParameterList(
            nn.Parameter(torch.empty(1, 4 * channels, 1, 1)) for _ in range(levels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return unavailable(x)


class Activated(Parts):
    """The structure of the reference layer with another forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(ReferenceWTConv2d.forward(self, x))  # type: ignore[arg-type]


class Variant(ReferenceWTConv2d):
    """The layer of one level in plain operations, with one of them changed."""

    def __init__(self, variant: str) -> None:
        super().__init__(3, 3, 3)
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        variant, (height, width) = self.variant, x.shape[2:]
        padded = F.pad(x, (0, width % 2, 0, height % 2), value=variant == "pad with ones")
        if variant == "pad before":
            padded = F.pad(x, (width % 2, 0, height % 2, 0))
        bands = F.conv2d(padded, self.wt_filter, stride=2, groups=3)
        if variant == "dilated":
            conv = F.conv2d(bands, self.wavelet_convs[0].weight, padding=2, dilation=2, groups=12)
        else:
            conv = self.wavelet_convs[0](bands)
        bands = self.wavelet_scale[0](conv).unflatten(1, (3, 4))
        low, high = bands[:, :, 0:1], bands[:, :, 1:]
        if variant == "flipped bands":
            high = high.flip(2)
        if variant == "doubled band":
            high = high * 2
        parts = [high, low] if variant == "high first" else [low, high]
        merged = torch.cat(parts, dim=2).flatten(1, 2)
        full = F.conv_transpose2d(merged, self.iwt_filter, stride=2, groups=3)
        wavelet = (
            full[:, :, -height:, -width:] if variant == "crop" else full[:, :, :height, :width]
        )
        if variant == "write amid":
            x.add_(1.0)
        base = self.base_conv(x)
        if variant == "other input":
            base = self.base_conv(x.sin())
        base = self.base_scale(base)
        if variant == "alpha":
            return torch.add(base, wavelet, alpha=2)
        return base + wavelet


def reference_layer(
    channels: int = 4, kernel_size: int = 5, *, seed: int = 0, **options: Any
) -> Any:
    """A reference layer with random parameters."""
    return randomize(ReferenceWTConv2d(channels, channels, kernel_size, **options), seed)


def run_fused(layer: Any, x: Tensor) -> Tensor:
    """What the fused CUDA layer computes, in plain PyTorch operations."""
    return reference.wtconv2d(
        x,
        layer.base_weight,
        layer.base_bias,
        layer.base_scale,
        list(layer.wt_weights),
        list(layer.wt_scales),
    )
