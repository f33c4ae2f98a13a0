"""Command line: ``python -m bench run --device cpu|cuda`` and ``python -m bench model``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

import wtconv_ops
from bench import cuda_report
from bench.cuda_providers import load_upstream_fused
from bench.cuda_run import DTYPES, CudaSettings, Row, header
from bench.cuda_run import run as run_cuda
from bench.cuda_timing import ColdTimer, copy_speed, tf32
from bench.model_table import print_model
from bench.run import LAYOUTS, NumbersDifferError, Settings, print_tables, run, write_csv
from bench.shapes import QUICK_SHAPES, QUICK_SWEEPS, SHAPES, SWEEPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a provider's numbers are wrong, 2 if it cannot run as asked."""
    options = _parser().parse_args(arguments)
    if options.command == "model":
        print_model(_console(120))
        return 0
    try:
        return _run_on_gpu(options) if options.device == "cuda" else _run_on_cpu(options)
    except FileNotFoundError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _run_on_cpu(options: argparse.Namespace) -> int:
    settings = Settings(
        shapes=QUICK_SHAPES if options.quick else SHAPES,
        layouts=_layouts(options),
        device=options.device,
        threads=options.threads,
        rounds=2 if options.quick else options.rounds,
        sample_ms=1.0 if options.quick else 50.0,
        upstream=options.upstream,
    )
    errors = Console(stderr=True)
    try:
        if errors.is_terminal:
            with errors.status("starting") as status:
                measurements = run(settings, status.update)
        else:
            measurements = run(settings, lambda _: None)
    except NumbersDifferError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print_tables(measurements, _console(120))
    if options.csv is not None:
        write_csv(measurements, options.csv)
        print(f"wrote {options.csv}")
    return 0


def _run_on_gpu(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench: --device cuda needs an NVIDIA GPU, torch sees none", file=sys.stderr)
        return 2
    sweeps = QUICK_SWEEPS if options.quick else SWEEPS
    settings = CudaSettings(
        groups=tuple(group for name in options.sweep for group in sweeps[name]),
        dtypes=tuple(options.dtype),
        layouts=_layouts(options),
        rounds=2 if options.quick else options.rounds,
        upstream=None if options.upstream is None else load_upstream_fused(options.upstream),
        compiled=options.compiled,
    )
    try:
        wtconv_ops.can_run("cuda", torch.float32, settings.kernel_size, 1, raise_error=True)
    except RuntimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    problems: list[str] = []

    def problem(sentence: str) -> None:
        problems.append(sentence)
        print(f"bench: {sentence}", file=sys.stderr)

    rows: list[Row] = []
    with tf32(False), ExitStack() as stack:
        timer = ColdTimer(torch.device("cuda"))
        copy_gb_per_s = copy_speed(timer, torch.device("cuda"))
        line = header(settings, copy_gb_per_s)
        sink = None
        if options.csv is not None:
            sink = stack.enter_context(cuda_report.csv_sink(options.csv, line))
        errors = Console(stderr=True)
        progress: Callable[[str], None] = errors.print
        if errors.is_terminal:
            progress = stack.enter_context(errors.status("starting")).update
        for measured in run_cuda(settings, timer, copy_gb_per_s, problem, progress):
            rows += measured
            if sink is not None:
                sink(measured)
    console = _console(200)
    cuda_report.print_tables(rows, console)
    cuda_report.print_means(rows, settings.kernel_size, console)
    console.print(line, highlight=False)
    return 1 if problems else 0


def _console(width: int) -> Console:
    return Console(width=None if sys.stdout.isatty() else width)


def _layouts(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(LAYOUTS) if options.layout == "both" else (options.layout,)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model", help="memory traffic, arithmetic and roofline, counted by hand")
    command = commands.add_parser("run", help="check against fp64, then time all providers")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--layout", choices=(*LAYOUTS, "both"), default="nchw")
    command.add_argument("--rounds", type=int, default=11, help="samples of each provider")
    command.add_argument("--csv", type=Path, help="write every measurement to this file")
    command.add_argument("--upstream", type=Path, help="checkout of BGU-CS-VIL/WTConv to add")
    command.add_argument("--quick", action="store_true", help="tiny shapes, to test the benchmark")
    cpu = command.add_argument_group("with --device cpu")
    cpu.add_argument("--threads", type=int, default=2, help="default: 2")
    cuda = command.add_argument_group("with --device cuda")
    cuda.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=["float32"])
    cuda.add_argument("--sweep", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS))
    cuda.add_argument("--compiled", action="store_true", help="add the compiled reference; slow")
    return parser


if __name__ == "__main__":
    sys.exit(main())
