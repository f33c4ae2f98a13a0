"""The picture: photograph and Haar pyramid above, effective receptive fields below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from wtconv_ops.demo.receptive_field import ReceptiveField

_Array = npt.NDArray[np.float64]

_COLOURS = "magma"  # one map for everything that is a magnitude
_INK = "#1f2328"
_MUTED = "#59636e"
_WEAKEST = 1e-6  # receptive field shown down to this fraction of its peak
_BANDS = ("LH", "HL", "HH")


def draw_figure(
    photograph: Tensor,
    lowpass: Tensor,
    details: Sequence[Tensor],
    fields: Mapping[str, ReceptiveField],
    path: Path,
) -> None:
    """Write the picture to ``path`` as PNG.

    Args:
        photograph: [1, 3, H, W] in [0, 1].
        lowpass: [1, 3, h_L, w_L], the coarsest LL band of the photograph.
        details: finest first, each [1, 3, 3, h, w] with bands LH, HL, HH.
        fields: title to receptive field, in the order shown.
        path: file to write; its folder exists.
    """
    figure = Figure(figsize=(12.0, 8.1), dpi=100, facecolor="white")
    top = figure.add_gridspec(1, 2, left=0.045, right=0.965, top=0.94, bottom=0.50, wspace=0.04)
    height, width = photograph.shape[-2:]
    axes = figure.add_subplot(top[0])
    _titled(axes, f"Photograph, {height} × {width}")
    axes.imshow(photograph[0].permute(1, 2, 0).numpy(), interpolation="antialiased")
    axes = figure.add_subplot(top[1])
    _titled(axes, f"Haar pyramid, {len(details)} levels")
    _draw_pyramid(axes, lowpass, details)
    _draw_fields(figure, fields)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as a PNG of 256 colours, a third of the size of full colour."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


def _draw_pyramid(axes: Any, lowpass: Tensor, details: Sequence[Tensor]) -> None:
    canvas, corners = pyramid_mosaic(lowpass, details)
    axes.imshow(canvas, interpolation="antialiased")
    for number, (bottom, right) in enumerate(corners, start=1):
        if number > 2:
            continue  # the coarser ones are too small to write in
        spots = ((0, right), (bottom, 0), (bottom, right))
        for band, (row, column) in zip(_BANDS, spots, strict=True):
            axes.annotate(
                f"{band}{number}",
                (column, row),
                xytext=(5, -5),
                textcoords="offset points",
                va="top",
                color="white",
                fontsize=9,
            )
    for bottom, right in corners:
        axes.plot([right, right], [0, 2 * bottom], color="white", linewidth=0.8)
        axes.plot([0, 2 * right], [bottom, bottom], color="white", linewidth=0.8)
    axes.set_xlim(0, canvas.shape[1] - 0.5)
    axes.set_ylim(canvas.shape[0] - 0.5, 0)


def pyramid_mosaic(
    lowpass: Tensor, details: Sequence[Tensor]
) -> tuple[_Array, list[tuple[int, int]]]:
    """Lay a Haar pyramid out in the usual nested quadrants.

    LL keeps the colours of the photograph (each level doubles it, so it is divided by 2^L); the
    detail bands show their magnitude, each level on its own scale.

    Args:
        lowpass: [1, 3, h_L, w_L].
        details: finest first, each [1, 3, 3, h, w] (colour, band LH HL HH, height, width).

    Returns:
        Picture [2 h, 2 w, 3] in [0, 1] and, finest level first, row and column where its lower
        and right quadrants begin.
    """
    from matplotlib import colormaps

    colours = colormaps[_COLOURS]
    rows, columns = details[0].shape[-2:]
    canvas = np.zeros((2 * rows, 2 * columns, 3))
    corners = []
    for level in details:
        height, width = level.shape[-2:]
        magnitude = level[0].abs().mean(dim=0).numpy()  # [3, h, w]
        bright = max(float(np.quantile(magnitude, 0.99)), 1e-12)
        painted = colours(np.sqrt(np.clip(magnitude / bright, 0.0, 1.0)))[..., :3]
        canvas[:height, width : 2 * width] = painted[0]
        canvas[height : 2 * height, :width] = painted[1]
        canvas[height : 2 * height, width : 2 * width] = painted[2]
        corners.append((height, width))
    height, width = lowpass.shape[-2:]
    low = lowpass[0].permute(1, 2, 0).numpy() / 2.0 ** len(details)
    canvas[:height, :width] = np.clip(low, 0.0, 1.0)
    return canvas, corners


def _draw_fields(figure: Figure, fields: Mapping[str, ReceptiveField]) -> None:
    grid = figure.add_gridspec(
        1, len(fields), left=0.045, right=0.905, top=0.40, bottom=0.075, wspace=0.08
    )
    scale = LogNorm(vmin=_WEAKEST, vmax=1.0, clip=True)
    shown: Any = None
    for index, (name, field) in enumerate(fields.items()):
        axes = figure.add_subplot(grid[index])
        _titled(axes, name)
        size = field.magnitude.shape[0]
        half = size / 2.0
        values = np.maximum(field.magnitude.numpy(), _WEAKEST)
        extent = (-half, half, half, -half)
        shown = axes.imshow(
            values, norm=scale, cmap=_COLOURS, extent=extent, interpolation="nearest"
        )
        axes.text(
            0.04,
            0.04,
            f"reach {field.reach} px",
            transform=axes.transAxes,
            color="white",
            fontsize=11,
        )
        ticks = [-96, -48, 0, 48, 96]
        axes.set_xticks([tick for tick in ticks if abs(tick) <= half])
        axes.tick_params(length=3, color=_MUTED, labelcolor=_MUTED, labelsize=8)
        axes.tick_params(left=False, labelleft=False)
        if index == 0:
            axes.set_xlabel("pixels from the output pixel", fontsize=9, color=_MUTED)
    box = figure.axes[-1].get_position()
    bar = figure.colorbar(shown, cax=figure.add_axes((0.915, box.y0, 0.011, box.height)))
    bar.outline.set_visible(False)
    bar.set_label("|∂ output / ∂ input|, peak = 1", fontsize=9, color=_MUTED)
    bar.ax.tick_params(length=3, color=_MUTED, labelcolor=_MUTED, labelsize=8)
    figure.text(
        0.045,
        0.453,
        "Effective receptive field of one layer, at initialisation",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )


def _titled(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=11.5, color=_INK, loc="left", pad=6)
    axes.set_anchor("NW")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
