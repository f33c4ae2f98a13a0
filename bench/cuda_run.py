"""Check every WTConv provider against fp64, then time all providers in turn on each input size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.cuda_check import TF32_LIMITS, NumbersDifferError, check, exact_results
from bench.cuda_memory import peak_mib
from bench.cuda_providers import (
    COMPILED,
    LAYOUTS,
    REFERENCE_TF32,
    Candidate,
    build_candidates,
)
from bench.cuda_timing import Call, Sampler, Timer, interleaved_medians, tf32, with_tf32
from bench.environment import gpu_line
from bench.io_model import COMPULSORY
from bench.providers import OURS, REFERENCE
from bench.shapes import Group
from bench.timing import MODES, forward_call, training_call

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: How each sweep is timed unless a run says otherwise; see `bench.cuda_timing.METHODS`.
SWEEP_METHODS = {"paper": ("events",), "stages": ("events", "graph")}
#: Timed as they run, eager or compiled.
NOT_CAPTURED = (REFERENCE, REFERENCE_TF32, COMPILED)


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
    upstream_commit: str | None = None
    compiled: bool = False
    methods: tuple[str, ...] | None = None  # None: those of `SWEEP_METHODS`


@dataclass(frozen=True)
class Messages:
    """Where the sentences of a run go."""

    problem: Callable[[str], None]  # wrong numbers, or ours does not run: the run has failed
    note: Callable[[str], None]  # a rival does not run, or not by some method
    progress: Callable[[str], None]

    def failure(self, provider: str, label: str, error: Exception) -> None:
        """Say that ``provider`` raised ``error``."""
        lines = str(error).strip().splitlines() or [type(error).__name__]
        say = self.problem if provider == OURS else self.note
        say(f"{provider} on {label}: {lines[0]}")


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
    method: str  # one of `bench.cuda_timing.METHODS`
    ms: float
    gb_per_s: float  # compulsory bytes, 2 N or 5 N, over the time
    copy_percent: float  # of the copy speed of the same run
    error: float | None  # largest relative error of output and gradients
    peak_mib: float | None  # memory at its highest, image and grad_output included


def run(
    settings: CudaSettings,
    timer: Timer,
    copy_gb_per_s: float,
    messages: Messages,
) -> Iterator[list[Row]]:
    """Measure group by group; a provider that fails goes to ``messages`` and is not timed."""
    for dtype in settings.dtypes:
        for group in settings.groups:
            messages.progress(f"{group.sweep} {group.label} {dtype}")
            with _fresh_compiler() if settings.compiled else nullcontext():
                rows = _measure(settings, group, dtype, timer, copy_gb_per_s, messages)
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
    messages: Messages,
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
    errors = _check(candidates, images, grad_outputs, label, messages)
    timed = [c for c in candidates if c.levels is None or c.key in errors]
    methods = settings.methods or SWEEP_METHODS[group.sweep]
    rows = []
    for mode in MODES:
        samplers: dict[tuple[str, ...], Sampler] = {}
        peaks: dict[tuple[str, str, str], float | None] = {}
        size = group.elements * DTYPES[dtype].itemsize
        for c in (c for c in timed if mode in c.modes):
            call = _call(c, images[c.layout], grad_outputs[c.layout], mode)
            chosen = _samplers(c, call, timer, methods, f"{label} {mode}", messages)
            if chosen:
                peaks[c.key] = peak_mib(call, size if mode == "forward" else 2 * size, device)
            samplers |= chosen
        medians = interleaved_medians(samplers, settings.rounds)
        for c in timed:
            for method in methods:
                ms = medians.get((*c.key, method))
                if ms is None:
                    continue
                speed = COMPULSORY[mode] * size / ms / 1e6
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
                        peak_mib=peaks[c.key],
                    )
                )
    return rows


def _samplers(
    candidate: Candidate,
    call: Call,
    timer: Timer,
    methods: Sequence[str],
    label: str,
    messages: Messages,
) -> dict[tuple[str, ...], Sampler]:
    """A sampler for each method by which ``call`` can be timed."""
    samplers: dict[tuple[str, ...], Sampler] = {}
    for method in methods:
        if method == "graph" and candidate.name in NOT_CAPTURED:
            continue
        try:
            key = (*candidate.key, method)
            samplers[key] = timer.prepare(call, method)
        except Exception as error:  # a rival may raise anything
            what = "no CUDA graph" if method == "graph" else f"no {method}"
            case = f"{label} {candidate.layout}: {what}"
            if candidate.levels is not None:
                case = f"{label} L{candidate.levels} {candidate.layout}: {what}"
            messages.failure(candidate.name, case, error)
    return samplers


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
    messages: Messages,
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
                case = f"{label} L{levels} {layout}"
                loose = c.name == REFERENCE_TF32
                limits = TF32_LIMITS if loose else None
                try:
                    with tf32(loose):
                        errors[c.key] = check(
                            f"{c.name} on {case}", c.layer, images[layout], exact, limits
                        )
                except NumbersDifferError as error:
                    messages.problem(str(error))
                except Exception as error:  # a rival may raise anything
                    messages.failure(c.name, case, error)
    return errors


def header(settings: CudaSettings, copy_gb_per_s: float) -> str:
    """Card, software, flags and method of a run, in one line."""
    upstream = ""
    if settings.upstream is not None:
        upstream = f"upstream at commit {settings.upstream_commit or 'unknown'}; "
    return (
        f"{gpu_line(settings.device)}, cuDNN {torch.backends.cudnn.version()}, TF32 off, "
        f"cudnn.benchmark {'on' if torch.backends.cudnn.benchmark else 'off'}; {upstream}"
        f"k = {settings.kernel_size}; device-to-device copy {copy_gb_per_s:.0f} GB/s; "
        f"cold L2, median of {settings.rounds} rounds, providers interleaved; "
        "events and graph are device time alone, eager is wall time"
    )
