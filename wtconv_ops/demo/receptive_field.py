"""Effective receptive field: which input pixels an output in the centre feels, and how much.

The map is the root mean square, over channels and positions, of d output / d input for one
output pixel (Luo et al., "Understanding the Effective Receptive Field in Deep CNNs", 2016).
Haar blocks make the reach depend on where a pixel lies in its 2^L block, so the map averages over
output pixels near the centre, each gradient moved so that its own output pixel is the origin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ReceptiveField:
    """Map of gradient magnitudes, 1 at the strongest pixel, and the reach of one output."""

    magnitude: Tensor  # [size, size], float32, the output pixel in the middle
    reach: int  # side in pixels of the square that one output pixel depends on


def receptive_field(layer: nn.Module, channels: int, size: int, seed: int) -> ReceptiveField:
    """Measure the effective receptive field of a depthwise layer by input gradients.

    Args:
        layer: maps [B, channels, H, W] to the same shape, channel by channel.
        channels: number of channels to average over.
        size: odd side of the map in pixels; must hold the reach of the layer.
        seed: of the positions; layers measured with one seed use the same positions.
    """
    positions = 24
    margin = 32
    side = size + 2 * margin
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randint(0, 2 * margin + 1, (positions, 2), generator=generator)
    centres = (offsets + size // 2).tolist()
    image = torch.zeros(positions, channels, side, side, requires_grad=True)
    output = layer(image)
    picked = torch.stack([output[n, :, y, x] for n, (y, x) in enumerate(centres)])
    (gradient,) = torch.autograd.grad(picked.sum(), image)
    power = gradient.square().mean(dim=1)  # [positions, side, side]
    crops = [
        power[n, top : top + size, left : left + size]
        for n, (top, left) in enumerate(offsets.tolist())
    ]
    magnitude = torch.stack(crops).mean(dim=0).sqrt()
    reach = max(_extent(crop) for crop in crops)
    return ReceptiveField(magnitude / magnitude.max(), reach)


def _extent(crop: Tensor) -> int:
    """Longest side of the bounding box of the non-zero pixels."""
    sides = []
    for axis in (0, 1):
        used = (crop != 0).any(dim=axis).nonzero().flatten()
        sides.append(int(used[-1] - used[0]) + 1 if used.numel() else 0)
    return max(sides)
