"""Failed allocations of the library as ``torch.OutOfMemoryError``, which batch-size finders catch.

Through the stable interface of LibTorch an exception of the library reaches Python as a
RuntimeError. Each Python frame around an operator gives it its type; where there is none (a direct
call in inference mode) its text still has the words that PyTorch's own errors have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

# How the library begins the message of a failed allocation.
_OUT_OF_MEMORY = "wtconv: out of memory"

_Result = TypeVar("_Result")


def reraise(error: RuntimeError) -> NoReturn:
    """Raise ``error``, as torch.OutOfMemoryError if it says that an allocation failed."""
    if _OUT_OF_MEMORY in str(error) and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(str(error)) from None
    try:
        raise error
    finally:
        del error  # which refers to this frame; the cycle would keep the tensors of the call alive


def with_memory_errors(kernel: Callable[..., _Result]) -> Callable[..., _Result]:
    """``kernel`` that raises :func:`reraise` of its RuntimeErrors."""

    @functools.wraps(kernel)
    def run(*args: object, **kwargs: object) -> _Result:
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            reraise(error)

    return run
