"""Which network the demonstration runs: WTConvNeXt-T where timm is there, else a small one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from wtconv_ops.demo.network import NetworkConfig, WTConvNetwork
from wtconv_ops.demo.report import one_line

WTCONVNEXT_SIDE = 65  # shorter side of the image for WTConvNeXt-T: seconds, not minutes, on a CPU

_log = logging.getLogger("wtconv_ops")


@dataclass(frozen=True)
class Choice:
    """A network, and the size of the photograph it gets.

    Attributes:
        name: The network, as the report's header says it.
        build: Network of a constructor of the WTConv layer, image [B, 3, H, W] to features.
        shorter_side: To which the photograph is scaled; None: at its own size.
    """

    name: str
    build: Callable[[Callable[..., nn.Module]], nn.Module]
    shorter_side: int | None = None


def choose_network(config: NetworkConfig | None) -> Choice:
    """The small network of ``config``; None: WTConvNeXt-T, or the small one without timm."""
    if config is not None:
        return _small(config, "small WTConv network")
    try:
        import timm

        from wtconv_ops.timm import wtconvnext_tiny
    except Exception as error:  # not installed, or its torchvision does not fit this torch
        _log.debug("no WTConvNeXt", exc_info=True)
        return _small(
            NetworkConfig(), f"small WTConv network; WTConvNeXt-T needs timm: {one_line(error)}"
        )

    def build(layer: Callable[..., nn.Module]) -> nn.Module:
        network: nn.Module = wtconvnext_tiny(num_classes=0, global_pool="", wtconv_class=layer)
        return network

    return Choice(f"WTConvNeXt-T, timm {timm.__version__}", build, WTCONVNEXT_SIDE)


def _small(config: NetworkConfig, name: str) -> Choice:
    return Choice(name, partial(WTConvNetwork, config=config))
