"""Loading the library, living without it, and the one predicate that says what can run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import wtconv_ops
from wtconv_ops import _capability, _library

PACKAGE = Path(wtconv_ops.__file__).parent


def run_python(code: str, folder: Path, *, library: bytes | None) -> str:
    """Output of a new process that imports a copy of the package with another library file."""
    shutil.copytree(
        PACKAGE,
        folder / "wtconv_ops",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    if library is not None:
        (folder / "wtconv_ops" / _library.FILE_NAME).write_bytes(library)
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


WITHOUT_LIBRARY = """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import wtconv_ops
    import torch
    assert len(caught) == 1, caught
    assert caught[0].filename == __file__, caught[0].filename
    print(caught[0].message)
    assert not wtconv_ops.can_run("cpu", torch.float32, 5, 3)
    layer = wtconv_ops.WTConv2d(3, 3, wt_levels=2)
    layer(torch.ones(1, 3, 7, 5)).sum().backward()
    assert layer.base_conv.weight.grad.abs().sum() > 0
"""


@pytest.mark.parametrize(
    ("library", "said"),
    [(None, "is not installed"), (b"not a library", "cannot be loaded")],
    ids=["missing", "broken"],
)
def test_without_library_one_warning_and_the_plain_path(tmp_path, library, said):
    assert said in run_python(WITHOUT_LIBRARY, tmp_path, library=library)


def test_import_prints_nothing_and_changes_no_setting(tmp_path, ops):
    code = """
        import warnings
        import torch
        warnings.simplefilter("error")
        before = torch.__config__.parallel_info(), torch.get_default_dtype(), torch.get_rng_state()
        import logging, wtconv_ops
        after = torch.__config__.parallel_info(), torch.get_default_dtype(), torch.get_rng_state()
        assert before[:2] == after[:2] and torch.equal(before[2], after[2])
        assert not logging.getLogger().handlers
        assert not logging.getLogger("wtconv_ops").handlers
    """
    library = _library.default_path()
    if not library.is_file():
        pytest.skip(f"no {_library.FILE_NAME} in the package")
    assert run_python(code, tmp_path, library=library.read_bytes()) == ""


def test_library_loaded_by_another_party_is_used_as_it_is(tmp_path, ops):
    library = _library.default_path()
    if not library.is_file():
        pytest.skip(f"no {_library.FILE_NAME} in the package")
    code = f"""
        import torch
        torch.ops.load_library({str(library)!r})
        import wtconv_ops
        assert wtconv_ops.can_run("cpu", torch.float32, 5, 3)
        layer = wtconv_ops.WTConv2d(3, 3)
        layer(torch.ones(1, 3, 7, 5)).sum().backward()
    """
    assert run_python(code, tmp_path, library=library.read_bytes()) == ""


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (("cpu", torch.int32, 5, 3), TypeError, "dtype must be one of float32"),
        (("cpu", torch.complex64, 5, 3), TypeError, "got torch.complex64"),
        (("cpu", torch.float32, 0, 3), ValueError, "kernel_size must be 1 to 31, got 0"),
        (("cpu", torch.float32, 32, 3), ValueError, "kernel_size must be 1 to 31, got 32"),
        (("cpu", torch.float32, 5, 0), ValueError, "levels must be 1 to 32, got 0"),
        (("cpu", torch.float32, 5, 33), ValueError, "levels must be 1 to 32, got 33"),
        (("mps", torch.float32, 5, 3), RuntimeError, "no kernels for mps devices"),
    ],
)
def test_can_run_says_why_not(ops, arguments, error, said):
    assert not wtconv_ops.can_run(*arguments)
    with pytest.raises(error, match=said):
        wtconv_ops.can_run(*arguments, raise_error=True)


def test_can_run_agrees_with_the_operator(device):
    assert wtconv_ops.can_run(device, torch.bfloat16, 31, 32)
    assert wtconv_ops.can_run(torch.device(device), torch.float64, 1, 1, raise_error=True)


def test_can_run_is_a_constant_under_compile(ops, fresh_compiler):
    def branch(x):
        return x + 1 if wtconv_ops.can_run(x.device, x.dtype, 5, 3) else x

    compiled = torch.compile(branch, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).sum() == 2
    assert compiled(torch.zeros(2, dtype=torch.int32)).sum() == 0


@pytest.mark.parametrize(
    ("arch", "capability", "serves"),
    [
        ("9.0", (9, 0), True),
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("90a", (9, 1), False),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("12.0+PTX", (12, 1), True),
        ("12.0+PTX", (13, 0), True),
        ("compute_90", (8, 9), False),
        ("", (9, 0), False),
    ],
)
def test_compiled_architectures_serve_devices(arch, capability, serves):
    assert _capability._serves(arch, capability) is serves
