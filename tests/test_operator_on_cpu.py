"""The operators of csrc/cuda, host code and kernels, run on the CPU (emulator.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import emulator
import pytest

#: Of each dtype. They run and fail in two parts.
CASES = {"float16": 30, "bfloat16": 30, "float32": 20, "float64": 10}
PROGRAM = """
import sys, torch
torch.ops.load_library(sys.argv[1])
import emulated_operator
emulated_operator.main(*sys.argv[1:])
"""


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("dtype", list(CASES))
def test_every_result_is_a_few_roundings_from_the_reference(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, part: int
) -> None:
    library = emulator.operator_library(emulator.shared_folder(tmp_path_factory))
    ends = [str(CASES[dtype] // 2 * n) for n in (part, part + 1)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, library, dtype, *ends],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
