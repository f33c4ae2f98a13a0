"""Operations of a graph by name, their arguments, and the shapes that the graph carries."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

_aten = torch.ops.aten
# Only these are understood; each returns a new tensor or a view and changes none.
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.conv2d, _aten.conv2d.default, _aten.conv2d.padding), "conv2d"),
    **dict.fromkeys((torch.conv_transpose2d, _aten.conv_transpose2d.input), "conv_transpose2d"),
    **dict.fromkeys((torch._C._nn.pad, F.pad, _aten.pad.default), "pad"),
    **dict.fromkeys((torch.reshape, _aten.reshape.default, _aten.view.default), "reshape"),
    **dict.fromkeys((torch.flatten, _aten.flatten.using_ints, _aten.unflatten.int), "reshape"),
    **dict.fromkeys((torch.unsqueeze, _aten.unsqueeze.default), "unsqueeze"),
    **dict.fromkeys((torch.cat, torch.concat, _aten.cat.default), "cat"),
    **dict.fromkeys((torch.mul, operator.mul, _aten.mul.Tensor), "mul"),
    **dict.fromkeys((torch.add, operator.add, _aten.add.Tensor), "add"),
    **dict.fromkeys((torch.select, _aten.select.int), "select"),
    operator.getitem: "getitem",
    _aten.slice.Tensor: "slice",
}
_METHODS = {
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "contiguous"), "reshape"),
    **{name: name for name in ("unsqueeze", "mul", "add", "select")},
}
_SYMBOLIC = ("size", "dim")  # methods that give numbers
ARGUMENTS = {
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv_transpose2d": (
        *("input", "weight", "bias", "stride", "padding", "output_padding", "groups"),
        "dilation",
    ),
    "pad": ("input", "pad", "mode", "value"),
    "unsqueeze": ("input", "dim"),
    "cat": ("tensors", "dim"),
    "mul": ("input", "other"),
    "add": ("input", "other", "alpha"),
    "select": ("input", "dim", "index"),
    "slice": ("input", "dim", "start", "end", "step"),
    "getitem": ("input", "index"),
}
_ALIASES = {"axis": "dim", "self": "input", "x1": "input", "x2": "other"}


def operation(node: fx.Node) -> str | None:
    """Name of the rule for a node; None for an operation that is not understood."""
    if node.kwargs.get("out") is not None:
        return None
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target)
    return _METHODS.get(str(node.target)) if node.op == "call_method" else None


def is_harmless(node: fx.Node) -> bool:
    """Whether a node certainly changes no tensor and no state."""
    if operation(node) is not None or node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op == "call_method":
        return node.target in _SYMBOLIC
    return isinstance(node.meta.get("example_value"), (int, float, torch.SymInt, torch.Size))


def arguments(node: fx.Node, name: str) -> dict[str, Any]:
    """Arguments by name, without those that the rules do not know."""
    given = dict(zip(ARGUMENTS[name], node.args, strict=False))
    given.update({_ALIASES.get(key, key): value for key, value in node.kwargs.items()})
    return given


def example(node: Any) -> Any:
    """The fake tensor or number that stands for a node."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def shape(node: Any) -> Any:
    """Shape of a node that holds a tensor, else None."""
    value = example(node)
    return tuple(value.shape) if isinstance(value, Tensor) else None


def same(left: Any, right: Any) -> bool:
    """Whether two sizes are certainly equal."""
    if type(left) is int and type(right) is int:
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(left == right))


def is_even(size: Any) -> bool:
    """Whether a size is even; of a symbolic size, its parity becomes a guard of the graph."""
    if type(size) is int:
        return size % 2 == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(size % 2 == 0))


def all_same(left: Any, right: Any) -> bool:
    """Whether two shapes are certainly equal."""
    return len(left) == len(right) and all(map(same, left, right))


def looks_like_synthesis(node: fx.Node) -> bool:
    """Whether a node is a transposed convolution by filters of a wavelet transform of any kind."""
    if operation(node) != "conv_transpose2d":
        return False
    given = arguments(node, "conv_transpose2d")
    filters, input = shape(given.get("weight")), shape(given.get("input"))
    if filters is None or input is None or len(filters) != 4 or len(input) != 4:
        return False
    depthwise = same(filters[1], 1) and same(input[1], 4 * shape(node)[1])
    return depthwise and is_number(given.get("stride", 1), 2)


def is_number(value: Any, expected: Any) -> bool:
    """Whether a number or all numbers of a sequence are ``expected``."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(type(item) is int and same(item, expected) for item in values)
