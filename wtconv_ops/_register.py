"""Register everything that the operators need beside their kernels.

The kernels and schemas come from the C++ library. Here: fake impls, autograd and torch.func
(keys Autograd, Batched and FuncTorchDynamicLayerFrontMode; ``torch.library.register_autograd``
supports neither torch.func nor forward-mode AD), autocast, and FLOP formulas.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _autocast, _fake, _inductor, _library

_FRONT = "FuncTorchDynamicLayerFrontMode"
# Kernels live as long as the Library object that registered them.
_REGISTRATIONS: list[torch.library.Library] = []


def register() -> bool:
    """Load the library and register its operators; further calls do nothing.

    Returns:
        True if the operators are usable, False if there is no library (a warning said so).
    """
    if _REGISTRATIONS:
        return True
    if _library.load() is None:
        return False
    lib = torch.library.Library(_library.NAMESPACE, "IMPL")
    _REGISTRATIONS.append(lib)
    _register_fakes(lib)
    _register_fused(lib)
    _register_staged(lib)
    _register_graph(lib)
    _register_flops()
    return True


def _register_fakes(lib: torch.library.Library) -> None:
    """Fake impls."""
    for name, fake in (
        ("fused_forward", _fake.fused_forward),
        ("_fused_forward", _fake.mixed_fused_forward),
        ("fused_backward", _fake.fused_backward),
        ("analysis_conv", _fake.analysis_conv),
        ("synthesis", _fake.synthesis),
    ):
        torch.library.register_fake(f"{_library.NAMESPACE}::{name}", fake, lib=lib)


def _register_fused(lib: torch.library.Library) -> None:
    """Autograd, torch.func and autocast of fused_forward, _fused_forward and fused_backward."""
    # These modules bind the operators, which exist only now.
    from . import _batched, _kernels

    for name, autograd, front, batched in (
        (
            "fused_forward",
            _kernels.forward_kernel,
            _kernels.front_forward_kernel,
            _batched.fused_forward,
        ),
        (
            "_fused_forward",
            _kernels.mixed_forward_kernel,
            _kernels.front_mixed_forward_kernel,
            _batched.mixed_fused_forward,
        ),
        (
            "fused_backward",
            _kernels.backward_kernel,
            _kernels.front_backward_kernel,
            _batched.fused_backward,
        ),
    ):
        lib.impl(name, autograd, "Autograd", with_keyset=True)
        lib.impl(name, front, _FRONT, with_keyset=True)
        lib.impl(name, batched, "Batched", with_keyset=True)
    for key in _autocast.AUTOCAST_KEYS:
        lib.impl("fused_forward", _kernels.autocast_forward_kernel, key, with_keyset=True)


def _register_graph(lib: torch.library.Library) -> None:
    """Fake impls of the operators that compiled graphs call, which have no derivatives.

    A library that an exported program loaded first may be too old to define them.
    """
    fakes: tuple[Callable[..., Any], ...] = (_fake.graph_forward, _fake.fused_backward)
    for name, fake in zip(_inductor.GRAPH_OPS, fakes, strict=True):
        if hasattr(getattr(torch.ops, _library.NAMESPACE), name):
            torch.library.register_fake(f"{_library.NAMESPACE}::{name}", fake, lib=lib)
            lib.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _inductor.type_memory_errors()


def _register_flops() -> None:
    """FLOP formulas; a torch whose counter is another one gives a warning and goes without."""
    try:
        from . import _flops

        _flops.register()
    except Exception as error:
        warnings.warn(
            f"wtconv_ops: torch {torch.__version__} lacks the FLOP counter that the package "
            f"knows ({type(error).__name__}: {error}); FlopCounterMode counts 0 for the operators, "
            "everything else works; use a torch version that the README lists, or a newer "
            "wtconv_ops",
            RuntimeWarning,
            stacklevel=4,  # the statement that imports the package
        )


def _register_staged(lib: torch.library.Library) -> None:
    """Autograd, torch.func and autocast of analysis_conv and synthesis."""
    from . import _staged

    for name, autograd, front, autocast in (
        (
            "analysis_conv",
            _staged.analysis_conv_kernel,
            _staged.analysis_conv_front,
            _staged.analysis_conv_autocast,
        ),
        (
            "synthesis",
            _staged.synthesis_kernel,
            _staged.synthesis_front,
            _staged.synthesis_autocast,
        ),
    ):
        lib.impl(name, autograd, "Autograd", with_keyset=True)
        lib.impl(name, front, _FRONT, with_keyset=True)
        for key in _autocast.AUTOCAST_KEYS:
            lib.impl(name, autocast, key, with_keyset=True)
