"""Multi-level two-dimensional Haar transform and its inverse, exact for every size.

Equivalent to:
    >>> lowpass, details = wtconv_ops.dwt2d(image, levels=3)
    >>> restored = wtconv_ops.idwt2d(lowpass, details, size=image.shape[-2:])  # == image
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._arguments import require_int
from ._checks import MAX_LEVELS
from .reference import haar_analysis, haar_synthesis

__all__ = ["dwt2d", "idwt2d"]


def dwt2d(input: Tensor, levels: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Analysis: split into LL and the details LH, HL, HH, then go on with LL.

    The transform is orthonormal for sizes that are multiples of ``2**levels``. An odd size, at any
    level, is extended by a zero row below or a zero column on the right.

    Args:
        input: [B, C, H, W], any floating dtype, H, W >= 1.
        levels: Number of levels, 1 to 32.

    Returns:
        ``(lowpass, details)``: lowpass [B, C, h_L, w_L]; details, the finest level first, each
        [B, C, 3, h_l, w_l] with LH, HL, HH on dimension 2, h_l = ceil(H / 2**l).
        A lowpass value grows up to 2**levels times, which float16 may not hold.

    Raises:
        TypeError: ``input`` is not floating-point, or ``levels`` not an int.
        ValueError: Wrong rank, an empty height or width, or ``levels`` out of range.

    Source: the WTConv paper, eq. butterfly.
    """
    levels = require_int("dwt2d", "levels", levels, 1, MAX_LEVELS)
    _require_map("dwt2d", "input", "[B, C, H, W]", input, 4)
    lowpass, details = input, []
    for _ in range(levels):
        bands = haar_analysis(lowpass)
        lowpass = bands[:, :, 0].clone()
        details.append(bands[:, :, 1:])
    return lowpass, details


def idwt2d(lowpass: Tensor, details: Sequence[Tensor], size: Sequence[int] | None = None) -> Tensor:
    """Synthesis: the inverse of :func:`dwt2d`, from the coarsest level to the finest.

    Args:
        lowpass: [B, C, h_L, w_L], any floating dtype.
        details: The finest level first, each [B, C, 3, h_l, w_l] with LH, HL, HH.
        size: (H, W) of the result, with ceil(H/2) = h_1 and ceil(W/2) = w_1. Default: the even
            sizes 2*h_1 and 2*w_1. The sizes between the levels follow from the details.

    Returns:
        [B, C, H, W]; ``idwt2d(*dwt2d(x, levels), size=x.shape[-2:])`` is x up to rounding.

    Raises:
        TypeError: Not floating-point, dtypes that differ, or ``size`` not a pair of ints.
        ValueError: No level, or shapes and sizes that do not go together.

    Source: the WTConv paper, eq. butterfly and its proposition on self-inversion.
    """
    _require_map("idwt2d", "lowpass", "[B, C, h, w]", lowpass, 4)
    details = list(details)
    if not 1 <= len(details) <= MAX_LEVELS:
        raise ValueError(f"idwt2d: details must have 1 to {MAX_LEVELS} levels, got {len(details)}")
    for i, level in enumerate(details):
        _require_map("idwt2d", f"details[{i}]", "[B, C, 3, h, w]", level, 5)
        if level.dtype != lowpass.dtype:
            raise TypeError(
                f"idwt2d: details[{i}] must have the dtype of lowpass, {lowpass.dtype}, "
                f"got {level.dtype}"
            )
    sizes = [_finest_size(details[0], size), *(level.shape[3:] for level in details[:-1])]
    for i in reversed(range(len(details))):
        _require_level(i, lowpass, details[i], sizes[i])
        bands = torch.cat([lowpass.unsqueeze(2), details[i]], dim=2)
        lowpass = haar_synthesis(bands, sizes[i])
    return lowpass


def _finest_size(finest: Tensor, size: Sequence[int] | None) -> Sequence[int]:
    """(H, W) of the result of idwt2d."""
    if size is None:
        return 2 * finest.shape[3], 2 * finest.shape[4]
    if not isinstance(size, Sequence) or len(size) != 2:
        raise TypeError(f"idwt2d: size must be (H, W), got {size!r}")
    if torch.compiler.is_compiling():  # symbolic sizes stay symbolic
        return size
    return [require_int("idwt2d", f"size[{i}]", side, 1) for i, side in enumerate(size)]


def _require_level(i: int, lowpass: Tensor, level: Tensor, size: Sequence[int]) -> None:
    """Check that level ``i`` goes with the lowpass band below it and the size above it."""
    batch, channels, height, width = lowpass.shape
    expected = [batch, channels, 3, height, width]
    if list(level.shape) != expected:
        raise ValueError(
            f"idwt2d: details[{i}] must be [B, C, 3, h, w] = {expected} to go with the lowpass "
            f"band of that level, got {list(level.shape)}"
        )
    if [(side + 1) // 2 for side in size] != [height, width]:
        above = "size" if i == 0 else f"the height and width of details[{i - 1}]"
        raise ValueError(
            f"idwt2d: {above} must be one of {2 * height - 1}, {2 * height} by one of "
            f"{2 * width - 1}, {2 * width}, got {list(size)}"
        )


def _require_map(owner: str, name: str, form: str, tensor: Tensor, rank: int) -> None:
    """Check rank, dtype and that height and width are not empty."""
    if tensor.dim() != rank:
        raise ValueError(f"{owner}: {name} must be {rank}-D {form}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{owner}: {name} must have a floating dtype, got {tensor.dtype}")
    if tensor.shape[-2] < 1 or tensor.shape[-1] < 1:
        raise ValueError(f"{owner}: {name} must have H, W >= 1, got {list(tensor.shape)}")
