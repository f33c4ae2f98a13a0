"""Memory traffic, arithmetic and the roofline of one forward pass, counted by hand.

Traffic is in units of N = B*C*H*W elements of the input's dtype that cross the boundary of device
memory; weights are left out, as in the paper. Every count is an exact fraction.

* `reference_stages`: the chain of framework operations of Algorithm 1 (eq. qref),
* `fused_stages`: the paper's fused form, level by level (eq. qfused),
* `forward_stages`, `backward_stages`: what ``csrc/cuda`` does, launch by launch. A launch reads x
  once (the halo again, but from L2), forms the pyramid of its levels on chip and writes y once. The
  levels past those need one more read of x, for their low-pass band; what they reconstruct, a
  float32 tensor of the size of that band, is read by the launch. `Plane` says which levels a launch
  takes.

Source: Aflalo et al., 2026, sec. "WTConv is memory-bound" and "The resulting I/O cost".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

#: Passes over N that no form can avoid: x and y; a training step reads x and grad_y once more and
#: writes grad_x.
COMPULSORY = {"forward": 2, "training": 5}
#: Pixels of a tile of ``csrc/cuda`` on each side.
TILE = 64
#: Of an H100 or H200.
MULTIPROCESSORS = 132
#: Tiles from which the input gradient of three levels leaves the third to a band.
TILES_TO_LEAVE_A_LEVEL = 12 * MULTIPROCESSORS
#: Tiles from which tensor cores take the weight gradients of several planes to a tile: of up to two
#: levels, and of more.
TILES_OF_TWO_LEVELS, TILES_OF_MORE_LEVELS = 3 * MULTIPROCESSORS, 8 * MULTIPROCESSORS
#: Largest channels_last plane of which a block of the weight gradients has all levels, of 5x5 taps.
LARGEST_GRAD_PLANE = 88
#: Side of the largest float32 plane in channels_last of which that of the patch kernels holds a
#: group of channels.
LARGEST_GRAD_GROUP = 58
#: Of half types in channels_last, the largest that tensor cores take weight gradients of.
LARGEST_MMA_GROUP = 59
#: Sides of the planes in channels_last whose groups are the largest (``group_of``).
SMALLEST = (*range(1, 9), 15, 16)


@dataclass(frozen=True)
class Stage:
    """Elements, in units of N, that one step reads and writes; level 0 is the full resolution."""

    name: str
    level: int
    traffic: Fraction


@dataclass(frozen=True)
class Machine:
    """Peak fp32 arithmetic in TFLOP/s and peak bandwidth of device memory in GB/s (1e9 bytes)."""

    name: str
    peak_tflops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP/byte at which arithmetic and memory take equally long."""
        return self.peak_tflops * 1e3 / self.bandwidth

    def bound(self, intensity: float) -> float:
        """Attainable TFLOP/s at ``intensity`` FLOP/byte: min(peak, bandwidth * intensity)."""
        return min(self.peak_tflops, self.bandwidth * intensity / 1e3)

    def shortest_ms(self, flops: float, moved_bytes: float) -> float:
        """Time in ms below which ``flops`` on ``moved_bytes`` cannot go."""
        return max(flops / (self.peak_tflops * 1e9), moved_bytes / (self.bandwidth * 1e6))


#: The card of the paper, and two data-center cards by their data sheets (SXM, fp32 without TF32).
MACHINES = (
    Machine("RTX A6000", 38.7, 768.0),
    Machine("H100 SXM", 66.9, 3350.0),
    Machine("H200", 66.9, 4800.0),
)


def level_size(level: int) -> Fraction:
    """Elements entering ``level`` >= 1, which its coefficients have too: 4^-(level - 1)."""
    if level < 1:
        raise ValueError(f"level_size: level must be >= 1, got {level}")
    return Fraction(1, 4 ** (level - 1))


def reference_stages(levels: int) -> list[Stage]:
    """The steps of the reference, each reading its inputs and writing its output once."""
    stages = [
        Stage("base convolution", 0, Fraction(2)),
        Stage("base scale", 0, Fraction(2)),
        Stage("final add", 0, Fraction(3)),
    ]
    for level in range(1, levels + 1):
        size = level_size(level)
        stages += [
            Stage("analysis", level, 2 * size),
            Stage("depthwise convolution", level, 2 * size),
            Stage("scale", level, 2 * size),
            Stage("low-pass add", level, Fraction(3, 4) * size),
            Stage("concatenation", level, 2 * size),
            Stage("synthesis", level, 2 * size),
        ]
    return stages


def fused_stages(levels: int) -> list[Stage]:
    """The paper's fused form: base path, one kernel per level, one synthesis."""
    stages = [Stage("base convolution", 0, Fraction(2))]
    for level in range(1, levels + 1):
        size = level_size(level)
        lowpass = Fraction(0) if level == levels else size / 4
        stages.append(Stage("analysis and convolution", level, 2 * size + lowpass))
    bands = sum((level_size(level) for level in range(1, levels + 1)), Fraction(0))
    stages.append(Stage("synthesis and base add", 0, bands + 2))
    return stages


def tiles_of(batch: int, channels: int, side: int) -> int:
    """Tiles of ``csrc/cuda/patch`` of square planes, or of those that share a tile."""
    across = next(n for n in (8, 4, 2, 1) if n * side <= TILE or n == 1)  # planes of a tile
    return math.ceil(batch / across**2) * channels * math.ceil(side / TILE) ** 2


@dataclass(frozen=True)
class Plane:
    """Square planes that a launch of ``csrc/cuda`` works on: x, or a low-pass band of it.

    Its choices are those of ``csrc/cuda/patch/choose.cpp`` (``tile/choose.cpp`` for large planes in
    channels_last), on a GPU of compute capability 9.0, for kernels of 3x3 and 5x5 (launches that
    give the input gradient, too, and input gradients of three levels: of 5x5 alone), up to five
    levels, and as many planes as fill a tile. Planes of less than 4x4 may differ; they are next to
    nothing.
    """

    side: int
    element_bytes: int
    channels_last: bool = False
    level: int = 0  # levels below x
    tiles: float = math.inf  # of all channels; :func:`tiles_of`
    size: Fraction = Fraction(1)  # in units of N

    @property
    def in_groups(self) -> bool:
        """Whether weight gradients take channels in groups, of planes that fit a tile."""
        return self.channels_last and (self.element_bytes == 2 or self.side <= LARGEST_GRAD_GROUP)

    def on_tensor_cores(self, levels: int) -> bool:
        """Whether weight gradients of ``levels`` levels and more run on tensor cores."""
        if self.element_bytes != 2:
            return False
        if self.channels_last:
            return TILE // 2 < self.side <= LARGEST_MMA_GROUP
        least = TILES_OF_TWO_LEVELS if levels <= 2 else TILES_OF_MORE_LEVELS
        several = self.side > 8 and self.side % 2 == 0 and self.tiles >= least
        return self.side > TILE // 2 or several

    def whole(self, levels: int) -> bool:
        """Whether a launch of weight gradients takes all ``levels`` of such planes."""
        return self.side <= TILE and not self.in_groups and not self.on_tensor_cores(levels)

    @property
    def hands_on_channels_last(self) -> bool:
        """Whether the weight gradients leave low-pass bands in channels_last, else as planes."""
        return self.in_groups and self.side in SMALLEST

    @property
    def tile_kernel(self) -> bool:
        """Whether the kernels of ``csrc/cuda/tile`` take it."""
        return self.channels_last and self.side > TILE

    def operator_levels(self, levels: int, input_gradient: bool = False) -> int:
        """Levels that a launch of the operator takes where ``levels`` are left.

        The first launch of an ``input_gradient`` of many tiles leaves the third level to the band
        that the weight gradients left.
        """
        if self.side <= (2 * TILE if self.channels_last else TILE):
            return levels
        left = input_gradient and self.tiles >= TILES_TO_LEAVE_A_LEVEL
        three = not self.channels_last and levels == 3 and not left
        return min(levels, 3 if three else 2)

    def gradient_levels(self, levels: int) -> int:
        """Levels that a launch of the weight gradients takes where ``levels`` are left."""
        if self.tile_kernel and self.side <= LARGEST_GRAD_PLANE:
            return levels
        if self.whole(levels) and levels <= (3 if self.side <= 8 else 4 if self.side <= 16 else 5):
            return levels
        if self.channels_last and self.side <= 8 and levels == 2:
            return levels
        return min(levels, 2 if self.on_tensor_cores(levels) or self.tile_kernel else 1)

    def gives_input_gradient(self, levels: int) -> bool:
        """Whether one launch gives the weight gradients of all ``levels`` and the input gradient.

        With 5x5 taps (``kInputGradFits``).
        """
        on_tensor_cores = self.on_tensor_cores(levels)
        if self.level > 0 or on_tensor_cores or self.gradient_levels(levels) < levels:
            return False
        if self.side > TILE:
            return not self.channels_last
        # Sides of whole planes of which fewer blocks would run together with the input gradient.
        # Of half types the operator has its own on tensor cores.
        low = 33 if self.element_bytes == 4 else 9
        return self.whole(levels) and not low <= self.side <= TILE

    def has_lowpass_on_chip(self, levels: int) -> bool:
        """Whether one launch forms the band ``levels`` levels down and runs all its levels."""
        return (
            not self.channels_last
            and self.side * self.element_bytes % 16 == 0  # rows are aligned
            and levels == 2
            and self.band(levels).side <= TILE
        )

    def band(self, levels: int, element_bytes: int = 4, channels_last: bool = False) -> Plane:
        """Its low-pass band ``levels`` levels down."""
        return replace(
            self,
            side=-(-self.side // 2**levels),
            element_bytes=element_bytes,
            channels_last=channels_last,
            level=self.level + levels,
            tiles=self.tiles / 4**levels,
            size=self.size * Fraction(element_bytes, self.element_bytes) / 4**levels,
        )


def forward_stages(
    plane: Plane, levels: int, low_levels: int = 0, input_gradient: bool = False
) -> list[Stage]:
    """The launches of the operator on ``plane``.

    Args:
        plane: its input.
        levels: those of ``plane`` and past it.
        low_levels: levels down to a float32 low-pass band that is at hand, 0 for none.
        input_gradient: whether ``plane`` is grad_output.
    """
    taken = plane.operator_levels(levels, input_gradient)
    if taken == levels:
        return [Stage("tiles", plane.level, 2 * plane.size)]
    band = plane.band(taken)
    tiles = Stage("tiles", plane.level, 2 * plane.size + band.size)
    if low_levels == 0 and plane.has_lowpass_on_chip(taken):
        return [Stage("low-pass and its levels", plane.level, plane.size + band.size), tiles]
    stages = [*forward_stages(band, levels - taken), tiles]
    if low_levels < taken:
        source = plane.band(low_levels) if low_levels else plane
        stages.insert(0, Stage("low-pass", source.level, source.size + band.size))
    return stages


def weight_gradient_stages(plane: Plane, levels: int, low_levels: int = 0) -> list[Stage]:
    """The launches of the weight gradients, beside their partial sums.

    Each reads grad_output and x, both like ``plane``, and writes the low-pass bands of both for the
    next: on tensor cores in their type, else in float32, in channels_last of the smallest planes
    alone. The tile kernel leaves the bands to launches of their own.

    Args:
        plane: grad_output and x.
        levels: those of ``plane`` and past it.
        low_levels: levels down to a float32 band of grad_output that the operator takes, 0 for
            none; it is written where it is not one of those for the next launch.
    """
    name = "weight gradients"
    taken, on_tensor_cores = plane.gradient_levels(levels), plane.on_tensor_cores(levels)
    extra = Fraction(0)
    if low_levels > 0 and (on_tensor_cores or taken == levels):
        extra = plane.band(taken if on_tensor_cores else 1).size
    if taken == levels:
        return [Stage(name, plane.level, 2 * plane.size + extra)]
    band = plane.band(taken)
    if plane.tile_kernel:
        stages = [
            Stage(name, plane.level, 2 * plane.size),
            Stage(f"{name}, low-pass", plane.level, 2 * (plane.size + band.size)),
        ]
    else:
        element_bytes = plane.element_bytes if on_tensor_cores else 4
        band = plane.band(taken, element_bytes, plane.hands_on_channels_last)
        stages = [Stage(name, plane.level, 2 * (plane.size + band.size) + extra)]
    return stages + weight_gradient_stages(band, levels - taken, max(0, low_levels - taken))


def lowpass_at_hand(plane: Plane, levels: int) -> int:
    """Levels down to the band of grad_output that the weight gradients leave for the operator.

    The deepest one not past the levels of the operator's first launch, 0 where that takes all; on
    tensor cores their first, since the next ones are in the type of the tensors only; of whole
    planes that of their first level.
    """
    most, down, band = plane.operator_levels(levels, input_gradient=True), 0, plane
    while most < levels:
        taken = band.gradient_levels(levels - down)
        left = 1 if band.whole(levels - down) else taken
        if down + left > most or (down > 0 and plane.on_tensor_cores(levels)):
            break
        down += left
        if down + taken - left == levels:
            break
        band = band.band(taken)
    return down


def backward_stages(plane: Plane, levels: int) -> list[Stage]:
    """The launches of the backward pass: weight gradients, then the operator on grad_output.

    Where that has levels past its first launch, it takes a low-pass band of grad_output that the
    weight gradients left. Or one launch gives all gradients.
    """
    if plane.gives_input_gradient(levels):
        return [Stage("all gradients", plane.level, 3 * plane.size)]
    low_levels = lowpass_at_hand(plane, levels)
    operator = forward_stages(plane, levels, low_levels, input_gradient=True)
    return weight_gradient_stages(plane, levels, low_levels) + [
        Stage(f"input gradient, {stage.name}", stage.level, stage.traffic) for stage in operator
    ]


def training_stages(plane: Plane, levels: int) -> list[Stage]:
    """The launches of a training step."""
    return forward_stages(plane, levels) + backward_stages(plane, levels)


def total(stages: Iterable[Stage]) -> Fraction:
    """Sum of the traffic, in units of N."""
    return sum((stage.traffic for stage in stages), Fraction(0))


def macs(kernel_size: int, levels: int) -> Fraction:
    """Multiply-adds in units of N: k^2 + (k^2 + 8) * 4/3 * (1 - 4^-L), eq. mac.

    The 8 are analysis and synthesis, which the reference runs as 2x2 convolutions.
    """
    bands = sum((level_size(level) for level in range(1, levels + 1)), Fraction(0))
    return kernel_size**2 + (kernel_size**2 + 8) * bands


def intensity(kernel_size: int, levels: int, traffic: Fraction, element_bytes: int) -> float:
    """FLOP/byte of a form that moves ``traffic`` * N elements, two FLOPs a multiply-add."""
    return float(2 * macs(kernel_size, levels) / (traffic * element_bytes))
