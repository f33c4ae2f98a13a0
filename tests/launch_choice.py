"""Launch choices of csrc/cuda compiled for the host: devices, and a driver built by g++."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parent.parent / "csrc" / "cuda"

#: Multiprocessors, shared bytes a block may ask for, shared bytes of a multiprocessor.
DEVICES = {
    "sm_86": (84, 99 * 1024, 100 * 1024),
    "sm_80": (108, 163 * 1024, 164 * 1024),
    "sm_90": (132, 227 * 1024, 228 * 1024),
}


@dataclass(frozen=True)
class Problem:
    """The fields of problem.h that both kinds of kernels choose by."""

    batch: int
    channels: int
    height: int
    width: int
    kernel_size: int
    levels: int
    accumulator_bytes: int
    element_bytes: int
    channels_last: int


def build(folder: Path, driver: str, *sources: Path) -> Path:
    """A program of ``driver`` and ``sources``, under the sanitizer for undefined behaviour."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source, program = folder / "driver.cpp", folder / "driver"
    source.write_text(driver)
    command = [compiler, "-std=c++20", "-O1", "-fsanitize=undefined", f"-I{CUDA}"]
    command += [str(source), *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return program
