"""The source tree that the tests stand in, and the modules of csrc, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    """A fresh copy of a module of csrc.

    Raises:
        FileNotFoundError: There is no source tree.
    """
    spec = importlib.util.spec_from_file_location(f"tested_{name}", ROOT / "csrc" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module
