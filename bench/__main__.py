"""Command line: ``python -m bench run --device cpu [--layout both] [--csv FILE]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.run import LAYOUTS, NumbersDifferError, Settings, print_tables, run, write_csv
from bench.shapes import QUICK_SHAPES, SHAPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if a provider's numbers are wrong, 2 if it cannot run as asked."""
    options = _parser().parse_args(arguments)
    layouts = tuple(LAYOUTS) if options.layout == "both" else (options.layout,)
    settings = Settings(
        shapes=QUICK_SHAPES if options.quick else SHAPES,
        layouts=layouts,
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
    except FileNotFoundError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print_tables(measurements, Console(width=None if sys.stdout.isatty() else 120))
    if options.csv is not None:
        write_csv(measurements, options.csv)
        print(f"wrote {options.csv}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="check against fp64, then time all providers")
    command.add_argument("--device", choices=("cpu",), default="cpu")
    command.add_argument("--threads", type=int, default=2, help="default: 2")
    command.add_argument("--layout", choices=(*LAYOUTS, "both"), default="nchw")
    command.add_argument("--rounds", type=int, default=11, help="samples of each provider")
    command.add_argument("--csv", type=Path, help="write every measurement to this file")
    command.add_argument("--upstream", type=Path, help="checkout of BGU-CS-VIL/WTConv to add")
    command.add_argument("--quick", action="store_true", help="tiny shapes, to test the benchmark")
    return parser


if __name__ == "__main__":
    sys.exit(main())
