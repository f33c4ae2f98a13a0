"""The shapes the benchmark runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One input [batch, channels, side, side] and the number of Haar levels for it."""

    batch: int
    channels: int
    side: int
    levels: int

    @property
    def label(self) -> str:
        """Such as ``8x96x56x56 L5``."""
        return f"{self.batch}x{self.channels}x{self.side}x{self.side} L{self.levels}"


#: The four stages of WTConvNeXt-T at 224 x 224, and one larger map.
SHAPES = (
    Shape(8, 96, 56, 5),
    Shape(8, 192, 28, 4),
    Shape(8, 384, 14, 3),
    Shape(8, 768, 7, 2),
    Shape(2, 64, 128, 3),
)

#: Small stand-ins for a test of the benchmark itself.
QUICK_SHAPES = (Shape(1, 4, 13, 2), Shape(2, 3, 8, 1))
