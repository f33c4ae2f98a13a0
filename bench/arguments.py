"""Command line of ``python -m bench``: every option with its default in the help."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.compiled import MODES, PRECISIONS, SUBJECTS, VARIANTS
from bench.cuda_run import DTYPES
from bench.cuda_timing import METHODS
from bench.run import LAYOUTS
from bench.shapes import SWEEPS, Size
from bench.traffic_target import DIRECTIONS


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; stops with a usage message where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model", help="memory traffic, arithmetic and roofline, counted by hand")
    _add_run(commands.add_parser("run", help="check against fp64, then time all providers"))
    _add_traffic(
        commands.add_parser("traffic", help="measure device memory traffic with Nsight Compute")
    )
    _add_host(commands.add_parser("host", help="time a call takes on a tiny input"))
    _add_compile(
        commands.add_parser(
            "compile",
            help="eager against torch.compile, alone and in a network",
            description="Of one model and mode after the other. The profiler that counts the "
            "kernels of one can slow the launches of those after it: where the host's time "
            "matters, one a command.",
        )
    )
    _add_synthesis(
        commands.add_parser("synthesis", help="the two lowerings of synthesis, with neighbours")
    )
    return parser.parse_args(arguments)


def layouts(options: argparse.Namespace) -> tuple[str, ...]:
    """The layouts that ``--layout`` names."""
    return tuple(LAYOUTS) if options.layout == "both" else (options.layout,)


def _add(group: Any, flag: str, text: str, default: Any = None, **settings: Any) -> None:
    """Add an option whose help ends with its default."""
    if default is not None:
        shown = default if isinstance(default, (list, tuple)) else [default]
        text = f"{text} (default: {' '.join(map(str, shown))})"
    group.add_argument(flag, help=text, default=default, **settings)


def _add_layout(command: Any) -> None:
    _add(command, "--layout", "memory layout", "nchw", choices=(*LAYOUTS, "both"))


def _add_dtype(command: Any) -> None:
    _add(command, "--dtype", "one or more dtypes", ["float32"], nargs="+", choices=tuple(DTYPES))


def _add_csv(command: Any) -> None:
    _add(command, "--csv", "write every measurement to this file", type=_file, metavar="PATH")


def _add_run(command: argparse.ArgumentParser) -> None:
    _add(command, "--device", "where to run", "cpu", choices=("cpu", "cuda"))
    _add_layout(command)
    _add(command, "--rounds", "samples of each provider", 11, type=_positive, metavar="N")
    _add_csv(command)
    _add(command, "--upstream", "checkout of BGU-CS-VIL/WTConv to add", type=Path, metavar="PATH")
    command.add_argument("--quick", action="store_true", help="tiny shapes, to test the benchmark")
    cpu = command.add_argument_group("with --device cpu")
    _add(cpu, "--threads", "intra-op threads", 2, type=_positive, metavar="N")
    cuda = command.add_argument_group("with --device cuda")
    _add_dtype(cuda)
    _add(cuda, "--sweep", "one or more sweeps", list(SWEEPS), nargs="+", choices=tuple(SWEEPS))
    _add(
        cuda,
        "--shape",
        "of the sweeps, only these BxCxHxW (default: all)",
        nargs="+",
        type=_size,
        metavar="SHAPE",
    )
    text = "of the sweeps, only these numbers of levels (default: all)"
    _add(cuda, "--levels", text, nargs="+", type=_positive)
    _add(cuda, "--kernel-size", "of the filters", 5, type=_positive, metavar="K")
    _add(
        cuda,
        "--method",
        "device time of a call (events) or of its captured replay (graph), wall time (eager); "
        "one or more (default: events, for the stages also graph)",
        nargs="+",
        choices=METHODS,
    )
    cuda.add_argument("--compiled", action="store_true", help="add the compiled reference; slow")


def _add_traffic(command: argparse.ArgumentParser) -> None:
    sizes = [Size(8, 64, 256, 256)]
    _add(command, "--shape", "one or more BxCxHxW", sizes, nargs="+", type=_size, metavar="SHAPE")
    _add(command, "--levels", "one or more numbers of levels", [5], nargs="+", type=_positive)
    _add(command, "--direction", "one or both", list(DIRECTIONS), nargs="+", choices=DIRECTIONS)
    _add_dtype(command)
    _add_layout(command)
    _add_csv(command)


def _add_host(command: argparse.ArgumentParser) -> None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    _add(command, "--device", "one or both", devices, nargs="+", choices=("cpu", "cuda"))
    _add(command, "--levels", "one or more numbers of levels", [1, 3, 5], nargs="+", type=_positive)
    _add_dtype(command)
    _add(command, "--rounds", "samples of each call", 101, type=_positive, metavar="N")
    _add(command, "--threads", "intra-op threads", 2, type=_positive, metavar="N")
    text = "add the compiled layer, alone and in networks, with and without size_asserts, and a "
    text += "compiled convolution"
    command.add_argument("--compiled", action="store_true", help=text)
    _add_csv(command)


def _add_compile(command: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _add(command, "--device", "where to run", device, choices=("cpu", "cuda"))
    text = "one or more models; the network beside a compiled ConvNeXt-T"
    _add(command, "--subject", text, list(SUBJECTS), nargs="+", choices=SUBJECTS)
    text = "float32, or bfloat16 under autocast; one or both"
    _add(command, "--dtype", text, list(PRECISIONS), nargs="+", choices=PRECISIONS)
    _add(command, "--mode", "one or both", list(MODES), nargs="+", choices=MODES)
    text = "one or more ways to run a model, of those that it has"
    _add(command, "--variant", text, list(VARIANTS), nargs="+", choices=VARIANTS, metavar="NAME")
    _add_layout(command)
    _add(command, "--batch", "images of a batch", 64, type=_positive, metavar="N")
    _add(command, "--rounds", "samples of each variant", 11, type=_positive, metavar="N")
    _add(command, "--threads", "intra-op threads", 2, type=_positive, metavar="N")
    _add_csv(command)
    _add(command, "--figure", "draw the times; needs matplotlib", type=_file, metavar="PATH")
    command.add_argument("--quick", action="store_true", help="tiny models, to test the benchmark")


def _add_synthesis(command: argparse.ArgumentParser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [Size(8, 96, 56, 56), Size(2, 64, 128, 128)]
    _add(command, "--device", "where to run", device, choices=("cpu", "cuda"))
    _add(command, "--shape", "one or more BxCxHxW", sizes, nargs="+", type=_size, metavar="SHAPE")
    _add(command, "--levels", "one or more numbers of levels", [1, 3], nargs="+", type=_positive)
    _add_dtype(command)
    _add(command, "--rounds", "samples of each variant", 11, type=_positive, metavar="N")
    _add(command, "--threads", "intra-op threads", 2, type=_positive, metavar="N")
    _add_csv(command)


def _size(text: str) -> Size:
    try:
        return Size.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that exists, got {text}")
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)
