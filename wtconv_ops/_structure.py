"""Recognise a wavelet convolution layer by its structure: names, shapes and filter values.

Three structures compute Algorithm 1 of the paper, or something close to it:

    reference      wt_filter, iwt_filter, base_conv, base_scale.weight, wavelet_convs, wavelet_scale
    fused          base_weight, base_bias, base_scale, wt_weights, wt_scales
    early fused    base_conv, base_scale, wavelet_convs, wavelet_scales

Class names and module paths play no part. A layer with anything of its own beside these names is
refused, and the sentence says what it was.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor, nn

from ._checks import DTYPES, MAX_KERNEL_SIZE, MAX_LEVELS
from .nn import _filter_problem, _has_values

FILTERS = ("wt_filter", "iwt_filter")
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_SIGNS = {*FILTERS, "base_scale", "wavelet_convs", "wavelet_scale", "wavelet_scales"} | {
    "wt_weights",
    "wt_scales",
}
_SUBSAMPLING = ("do_stride", "stride_filter")
# Methods of which WTConv2d has its own, and what Python gives every class.
_COMMON = {"__init__", "extra_repr", "__repr__", "reset_parameters", "__dict__", "__weakref__"}
_COMMON |= {"__annotate_func__", "__annotate__"}
# Bases that give a layer nothing.
_BARE = (*nn.Module.__mro__, ABC, Generic)


class MismatchError(Exception):
    """A layer that looks like WTConv and is not; the text says why."""


@dataclass(frozen=True)
class Structure:
    """A recognised layer.

    Attributes:
        kind: ``reference``, ``fused`` or ``early fused``.
        stride: Subsampling of the result.
        parameters: Parameter for each name that ``WTConv2d`` gives it; no entry without a bias.
        names: Name in the layer for each name that ``WTConv2d`` gives it.
    """

    kind: str
    stride: int
    parameters: Mapping[str, nn.Parameter]
    names: Mapping[str, str]

    @property
    def channels(self) -> int:
        return int(self.parameters["base_conv.weight"].shape[0])

    @property
    def kernel_size(self) -> int:
        return int(self.parameters["base_conv.weight"].shape[-1])

    @property
    def levels(self) -> int:
        return sum(name.startswith("wavelet_convs.") for name in self.parameters)

    @property
    def bias(self) -> bool:
        return "base_conv.bias" in self.parameters


def resembles(module: nn.Module) -> bool:
    """Whether a module has at least two of the names that mark a WTConv layer."""
    return sum(name in _SIGNS for name in _members(module)) >= 2


def read(module: nn.Module) -> Structure:
    """The structure of a layer whose names, shapes and filters are those of a WTConv layer.

    Args:
        module: A module for which :func:`resembles` is True; nothing of it changes or runs.

    Returns:
        Its structure. That its ``forward`` computes Algorithm 1 is left to show.

    Raises:
        MismatchError: The first thing in which the layer differs.
    """
    _require_plain_call(module)
    members = _members(module)
    if "wt_weights" in members:
        kind = "fused"
        required = {"base_weight", "base_scale", "wt_weights", "wt_scales"}
        optional = {"base_bias"}
    elif "wavelet_scales" in members:
        kind = "early fused"
        required = {"base_conv", "base_scale", "wavelet_convs", "wavelet_scales"}
        optional = set()
    else:
        kind = "reference"
        required = {"base_conv", "base_scale", "wavelet_convs", "wavelet_scale", *FILTERS}
        optional = set()
    _require_names(members, required, optional | set(_SUBSAMPLING))
    _require_plain_class(type(module))
    _require_no_hooks_within(module)
    names = dict(_names(kind, members))
    parameters = {}
    for ours, theirs in names.items():
        value = _resolve(module, theirs)
        if type(value) is not nn.Parameter:
            _fail(f"{theirs} is a {type(value).__name__}, not a plain parameter")
        parameters[ours] = value
    structure = Structure(kind, _stride(module), parameters, names)
    _require_shapes(structure)
    _require_attributes(module, structure)
    if kind == "reference":
        for name in FILTERS:
            _require_haar(name, members[name], structure.channels)
    return structure


def _fail(reason: str) -> NoReturn:
    raise MismatchError(reason)


def _members(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and submodules by name, without those that are None."""
    found: dict[str, Any] = {**module._parameters, **module._buffers, **module._modules}
    return {name: value for name, value in found.items() if value is not None}


def _require_plain_call(module: nn.Module) -> None:
    """A call of the module runs the ``forward`` of its class and the hooks, and nothing else."""
    if isinstance(module, torch.jit.ScriptModule):
        _fail("it is a TorchScript module; convert the model before scripting it")
    if getattr(module, "_compiled_call_impl", None) is not None:
        _fail("it is compiled in place; convert the model before compiling it")
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        _fail("its forward or __call__ is replaced")
    if vars(module).get("_is_full_backward_hook") is False and module._backward_hooks:
        _fail("a backward hook of the old kind sees the last operation of its forward")
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            _fail("a load_state_dict pre-hook is bound to it")


def _require_plain_class(kind: type[nn.Module]) -> None:
    """Nothing that the class does beside its ``forward`` is lost, and its forward is no extension.

    A run shows what a forward computes for a few inputs. One that extends that of another layer
    does so for a reason, which other inputs may show.
    """
    classes = [base for base in kind.__mro__ if base not in _BARE]
    layer = next((base for base in reversed(classes) if "forward" in vars(base)), nn.Module)
    for base in classes:
        own = [name for name in _methods(base) if name not in _COMMON]
        if base is layer:  # its forward and the helpers of that
            own = [name for name in own if name != "forward" and not _is_helper(name)]
        extends = base is not layer and issubclass(base, layer)
        verb = f"extends {layer.__name__} by" if extends else "has methods of its own:"
        if own:
            _fail(f"its class {base.__name__} {verb} {', '.join(own)}")
    others = list(inspect.signature(kind.forward).parameters)[2:]
    if others:
        _fail(f"its forward takes more than one input: {', '.join(others)}")


def _is_helper(name: str) -> bool:
    """Whether only the class itself calls a method of this name."""
    return name[0] == "_" and not name.endswith("__") and not hasattr(nn.Module, name)


def _methods(kind: type) -> list[str]:
    """Names of what a class defines to be called, or computed when read."""
    return sorted(
        name for name, value in vars(kind).items() if callable(value) or hasattr(value, "__get__")
    )


def _require_names(members: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    if "parametrizations" in members:
        _fail("it is parametrized; remove the parametrizations first")
    extra = sorted(set(members) - required - optional)
    if extra:
        _fail(f"it has parameters, buffers or submodules of its own: {', '.join(extra)}")
    missing = sorted(required - set(members))
    if missing:
        _fail(f"it has no {', '.join(missing)}")


def _require_no_hooks_within(module: nn.Module) -> None:
    """Hooks and replaced forwards of submodules, which ``WTConv2d`` would not run."""
    for name, child in module.named_modules():
        if child is module:
            continue
        if any(vars(child).get(hooks) for hooks in HOOKS):
            _fail(f"{name} has hooks, which WTConv2d does not run")
        if "forward" in vars(child) or getattr(child, "_compiled_call_impl", None) is not None:
            _fail(f"the forward of {name} is replaced")
        if "parametrizations" in child._modules:
            _fail(f"{name} is parametrized; remove the parametrizations first")


def _names(kind: str, members: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of the name that ``WTConv2d`` gives a parameter and its name in the layer."""
    if kind == "fused":
        yield "base_conv.weight", "base_weight"
        if "base_bias" in members:
            yield "base_conv.bias", "base_bias"
    else:
        conv = members["base_conv"]
        _require_depthwise("base_conv", conv)
        yield "base_conv.weight", "base_conv.weight"
        if conv.bias is not None:
            yield "base_conv.bias", "base_conv.bias"
    yield "base_scale.weight", _scale_name("base_scale", members["base_scale"])
    convs = "wt_weights" if kind == "fused" else "wavelet_convs"
    scales = {"fused": "wt_scales", "early fused": "wavelet_scales"}.get(kind, "wavelet_scale")
    for name in (convs, scales):
        if not isinstance(members[name], (nn.ModuleList, nn.ParameterList)):
            _fail(f"{name} is a {type(members[name]).__name__}, not a list of levels")
    if len(members[convs]) != len(members[scales]):
        _fail(f"{convs} and {scales} differ in length")
    for i, (conv, scale) in enumerate(zip(members[convs], members[scales], strict=True)):
        name = f"{convs}.{i}"
        if kind != "fused":
            _require_depthwise(name, conv)
            if conv.bias is not None:
                _fail(f"{name} has a bias")
            name += ".weight"
        yield f"wavelet_convs.{i}.weight", name
        yield f"wavelet_scale.{i}.weight", _scale_name(f"{scales}.{i}", scale)


def _scale_name(name: str, scale: Any) -> str:
    """Name of the factors: a parameter, or the one parameter of a module."""
    if isinstance(scale, Tensor):
        return name
    if set(_members(scale)) != {"weight"}:
        _fail(f"{name} must have a weight and nothing else, it has {sorted(_members(scale))}")
    return f"{name}.weight"


def _require_depthwise(name: str, conv: Any) -> None:
    """A plain depthwise ``nn.Conv2d`` that keeps the size."""
    if type(conv) is not nn.Conv2d:
        _fail(f"{name} is a {type(conv).__name__}, not an nn.Conv2d")
    if conv.in_channels != conv.out_channels or conv.groups != conv.in_channels:
        _fail(
            f"{name} is not depthwise: {conv.in_channels} to {conv.out_channels} channels in "
            f"{conv.groups} groups"
        )
    height, width = conv.kernel_size
    if height != width:
        _fail(f"{name} has a kernel of {height}x{width}, not a square one")
    if conv.stride != (1, 1) or conv.dilation != (1, 1):
        _fail(f"{name} has stride {conv.stride} and dilation {conv.dilation}, not 1")
    same = conv.padding == "same" or (height % 2 == 1 and conv.padding == (height // 2,) * 2)
    if not same or conv.padding_mode != "zeros":
        _fail(f"{name} pads {conv.padding} with {conv.padding_mode}; it must keep the size")
    if set(_members(conv)) - {"weight", "bias"}:
        _fail(f"{name} has parameters, buffers or submodules of its own")


def _resolve(module: nn.Module, name: str) -> Any:
    """The parameter of a dotted name, as stored."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(leaf)


def _stride(module: nn.Module) -> int:
    """The subsampling of the result."""
    stride = getattr(module, "stride", 1)
    if type(stride) is not int or stride < 1:
        _fail(f"stride is {stride!r}, not a positive int")
    members = _members(module)
    pool = members.get("do_stride", vars(module).get("do_stride"))
    ones = members.get("stride_filter")
    if stride == 1:
        if pool is not None:
            _fail("do_stride is not None although stride is 1")
    elif isinstance(pool, nn.AvgPool2d):
        settings = (pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode)
        pairs = (settings[0], settings[1]) in ((1, stride), ((1, 1), (stride, stride)))
        if not pairs or settings[2] not in (0, (0, 0)) or pool.ceil_mode:
            _fail(f"do_stride is {pool}, not the subsampling of stride {stride}")
    elif ones is None:
        _fail(f"do_stride is a {type(pool).__name__}, not the subsampling of stride {stride}")
    if ones is not None:
        if not isinstance(ones, Tensor) or ones.requires_grad or not _has_values(ones):
            _fail("stride_filter is not a frozen tensor of ones")
        if bool((ones.detach() != 1).any()):
            _fail("stride_filter is not a frozen tensor of ones")
    return stride


def _require_shapes(structure: Structure) -> None:
    """Shapes of all parameters; one dtype and one device, on which values exist."""
    parameters = structure.parameters
    weight = parameters["base_conv.weight"]
    if weight.dim() != 4 or not 1 <= weight.shape[-1] <= MAX_KERNEL_SIZE:
        _fail(
            f"the base kernel is {list(weight.shape)}, not [C, 1, k, k] with k of 1 to "
            f"{MAX_KERNEL_SIZE}"
        )
    if structure.levels > MAX_LEVELS:
        _fail(f"it has {structure.levels} levels, more than {MAX_LEVELS}")
    channels, size = structure.channels, structure.kernel_size
    expected = {
        "base_conv.weight": [channels, 1, size, size],
        "base_conv.bias": [channels],
        "base_scale.weight": [1, channels, 1, 1],
    }
    for i in range(structure.levels):
        expected[f"wavelet_convs.{i}.weight"] = [4 * channels, 1, size, size]
        expected[f"wavelet_scale.{i}.weight"] = [1, 4 * channels, 1, 1]
    for name, parameter in parameters.items():
        theirs = structure.names[name]
        if list(parameter.shape) != expected[name]:
            _fail(f"{theirs} is {list(parameter.shape)}, not {expected[name]}")
        if parameter.dtype not in DTYPES:
            _fail(f"{theirs} is {parameter.dtype}, for which WTConv2d has no kernel")
        if parameter.dtype != weight.dtype or parameter.device != weight.device:
            _fail(f"{theirs} differs from the base kernel in dtype or device")
        if not _has_values(parameter):
            _fail(f"{theirs} has no values yet (meta or fake tensor); load the weights first")


def _require_attributes(module: nn.Module, structure: Structure) -> None:
    """Numbers that the layer states about itself and the parameters contradict."""
    for name, value in (
        ("in_channels", structure.channels),
        ("out_channels", structure.channels),
        ("wt_levels", structure.levels),
    ):
        stated = getattr(module, name, value)
        if stated != value:
            _fail(f"{name} is {stated!r}, the parameters have {value}")


def _require_haar(name: str, value: Any, channels: int) -> None:
    """Frozen Haar filters, by value."""
    if not isinstance(value, Tensor):
        _fail(f"{name} is a {type(value).__name__}, not a tensor")
    if value.requires_grad:
        _fail(f"{name} is trainable; the filters of WTConv2d are fixed")
    if not _has_values(value):
        _fail(f"{name} has no values yet (meta or fake tensor); load the weights first")
    problem = _filter_problem(name, value, channels)
    if problem is not None:
        _fail(problem)
