"""Memory traffic, arithmetic and the roofline of one forward pass, counted by hand.

Traffic is in units of N = B*C*H*W elements of the input's dtype that cross the boundary of device
memory; weights are left out, as in the paper. Every count is an exact fraction.

* `reference_stages`: the chain of framework operations of Algorithm 1 (eq. qref),
* `fused_stages`: the paper's fused form, level by level (eq. qfused),
* `single_pass_stages`: what ``csrc/cuda`` does. One launch reads x once (the halo again, but from
  L2), forms the pyramid of its levels on chip and writes y once. Levels past those of the launch
  work on the low-pass band: one more read of x to form it, then tensors of N/4^l.

Source: Aflalo et al., 2026, sec. "WTConv is memory-bound" and "The resulting I/O cost".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

#: Passes over N that no form can avoid: x and y; a training step reads x and grad_y once more and
#: writes grad_x.
COMPULSORY = {"forward": 2, "training": 5}


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


def single_pass_stages(levels_per_launch: Sequence[int], band_ratio: int = 1) -> list[Stage]:
    """What ``csrc/cuda`` moves when its launches take ``levels_per_launch`` levels, finest first.

    Args:
        levels_per_launch: such as (5,) for a plane that fits on chip, (2, 3) for a large one.
        band_ratio: bytes of a low-pass element, which has the accumulator's type, over those of
            an input element: 1 for fp32 and fp64, 2 for fp16 and bf16.

    Raises:
        ValueError: no launch, or one without levels.
    """
    if not levels_per_launch or min(levels_per_launch) < 1:
        raise ValueError(
            "single_pass_stages: every launch must take at least one level, "
            f"got {list(levels_per_launch)}"
        )
    stages = []
    done = 0
    for launch, levels in enumerate(levels_per_launch):
        # The first launch reads and writes tensors of the input's dtype, the others bands.
        size = Fraction(1) if launch == 0 else Fraction(band_ratio, 4**done)
        deeper = Fraction(0)
        if launch + 1 < len(levels_per_launch):
            deeper = Fraction(band_ratio, 4 ** (done + levels))
            stages.append(Stage("low-pass", done, size + deeper))
        stages.append(Stage("tile launch", done, 2 * size + deeper))
        done += levels
    return stages


def backward_stages(levels_per_launch: Sequence[int], band_ratio: int = 1) -> list[Stage]:
    """What the backward pass of ``csrc/cuda`` moves, beside partial sums of the weight gradients.

    The input gradient is the operator on grad_output, see `single_pass_stages`; the weight
    gradients read grad_output and x once in every launch, and their low-pass bands as well.
    """
    stages = [
        Stage(f"input gradient, {stage.name}", stage.level, stage.traffic)
        for stage in single_pass_stages(levels_per_launch, band_ratio)
    ]
    done = 0
    for launch, levels in enumerate(levels_per_launch):
        size = Fraction(1) if launch == 0 else Fraction(band_ratio, 4**done)
        stages.append(Stage("weight gradients", done, 2 * size))
        if launch + 1 < len(levels_per_launch):
            deeper = Fraction(band_ratio, 4 ** (done + levels))
            stages.append(Stage("weight gradients, low-pass", done, 2 * (size + deeper)))
        done += levels
    return stages


def forms(levels: int, band_ratio: int = 1, first: int = 2) -> dict[str, list[Stage]]:
    """The forms to compare, by name; ``first`` levels of a large plane are in its first launch."""
    return {
        "reference": reference_stages(levels),
        "paper's fused form": fused_stages(levels),
        "csrc/cuda, plane on chip": single_pass_stages((levels,), band_ratio),
        "csrc/cuda, large plane": single_pass_stages(split_levels(levels, first), band_ratio),
    }


def backward_forms(levels: int, band_ratio: int = 1, first: int = 2) -> dict[str, list[Stage]]:
    """The same of the backward pass, of ours only."""
    return {
        "csrc/cuda, plane on chip": backward_stages((levels,), band_ratio),
        "csrc/cuda, large plane": backward_stages(split_levels(levels, first), band_ratio),
    }


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


def split_levels(levels: int, first: int) -> tuple[int, ...]:
    """Launches of a large plane: ``first`` levels, then all others on the low-pass band."""
    return (levels,) if levels <= first else (first, levels - first)
