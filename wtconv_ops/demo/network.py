"""A small ConvNeXt-style network whose spatial mixing is WTConv.

Stem (7x7, stride 4), then stages of blocks with a 2x2 downsampling between them. A block is
WTConv -> permute to channels-last -> LayerNorm -> MLP -> layer scale -> residual, as in ConvNeXt.
The same weights fit whichever WTConv layer the network is built with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class NetworkConfig:
    """Widths, numbers of blocks and Haar levels of the stages; levels as in WTConvNeXt."""

    widths: tuple[int, ...] = (32, 64, 96, 128)
    depths: tuple[int, ...] = (1, 1, 1, 1)
    levels: tuple[int, ...] = (5, 4, 3, 2)
    kernel_size: int = 5


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """x + layer_scale * MLP(LayerNorm(WTConv(x))), [B, C, H, W] to [B, C, H, W]."""

    def __init__(self, wtconv: nn.Module, channels: int) -> None:
        super().__init__()
        self.wtconv = wtconv
        self.norm = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, 4 * channels)
        self.project = nn.Linear(4 * channels, channels)
        self.layer_scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.wtconv(x).permute(0, 2, 3, 1))
        y = self.layer_scale * self.project(F.gelu(self.expand(y)))
        mixed: Tensor = x + y.permute(0, 3, 1, 2)
        return mixed


class WTConvNetwork(nn.Module):
    """Image [B, 3, H, W] to features [B, widths[-1], h, w], h about H / 2^(stages + 1).

    Args:
        layer: constructor of the WTConv layer, called as
            ``layer(channels, channels, kernel_size=..., wt_levels=...)``.
        config: widths, depths and levels of the stages, of equal length.
    """

    def __init__(self, layer: Callable[..., nn.Module], config: NetworkConfig) -> None:
        super().__init__()
        first = config.widths[0]
        modules: list[nn.Module] = [
            nn.Conv2d(3, first, kernel_size=7, stride=4, padding=3),
            ChannelNorm(first),
        ]
        previous = first
        for width, depth, levels in zip(config.widths, config.depths, config.levels, strict=True):
            if width != previous:
                modules += [ChannelNorm(previous), nn.Conv2d(previous, width, 2, stride=2)]
            for _ in range(depth):
                wtconv = layer(width, width, kernel_size=config.kernel_size, wt_levels=levels)
                modules.append(Block(wtconv, width))
            previous = width
        self.layers = nn.Sequential(*modules, ChannelNorm(previous))

    def forward(self, image: Tensor) -> Tensor:
        """Return the features of ``image`` [B, 3, H, W]; four stages need H and W >= 29."""
        features: Tensor = self.layers(image)
        return features


def randomise(network: nn.Module, seed: int) -> None:
    """Move every parameter away from its initial value, in place, repeatably.

    Scales become uniform in [0.5, 1.5], biases and norms get a random offset, so that a wrong
    use of any of them changes the output. Parameters that do not train (Haar filters) stay.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.rand(parameter.shape, generator=generator)
            if "scale" in name:
                parameter.copy_(0.5 + noise)
            elif parameter.ndim == 1:  # a bias, or the weight of a norm
                centre = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.4 * (noise - 0.5))
            else:
                fan_in = parameter[0].numel()
                parameter.copy_((2.0 * noise - 1.0) * (3.0 / fan_in) ** 0.5)
