"""Memory layouts of images: of which an output is, and how plain operations give it that one."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import certainly


def is_channels_last(tensor: Tensor) -> bool:
    """Layout rule of the outputs: True for NHWC, False for NCHW.

    Args:
        tensor: [B, C, H, W], any strides.

    Returns:
        True iff the channels are consecutive, of an empty batch too; a single channel or pixel
        has no layout.
    """
    if not certainly(tensor.stride(1) == 1) or certainly(tensor.shape[1] == 1):
        return False
    return not all(certainly(size == 1) for size in tensor.shape[2:])


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Memory format of an output that follows ``tensor`` ([B, C, H, W])."""
    return torch.channels_last if is_channels_last(tensor) else torch.contiguous_format


def laid_out(image: Tensor, channels_last: bool, stride: int = 1) -> Tensor:
    """Every stride-th row and column of an image, dense in a layout, without a memory format.

    vmap takes none but the default, and one asked of a strided view guards on the sizes.

    Args:
        image: [B, C, H, W], any strides.
        channels_last: The layout; else contiguous.
        stride: >= 1.

    Returns:
        [B, C, ceil(H/stride), ceil(W/stride)]; a view of ``image`` where that is dense already.
    """
    dense = image.permute(0, 2, 3, 1) if channels_last else image
    if stride > 1:
        dense = dense[:, ::stride, ::stride] if channels_last else dense[:, :, ::stride, ::stride]
    if stride > 1 or certainly(image.shape[0] == 0):  # which counts as contiguous as it is
        dense = dense.clone(memory_format=torch.contiguous_format)
    else:
        dense = dense.contiguous()
    return dense.permute(0, 3, 1, 2) if channels_last else dense
