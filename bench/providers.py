"""The layers that compete, built for one shape.

``reference`` computes WTConv as the original layer does. The two depthwise convolutions are what
WTConv replaces (7x7) and what its base path alone costs (5x5).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from bench.shapes import Shape
from wtconv_ops import WTConv2d
from wtconv_ops.demo.network import randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

OURS = "wtconv_ops"
REFERENCE = "reference"
DEPTHWISE = "depthwise 7x7"


@dataclass(frozen=True)
class Provider:
    """A layer for one shape; ``wtconv`` says whether it must equal the reference."""

    name: str
    layer: nn.Module
    wtconv: bool


def build_providers(
    shape: Shape, kernel_size: int, device: torch.device, upstream: Path | None
) -> list[Provider]:
    """Build every provider for ``shape``; all WTConv layers get the same random weights."""
    channels = shape.channels
    reference = ReferenceWTConv2d(
        channels, channels, kernel_size=kernel_size, wt_levels=shape.levels
    )
    randomise(reference, seed=0)
    constructors: dict[str, Callable[..., nn.Module]] = {OURS: WTConv2d}
    if upstream is not None:
        constructors["upstream"] = load_upstream(upstream).WTConv2d
    providers = [Provider(REFERENCE, reference, wtconv=True)]
    for name, constructor in constructors.items():
        layer = constructor(channels, channels, kernel_size=kernel_size, wt_levels=shape.levels)
        layer.load_state_dict(reference.state_dict())
        providers.append(Provider(name, layer, wtconv=True))
    for name, size in ((DEPTHWISE, 7), ("depthwise 5x5", 5)):
        conv = nn.Conv2d(channels, channels, size, padding=size // 2, groups=channels)
        providers.append(Provider(name, conv, wtconv=False))
    return [Provider(p.name, p.layer.to(device), p.wtconv) for p in providers]


def load_upstream(checkout: Path) -> ModuleType:
    """Load the package ``wtconv`` of a checkout of BGU-CS-VIL/WTConv; needs PyWavelets.

    Raises:
        FileNotFoundError: no ``wtconv/__init__.py`` in ``checkout``.
    """
    folder = checkout / "wtconv"
    source = folder / "__init__.py"
    if not source.is_file():
        raise FileNotFoundError(f"--upstream: {source} not found")
    name = "upstream_wtconv"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, source, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"--upstream: cannot load {source}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
