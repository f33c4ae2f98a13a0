"""The shapes the benchmark runs on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Size:
    """One input [batch, channels, height, width]."""

    batch: int
    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.channels}x{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read ``8x32x128x128``.

        Raises:
            ValueError: not four positive numbers.
        """
        parts = text.lower().split("x")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(f"a shape must be BxCxHxW, such as 8x64x256x256, got {text!r}")
        return cls(*map(int, parts))

    @property
    def elements(self) -> int:
        """N of the paper: elements of the input."""
        return self.batch * self.channels * self.height * self.width


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


@dataclass(frozen=True)
class Group:
    """One input [batch, channels, side, side] with several numbers of levels, timed together."""

    sweep: str
    batch: int
    channels: int
    side: int
    levels: tuple[int, ...]

    @property
    def label(self) -> str:
        """Such as ``8x32x128x128``."""
        return f"{self.batch}x{self.channels}x{self.side}x{self.side}"

    @property
    def elements(self) -> int:
        """N of the paper: elements of the input."""
        return self.batch * self.channels * self.side * self.side


class NoSuchShapeError(ValueError):
    """A shape that was asked for is in none of the sweeps."""


def only_levels(groups: Sequence[Group], levels: Collection[int]) -> tuple[Group, ...]:
    """The groups with these numbers of levels alone.

    Raises:
        NoSuchShapeError: no group has any of them.
    """
    chosen = (replace(g, levels=tuple(n for n in g.levels if n in levels)) for g in groups)
    left = tuple(group for group in chosen if group.levels)
    if not left:
        raise NoSuchShapeError(f"--levels: no shape has {' or '.join(map(str, levels))}")
    return left


def only(groups: Sequence[Group], sizes: Iterable[Size]) -> tuple[Group, ...]:
    """The groups of these sizes.

    Raises:
        NoSuchShapeError: a size is in no group.
    """
    labels = [str(size) for size in sizes]
    known = [group.label for group in groups]
    for label in labels:
        if label not in known:
            raise NoSuchShapeError(f"--shape: {label} is not one of {', '.join(known)}")
    return tuple(group for group in groups if group.label in labels)


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

#: GPU sweeps: the paper's shapes, and the stages of WTConvNeXt-T at batch 64.
SWEEPS = {
    "paper": tuple(
        Group("paper", 8, channels, side, (1, 3, 5))
        for channels in (32, 64, 128)
        for side in (128, 256, 512)
    ),
    "stages": (
        Group("stages", 64, 96, 56, (5,)),
        Group("stages", 64, 192, 28, (4,)),
        Group("stages", 64, 384, 14, (3,)),
        Group("stages", 64, 768, 7, (2,)),
    ),
}

#: Small stand-ins for both sweeps.
QUICK_SWEEPS = {
    "paper": (Group("paper", 2, 4, 13, (1, 2)), Group("paper", 2, 8, 16, (1, 2))),
    "stages": (Group("stages", 3, 8, 7, (2,)),),
}
