"""Command line of ``python -m bench``; the commands are listed in :mod:`bench.arguments`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

import wtconv_ops
from bench import arguments, compiled, cuda_report, host, host_compiled, ncu, synthesis, traffic
from bench.compiled_report import print_compiled
from bench.csv_file import Sink, cells_of, csv_sink
from bench.cuda_check import NumbersDifferError as GpuNumbersDifferError
from bench.cuda_providers import load_upstream_fused
from bench.cuda_run import CudaSettings, Messages, Row, header
from bench.cuda_run import run as run_cuda
from bench.cuda_timing import ColdTimer, copy_speed, tf32
from bench.environment import checkout_commit, gpu_line
from bench.model_table import print_model
from bench.run import NumbersDifferError, Settings, print_tables, run
from bench.shapes import (
    QUICK_SHAPES,
    QUICK_SWEEPS,
    SHAPES,
    SWEEPS,
    NoSuchShapeError,
    only,
    only_levels,
)
from bench.timing import threads
from wtconv_ops.demo.timing import processor_name

_WRONG_NUMBERS = (
    NumbersDifferError,
    GpuNumbersDifferError,
    compiled.WrongNumbersError,
    synthesis.WrongSynthesisError,
)


class _CannotRunError(Exception):
    """The machine lacks what a command needs."""


def main(command_line: Sequence[str] | None = None) -> int:
    """Run a command; 1 if a provider's numbers are wrong, 2 if it cannot run as asked."""
    options = arguments.parse(command_line)
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "model": _model,
        "run": _run_on_gpu if getattr(options, "device", "") == "cuda" else _run_on_cpu,
        "traffic": _traffic,
        "host": _host,
        "compile": _compile,
        "synthesis": _synthesis,
    }
    try:
        return commands[options.command](options)
    except _WRONG_NUMBERS as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (FileNotFoundError, NoSuchShapeError, _CannotRunError, ncu.NcuError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _compile(options: argparse.Namespace) -> int:
    wanted = set(options.subject)
    if compiled.NETWORK in wanted and (options.quick or not compiled.has_timm()):
        wanted.remove(compiled.NETWORK)
        if not options.quick:
            print(f"bench: {compiled.NETWORK} needs timm and is left out", file=sys.stderr)
    if not wanted:
        raise _CannotRunError(
            f"compile: {compiled.NETWORK} alone was asked for, which needs timm and is not quick"
        )
    settings = compiled.CompileSettings(
        subjects=compiled.subjects(tuple(wanted), options.batch, options.quick),
        device=options.device,
        precisions=tuple(dict.fromkeys(options.dtype)),
        layouts=arguments.layouts(options),
        modes=tuple(dict.fromkeys(options.mode)),
        rounds=options.rounds,
        variants=tuple(options.variant),
    )
    _require_kernels(options.device, f"--device {options.device}", 5)
    cuda = options.device == "cuda"
    machine = gpu_line("cuda") if cuda else f"{processor_name()}; torch {torch.__version__}"
    rows: list[compiled.CompileRow] = []
    with (
        tf32(False),
        threads(options.threads),
        _sink(options, machine) as write,
        _progress(lines=True) as progress,
    ):
        for measured in compiled.run(settings, progress):
            write(measured)
            rows += measured
    if not rows:
        raise _CannotRunError(
            "compile: no model has one of the variants asked for here; "
            f"{compiled.GRAPH!r}, {compiled.REPLAYED!r} and {compiled.PEER_REPLAYED!r} need a GPU, "
            f"the second a {compiled.BLOCK} or {compiled.NETWORK}, the third and {compiled.PEER!r} "
            f"{compiled.NETWORK}"
        )
    print_compiled(rows, machine, _console(160))
    if options.figure is not None:
        from bench.compiled_figure import draw

        draw(rows, machine, options.figure)
    return 0


def _model(options: argparse.Namespace) -> int:
    print_model(_console(120))
    return 0


def _run_on_cpu(options: argparse.Namespace) -> int:
    settings = Settings(
        shapes=QUICK_SHAPES if options.quick else SHAPES,
        layouts=arguments.layouts(options),
        device=options.device,
        threads=options.threads,
        rounds=2 if options.quick else options.rounds,
        sample_ms=1.0 if options.quick else 50.0,
        upstream=options.upstream,
    )
    with _progress() as progress:
        measurements = run(settings, progress)
    print_tables(measurements, _console(120))
    _save(measurements, options)
    return 0


def _run_on_gpu(options: argparse.Namespace) -> int:
    sweeps = QUICK_SWEEPS if options.quick else SWEEPS
    groups = tuple(group for name in options.sweep for group in sweeps[name])
    if options.shape is not None:
        groups = only(groups, options.shape)
    if options.levels is not None:
        groups = only_levels(groups, options.levels)
    settings = CudaSettings(
        groups=groups,
        dtypes=tuple(options.dtype),
        layouts=arguments.layouts(options),
        rounds=2 if options.quick else options.rounds,
        compiled=options.compiled,
        methods=None if options.method is None else tuple(dict.fromkeys(options.method)),
        kernel_size=options.kernel_size,
    )
    _require_kernels("cuda", "--device cuda", settings.kernel_size)
    if options.upstream is not None:
        settings = replace(
            settings,
            upstream=load_upstream_fused(options.upstream),
            upstream_commit=checkout_commit(options.upstream),
        )
    problems: list[str] = []

    def say(sentence: str) -> None:
        print(f"bench: {sentence}", file=sys.stderr)

    def problem(sentence: str) -> None:
        problems.append(sentence)
        say(sentence)

    rows: list[Row] = []
    with tf32(False), ExitStack() as stack:
        timer = ColdTimer(torch.device("cuda"))
        copy_gb_per_s = copy_speed(timer, torch.device("cuda"))
        line = header(settings, copy_gb_per_s)
        write = stack.enter_context(_sink(options, line, cuda_report.cells_of))
        messages = Messages(problem, say, stack.enter_context(_progress(lines=True)))
        for measured in run_cuda(settings, timer, copy_gb_per_s, messages):
            rows += measured
            write(measured)
    console = _console(200)
    cuda_report.print_tables(rows, console)
    cuda_report.print_means(rows, settings.kernel_size, console)
    cuda_report.print_memory(rows, console)
    console.print(line, highlight=False)
    return 1 if problems else 0


def _traffic(options: argparse.Namespace) -> int:
    settings = traffic.TrafficSettings(
        sizes=tuple(options.shape),
        levels=tuple(options.levels),
        dtypes=tuple(options.dtype),
        layouts=arguments.layouts(options),
        directions=tuple(options.direction),
    )
    path = traffic.find_ncu()
    _require_kernels("cuda", "traffic", settings.kernel_size)
    line = traffic.header(settings, path)
    console = _console(120)
    with _sink(options, line) as write, _progress(lines=True) as progress:
        for measured in traffic.run(settings, lambda target: ncu.profile(path, target), progress):
            traffic.print_traffic(measured, console)
            write(measured)
    console.print(line, highlight=False)
    return 0


def _host(options: argparse.Namespace) -> int:
    settings = host.HostSettings(
        devices=tuple(dict.fromkeys(options.device)),
        levels=tuple(dict.fromkeys(options.levels)),
        dtypes=tuple(dict.fromkeys(options.dtype)),
        rounds=options.rounds,
        threads=options.threads,
    )
    for device in settings.devices:
        _require_kernels(device, f"host --device {device}", settings.kernel_size)
    with _progress() as progress:
        rows = host.run(settings, progress)
        compiled_rows = host_compiled.run(settings, progress) if options.compiled else []
    host.print_host(rows, _console(120))
    if compiled_rows:
        host_compiled.print_compiled_host(compiled_rows, _console(120))
    _save([*rows, *compiled_rows], options)
    return 0


def _synthesis(options: argparse.Namespace) -> int:
    settings = synthesis.SynthesisSettings(
        device=options.device,
        sizes=tuple(options.shape),
        levels=tuple(dict.fromkeys(options.levels)),
        dtypes=tuple(dict.fromkeys(options.dtype)),
        rounds=options.rounds,
        threads=options.threads,
    )
    _require_kernels(options.device, f"synthesis --device {options.device}", 1)
    with _progress(lines=True) as progress:
        rows = synthesis.run(settings, progress)
    synthesis.print_synthesis(rows, _console(120))
    _save(rows, options)
    return 0


def _require_kernels(device: str, command: str, kernel_size: int) -> None:
    """Stop with a sentence where there is no GPU, or the kernels do not run."""
    if device == "cuda" and not torch.cuda.is_available():
        raise _CannotRunError(f"{command} needs an NVIDIA GPU, torch sees none")
    try:
        wtconv_ops.can_run(device, torch.float32, kernel_size, 1, raise_error=True)
    except RuntimeError as error:
        raise _CannotRunError(str(error)) from error


@contextmanager
def _progress(lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A status line on a terminal; elsewhere ``lines``, or nothing."""
    errors = Console(stderr=True)
    if errors.is_terminal:
        with errors.status("starting") as status:
            yield status.update
    else:
        yield errors.print if lines else lambda _: None


def _sink(
    options: argparse.Namespace, line: str = "", cells: Callable[[Any], dict[str, Any]] = cells_of
) -> AbstractContextManager[Sink[Any]]:
    """Where rows go as they are measured: to the file, if one was asked for."""
    if options.csv is None:
        return nullcontext(lambda _: None)
    return csv_sink(options.csv, line, cells)


def _save(rows: Sequence[object], options: argparse.Namespace) -> None:
    with _sink(options) as write:
        write(rows)


def _console(width: int) -> Console:
    return Console(width=None if sys.stdout.isatty() else width)


if __name__ == "__main__":
    sys.exit(main())
