"""Check every WTConv provider against fp64, then time all providers in turn on each input size."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.cuda_check import TF32_LIMITS, NumbersDifferError, check, exact_results
from bench.cuda_providers import (
    COMPILED,
    LAYOUTS,
    REFERENCE_TF32,
    Candidate,
    build_candidates,
)
from bench.cuda_timing import Call, Timer, interleaved_medians, tf32, with_tf32
from bench.io_model import COMPULSORY
from bench.providers import REFERENCE
from bench.shapes import Group
from bench.timing import forward_call, training_call

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MODES = ("forward", "training")


@dataclass(frozen=True)
class CudaSettings:
    """What to run."""

    groups: tuple[Group, ...]
    dtypes: tuple[str, ...] = ("float32",)
    layouts: tuple[str, ...] = ("nchw",)
    device: str = "cuda"
    kernel_size: int = 5
    rounds: int = 11
    upstream: Callable[..., nn.Module] | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Row:
    """One provider on one input size in one mode; the columns of the CSV file."""

    sweep: str
    shape: str
    levels: int | None  # None for a plain convolution
    dtype: str
    layout: str
    mode: str
    provider: str
    method: str  # "events", or "graph" for the replay of a captured call
    ms: float
    gb_per_s: float  # compulsory bytes, 2 N or 5 N, over the time
    copy_percent: float  # of the copy speed of the same run
    error: float | None  # largest relative error of output and gradients


def run(
    settings: CudaSettings,
    timer: Timer,
    copy_gb_per_s: float,
    problem: Callable[[str], None],
    progress: Callable[[str], None],
) -> Iterator[list[Row]]:
    """Measure group by group; a provider that fails goes to ``problem`` and is not timed."""
    for dtype in settings.dtypes:
        for group in settings.groups:
            progress(f"{group.sweep} {group.label} {dtype}")
            with _fresh_compiler() if settings.compiled else nullcontext():
                rows = _measure(settings, group, dtype, timer, copy_gb_per_s, problem)
            yield rows


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Forget compiled code; the reference is one function with many levels and layouts."""
    import torch._dynamo.config  # seconds, for a flag that few runs ask for

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def _measure(
    settings: CudaSettings,
    group: Group,
    dtype: str,
    timer: Timer,
    copy_gb_per_s: float,
    problem: Callable[[str], None],
) -> list[Row]:
    device = torch.device(settings.device)
    images, grad_outputs = _inputs(group, device, DTYPES[dtype])
    candidates = build_candidates(
        group,
        settings.kernel_size,
        device,
        DTYPES[dtype],
        settings.layouts,
        settings.upstream,
        settings.compiled,
    )
    label = f"{group.label} {dtype}"
    errors = _check(candidates, images, grad_outputs, label, problem)
    timed = [c for c in candidates if c.levels is None or c.key in errors]
    rows = []
    for mode in MODES:
        calls: dict[tuple[str, ...], Call] = {
            (*c.key, "events"): _call(c, images[c.layout], grad_outputs[c.layout], mode)
            for c in timed
        }
        if group.sweep == "stages":
            calls |= _graphs(calls, timer, f"{label} {mode}", problem)
        medians = interleaved_medians(timer, calls, settings.rounds)
        for c in timed:
            for method in ("events", "graph"):
                key = (*c.key, method)
                if key not in medians:
                    continue
                ms = medians[key]
                moved = COMPULSORY[mode] * group.elements * DTYPES[dtype].itemsize
                speed = moved / ms / 1e6
                rows.append(
                    Row(
                        sweep=group.sweep,
                        shape=group.label,
                        levels=c.levels,
                        dtype=dtype,
                        layout=c.layout,
                        mode=mode,
                        provider=c.name,
                        method=method,
                        ms=ms,
                        gb_per_s=speed,
                        copy_percent=100 * speed / copy_gb_per_s,
                        error=errors.get(c.key),
                    )
                )
    return rows


def _call(candidate: Candidate, image: Tensor, grad_output: Tensor, mode: str) -> Call:
    if mode == "forward":
        call: Call = forward_call(candidate.layer, image)
    else:
        call = training_call(candidate.layer, image, grad_output)
    return with_tf32(call) if candidate.name == REFERENCE_TF32 else call


def _inputs(
    group: Group, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same random image and grad_output in each layout."""
    generator = torch.Generator(device).manual_seed(1)
    size = (group.batch, group.channels, group.side, group.side)
    results = []
    for _ in range(2):
        values = torch.randn(size, generator=generator, device=device).to(dtype)
        results.append({name: values.to(memory_format=f) for name, f in LAYOUTS.items()})
    return results[0], results[1]


def _check(
    candidates: Sequence[Candidate],
    images: Mapping[str, Tensor],
    grad_outputs: Mapping[str, Tensor],
    label: str,
    problem: Callable[[str], None],
) -> dict[tuple[str, str, str], float]:
    """The errors of the WTConv candidates whose numbers are right."""
    errors = {}
    references = {c.levels: c.layer for c in candidates if c.name == REFERENCE}
    for levels, reference in references.items():
        for layout in LAYOUTS:
            chosen = [c for c in candidates if c.levels == levels and c.layout == layout]
            if not chosen:
                continue
            exact = exact_results(reference, images[layout], grad_outputs[layout])
            for c in chosen:
                name = f"{c.name} on {label} L{levels} {layout}"
                loose = c.name == REFERENCE_TF32
                limits = TF32_LIMITS if loose else None
                try:
                    with tf32(loose):
                        errors[c.key] = check(name, c.layer, images[layout], exact, limits)
                except NumbersDifferError as error:
                    problem(str(error))
                except RuntimeError as error:  # out of memory too
                    problem(f"{name}: {str(error).splitlines()[0]}")
    return errors


def _graphs(
    calls: Mapping[tuple[str, ...], Call],
    timer: Timer,
    label: str,
    problem: Callable[[str], None],
) -> dict[tuple[str, ...], Call]:
    """The calls as CUDA graphs; the references are timed as they run, eager or compiled."""
    graphs = {}
    for key, call in calls.items():
        if key[0] in (REFERENCE, REFERENCE_TF32, COMPILED):
            continue
        try:
            captured = (*key[:-1], "graph")
            graphs[captured] = timer.capture(call)
        except RuntimeError as error:
            problem(f"{key[0]} on {label}: no CUDA graph: {str(error).splitlines()[0]}")
    return graphs


def header(settings: CudaSettings, copy_gb_per_s: float) -> str:
    """Card, software, flags and method of a run, in one line."""
    return (
        f"{torch.cuda.get_device_name(settings.device)}, driver {driver_version()}; "
        f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, TF32 off, "
        f"cudnn.benchmark {'on' if torch.backends.cudnn.benchmark else 'off'}; "
        f"k = {settings.kernel_size}; device-to-device copy {copy_gb_per_s:.0f} GB/s; "
        f"cold L2, median of {settings.rounds} rounds, providers interleaved"
    )


def driver_version() -> str:
    """Version of the NVIDIA driver, such as "580.65.06"; "unknown" where nothing says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"
