"""Nsight Compute on a command: the ncu command line, and the traffic of each kernel it reports.

ncu runs every profiled kernel alone and may repeat it. With ``--cache-control all`` it writes back
and invalidates the caches before each of them, so every kernel starts with a cold and clean L2, as
the I/O model supposes: what one kernel leaves in L2 for the next is read from memory again. The
other choice, no cache control and a flush of our own, would count the write-back of the lines that
the flush left dirty, and only the first kernel would start cold.

Writes that are still in L2 when a kernel ends are not counted, at most the size of that cache (50
MB on an H100): take tensors that are several times as large.
"""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

READ = "dram__bytes_read.sum"
WRITTEN = "dram__bytes_write.sum"


class NcuError(Exception):
    """ncu failed, or printed something that has no traffic in it."""


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes that one launch of a kernel read from device memory and wrote to it."""

    kernel: str
    read_bytes: float
    written_bytes: float


def command_line(ncu: str, target: Sequence[str]) -> list[str]:
    """The command that profiles ``target`` between its cudaProfilerStart and cudaProfilerStop."""
    return [
        ncu,
        *("--target-processes", "all"),
        *("--profile-from-start", "off"),
        *("--cache-control", "all"),
        *("--metrics", f"{READ},{WRITTEN}"),
        *("--print-units", "base"),
        *("--print-kernel-base", "function"),
        "--csv",
        *target,
    ]


def profile(ncu: str, target: Sequence[str], timeout_s: float = 600) -> list[KernelTraffic]:
    """Run ``target`` under ``ncu``; one entry for each kernel launched, in order.

    Raises:
        NcuError: ncu or ``target`` failed, or no kernel was profiled.
    """
    command = command_line(ncu, target)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise NcuError(f"cannot run ncu: {error}") from error
    if done.returncode != 0 or "==ERROR==" in done.stdout:
        raise NcuError(f"ncu failed: {failure(done.stdout, done.stderr)}")
    return parse(done.stdout)


def failure(stdout: str, stderr: str) -> str:
    """The one line that says most about a failed run: ncu's error, else the last line of all."""
    lines = [line.strip() for line in (*stdout.splitlines(), *stderr.splitlines())]
    for line in lines:
        if line.startswith("==ERROR=="):
            return line.removeprefix("==ERROR==").strip()
    return next((line for line in reversed(lines) if line), "no output")


def parse(text: str) -> list[KernelTraffic]:
    """Read what ``ncu --csv`` printed: one line for each kernel launch and metric.

    Lines around the table, of ncu and of the program, are skipped.

    Raises:
        NcuError: no table, or a kernel without both metrics in bytes.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise NcuError("ncu printed no table; did the program launch a kernel?")
    rows = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    kernels: dict[str, str] = {}
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        launch, metric = row["ID"], row["Metric Name"]
        if metric not in (READ, WRITTEN):
            continue
        kernels[launch] = short_name(row["Kernel Name"])
        values.setdefault(launch, {})[metric] = _bytes(row)
    for launch, found in values.items():
        missing = [metric for metric in (READ, WRITTEN) if metric not in found]
        if missing:
            raise NcuError(f"ncu printed no {missing[0]} for {kernels[launch]}")
    if not values:
        raise NcuError(f"ncu printed no {READ}; does this GPU have the metric?")
    return [
        KernelTraffic(kernels[launch], found[READ], found[WRITTEN])
        for launch, found in values.items()
    ]


def _bytes(row: dict[str, str]) -> float:
    """The value of a line, whose thousands may be separated by commas."""
    metric, unit, value = row["Metric Name"], row["Metric Unit"], row["Metric Value"]
    if unit not in ("byte", "bytes"):
        raise NcuError(f"{metric} must be in bytes, got {value} {unit}")
    try:
        return float(value.replace(",", ""))
    except ValueError:
        raise NcuError(f"{metric} must be a number, got {value!r}") from None


def short_name(kernel: str) -> str:
    """Name without return type, namespaces, template arguments and parameters."""
    name = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    name = re.split(r"[<(]", name, maxsplit=1)[0]
    return name.split("::")[-1].split(" ")[-1]
