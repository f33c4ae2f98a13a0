"""The layers that compete on a GPU, built for one input size.

``reference`` computes WTConv as the original layer does; ``reference TF32`` is the same float32
layer under torch's default flag, which lets cuDNN round to TF32 and choose other kernels.
``upstream`` is the fused CUDA layer of a checkout of the original repository. ``staged`` is the
paper's form from this package's own building blocks, of which only the forward pass has kernels.
The depthwise convolutions are what WTConv replaces (7x7) and what its base path alone costs (k x
k); they run in both layouts, whatever the layout of the run.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from bench.providers import DEPTHWISE, OURS, REFERENCE
from bench.shapes import Group
from bench.staged_layer import StagedWTConv2d
from bench.timing import MODES
from wtconv_ops import WTConv2d, can_run
from wtconv_ops.demo.network import randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

UPSTREAM = "upstream"
STAGED = "staged"
REFERENCE_TF32 = "reference TF32"
COMPILED = "reference compiled"
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Candidate:
    """A layer, the layout and the modes it is timed in, its levels; None for a convolution."""

    name: str
    layer: nn.Module
    layout: str
    levels: int | None
    modes: tuple[str, ...] = MODES

    @property
    def key(self) -> tuple[str, str, str]:
        """Distinct within a group."""
        return self.name, self.layout, str(self.levels or "")


def depthwise_name(kernel_size: int) -> str:
    """Such as ``depthwise 5x5``."""
    return f"depthwise {kernel_size}x{kernel_size}"


def build_candidates(
    group: Group,
    kernel_size: int,
    device: torch.device,
    dtype: torch.dtype,
    layouts: Sequence[str],
    upstream: Callable[..., nn.Module] | None = None,
    compiled: bool = False,
) -> list[Candidate]:
    """Build every candidate for ``group``; all WTConv layers get the same random weights."""
    candidates = []
    channels = group.channels
    for levels in group.levels:
        reference = ReferenceWTConv2d(channels, channels, kernel_size, wt_levels=levels)
        randomise(reference, seed=levels)
        ours = WTConv2d(channels, channels, kernel_size, wt_levels=levels)
        ours.load_state_dict(reference.state_dict())
        layers: dict[str, nn.Module] = {REFERENCE: reference, OURS: ours}
        if dtype == torch.float32:
            layers[REFERENCE_TF32] = reference
        if compiled:
            layers[COMPILED] = cast(
                nn.Module, torch.compile(reference, dynamic=False, fullgraph=True)
            )
        if can_run(device, dtype, kernel_size, levels):
            staged = StagedWTConv2d(channels, channels, kernel_size, wt_levels=levels)
            staged.load_state_dict(reference.state_dict())
            layers[STAGED] = staged
        if upstream is not None:
            layer = upstream(channels, channels, kernel_size=kernel_size, wt_levels=levels)
            copy_parameters(reference, layer)
            layers[UPSTREAM] = layer
        candidates += [
            Candidate(
                name,
                layer.to(device, dtype),
                layout,
                levels,
                modes=("forward",) if name == STAGED else MODES,
            )
            for layout in layouts
            for name, layer in layers.items()
        ]
    for size, name in dict.fromkeys([(kernel_size, depthwise_name(kernel_size)), (7, DEPTHWISE)]):
        for layout, memory_format in LAYOUTS.items():
            conv = nn.Conv2d(channels, channels, size, padding=size // 2, groups=channels)
            conv.to(device, dtype)
            conv.weight.data = conv.weight.data.to(memory_format=memory_format)
            candidates.append(Candidate(name, conv, layout, None))
    return candidates


def ordered_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Base weight, bias and scale, then the weights and the scales of all levels."""
    if hasattr(layer, "base_weight"):  # upstream's fused layer
        levels = range(len(cast(nn.ParameterList, layer.wt_weights)))
        names = ["base_weight", "base_bias", "base_scale"]
        names += [f"wt_weights.{i}" for i in levels] + [f"wt_scales.{i}" for i in levels]
    else:
        layer = getattr(layer, "_orig_mod", layer)  # of a compiled layer
        levels = range(len(cast(nn.ModuleList, layer.wavelet_convs)))
        names = ["base_conv.weight", "base_conv.bias", "base_scale.weight"]
        names += [f"wavelet_convs.{i}.weight" for i in levels]
        names += [f"wavelet_scale.{i}.weight" for i in levels]
    return [layer.get_parameter(name) for name in names]


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the parameters of ``source``, whatever each calls them."""
    with torch.no_grad():
        pairs = zip(ordered_parameters(source), ordered_parameters(target), strict=True)
        for parameter, copy in pairs:
            copy.copy_(parameter)


def load_upstream_fused(checkout: Path) -> Callable[..., nn.Module]:
    """The class of upstream's fused CUDA layer; its kernels compile on first use.

    Raises:
        FileNotFoundError: no ``fast_wtconv/wtconv_cuda.py`` in ``checkout``.
    """
    source = checkout.resolve() / "fast_wtconv" / "wtconv_cuda.py"
    if not source.is_file():
        raise FileNotFoundError(f"--upstream: {source} not found")
    name = "upstream_fast_wtconv"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, source)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"--upstream: cannot load {source}")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return cast(Callable[..., nn.Module], sys.modules[name].WTConv2d)
