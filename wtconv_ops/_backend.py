"""``torch.compile(model, backend="wtconv")``: Inductor with WTConv layers found in the graph."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, cast

from torch import SymInt, Tensor, fx

from ._rewrite import Rewritten, copy_of, filter_problem, has_candidates, rewrite

_NAME, _GROUP = "wtconv", "torch_dynamo_backends"
_NOT_COMPILED = (
    "backend wtconv: Inductor cannot compile what was left alone for sizes that change (%s: %s); "
    "the graph runs without compilation; torch.compile(..., dynamic=False) compiles it"
)
_log = logging.getLogger("wtconv_ops")


def wtconv(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph with Inductor after its WTConv layers became ``wtconv::fused_forward``.

    For models that cannot be changed; where they can, :func:`wtconv_ops.convert` is the better
    way, since it looks at modules. Found are layers written in PyTorch operations, as the
    reference layer is, with any number of levels, also inside activation checkpointing; Dynamo
    captures no graph of the fused CUDA and Triton layers, which stay. A layer is replaced only if
    its operations are those of Algorithm 1, its filters are frozen inputs of the graph and Haar's
    by value, and nothing amid its operations may change a tensor. What is left alone is logged with
    the reason as a warning of the logger ``wtconv_ops``; what is replaced as information.

    The compiled graph checks its filters at each call: after a change that makes them other than
    Haar's, it runs as captured, without compilation, and says so once. A change through
    ``Tensor.data``, which PyTorch does not count, makes the output NaN. dtype and layout of every
    output stay; under autocast the layer is rounded once, to the autocast dtype.

    Inductor fails on the reference layer in training with sizes left open (``dynamic=True``): a
    graph in which such a layer was left alone then runs without compilation, and the log says so.

    Args:
        graph_module: Graph that Dynamo captured.
        example_inputs: Its inputs.
        mode: Mode of ``torch.compile``, handed to Inductor.
        options: Options of ``torch.compile``, handed to Inductor.

    Returns:
        The compiled function.

    Raises:
        RuntimeError: ``mode`` and the options are judged by Inductor.

    Equivalent to:
        >>> torch.compile(model, backend="wtconv")

    Source: Algorithm 1 of the WTConv paper.
    """
    from torch._dynamo.exc import RestartAnalysis, SkipFrame
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = dict(list_mode_options(mode)) if mode else {}
    patches.update({key.replace("-", "_"): value for key, value in (options or {}).items()})
    compile_rest = cast(Callable[..., Callable[..., Any]], compile_fx)
    if not has_candidates(graph_module):
        return compile_rest(graph_module, example_inputs, config_patches=patches)
    plain = copy_of(graph_module)
    result = rewrite(graph_module)
    _report(result)
    symbolic = any(isinstance(value, SymInt) for value in example_inputs)
    uncompiled = copy_of(graph_module) if result.left and symbolic else None
    try:
        compiled = compile_rest(graph_module, example_inputs, config_patches=patches)
    except (RestartAnalysis, SkipFrame):  # Dynamo's own: it captures the graph anew or not at all
        raise
    except Exception as error:
        if uncompiled is None:
            raise
        compiled = uncompiled
        _log.warning(_NOT_COMPILED, type(error).__name__, next(iter(str(error).splitlines()), ""))
    return _checked(compiled, plain, result.filters) if result.filters else compiled


def register() -> None:
    """Make the backend known where the installed package does not: in a source tree."""
    try:
        installed = metadata.distribution("wtconv_ops").entry_points
    except metadata.PackageNotFoundError:
        installed = metadata.EntryPoints()
    if any(entry.group == _GROUP and entry.name == _NAME for entry in installed):
        return
    try:
        from torch._dynamo.backends import registry

        if _NAME not in registry._COMPILER_FNS:
            registry.register_backend(wtconv, name=_NAME)
    except Exception as error:  # a torch without this private registry
        warnings.warn(
            f'wtconv_ops: torch.compile(backend="wtconv") is not available ({error}); '
            "use wtconv_ops.convert(model)",
            RuntimeWarning,
            stacklevel=3,
        )


def _report(result: Rewritten) -> None:
    """Log what was replaced and what was not."""
    if result.replaced:
        _log.info("backend wtconv: replaced %d by wtconv::fused_forward", result.replaced)
    for reason, number in Counter(result.left).items():
        _log.warning("backend wtconv: left %d alone that look like WTConv: %s", number, reason)


def _checked(
    compiled: Callable[..., Any], plain: fx.GraphModule, filters: Mapping[int, int]
) -> Callable[..., Any]:
    """``compiled`` as long as the inputs ``filters`` are Haar filters, else ``plain``."""
    checks = [(index, _Filters(channels)) for index, channels in filters.items()]
    warned = False

    def run(*args: Any) -> Any:
        nonlocal warned
        for index, filters in checks:
            problem = filters.problem(args[index])
            if problem is not None:
                if not warned:
                    warned = True
                    _log.warning(
                        "backend wtconv: a graph runs as captured from now on: %s", problem
                    )
                return plain(*args)
        return compiled(*args)

    return run


def _nothing() -> None:
    """A reference to nothing."""


class _Filters:
    """Which tensors have been seen to be Haar filters, and in which state."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    def problem(self, tensor: Tensor) -> str | None:
        """Why ``tensor`` is not frozen Haar filters; None if it is."""
        seen, version, address = self.seen.get(id(tensor), (_nothing, 0, 0))
        known = seen() is tensor and not tensor.requires_grad
        if known and version == tensor._version and address == tensor.data_ptr():
            return None
        found = filter_problem(tensor, self.channels)
        if found is None:
            state = weakref.ref(tensor), tensor._version, tensor.data_ptr()
            alive = {key: value for key, value in self.seen.items() if value[0]() is not None}
            self.seen = {**alive, id(tensor): state}
        return found
