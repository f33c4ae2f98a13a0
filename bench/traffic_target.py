"""The program that ncu profiles: one forward or one backward pass of the layer.

``python -m bench.traffic_target 8x64x256x256 5 5 float32 nchw forward``: shape, kernel size,
levels, dtype, layout, direction. Only that pass is between cudaProfilerStart and cudaProfilerStop,
after the same pass has run once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.cuda.profiler

from bench.cuda_run import DTYPES
from bench.run import LAYOUTS
from bench.shapes import Size
from bench.timing import forward_call
from wtconv_ops import WTConv2d

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """One pass to profile."""

    size: Size
    kernel_size: int
    levels: int
    dtype: str
    layout: str
    direction: str

    def arguments(self) -> list[str]:
        """The command line that says it."""
        numbers = [str(self.size), str(self.kernel_size), str(self.levels)]
        return [*numbers, self.dtype, self.layout, self.direction]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Case:
        """Read what `arguments` gives."""
        size, kernel_size, levels, dtype, layout, direction = arguments
        return cls(Size.parse(size), int(kernel_size), int(levels), dtype, layout, direction)


def build_call(case: Case, device: torch.device) -> Callable[[], object]:
    """The pass of ``case`` on random numbers; the backward pass has its forward pass behind it."""
    size, dtype = case.size, DTYPES[case.dtype]
    layer = WTConv2d(size.channels, size.channels, case.kernel_size, wt_levels=case.levels)
    layer.to(device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    shape = (size.batch, size.channels, size.height, size.width)
    image, grad_output = (
        torch.randn(shape, generator=generator, device=device)
        .to(dtype)
        .to(memory_format=LAYOUTS[case.layout])
        for _ in range(2)
    )
    if case.direction == "forward":
        return forward_call(layer, image)
    leaves = [image.requires_grad_(), *layer.parameters()]
    output = layer(image)
    return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)


def main(arguments: Sequence[str]) -> None:
    """Run the pass twice, the second time for the profiler."""
    call = build_call(Case.parse(arguments), torch.device("cuda"))
    call()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        call()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
