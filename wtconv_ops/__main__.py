"""Command line: ``python -m wtconv_ops demo`` and ``python -m wtconv_ops doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

_DEMO_MODULES = ("rich", "matplotlib", "PIL", "sklearn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: all went well. 1: the demonstration found a difference or a step failed. 2: the command
    cannot run as asked (unreadable image, missing extra, unknown option).
    """
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from wtconv_ops import doctor

        return doctor.main()
    return _demo(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wtconv_ops", description="WTConv for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="run, compile, export and package a WTConv network on a photograph",
        description="Runs WTConvNeXt-T, or a small WTConv network where timm is missing, on a "
        "photograph under torch.compile, compares it with the plain-PyTorch reference on the same "
        "weights, exports it with dynamic sizes, runs an AOTInductor package in a fresh process, "
        "prints a table and writes wtconv_demo.png. Exit status: 1 if anything differs or a step "
        "fails, 2 if it cannot run as asked.",
    )
    demo.add_argument("--image", type=Path, help="photograph; default: one from scikit-learn")
    demo.add_argument("--out", type=Path, default=Path(), help="folder for the picture; default: .")
    demo.add_argument("--threads", type=_positive, help="CPU threads; default: torch's own")
    commands.add_parser(
        "doctor",
        help="report the environment, the library, and which kernels would run and why",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _demo(options: argparse.Namespace) -> int:
    missing = [name for name in _DEMO_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f'{", ".join(missing)} missing: pip install "wtconv_ops[demo]"')
    import torch

    from wtconv_ops.demo.photograph import UnreadableImageError
    from wtconv_ops.demo.pipeline import Options, run_demo
    from wtconv_ops.demo.report import print_report, report_console

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        report, picture = run_demo(Options(image=options.image, out=options.out))
    except UnreadableImageError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"cannot write to {options.out}: {error.strerror or error}")
    print_report(report, report_console())
    print(f"wrote {picture}")
    return 0 if report.passed else 1


def _refuse(reason: str) -> int:
    print(f"wtconv_ops demo: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
