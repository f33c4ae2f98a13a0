"""Find and load the operator library, and read back what it was built for."""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FILE_NAME = "libwtconv_ops.so"
NAMESPACE = "wtconv"


@dataclass(frozen=True)
class Library:
    """A loaded operator library.

    Attributes:
        path: File that was loaded; None if another party had already defined the operators.
        info: What the library says about itself (``wtconv_build_info``): version, source_hash,
            cuda, cuda_archs, cpu_isas, cpu_isa, max_kernel_size, max_levels, dtypes, torch_target.
            Empty if the library cannot be asked.
    """

    path: Path | None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass
class _State:
    tried: bool = False
    library: Library | None = None
    problem: str | None = None


_STATE = _State()


def default_path() -> Path:
    """Path where the build puts the library: beside this file."""
    return Path(__file__).resolve().with_name(FILE_NAME)


def ops_defined() -> bool:
    """Whether ``torch.ops.wtconv.fused_forward`` exists in this process."""
    return hasattr(getattr(torch.ops, NAMESPACE), "fused_forward")


def library() -> Library | None:
    """The loaded library, or None where there is none; the first call loads it."""
    if not _STATE.tried:
        load()
    return _STATE.library


def problem() -> str | None:
    """One sentence that says why :func:`library` is None; None where it is loaded."""
    library()
    return _STATE.problem


def load() -> Library | None:
    """Load the library once per process.

    Operators that are defined already (an exported program loaded the library first) are taken
    as they are. A missing or unloadable library gives one warning; the layer then runs plain
    PyTorch operations.

    Returns:
        The library, or None.
    """
    if _STATE.tried:
        return _STATE.library
    _STATE.tried = True
    path = default_path()
    if ops_defined():
        loaded = _already_loaded(path)
        info = {} if loaded is None else _build_info(loaded)
        _STATE.library = Library(path if info else None, info)
        return _STATE.library
    if not path.is_file():
        _STATE.problem = f"the operator library {FILE_NAME} is not installed; reinstall wtconv_ops"
    else:
        try:
            torch.ops.load_library(str(path))
            _STATE.library = Library(path, _build_info(ctypes.CDLL(str(path))))
        except (OSError, RuntimeError) as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            _STATE.problem = f"the operator library {FILE_NAME} cannot be loaded ({reason})"
    if _STATE.problem is not None:
        warnings.warn(
            f"wtconv_ops: {_STATE.problem}; WTConv2d runs plain PyTorch operations until then",
            RuntimeWarning,
            stacklevel=4,  # the statement that imports the package
        )
    return _STATE.library


def build_info() -> dict[str, Any]:
    """What the loaded library was built for; empty where there is no library."""
    loaded = library()
    return {} if loaded is None else dict(loaded.info)


def _already_loaded(path: Path) -> ctypes.CDLL | None:
    """Handle of the library at ``path`` if the process has it loaded; never loads it."""
    no_load = getattr(os, "RTLD_NOLOAD", None)
    if no_load is None or not path.is_file():
        return None
    try:
        return ctypes.CDLL(str(path), mode=no_load | os.RTLD_NOW)
    except OSError:
        return None


def _build_info(handle: ctypes.CDLL) -> dict[str, Any]:
    """Parse the JSON text that ``wtconv_build_info`` returns."""
    function = getattr(handle, "wtconv_build_info", None)
    if function is None:
        return {}
    function.restype = ctypes.c_char_p
    function.argtypes = []
    text = function()
    info = json.loads(text.decode()) if text else {}
    return info if isinstance(info, dict) else {}
