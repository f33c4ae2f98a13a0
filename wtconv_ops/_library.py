"""Find and load the operator library, and read back what it was built for."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FILE_NAME = "libwtconv_ops.so"
NAMESPACE = "wtconv"
ISA_VARIABLE = "WTCONV_CPU_ISA"
MIN_TORCH = (2, 11)  # whose stable interface the library is built against


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
    PyTorch operations. An unknown ``WTCONV_CPU_ISA``, which the kernels ignore, gives one, too.

    Returns:
        The library, or None.
    """
    if _STATE.tried:
        return _STATE.library
    _STATE.tried = True
    path = default_path()
    try:
        _STATE.library = _find(path)
    except FileNotFoundError:
        _STATE.problem = f"the operator library {FILE_NAME} is not installed; reinstall wtconv_ops"
    except (OSError, RuntimeError, ValueError) as error:
        text = str(error.__cause__ or error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        _STATE.problem = f"the operator library {FILE_NAME} cannot be loaded ({reason})"
    said = isa_problem()
    if _STATE.problem is not None:
        said = f"{_STATE.problem}; WTConv2d runs plain PyTorch operations until then"
    if said is not None:
        warnings.warn(
            f"wtconv_ops: {said}",
            RuntimeWarning,
            stacklevel=4,  # the statement that imports the package
        )
    return _STATE.library


def isa_problem() -> str | None:
    """One sentence if ``WTCONV_CPU_ISA`` is no instruction set of the library; else None."""
    value, names = os.environ.get(ISA_VARIABLE), build_info().get("cpu_isas")
    if not value or not names or value in names:
        return None
    return f"{ISA_VARIABLE} must be one of {', '.join(names)}, got {value!r}, which is ignored"


def _find(path: Path) -> Library:
    """The library whose operators the process has, else the one at ``path``, loaded now.

    Raises:
        FileNotFoundError: There is no file.
        OSError, RuntimeError: The file cannot be loaded.
        ValueError: The file is truncated, or is not the library of this version of the package, or
            torch is too old for it.
    """
    if ops_defined():
        handle = _already_loaded(path)
        if handle is None:
            return Library(None)
    else:
        if not path.is_file():
            raise FileNotFoundError(path)
        if _is_truncated(path):
            raise ValueError("the file is truncated")
        if tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH:
            oldest = ".".join(map(str, MIN_TORCH))
            raise ValueError(
                f"torch {torch.__version__} is older than {oldest}; install torch>={oldest}"
            )
        torch.ops.load_library(str(path))
        handle = ctypes.CDLL(str(path))
    if not ops_defined():
        raise ValueError("it does not define the operators")
    return Library(path, _checked_info(handle))


def _is_truncated(path: Path) -> bool:
    """Whether an ELF file ends before its section headers, which linkers write last.

    The loader maps such a file without a check, and the first access behind its end would kill
    the process.
    """
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        return False  # not a 64-bit little-endian ELF file: the loader itself says what is wrong
    (section_headers,) = struct.unpack_from("<Q", header, 0x28)
    entry_size, entries = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size < section_headers + entry_size * entries  # type: ignore[no-any-return]


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


def _checked_info(handle: ctypes.CDLL) -> dict[str, Any]:
    """Parse the JSON text that ``wtconv_build_info`` returns.

    Raises:
        ValueError: There is no such text, or the library is of another version of the package.
    """
    from . import __version__

    function = getattr(handle, "wtconv_build_info", None)
    if function is None:
        raise ValueError("it has no wtconv_build_info")
    function.restype = ctypes.c_char_p
    function.argtypes = []
    text = function() or b""
    try:
        info = json.loads(text.decode())
    except ValueError:
        raise ValueError("wtconv_build_info returns no JSON") from None
    version = info.get("version") if isinstance(info, dict) else None
    if version != __version__:
        raise ValueError(f"it is of version {version}, the package of version {__version__}")
    return dict(info)
