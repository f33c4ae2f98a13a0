"""The kernels of every instruction set in the library: the numbers are right with each.

WTCONV_CPU_ISA limits the kernels of a process; a test process of its own runs the parity tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wtconv_ops import _library

TESTS = Path(__file__).resolve().parent
COMPACT = ["test_accuracy.py", "test_half_conversions.py", "test_threads.py"]
pytestmark = pytest.mark.usefixtures("ops")


def environment(isa: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, "WTCONV_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}


def chosen(isa: str) -> str:
    """The instruction set that a process runs when limited to ``isa``."""
    program = "import json, wtconv_ops._library as l; print(json.dumps(l.build_info()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(isa),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return str(json.loads(done.stdout)["cpu_isa"])


@pytest.mark.slow
@pytest.mark.parametrize("isa", _library.build_info().get("cpu_isas", ["baseline"]))
def test_numbers_are_right_with_every_instruction_set(isa: str) -> None:
    if chosen(isa) != isa:
        pytest.skip(f"this machine has no {isa}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [str(TESTS / name) for name in COMPACT],
        env=environment(isa),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout


def test_limit_names_the_kernels_that_run() -> None:
    assert chosen("baseline") == "baseline"
    assert chosen("avx2") in ("avx2", "baseline")
