"""The emulator finds what is wrong in a kernel; no kernel on tensor cores races under it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import emulator
import pytest
from emulator import Emulator

#: In the order of driver.cpp, which has two more whose results hold NaN, and one without a fault.
FAULTS = [
    "access outside of the block's shared memory",
    "access to shared memory not aligned",
    "wrote outside of the block's shared memory",
    "threads wait at different barriers",
    "has not waited for the previous grid",
    "lets the next grid start before it has waited",
    "waits for a team that is not its own",
    "team reaches past its block",
    "threads wait at different barriers",
]
#: Those of bulk copies; then comes one whose result is NaN, and one without a fault.
BOX_FAULTS = [
    "barrier of bulk copies is not initialised",
    "waits for a phase that is not armed",
    "armed before the last one was waited for",
    "other bytes arrive than are expected",
    "box is not aligned in shared memory",
    "columns of a box are not aligned in memory",
    "written without a fence",
    "overwritten before its store had read it",
    "returns before its boxes were read",
    "ends before its boxes have arrived",
]


def assert_found(kernels: Emulator, kernel: str, faults: list[str]) -> None:
    for fault, words in enumerate(faults):
        with pytest.raises(RuntimeError, match=words):
            kernels.faulty(kernel, fault)


def test_faults_are_found(kernels: Emulator) -> None:
    assert_found(kernels, "faulty", FAULTS)
    race, early = len(FAULTS), len(FAULTS) + 1
    assert bool(kernels.faulty("faulty", race).isnan().any())
    assert bool(kernels.faulty("faulty", early).isnan().all())
    assert kernels.faulty("faulty", early + 1).tolist() == [(i + 1) % 64 for i in range(64)]


def test_faults_of_bulk_copies_are_found(kernels: Emulator) -> None:
    assert_found(kernels, "faulty_boxes", BOX_FAULTS)
    early = len(BOX_FAULTS)
    assert bool(kernels.faulty("faulty_boxes", early).isnan().any())
    assert kernels.faulty("faulty_boxes", early + 1).tolist() == [i + 1 for i in range(64)]


def test_threads_of_a_block_do_not_race(tmp_path: Path) -> None:
    watch = ["-fsanitize=thread", "-g"]
    program, probe = tmp_path / "races", tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    command = emulator.compiler_command()
    built = subprocess.run([command[0], *watch, probe, "-o", program], capture_output=True)
    if built.returncode != 0 or subprocess.run([program], capture_output=True).returncode != 0:
        pytest.skip("needs a g++ with ThreadSanitizer")
    sources = {
        emulator.CUDA / "patch" / "forward.cu": watch,
        emulator.CUDA / "patch" / "mma_forward.cu": watch,
        emulator.CUDA / "patch" / "mma_planes.cu": watch,
        emulator.CUDA / "patch" / "mma_planes_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "mma_group.cu": watch,
        emulator.CUDA / "patch" / "mma_group_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "weight_grad.cu": watch,
        emulator.CUDA / "patch" / "mma_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "lowpass_planes.cu": watch,
        emulator.CUDA / "patch" / "group_forward.cu": watch,
        emulator.CUDA / "patch" / "group_weight_grad.cu": watch,
        emulator.CUDA / "patch" / "choose.cpp": [],
        emulator.HOST / "races.cpp": watch,
        emulator.HOST / "cuda_on_cpu.cpp": [],
    }
    emulator.compile_and_link(program, watch, sources)
    clean = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert clean.returncode == 0, clean.stdout + clean.stderr[:4000]
    racing = subprocess.run([program, "racing"], capture_output=True, text=True, timeout=120)
    assert "data race" in racing.stderr
