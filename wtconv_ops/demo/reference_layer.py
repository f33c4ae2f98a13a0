"""WTConv as the original layer computes it, step by step, for comparison and timing.

Haar analysis is a depthwise `conv2d` of stride 2 with 2x2 filters, each level is a depthwise
convolution and a product, synthesis is a `cat` and a depthwise `conv_transpose2d`: every step
writes a tensor. Names and shapes in `state_dict` are those of `wtconv_ops.WTConv2d`.

Source: Finder et al., "Wavelet Convolutions for Large Receptive Fields", ECCV 2024, Algorithm 1
of the follow-up by Aflalo et al., 2026.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Rows are LL, LH, HL, HH; columns are the pixels a b / c d of a 2x2 block.
_HAAR_SIGNS = ((1, 1, 1, 1), (1, 1, -1, -1), (1, -1, 1, -1), (1, -1, -1, 1))


class _Scale(nn.Module):
    """y = weight * x, one factor for each channel."""

    def __init__(self, channels: int, initial: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, channels, 1, 1), initial))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(self.weight, x)


class ReferenceWTConv2d(nn.Module):
    """y = scale_0 * (x conv w_0 + b) + sum over levels of synthesis(scale_l * (w_l conv analysis)).

    Args:
        in_channels: number of channels, >= 1.
        out_channels: must equal ``in_channels``; the convolutions are depthwise.
        kernel_size: side of every depthwise kernel, >= 1.
        bias: whether the base convolution has a bias.
        wt_levels: number of Haar levels, >= 1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        bias: bool = True,
        wt_levels: int = 1,
    ) -> None:
        super().__init__()
        if in_channels != out_channels:
            raise ValueError(
                f"out_channels must equal in_channels = {in_channels}, got {out_channels}"
            )
        haar = 0.5 * torch.tensor(_HAAR_SIGNS, dtype=torch.float32).reshape(4, 1, 2, 2)
        filters = haar.repeat(in_channels, 1, 1, 1)  # [4*C, 1, 2, 2]
        self.wt_filter = nn.Parameter(filters.clone(), requires_grad=False)
        self.iwt_filter = nn.Parameter(filters.clone(), requires_grad=False)
        self.base_conv = _depthwise(in_channels, kernel_size, bias)
        self.base_scale = _Scale(in_channels, 1.0)
        self.wavelet_convs = nn.ModuleList(
            _depthwise(4 * in_channels, kernel_size, bias=False) for _ in range(wt_levels)
        )
        self.wavelet_scale = nn.ModuleList(_Scale(4 * in_channels, 0.1) for _ in range(wt_levels))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [B, C, H, W]; returns [B, C, H, W]."""
        channels = x.shape[1]
        lowpass = x
        outputs: list[Tensor] = []
        sizes: list[tuple[int, int]] = []
        for conv, scale in zip(self.wavelet_convs, self.wavelet_scale, strict=True):
            height, width = lowpass.shape[-2:]
            sizes.append((height, width))
            if height % 2 or width % 2:
                lowpass = F.pad(lowpass, (0, width % 2, 0, height % 2))
            bands = F.conv2d(lowpass, self.wt_filter, stride=2, groups=channels)
            lowpass = bands.unflatten(1, (channels, 4))[:, :, 0]
            outputs.append(scale(conv(bands)).unflatten(1, (channels, 4)))
        carried: Tensor | None = None
        for bands, (height, width) in zip(reversed(outputs), reversed(sizes), strict=True):
            low = bands[:, :, 0] if carried is None else bands[:, :, 0] + carried
            merged = torch.cat([low.unsqueeze(2), bands[:, :, 1:]], dim=2).flatten(1, 2)
            full = F.conv_transpose2d(merged, self.iwt_filter, stride=2, groups=channels)
            carried = full[:, :, :height, :width]
        base: Tensor = self.base_scale(self.base_conv(x))
        return base if carried is None else base + carried


def _depthwise(channels: int, kernel_size: int, bias: bool) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, kernel_size, padding="same", groups=channels, bias=bias)
