"""How TorchInductor compiles the operators: every use of its private API stands here.

Without this file Inductor treats the operators as it treats any custom operator: inputs are copied
to the strides of the eager run, and each call passes the Python kernels of the key Autograd. Here:

* Lowerings of fused_forward, _fused_forward and fused_backward that take inputs in any layout, call
  the internal operators _graph_forward and _graph_backward, which have no Python kernel, and let
  the users of an output choose its layout: before ``permute(0, 2, 3, 1)`` it is channels_last, what
  is returned has the strides of the eager run, anything else the layout of the input.
* A graph pass that changes nothing, whose uuid is part of every key of the compile caches. It names
  the version and the sources of this package, so artifacts made by another version are not reused:
  the keys contain neither lowerings nor fake impls nor formulas of custom operators.
* With the environment variable ``WTCONV_INDUCTOR_SYNTHESIS=pointwise``, a lowering of synthesis to
  a pointwise loop, which Inductor fuses with its neighbours and which needs no library at run time.
  The default, ``extern``, calls the kernel, which is faster on the CPU.

The pass is chained into ``torch._inductor.config.post_grad_custom_pre_pass`` when a compiler first
traces an operator, and the lowerings are registered when it first runs: importing the package loads
no compiler. Where a private API is missing, one warning says so and the operators compile as plain
custom operators.

Sources: ``torch/_inductor/lowering.py``, ``ir.py`` (FallbackKernel), ``custom_graph_pass.py`` and
``codecache.py`` (FxGraphHashDetails) of torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _library
from ._errors import with_memory_errors

GRAPH_OPS = ("_graph_forward", "_graph_backward")
_PERMUTE = torch.ops.aten.permute.default
_READERS = (_PERMUTE, torch.ops.prims.convert_element_type.default)
_OPTION = "WTCONV_INDUCTOR_SYNTHESIS"
_SLOT = "post_grad_custom_pre_pass"


class _State:
    """What this process has done so far."""

    installed = False
    lowered = False
    warned = False


def install() -> None:
    """Chain the pass into Inductor's configuration, once, if the process has loaded Inductor.

    Called by the fake impls, which every compiler runs before it asks its caches.
    """
    if _State.installed or "torch._inductor.config" not in sys.modules:
        return
    _State.installed = True
    try:
        _chain_pass()
    except Exception as error:  # a private API may fail in any way
        _warn(error)


def type_memory_errors() -> None:
    """Have the operators of compiled graphs raise torch.OutOfMemoryError.

    No Python kernel of them runs: the one place for it is the bound function that an ``OpOverload``
    calls. A torch without it leaves a RuntimeError with the same text.
    """
    for name in GRAPH_OPS:
        operator: Any = getattr(torch.ops.wtconv, name, None)
        if operator is not None and callable(getattr(operator.default, "_op", None)):
            operator.default._op = with_memory_errors(operator.default._op)


def uuid() -> str:
    """Part of every cache key: version of the package, hash of what it is built from, option."""
    from . import __version__

    synthesis = "pointwise" if _synthesis_is_pointwise() else "extern"
    return f"wtconv_ops-{__version__}-{_source_hash()}-{synthesis}"


def _synthesis_is_pointwise() -> bool:
    """Whether ``WTCONV_INDUCTOR_SYNTHESIS`` asks for a loop in place of the kernel."""
    value = os.environ.get(_OPTION, "extern")
    if value not in ("extern", "pointwise"):
        raise ValueError(f"{_OPTION} must be extern or pointwise, got {value!r}")
    return value == "pointwise"


@functools.cache
def _source_hash() -> str:
    """First 16 hex digits of the sha256 over the Python sources and the hash of the C++ ones."""
    digest = hashlib.sha256(str(_library.build_info().get("source_hash")).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _warn(error: Exception) -> None:
    """Say once that the operators compile as plain custom operators, and why."""
    if _State.warned:
        return
    _State.warned = True
    warnings.warn(
        f"wtconv_ops: torch {torch.__version__} has not the Inductor interface that the package "
        f"knows ({type(error).__name__}: {error}); torch.compile takes the operators as plain "
        "custom operators, with the same results and more copies; use a torch version that the "
        "README lists, or a newer wtconv_ops",
        RuntimeWarning,
        stacklevel=2,
    )


def _chain_pass() -> None:
    """Append the pass to what ``post_grad_custom_pre_pass`` holds."""
    from torch._inductor import config, custom_graph_pass

    added = _make_pass(None)
    present = getattr(config, _SLOT)
    if present is None:
        setattr(config, _SLOT, added)
    elif hasattr(custom_graph_pass, "get_custom_graph_passes"):  # a list is allowed, torch >= 2.13
        setattr(config, _SLOT, [*custom_graph_pass.get_custom_graph_passes(present), added])
    else:
        setattr(config, _SLOT, _make_pass(present))


def _make_pass(other: Any) -> Any:
    """The pass, which runs ``other`` first where one slot must hold both."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class VersionPass(CustomGraphPass):
        """Changes no graph; registers the lowerings and puts :func:`uuid` into the cache keys."""

        of_wtconv_ops = True

        def __call__(self, graph: torch.fx.Graph) -> None:
            if other is not None:
                other(graph)
            _register_lowerings()

        def uuid(self) -> Any:
            """:func:`uuid`; None, which turns the caches off, where ``other`` has none."""
            if other is None:
                return uuid()
            theirs = other.uuid() if isinstance(other, CustomGraphPass) else None
            return None if theirs is None else (theirs, uuid())

    return VersionPass()


def _is_chained() -> bool:
    """Whether the graph that is being compiled has :func:`uuid` in its cache key."""
    from torch._inductor import config

    slot = getattr(config, _SLOT)
    passes = slot if isinstance(slot, (list, tuple)) else (slot,)
    return any(getattr(one, "of_wtconv_ops", False) for one in passes)


def _register_lowerings() -> None:
    """Register the lowerings, once."""
    if _State.lowered:
        return
    _State.lowered = True
    ops = torch.ops.wtconv
    try:
        missing = [name for name in GRAPH_OPS if not hasattr(ops, name)]
        if missing:
            raise RuntimeError(f"the loaded operator library does not define {', '.join(missing)}")
        from torch._inductor.lowering import (
            add_needs_realized_inputs,
            fallback_handler,
            register_lowering,
        )

        for op, plan in (
            (ops.fused_forward.default, _plan_forward),
            (ops._fused_forward.default, _plan_forward),
            (ops.fused_backward.default, _plan_backward),
        ):
            add_needs_realized_inputs(op)
            lowering = _lowering(op, plan, fallback_handler)
            register_lowering(op, type_promotion_kind=None)(lowering)
        op, lowering = ops.synthesis.default, _synthesis_lowering(fallback_handler)
        register_lowering(op, type_promotion_kind=None)(lowering)
    except Exception as error:  # a private API may fail in any way
        _warn(error)


_Plan = Callable[..., tuple[Any, Sequence[Any]]]


def _lowering(op: Any, plan: _Plan, fallback_handler: Callable[..., Any]) -> Callable[..., Any]:
    """Lowering of ``op`` to one extern call: of what ``plan`` returns, else of ``op`` itself."""

    def lower(*args: Any) -> Any:
        target: Any = op
        arguments: Sequence[Any] = args
        try:
            if _is_chained():
                target, arguments = plan(op, *args)
        except Exception as error:  # a private API may fail in any way
            _warn(error)
        return fallback_handler(target, add_to_fallback_set=False)(*arguments)

    return lower


def _plan_forward(op: Any, input: Any, *parameters: Any) -> tuple[Any, Sequence[Any]]:
    """_graph_forward with the layout that suits the users; the public operator in a package.

    A package for AOTInductor outlives this version of the library, so it names the operator whose
    schema is public. It runs without Python, where no kernel for autograd is in the way.
    """
    from torch._inductor.ir import ExternKernel, as_storage_and_layout, is_storage_and_layout
    from torch._inductor.virtualized import V

    if V.graph.aot_mode:
        return op, (input, *parameters)
    input = ExternKernel.realize_input(input)
    if is_storage_and_layout(input):
        as_storage_and_layout(input, freeze=True)
    node, visible = V.graph.current_node, V.graph.user_visible_output_strides
    readers = _readers(node)
    returned = [one for one in (node, *readers) if any(user.op == "output" for user in one.users)]
    if _may_be_channels_last(readers, returned, visible):
        channels_last = True
        _set_channels_last(node, readers)
    elif returned:
        channels_last = _is_channels_last(node.meta["val"].shape, node.meta["val"].stride())
    else:
        channels_last = _is_channels_last(input.get_size(), input.get_stride())
    return torch.ops.wtconv._graph_forward.default, (input, *parameters, channels_last)


def _plan_backward(op: Any, *args: Any) -> tuple[Any, Sequence[Any]]:
    """_graph_backward; the public operator in a package for AOTInductor."""
    from torch._inductor.virtualized import V

    return op if V.graph.aot_mode else torch.ops.wtconv._graph_backward.default, args


def _is_channels_last(shape: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether a map [B, C, H, W] has consecutive channels; a single pixel or channel has none."""
    _, channels, height, width = shape
    return bool(_is_one(strides[1]) and not _is_one(channels)) and not (
        _is_one(height) and _is_one(width)
    )


def _is_one(size: Any) -> bool:
    """Whether a size or stride is 1 for every input; adds no guard to a symbolic one."""
    return not isinstance(size, torch.SymInt) and bool(size == 1)


def _readers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Conversions of ``node`` to another dtype and permutations of both, in the graph's order."""
    readers = [node]
    for reader in readers:
        if reader.target is not _PERMUTE:
            readers.extend(user for user in reader.users if user.target in _READERS)
    return readers[1:]


def _may_be_channels_last(
    readers: Sequence[torch.fx.Node], returned: Sequence[torch.fx.Node], visible: Any
) -> bool:
    """Whether an output is read as [B, H, W, C] and may have the memory of that order.

    Args:
        readers: Conversions and permutations of the output.
        returned: Those of the output and its readers that the graph returns.
        visible: Nodes of which the caller sees the strides; the others are saved for backward.

    Returns:
        True if there is a permutation to [B, H, W, C] and no caller sees the strides. What is
        saved for backward keeps its strides where a size is symbolic: the backward graph would
        take the new ones as numbers, and serve one size only.
    """
    if not any(_reads_channels_last(reader) for reader in readers):
        return False
    return all(
        one not in visible
        and not any(isinstance(size, torch.SymInt) for size in one.meta["val"].shape)
        for one in returned
    )


def _reads_channels_last(reader: torch.fx.Node) -> bool:
    """Whether ``reader`` is permute(0, 2, 3, 1)."""
    order: Any = reader.args[1]
    return reader.target is _PERMUTE and [dim % 4 for dim in order] == [0, 2, 3, 1]


def _set_channels_last(node: torch.fx.Node, readers: Sequence[torch.fx.Node]) -> None:
    """Write the strides of a channels_last output into the graph.

    Inductor gives what it saves for backward the strides that stand there, by a copy if need be.
    """
    value = node.meta["val"]
    _, channels, height, width = value.shape
    strides = (height * width * channels, 1, width * channels, channels)
    node.meta["val"] = value.new_empty_strided(value.shape, strides)
    for reader in readers:
        source, *arguments = reader.args
        reader.meta["val"] = reader.target(source.meta["val"], *arguments)  # type: ignore


def _synthesis_lowering(fallback_handler: Callable[..., Any]) -> Callable[..., Any]:
    """Lowering of synthesis to the kernel, or to a loop where the option asks for it."""

    def lower(base: Any, coefficients: Sequence[Any]) -> Any:
        try:
            if _is_chained() and _synthesis_is_pointwise():
                return _pointwise_synthesis(base, coefficients)
        except Exception as error:  # a private API may fail in any way
            _warn(error)
        op = torch.ops.wtconv.synthesis.default
        return fallback_handler(op, add_to_fallback_set=False)(base, coefficients)

    return lower


def _pointwise_synthesis(base: Any, coefficients: Sequence[Any]) -> Any:
    """base + sum over l of 2**-l * (LL + v * LH + u * (HL + v * HH)), read at (y >> l, x >> l).

    v and u are -1 where bit l - 1 of the row y and of the column x is set, and 1 elsewhere. Sums
    are formed in float32, in float64 for float64.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import ops
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    dtype = base.get_dtype()
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for level in coefficients:
        level.realize()  # every value is read 4**l times
    load_base, *load_levels = [tensor.make_loader() for tensor in (base, *coefficients)]

    def pixel(index: Sequence[Any]) -> Any:
        item, channel, y, x = index

        def sign(position: Any, level: int) -> Any:
            bit = ModularIndexing(position, 2 ** (level - 1), 2)
            return ops.index_expr(1 - 2 * bit, compute)

        total = ops.to_dtype(load_base(index), compute)
        for level, load in enumerate(load_levels, 1):
            place = (FloorDiv(y, 2**level), FloorDiv(x, 2**level))
            low, lh, hl, hh = (
                ops.to_dtype(load([item, 4 * channel + band, *place]), compute) for band in range(4)
            )
            v, u = sign(y, level), sign(x, level)
            right = ops.mul(u, ops.add(hl, ops.mul(v, hh)))
            block = ops.add(ops.add(low, ops.mul(v, lh)), right)
            total = ops.add(total, ops.mul(block, ops.constant(0.5**level, compute)))
        return ops.to_dtype(total, dtype)

    return Pointwise.create(
        device=base.get_device(), dtype=dtype, inner_fn=pixel, ranges=base.get_size()
    )
