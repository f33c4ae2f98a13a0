"""Replace the WTConv layers in a graph of PyTorch operations by ``wtconv::fused_forward``.

:mod:`wtconv_ops._graph` finds the layers under the assumption that their filters are Haar's. Here
that is made sure of: a filter must be an input of the graph that nothing in the graph writes to,
frozen, and Haar's by value now. The caller checks the values again whenever a filter has changed.
For changes that PyTorch does not count (through ``Tensor.data``) the new graph reads the filters
too, and filters that are not Haar's make its output NaN instead of wrong.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._capability import can_run
from ._graph import Meaning, Reader
from ._graph_nodes import (
    all_same,
    arguments,
    example,
    is_harmless,
    looks_like_synthesis,
    operation,
    shape,
)
from ._layout import memory_format_of
from .nn import _HAAR_TOLERANCE, _value_problem

_CHECKPOINT = "tag_activation_checkpoint"  # the operator around a checkpointed part of the graph


class LeftError(Exception):
    """A layer that stays as it is; the text says why."""


@dataclass
class Rewritten:
    """What happened to a graph.

    Attributes:
        replaced: Number of layers that are ``fused_forward`` now.
        filters: Index of each input that must be Haar filters, and its number of channels.
        left: Reason for each look-alike that stays.
    """

    replaced: int = 0
    filters: dict[int, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def has_candidates(module: fx.GraphModule) -> bool:
    """Whether a graph holds anything that looks like a wavelet synthesis."""
    return any(map(looks_like_synthesis, module.graph.nodes)) or any(
        has_candidates(inner) for _, inner, _ in _checkpointed(module)
    )


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The same operations in a module of its own, for eager use; attributes are shared."""
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in twin.graph.nodes:
        node.meta = {}
    for call, inner, _ in _checkpointed(module):
        setattr(twin, _body_name(call), copy_of(inner))
    return twin


def rewrite(module: fx.GraphModule) -> Rewritten:
    """Replace the layers of a graph in place; also those in checkpointed parts of it.

    Args:
        module: A graph as Dynamo captures it, parameters and buffers as inputs.

    Returns:
        What was replaced, what has to be checked at each call, and what was left alone and why.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    result = Rewritten()
    read_only = {node for node in inputs if _is_only_read(module, node)}
    _Rewriter(module, {node: node for node in inputs}, inputs, read_only, result).run()
    return result


def filter_problem(value: Any, channels: int) -> str | None:
    """Why a tensor is not known to be frozen Haar filters [4*C, 1, 2, 2]; None if it is."""
    known = type(value) in (Tensor, nn.Parameter) and not value.is_meta
    if not known or torch._is_functional_tensor(value) or torch._C._len_torch_dispatch_stack():
        return "the values of its filters are not known"
    if value.requires_grad:
        return "its filters are trainable"
    if value.is_inference():
        return "its filters are inference tensors, whose changes cannot be noticed"
    if list(value.shape) != [4 * channels, 1, 2, 2]:
        return f"its filters are {list(value.shape)}, not [4*C, 1, 2, 2]"
    return _value_problem("its filter", value, channels)


def _checkpointed(
    module: fx.GraphModule,
) -> Iterator[tuple[fx.Node, fx.GraphModule, dict[fx.Node, Any]]]:
    """Checkpointed parts: the call, the graph, and the argument of each of its inputs."""
    calls = [n for n in module.graph.nodes if getattr(n.target, "_name", None) == _CHECKPOINT]
    for call in calls:
        body = call.args[0] if call.args else None
        if not isinstance(body, fx.Node) or body.op != "get_attr" or len(body.users) != 1:
            continue
        inner = getattr(module, _body_name(call), None)
        if not isinstance(inner, fx.GraphModule):
            continue
        inputs = [node for node in inner.graph.nodes if node.op == "placeholder"]
        if len(inputs) == len(call.args) - 1:
            yield call, inner, dict(zip(inputs, call.args[1:], strict=True))


def _body_name(call: fx.Node) -> str:
    """Name of the graph that a call checkpoints."""
    body = call.args[0]
    assert isinstance(body, fx.Node)
    return str(body.target)


def _is_only_read(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether convolutions read an input as their weight and nothing else uses it."""
    inner = {call: (body, given) for call, body, given in _checkpointed(module)}
    for user in node.users:
        name = operation(user)
        if name in ("conv2d", "conv_transpose2d"):
            if arguments(user, name).get("weight") is not node or user.args[0] is node:
                return False
        elif user in inner:
            body, given = inner[user]
            if not all(_is_only_read(body, key) for key, value in given.items() if value is node):
                return False
        else:
            return False
    return True


class _Rewriter:
    """One graph; ``origin`` maps its inputs to those of the outermost graph."""

    def __init__(
        self,
        module: fx.GraphModule,
        origin: Mapping[fx.Node, fx.Node],
        inputs: list[fx.Node],
        read_only: set[fx.Node],
        result: Rewritten,
    ) -> None:
        self.module, self.graph = module, module.graph
        self.origin, self.inputs, self.read_only, self.result = origin, inputs, read_only, result
        self.reader = Reader()
        self.reasons: dict[fx.Node, str] = {}  # of the nodes of a layer that stays

    def run(self) -> None:
        for _, inner, given in _checkpointed(self.module):
            origin = {
                key: self.origin[value] for key, value in given.items() if value in self.origin
            }
            _Rewriter(inner, origin, self.inputs, self.read_only, self.result).run()
        for node in list(self.graph.nodes):
            meaning = self.reader.read(node)
            if meaning is None or meaning.what != "layer":
                continue
            region = self._region(node, meaning)
            try:
                self._replace(node, meaning, region)
            except LeftError as reason:
                self.reasons.update(dict.fromkeys(region, str(reason)))
        for node in self.graph.nodes:
            if looks_like_synthesis(node):
                self.result.left.append(self.reasons.get(node) or _why_not(node))
        self.graph.lint()
        self.module.recompile()

    def _region(self, node: fx.Node, meaning: Meaning) -> list[fx.Node]:
        """The nodes of a layer, from its input (not included) to its output, in order."""
        found, pending = {node}, [node]
        while pending:
            for before in pending.pop().all_input_nodes:
                known = before in self.reader.meanings and before is not meaning.source
                if known and before not in found:
                    found.add(before)
                    pending.append(before)
        return [item for item in self.graph.nodes if item in found]

    def _replace(self, node: fx.Node, meaning: Meaning, region: list[fx.Node]) -> None:
        """Put ``fused_forward`` in the place of a layer.

        Raises:
            LeftError: It stays.
        """
        filters = self._filters(meaning)
        self._require_no_writes(region)
        source, weight = example(meaning.source), example(meaning.base[0])
        compute = meaning.dtype or source.dtype
        cast = not source.dtype == weight.dtype == compute
        try:
            levels = len(meaning.levels)
            can_run(source.device, compute, int(weight.shape[-1]), levels, raise_error=True)
        except (TypeError, ValueError, RuntimeError) as error:
            raise LeftError(str(error)) from None
        emitter = _Emitter(self.graph, node, torch.autocast(source.device.type, compute, cast))
        try:
            new = self._emit(emitter, node, meaning, list(filters))
        except Exception as error:
            emitter.undo()
            if isinstance(error, LeftError):
                raise
            raise LeftError(f"fused_forward refuses it ({error})") from None
        node.replace_all_uses_with(new)
        for item in reversed(region):
            if not item.users:
                self.graph.erase_node(item)
        self.result.replaced += 1
        self.result.filters.update(filters.values())

    def _filters(self, meaning: Meaning) -> dict[fx.Node, tuple[int, int]]:
        """Index in the outermost graph and channels of each filter, all of them Haar's now."""
        channels = int(shape(meaning.source)[1])
        found = {}
        for node in sorted(meaning.filters, key=lambda node: node.name):
            outermost = self.origin.get(node)
            if outermost is None:
                raise LeftError("its filters are computed in the graph")
            if outermost not in self.read_only:
                raise LeftError("its filters are used by other operations of the graph")
            given = getattr(outermost.meta.get("grapharg"), "example", None)
            problem = filter_problem(given, channels)
            if problem is not None:
                raise LeftError(problem)
            found[node] = self.inputs.index(outermost), channels
        return found

    def _require_no_writes(self, region: list[fx.Node]) -> None:
        """Nothing between the first and the last operation of a layer may change a tensor."""
        node = region[0]
        while node is not region[-1]:
            if not is_harmless(node):
                raise LeftError(f"{node.target} stands amid its operations and may change a tensor")
            node = node.next

    def _emit(
        self, emitter: _Emitter, node: fx.Node, meaning: Meaning, filters: list[fx.Node]
    ) -> fx.Node:
        """fused_forward with the dtype and layout of the layer's output."""
        weight, bias, scale = meaning.base
        old = example(node)
        new = emitter.call(
            torch.ops.wtconv.fused_forward.default,
            meaning.source,
            weight,
            bias,
            _guarded(emitter, scale, filters),
            [level.weight for level in meaning.levels],
            [level.scale for level in meaning.levels],
        )
        if example(new).dtype != old.dtype:  # a float32 scale promotes under autocast
            new = emitter.call(torch.Tensor.to, new, old.dtype)
        value = example(new)
        if not all_same(value.shape, old.shape) or value.device != old.device:
            raise LeftError(f"fused_forward gives {list(value.shape)}, it {list(old.shape)}")
        if not _same_strides(value, old):
            layout = memory_format_of(old)
            if not old.is_contiguous(memory_format=layout):
                raise LeftError("its output is in neither memory layout")
            new = emitter.call(torch.clone, new, memory_format=layout)
        return new


class _Emitter:
    """Adds calls in front of a node, with the fake values that go with them."""

    def __init__(self, graph: fx.Graph, node: fx.Node, autocast: Any) -> None:
        self.graph, self.node, self.autocast = graph, node, autocast
        self.mode = example(node).fake_mode  # not that of the compiler, which starts afresh
        self.added: list[fx.Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        values = fx.node.map_arg((args, kwargs), example)
        with self.mode, self.autocast, torch.no_grad():
            value = target(*values[0], **values[1])
        with self.graph.inserting_before(self.node):
            if target is torch.Tensor.to:
                new = self.graph.call_method("to", args, kwargs)
            else:
                new = self.graph.call_function(target, args, kwargs)
        new.meta["example_value"] = value
        if "stack_trace" in self.node.meta:
            new.meta["stack_trace"] = self.node.meta["stack_trace"]
        self.added.append(new)
        return new

    def undo(self) -> None:
        for node in reversed(self.added):
            self.graph.erase_node(node)


def _guarded(emitter: _Emitter, scale: fx.Node, filters: list[fx.Node]) -> fx.Node:
    """``scale`` if the filters are Haar's at run time, else NaN.

    Signs are -1 where the row is odd for LH and HH, times -1 where the column is for HL and HH.
    """
    call, device = emitter.call, example(filters[0]).device
    band = call(torch.reshape, call(torch.arange, 4, device=device), [4, 1, 1, 1])
    row = call(torch.reshape, call(torch.arange, 2, device=device), [1, 1, 2, 1])
    column = call(torch.reshape, call(torch.arange, 2, device=device), [1, 1, 1, 2])
    odd_row = call(operator.mul, call(operator.mod, band, 2), row)
    odd_column = call(operator.mul, call(operator.floordiv, band, 2), column)
    both = call(operator.mod, call(operator.add, odd_row, odd_column), 2)
    haar = call(operator.sub, 0.5, both)
    for node in filters:
        bands = call(torch.reshape, node, [-1, 4, 1, 2, 2])
        error = call(torch.amax, call(torch.abs, call(operator.sub, bands, haar)))
        scale = call(torch.where, call(operator.le, error, _HAAR_TOLERANCE), scale, float("nan"))
    return scale


def _same_strides(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, where a stride matters."""
    pairs = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(all_same([a], [b]) for size, a, b in pairs if not all_same([size], [1]))


def _why_not(node: fx.Node) -> str:
    """Reason for a synthesis that is part of no layer."""
    height, width = shape(arguments(node, "conv_transpose2d")["weight"])[2:]
    if not all_same((height, width), (2, 2)):
        return f"its filters are {height}x{width}, those of another wavelet than Haar"
    return "the operations around it are not those of the layer"
