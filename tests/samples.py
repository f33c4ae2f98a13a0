"""One registry of operator inputs, read by every test of the operators.

Every parameter is away from its initial value: scales in ±[0.5, 1.5], biases away from 0, inputs
with a mean of 0.5, so that a wrong padding or a missing factor shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wtconv_ops import reference

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LAYOUTS = [
    "contiguous",
    "channels_last",
    "sliced",
    "sliced_channels_last",
    "offset",
    "expanded",
    "permuted",
]

Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor, list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Sample:
    """Shapes and layout of one call; :meth:`make` draws the tensors."""

    height: int
    width: int
    levels: int
    kernel_size: int = 3
    channels: int = 2
    batch: int = 2
    bias: bool = True
    layout: str = "contiguous"

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.channels}x{self.height}x{self.width}"
        bias = "" if self.bias else "-nobias"
        layout = "" if self.layout == "contiguous" else f"-{self.layout}"
        return f"{shape}-L{self.levels}-k{self.kernel_size}{bias}{layout}"

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.channels, self.height, self.width

    def make(
        self,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        requires_grad: bool = False,
        seed: int = 0,
        generator: torch.Generator | None = None,
    ) -> Arguments:
        """Arguments of fused_forward in the order of the schema.

        Drawn on the CPU, the same for every device, unless a generator is given.
        """
        source = torch.Generator().manual_seed(seed) if generator is None else generator

        def place(values: Tensor) -> Tensor:
            return values.to(device, dtype).requires_grad_(requires_grad)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source, dtype=torch.float64, device=source.device)

        def weight(groups: int) -> Tensor:
            return place(normal(groups, 1, self.kernel_size, self.kernel_size) / self.kernel_size)

        def scale(groups: int) -> Tensor:
            signs = torch.sign(normal(1, groups, 1, 1))
            size = torch.rand(
                signs.shape, generator=source, dtype=torch.float64, device=source.device
            )
            return place(signs * (0.5 + size))

        groups = 4 * self.channels
        values = (normal(*self.input_shape) + 0.5).to(device, dtype)
        bias = normal(self.channels)
        return (
            lay_out(values, self.layout).requires_grad_(requires_grad),
            weight(self.channels),
            place(bias + 0.5 * torch.sign(bias)) if self.bias else None,
            scale(self.channels),
            [weight(groups) for _ in range(self.levels)],
            [scale(groups) for _ in range(self.levels)],
        )


def many_tiles(height: int, width: int, layout: str = "contiguous") -> Sample:
    """Three levels of 5x5 whose input gradient, on this GPU, leaves the third to a low-pass band.

    It does from 12 tiles of 64x64 for each multiprocessor on.
    """
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    tiles = 2 * math.ceil(height / 64) * math.ceil(width / 64)
    channels = 12 * multiprocessors // tiles + 4
    return Sample(height, width, 3, kernel_size=5, channels=channels, batch=2, layout=layout)


def lay_out(values: Tensor, layout: str) -> Tensor:
    """Values in a layout; "expanded" repeats the first batch item. Never the storage of another."""
    batch, channels, height, width = values.shape
    if layout == "contiguous":
        return values.contiguous()
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        wide = values.new_full((batch, channels, height + 3, 2 * width), torch.nan)
        wide[:, :, 2:-1, ::2] = values
        return wide[:, :, 2:-1, ::2]
    if layout == "sliced_channels_last":
        wide = values.new_full((batch, height, width, channels + 3), torch.nan)
        wide[..., 1:-2] = values.permute(0, 2, 3, 1)
        return wide[..., 1:-2].permute(0, 3, 1, 2)
    if layout == "offset":
        storage = values.new_full((values.numel() + 3,), torch.nan)
        storage[1 : values.numel() + 1] = values.flatten()
        return storage[1 : values.numel() + 1].view(values.shape)
    if layout == "expanded":
        return values[:1].contiguous().expand(batch, -1, -1, -1)
    if layout == "permuted":
        return values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    raise ValueError(f"layout must be one of {LAYOUTS}, got {layout}")


_SIZES = [
    Sample(56, 56, 5, batch=1),
    Sample(28, 28, 4, kernel_size=5),
    Sample(14, 14, 3, kernel_size=5),
    Sample(7, 7, 2, kernel_size=5, channels=3),
    Sample(13, 10, 1),
    Sample(13, 10, 3, bias=False),
    Sample(1, 7, 3, kernel_size=5),
    Sample(12, 9, 2),
    Sample(2, 2, 5, kernel_size=5),
    Sample(1, 1, 3, bias=False),
]
_KERNELS = [Sample(9, 12, 2, kernel_size=k) for k in (1, 2, 4, 5, 7, 8)]
_KERNELS.append(Sample(9, 12, 1, kernel_size=31, bias=False))
_EDGES = [
    Sample(6, 5, 2, batch=0),
    Sample(5, 6, 1, channels=1),
    Sample(5, 6, 2, channels=1, layout="channels_last"),
    Sample(1, 1, 1, layout="channels_last", channels=3),
    Sample(5, 6, 2, batch=0, layout="channels_last"),
    Sample(6, 7, 2, channels=19, batch=1, layout="channels_last", bias=False),
]
_LAYOUTS = [Sample(7, 10, 2, channels=3, layout=layout) for layout in LAYOUTS]

SAMPLES: list[Sample] = [*_SIZES, *_KERNELS, *_EDGES, *_LAYOUTS]
# A few of each kind, for the checks that take long.
FEW: list[Sample] = [
    Sample(5, 6, 2, kernel_size=2),
    Sample(4, 4, 1, bias=False, layout="channels_last"),
    Sample(5, 3, 2, channels=3, layout="sliced"),
    Sample(3, 4, 1, batch=0),
    Sample(1, 1, 1, channels=1),
]


def with_grad(sample: Sample) -> Sample:
    """The sample with every batch item in memory of its own, as a leaf needs for its gradient."""
    return replace(sample, layout="contiguous") if sample.layout == "expanded" else sample


def flatten(arguments: Sequence[Any]) -> list[Any]:
    """input, base_weight, base_bias, base_scale, then the levels: the order of output_mask."""
    *base, weights, scales = arguments
    return [*base, *weights, *scales]


def unflatten(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Inverse of :func:`flatten`."""
    levels = (len(flat) - 4) // 2
    return (*flat[:4], list(flat[4 : 4 + levels]), list(flat[4 + levels :]))


def present(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments, a missing bias left out."""
    return [tensor for tensor in flatten(arguments) if tensor is not None]


def fused(*flat: Any) -> Tensor:
    """``torch.ops.wtconv.fused_forward`` on flat arguments."""
    output: Tensor = torch.ops.wtconv.fused_forward(*unflatten(flat))
    return output


def plain(*flat: Any) -> Tensor:
    """The reference on flat arguments."""
    return reference.wtconv2d(*unflatten(flat))


def leaves(arguments: Sequence[Any], dtype: torch.dtype) -> Any:
    """Arguments as new leaves of another dtype that require grad."""
    return unflatten(
        [
            None if tensor is None else tensor.detach().to(dtype).clone().requires_grad_()
            for tensor in flatten(arguments)
        ]
    )
