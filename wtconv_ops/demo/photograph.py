"""The photograph the demonstration runs on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SMALLEST_SIDE = 64
LARGEST_PIXELS = 16_000_000


class UnreadableImageError(Exception):
    """The image cannot be used; the text names the path and the reason."""


def load_photograph(path: Path | None) -> Tensor:
    """Return the image at ``path`` as float32 [1, 3, H, W] in [0, 1], at its own size.

    Args:
        path: any file Pillow reads; None takes ``china.jpg`` of scikit-learn, 427 x 640.

    Raises:
        UnreadableImageError: missing or broken file, or a size the network cannot take.
    """
    pixels = _sample() if path is None else _read(path)
    height, width = pixels.shape[:2]
    if min(height, width) < SMALLEST_SIDE or height * width > LARGEST_PIXELS:
        raise UnreadableImageError(
            f"cannot use image {path}: it must be at least {SMALLEST_SIDE} x {SMALLEST_SIDE} and "
            f"at most {LARGEST_PIXELS // 1_000_000} million pixels, got {height} x {width}"
        )
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).unsqueeze(0)
    return image.float().div(255.0).contiguous()


def another_size(image: Tensor) -> Tensor:
    """Resample ``image`` [1, 3, H, W] to a different size with odd height and odd width."""
    height, width = (_another_side(side) for side in image.shape[-2:])
    return _resampled(image, height, width)


def scaled(image: Tensor, shorter_side: int) -> Tensor:
    """Resample ``image`` [1, 3, H, W] to a shorter side of ``shorter_side``, the other one odd."""
    height, width = image.shape[-2:]
    longer = shorter_side * max(height, width) // min(height, width) | 1
    if height <= width:
        return _resampled(image, shorter_side, longer)
    return _resampled(image, longer, shorter_side)


def _resampled(image: Tensor, height: int, width: int) -> Tensor:
    return torch.nn.functional.interpolate(
        image, size=(height, width), mode="bilinear", antialias=True
    )


def _another_side(side: int) -> int:
    smaller = (2 * side // 3) | 1
    return smaller if smaller >= SMALLEST_SIDE else (side + 10) | 1


def _sample() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from sklearn.datasets import load_sample_image

    return np.asarray(load_sample_image("china.jpg"), dtype=np.uint8)


def _read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"), dtype=np.uint8)
    except UnidentifiedImageError:
        reason = "not an image format that Pillow reads"
    except OSError as error:
        reason = error.strerror or str(error)
    except (Image.DecompressionBombError, SyntaxError, ValueError) as error:
        reason = str(error)
    raise UnreadableImageError(f"cannot read image {path}: {reason}")
