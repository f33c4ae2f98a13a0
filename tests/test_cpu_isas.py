"""The kernels of every instruction set in the library: the numbers are right with each.

WTCONV_CPU_ISA limits the kernels of a process; a test process of its own runs the parity tests.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, load

from wtconv_ops import _library

TESTS = Path(__file__).resolve().parent
COMPACT = ["test_accuracy.py", "test_half_conversions.py", "test_threads.py"]
pytestmark = pytest.mark.usefixtures("ops")


def environment(isa: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return {**kept, "WTCONV_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}


def loaded(isa: str) -> tuple[dict[str, object], str]:
    """What the library says about itself in a process limited to ``isa``, and the warnings."""
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
    return json.loads(done.stdout), done.stderr


def chosen(isa: str) -> str:
    """The instruction set that a process runs when limited to ``isa``."""
    return str(loaded(isa)[0]["cpu_isa"])


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


def test_unknown_limit_is_ignored_with_one_warning_that_names_the_known_ones() -> None:
    newest, said = loaded("")
    assert said == ""
    names = newest["cpu_isas"]
    assert isinstance(names, list)
    assert loaded(names[-1]) == (newest, "")
    info, said = loaded("AVX2")
    assert info == newest
    sentence = f"WTCONV_CPU_ISA must be one of {', '.join(names)}, got 'AVX2', which is ignored"
    assert said.count("Warning") == said.count(f"RuntimeWarning: wtconv_ops: {sentence}\n") == 1


SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/cpu/isa/engine_*.cpp"))


@pytest.mark.parametrize("source", SOURCES)
def test_a_machine_without_an_instruction_set_can_load_its_kernels(
    source: str, tmp_path: Path
) -> None:
    """Nothing runs as the library is loaded, and the linker takes no function from here for others.

    Whichever machine runs this: a machine that lacks AVX-512 would stop at its first instruction.
    """
    config = load("build_config")
    x86 = platform.machine() == "x86_64"
    flags = {str(path): options for path, options in config.cpp_sources(ROOT, x86, None)}
    if source not in flags:
        pytest.skip(f"not built on {platform.machine()}")
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    compiled = tmp_path / "engine.o"
    command = [*config.find_compiler(), "-std=c++17", "-O0", "-fPIC", "-Icsrc", *flags[source]]
    subprocess.run([*command, "-c", source, "-o", compiled], cwd=ROOT, check=True, timeout=300)
    assert b".init_array" not in compiled.read_bytes()
    symbols = subprocess.run(["nm", compiled], capture_output=True, text=True, check=True).stdout
    isa = config.isa_of(Path(source))
    shared = re.findall(r"^\S+ [VWu] (\S+)$", symbols, re.MULTILINE)
    assert [name for name in shared if f"3cpu{len(isa)}{isa}" not in name] == []
