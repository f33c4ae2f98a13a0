"""``python -m bench host``: time that a call takes on an input too small to matter.

On a GPU that is the host's time: the wall time until the call returns, which does not wait for the
device. On the CPU it is the whole call, arithmetic on 1,568 pixels included. Beside the forward
pass stands an operator in C++ that takes the same arguments and only allocates an output, beside
forward and backward a `torch.autograd.Function` that computes nothing on the same leaves: it
allocates an output and hands out gradients that are there already. The differences are what the
layer adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from timeit import timeit
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.cuda_check import Exact, check, exact_results
from bench.cuda_run import DTYPES
from bench.cuda_timing import Call
from bench.empty_operator import empty_forward
from bench.timing import forward_call, threads, training_call
from wtconv_ops import WTConv2d
from wtconv_ops.demo.network import randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d
from wtconv_ops.demo.timing import processor_name

SIZE = (1, 32, 7, 7)
CALLS_PER_SAMPLE = 20  # few enough for the launch queue of a GPU
FEWEST_CALLS = 4  # the first of a sample finds the host's caches cold
Key = TypeVar("Key")
FORWARD, EMPTY_OP = "forward, no gradients", "empty C++ operator"
TRAINING, EMPTY = "forward + backward", "empty Function"


@dataclass(frozen=True)
class HostSettings:
    """What to time."""

    devices: tuple[str, ...]
    levels: tuple[int, ...] = (1, 3, 5)
    dtypes: tuple[str, ...] = ("float32",)
    kernel_size: int = 5
    rounds: int = 101
    threads: int = 2


@dataclass(frozen=True)
class HostRow:
    """One call; the columns of the CSV file."""

    device: str
    machine: str
    torch: str
    threads: int
    shape: str
    kernel_size: int
    levels: int
    dtype: str
    call: str
    median_ms: float
    fastest_ms: float
    rounds: int


class _Empty(torch.autograd.Function):
    """Takes the tensors of a layer, computes nothing, returns ready gradients."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Sequence[Tensor], input: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return (None, *ctx.gradients)


def empty_op_call(layer: WTConv2d, image: Tensor) -> Call:
    """A call without gradients of an operator that does nothing, on what ``layer`` hands over."""
    operator = empty_forward()
    conv, scale = layer.base_conv, layer.base_scale
    weights = [conv.weight for conv in layer.wavelet_convs]
    scales = [scale.weight for scale in layer.wavelet_scale]
    arguments = (image, conv.weight, conv.bias, scale.weight, weights, scales)

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = operator(*arguments)
        return result

    return call


def empty_call(layer: nn.Module, image: Tensor, grad_output: Tensor) -> Call:
    """Forward and backward of a Function that does nothing, on the leaves of ``layer``."""
    leaves = [image.detach().requires_grad_(), *layer.parameters()]
    gradients = tuple(torch.zeros_like(leaf) for leaf in leaves)
    return lambda: torch.autograd.grad(_Empty.apply(gradients, *leaves), leaves, grad_output)


def run(settings: HostSettings, progress: Callable[[str], None]) -> list[HostRow]:
    """Check the layer against fp64, then time the calls of one device and dtype in turn.

    Raises:
        bench.cuda_check.NumbersDifferError: the layer is too far from fp64.
    """
    rows: list[HostRow] = []
    with threads(settings.threads):
        for device in settings.devices:
            for dtype in settings.dtypes:
                progress(f"{device} {dtype}")
                rows += _measure(settings, torch.device(device), dtype)
    return rows


def _measure(settings: HostSettings, device: torch.device, dtype: str) -> list[HostRow]:
    calls: dict[tuple[int, str], Call] = {}
    for levels in settings.levels:
        for name, call in _calls(settings.kernel_size, levels, device, DTYPES[dtype]).items():
            calls[levels, name] = call
    return [
        row_of(settings, device, dtype, levels, name, values)
        for (levels, name), values in samples_of(calls, settings.rounds, device).items()
    ]


def row_of(
    settings: HostSettings,
    device: torch.device,
    dtype: str,
    levels: int,
    call: str,
    values: Sequence[float],
) -> HostRow:
    """The row of one call from its samples in ms."""
    cuda = device.type == "cuda"
    return HostRow(
        device=device.type,
        machine=torch.cuda.get_device_name(device) if cuda else processor_name(),
        torch=torch.__version__,
        threads=settings.threads,
        shape="x".join(map(str, SIZE)),
        kernel_size=settings.kernel_size,
        levels=levels,
        dtype=dtype,
        call=call,
        median_ms=median(values),
        fastest_ms=min(values),
        rounds=settings.rounds,
    )


def _calls(
    kernel_size: int, levels: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Call]:
    """What is timed at one number of levels."""
    layer, image, grad_output, exact = inputs(kernel_size, levels, device, dtype)
    check(f"wtconv_ops on {device} {dtype} L{levels}", layer, image, exact)
    return {
        FORWARD: forward_call(layer, image),
        EMPTY_OP: empty_op_call(layer, image),
        TRAINING: training_call(layer, image, grad_output),
        EMPTY: empty_call(layer, image, grad_output),
    }


def inputs(
    kernel_size: int, levels: int, device: torch.device, dtype: torch.dtype
) -> tuple[WTConv2d, Tensor, Tensor, Exact]:
    """A layer with random parameters, an image, a grad_output and the results in fp64."""
    channels = SIZE[1]
    reference = ReferenceWTConv2d(channels, channels, kernel_size, wt_levels=levels)
    randomise(reference, seed=levels)
    layer = WTConv2d(channels, channels, kernel_size, wt_levels=levels)
    layer.load_state_dict(reference.state_dict())
    reference.to(device, dtype)
    layer.to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    image, grad_output = (
        torch.randn(SIZE, generator=generator).to(device, dtype) for _ in range(2)
    )
    return layer, image, grad_output, exact_results(reference, image, grad_output)


def samples_of(
    calls: Mapping[Key, Call], rounds: int, device: torch.device, layers: int = 1
) -> dict[Key, list[float]]:
    """Ms per layer, one value for each round; the device is idle before each sample.

    Args:
        calls: What to time, in turn.
        rounds: Samples of each.
        device: Where they run.
        layers: Of a call. A sample has as many calls as have `CALLS_PER_SAMPLE` of them together,
            and no fewer than `FEWEST_CALLS`.
    """
    number = max(FEWEST_CALLS, CALLS_PER_SAMPLE // layers)
    for call in calls.values():
        for _ in range(number):
            call()
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples[key].append(timeit(call, number=number) * 1e3 / (number * layers))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return samples


def print_host(rows: Sequence[HostRow], console: Console) -> None:
    """Print one line for each device, dtype and number of levels."""
    first = rows[0]
    console.print(
        f"{', '.join(dict.fromkeys(r.machine for r in rows))}; torch {first.torch}, "
        f"{first.threads} threads; {first.shape}, k = {first.kernel_size}; median ms of "
        f"{first.rounds} rounds of {CALLS_PER_SAMPLE} calls, interleaved",
        highlight=False,
    )
    table = Table(title="time until a call returns, ms")
    table.add_column("device")
    table.add_column("dtype")
    for name in ("levels", FORWARD, EMPTY_OP, "difference", TRAINING, EMPTY, "difference"):
        table.add_column(name, justify="right")
    for device, dtype, levels in dict.fromkeys((r.device, r.dtype, r.levels) for r in rows):
        times = {
            r.call: r.median_ms
            for r in rows
            if (r.device, r.dtype, r.levels) == (device, dtype, levels)
        }
        values: list[float] = []
        for call, empty in ((FORWARD, EMPTY_OP), (TRAINING, EMPTY)):
            values += times[call], times[empty], times[call] - times[empty]
        table.add_row(device, dtype, str(levels), *(f"{value:.4f}" for value in values))
    console.print(table)
