"""Check every WTConv provider against fp64, then time all providers in turn on each shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.providers import DEPTHWISE, OURS, REFERENCE, Provider, build_providers
from bench.shapes import Shape
from bench.timing import MODES, forward_call, geometric_mean, training_call
from wtconv_ops import _library
from wtconv_ops.demo.timing import interleaved_times, processor_name

OUTPUT_ERROR = 1e-6  # relative error that a float32 output may have against fp64
GRADIENT_ERROR = 5e-6  # and a float32 gradient
LAYOUTS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Settings:
    """What to run."""

    shapes: tuple[Shape, ...]
    layouts: tuple[str, ...] = ("nchw",)
    device: str = "cpu"
    kernel_size: int = 5
    threads: int = 2
    rounds: int = 11
    sample_ms: float = 50.0
    upstream: Path | None = None


@dataclass(frozen=True)
class Measurement:
    """One provider on one shape in one mode; the columns of the CSV file."""

    shape: str
    batch: int
    channels: int
    height: int
    width: int
    levels: int
    kernel_size: int
    dtype: str
    layout: str
    device: str
    mode: str
    provider: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    relative_error: float | None  # largest over output and gradients; None for the depthwise ones
    rounds: int
    threads: int
    torch: str
    machine: str


class NumbersDifferError(Exception):
    """A provider is too far from fp64; its shape was not timed."""


def run(settings: Settings, progress: Callable[[str], None]) -> list[Measurement]:
    """Measure every shape, layout and mode of ``settings``.

    Raises:
        NumbersDifferError: a WTConv provider is too far from fp64.
    """
    torch.set_num_threads(settings.threads)
    measurements: list[Measurement] = []
    for layout in settings.layouts:
        for shape in settings.shapes:
            measurements += _measure(settings, shape, layout, progress)
    return measurements


def _measure(
    settings: Settings, shape: Shape, layout: str, progress: Callable[[str], None]
) -> list[Measurement]:
    device = torch.device(settings.device)
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch, shape.channels, shape.side, shape.side)
    image, grad_output = (
        torch.randn(size, generator=generator).to(device, memory_format=LAYOUTS[layout])
        for _ in range(2)
    )
    providers = build_providers(shape, settings.kernel_size, device, settings.upstream)
    progress(f"{shape.label} {layout}: checking")
    errors = check_numbers(providers, image, grad_output, shape.label)
    machine = _machine(device)
    measurements = []
    for mode in MODES:
        progress(f"{shape.label} {layout}: {mode}")
        functions: dict[str, Callable[[], object]] = {
            p.name: forward_call(p.layer, image)
            if mode == "forward"
            else training_call(p.layer, image, grad_output)
            for p in providers
        }
        times = interleaved_times(
            functions,
            rounds=settings.rounds,
            sample_ms=settings.sample_ms,
            threads=settings.threads,
        )
        measurements += [
            Measurement(
                shape=shape.label,
                batch=shape.batch,
                channels=shape.channels,
                height=shape.side,
                width=shape.side,
                levels=shape.levels,
                kernel_size=settings.kernel_size,
                dtype="float32",
                layout=layout,
                device=settings.device,
                mode=mode,
                provider=name,
                median_ms=median(samples),
                fastest_ms=min(samples),
                slowest_ms=max(samples),
                relative_error=errors.get(name),
                rounds=settings.rounds,
                threads=settings.threads,
                torch=torch.__version__,
                machine=machine,
            )
            for name, samples in times.items()
        ]
    return measurements


def check_numbers(
    providers: Sequence[Provider], image: Tensor, grad_output: Tensor, label: str
) -> dict[str, float]:
    """Compare output and all gradients of the WTConv providers with the reference in fp64.

    Returns:
        For each WTConv provider the largest of its relative errors ||y - y64|| / ||y64||.

    Raises:
        NumbersDifferError: an output is off by more than `OUTPUT_ERROR`, or a gradient by more
            than `GRADIENT_ERROR`.
    """
    reference = next(p.layer for p in providers if p.name == REFERENCE)
    double = copy.deepcopy(reference).double()
    exact = _results(double, image.double(), grad_output.double())
    errors = {}
    for provider in providers:
        if not provider.wtconv:
            continue
        errors[provider.name] = 0.0
        for name, tensor in _results(provider.layer, image, grad_output).items():
            error = float((tensor.double() - exact[name]).norm() / exact[name].norm())
            limit = OUTPUT_ERROR if name == "output" else GRADIENT_ERROR
            if not error <= limit:  # also for NaN
                raise NumbersDifferError(
                    f"{provider.name} on {label}: {name} has relative error {error:.2e} against "
                    f"fp64, it may have {limit:.0e}"
                )
            errors[provider.name] = max(errors[provider.name], error)
    return errors


def _results(layer: torch.nn.Module, image: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    names = [n for n, p in layer.named_parameters() if p.requires_grad]
    gradients = training_call(layer, image, grad_output)()
    labelled = {f"grad of {name}": g for name, g in zip(["input", *names], gradients, strict=True)}
    return {"output": forward_call(layer, image)(), **labelled}


def speed_ups(measurements: Iterable[Measurement], mode: str, over: str, layout: str) -> float:
    """Geometric mean over the shapes of median(``over``) / median(ours)."""
    chosen = [m for m in measurements if m.mode == mode and m.layout == layout]
    ours = {m.shape: m.median_ms for m in chosen if m.provider == OURS}
    other = {m.shape: m.median_ms for m in chosen if m.provider == over}
    return geometric_mean(other[shape] / ours[shape] for shape in ours)


def print_tables(measurements: Sequence[Measurement], console: Console) -> None:
    """Print the header line, one table for each layout and mode, and the geometric means."""
    first = measurements[0]
    library = _library.library()
    kernels = "plain PyTorch, no library"
    if library is not None:
        kernels = f"library with {library.info.get('cpu_isa', 'unknown')} kernels"
    console.print(
        f"{first.machine}; torch {first.torch}, {first.threads} threads, {first.dtype}, "
        f"k = {first.kernel_size}; wtconv_ops: {kernels}; median ms of {first.rounds} rounds, "
        "providers interleaved",
        highlight=False,
    )
    providers = list(dict.fromkeys(m.provider for m in measurements))
    for layout in dict.fromkeys(m.layout for m in measurements):
        for mode in MODES:
            console.print(_table(measurements, layout, mode, providers))
            for over in (name for name in providers if name != OURS):
                mean = speed_ups(measurements, mode, over, layout)
                console.print(
                    f"geometric mean speed-up over {over}, {mode}, {layout}: {mean:.2f}x",
                    highlight=False,
                    style="bold" if over in (REFERENCE, DEPTHWISE) else "",
                )


def _table(
    measurements: Sequence[Measurement], layout: str, mode: str, providers: Sequence[str]
) -> Table:
    table = Table(title=f"{mode}, {layout}, ms")
    table.add_column("shape")
    for name in providers:
        table.add_column(name, justify="right")
    table.add_column("x reference", justify="right")
    table.add_column("error", justify="right")
    chosen = [m for m in measurements if m.layout == layout and m.mode == mode]
    for shape in dict.fromkeys(m.shape for m in chosen):
        row = {m.provider: m for m in chosen if m.shape == shape}
        ours = row[OURS]
        table.add_row(
            shape,
            *(f"{row[name].median_ms:.2f}" for name in providers),
            f"{row[REFERENCE].median_ms / ours.median_ms:.2f}",
            "" if ours.relative_error is None else f"{ours.relative_error:.1e}",
        )
    return table


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()
