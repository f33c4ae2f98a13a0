"""What the code that Inductor generates calls: kernels and operators, and which only copy."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CALL = re.compile(
    r"(?:= torch\.ops\.wtconv|extern_kernels)\.(\w+)|\b(?:cpp|triton\w*?)_fused_(\w+)"
)
# Operations that move numbers and do not compute any.
_MOVES = re.compile(r"(_?(clone|copy|permute|view|unsafe_view|to_copy|fused_forward|select)_?|\d)+")


def calls(code: str) -> list[str]:
    """Kernels and operators that ``call`` of a graph's code calls; of a fused kernel its names."""
    body = code[code.index("def call(") :]
    return [match[1] or f"fused {match[2]}" for match in _CALL.finditer(body)]


def copies(names: Iterable[str]) -> list[str]:
    """Of the names that :func:`calls` returns, the kernels that only copy."""
    kernels = [name.removeprefix("fused ") for name in names if name.startswith("fused ")]
    return [name for name in kernels if _MOVES.fullmatch(name)]
