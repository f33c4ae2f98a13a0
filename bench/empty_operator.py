"""An operator in C++ with the arguments of ``fused_forward`` that computes nothing.

It is compiled at the first call, in a few seconds, by the compiler of csrc/build_config.py.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_NAMESPACE, _NAME = "wtconv_bench", "empty_forward"
_SOURCE = Path(__file__).with_suffix(".cpp")
_DEFINITIONS: list[torch.library.Library] = []  # which last as long as these objects


@functools.cache
def empty_forward() -> Any:
    """``torch.ops.wtconv_bench.empty_forward.default``, which only allocates an output.

    Raises:
        RuntimeError: there is no compiler, or it failed; one line, or what it printed.
    """
    definition = torch.library.Library(_NAMESPACE, "DEF")
    schema = str(torch.ops.wtconv.fused_forward.default._schema)
    definition.define(_NAME + schema[schema.index("(") :])
    definition.impl(_NAME, torch.library.fallthrough_kernel, "Autograd")
    _DEFINITIONS.append(definition)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libempty_operator.so")
        done = subprocess.run(_command(library), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{_SOURCE.name} did not compile: {done.stderr}")
        torch.ops.load_library(library)
    return getattr(getattr(torch.ops, _NAMESPACE), _NAME).default


def _command(library: Path) -> list[str]:
    """The call of the compiler."""
    config = _build_config()
    root = Path(torch.__file__).parent
    include = root / "include"
    return [
        *config.find_compiler(),
        *("-shared", "-o", str(library), str(_SOURCE)),
        *(*config.CXX_FLAGS, *config.COMMON_DEFINES),
        *("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")),
        *(f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"),
    ]


def _build_config() -> ModuleType:
    """csrc/build_config.py, which lies outside any package."""
    path = Path(__file__).parent.parent / "csrc" / "build_config.py"
    spec = importlib.util.spec_from_file_location("wtconv_build_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
