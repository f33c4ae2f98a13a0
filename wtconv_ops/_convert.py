"""Swap the layers of the original implementation for WTConv2d: :func:`convert`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._probe import UnprovenError, difference
from ._structure import HOOKS, MismatchError, Structure, read, resembles
from .nn import WTConv2d

__all__ = ["ConversionReport", "Left", "Swapped", "convert"]

# What the layers know about themselves beside their parameters; WTConv2d has its own.
_REPLACED = {"in_channels", "out_channels", "kernel_size", "stride", "dilation", "wt_levels"} | {
    "wt_type",
    "do_stride",
    "wt_function",
    "iwt_function",
    "_haar",
}
_FORCE = "; unproven=True swaps it all the same"


@dataclass(frozen=True)
class Swapped:
    """A layer that is now a ``WTConv2d``.

    Attributes:
        names: Its names in the model; several for a shared layer. The model itself is ``""``.
        kind: Its former structure: ``reference``, ``fused`` or ``early fused``.
        layer: The new layer.
        proven: Whether a run showed that both are equal; False only with ``unproven=True``.
        renamed: New name in ``state_dict`` for each old one that changed.
    """

    names: tuple[str, ...]
    kind: str
    layer: WTConv2d
    proven: bool
    renamed: dict[str, str]


@dataclass(frozen=True)
class Left:
    """A look-alike that was left alone.

    Attributes:
        names: Its names in the model; several for a shared layer. The model itself is ``""``.
        reason: In what it differs from a WTConv layer.
    """

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did; ``print(report)`` shows it as a table.

    Attributes:
        model: The model: the object that was passed in, or the new layer if that was a layer.
        swapped: The layers that are ``WTConv2d`` now.
        left: The look-alikes that are as they were, each with its reason.
    """

    model: nn.Module
    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """New name in ``state_dict`` for each old one that changed, to load old checkpoints.

        Empty after a conversion of reference layers, which have the names of ``WTConv2d``.

        Equivalent to:
            >>> model.load_state_dict({report.renamed.get(k, k): v for k, v in old.items()})
        """
        return {old: new for entry in self.swapped for old, new in entry.renamed.items()}

    def __str__(self) -> str:
        rows = []
        for entry in self.swapped:
            text = f"{entry.kind} layer, {entry.layer.extra_repr()}"
            rows.append((entry.names, "swapped", text if entry.proven else f"{text}, unproven"))
        rows += [(entry.names, "left alone", entry.reason) for entry in self.left]
        title = f"convert: {len(self.swapped)} swapped, {len(self.left)} left alone"
        labels = [", ".join(name or "(the model)" for name in names) for names, _, _ in rows]
        width = max(map(len, labels), default=0)
        lines = [
            f"  {label:<{width}}  {action:<10}  {text}"
            for label, (_, action, text) in zip(labels, rows, strict=True)
        ]
        return "\n".join([title, *lines])


def convert(model: nn.Module, *, unproven: bool = False) -> ConversionReport:
    """Swap the WTConv layers of the original implementation for ``WTConv2d``, in place.

    Layers are recognised by structure (names, shapes, groups, padding, and filters by value:
    within 1e-3 of Haar's, in the order LL, LH, HL, HH) and then run, on random inputs with random
    parameters, to show that they compute Algorithm 1. Class names and module paths play no part.
    A layer that is not shown to be equal is left alone, and the report says why: other or trainable
    filters, another padding or stride, parameters of its own, parametrizations or pruning, hooks on
    its submodules, a replaced ``forward``, a compiled or scripted layer. So is one whose class has
    behaviour of its own: it extends the forward or any method of another layer class, has public
    methods beside its forward, or a forward that takes more than one input.

    The new layer has the very ``Parameter`` objects, so that an optimizer goes on, and the hooks
    (their handles still remove them), the training flags, dtype, device and ``requires_grad``. A
    layer that is registered several times stays shared. Keys of ``state_dict`` stay those of the
    reference layer; ``report.renamed`` maps those of the fused layers. Other Python references to
    an old layer, such as a list beside the module tree, keep it, with the same parameters.

    Under autocast ``WTConv2d`` returns the autocast dtype, the reference layer float32.

    The fused layers: that of ``fast_wtconv/wtconv_cuda.py`` is run with plain PyTorch operations in
    place of the kernels that it holds, on any device. Triton's (bias after the scale, another
    result at odd inner sizes) and those of the first release hold no such kernels: they are swapped
    where their own kernels run and agree, else left alone.

    Args:
        model: Any module; a layer itself comes back as ``report.model``.
        unproven: Also swap fused layers of the right structure whose ``forward`` cannot be run
            here or gives another result. They compute Algorithm 1 from then on.

    Returns:
        The report.

    Raises:
        TypeError: ``model`` is not a module.

    Equivalent to:
        >>> new = WTConv2d(C, C, k, stride, bias, levels)
        >>> new.load_state_dict(layer.state_dict())  # but with the same Parameter objects
        >>> setattr(parent, name, new)               # for every layer and every parent

    Source: Finder et al., "Wavelet Convolutions for Large Receptive Fields", ECCV 2024; the
    structures are those of https://github.com/BGU-CS-VIL/WTConv.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert: model must be an nn.Module, got {type(model).__name__}")
    places: dict[int, list[_Place]] = {}
    for place in _places(model):
        if resembles(place.module) and not isinstance(place.module, WTConv2d):
            places.setdefault(id(place.module), []).append(place)
    swapped: list[Swapped] = []
    left: list[Left] = []
    for group in places.values():
        names = tuple(place.name for place in group)
        try:
            entry = _swap(group, names, unproven)
        except MismatchError as reason:
            left.append(Left(names, str(reason)))
            continue
        swapped.append(entry)
        if group[0].parent is None:
            model = entry.layer
    return ConversionReport(model, tuple(swapped), tuple(left))


@dataclass(frozen=True)
class _Place:
    """A module, the parent that registers it (None for the model) and both of its names."""

    module: nn.Module
    parent: nn.Module | None
    key: str
    name: str


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every registration of every module, under every name, in the order of the tree."""
    found = dict(model.named_modules(remove_duplicate=False))
    for name, module in found.items():
        path, _, key = name.rpartition(".")
        yield _Place(module, found[path] if name else None, key, name)


def _swap(places: list[_Place], names: tuple[str, ...], unproven: bool) -> Swapped:
    """Swap one layer at all its places.

    Raises:
        MismatchError: It stays as it is.
    """
    layer = places[0].module
    structure = read(layer)
    for place in places:
        _require_open(place.parent)
    proven = _is_proven(layer, structure, unproven)
    new = _build(layer, structure)
    for place in places:
        if place.parent is not None:
            place.parent._modules[place.key] = new
    renamed = {
        _join(name, theirs): _join(name, ours)
        for name in names
        for ours, theirs in structure.names.items()
        if ours != theirs
    }
    return Swapped(names, structure.kind, new, proven, renamed)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _require_open(parent: nn.Module | None) -> None:
    """Parents that hold on to the module they were made with."""
    compiler = sys.modules.get("torch._dynamo")  # not imported only to ask this
    if compiler is not None and isinstance(parent, compiler.OptimizedModule):
        raise MismatchError("the module around it is compiled; convert the model before that")
    if isinstance(parent, torch.jit.ScriptModule):
        raise MismatchError("the module around it is scripted; convert the model before that")


def _is_proven(layer: nn.Module, structure: Structure, unproven: bool) -> bool:
    """Whether a run showed the layer to be equal; False where ``unproven`` lets it pass.

    Raises:
        MismatchError: It did not, and the layer must stay.
    """
    hint = "" if structure.kind == "reference" else _FORCE
    unproven = unproven and structure.kind != "reference"
    try:
        error = difference(layer, structure)
    except UnprovenError as reason:
        if unproven:
            return False
        raise MismatchError(f"its forward cannot be run to compare it ({reason}){hint}") from None
    if error is None:
        return True
    if unproven:
        return False
    raise MismatchError(
        f"its forward does not compute WTConv: it differs by {error:.2g} of the largest value{hint}"
    )


def _build(layer: nn.Module, structure: Structure) -> WTConv2d:
    """The WTConv2d that takes the place of ``layer``.

    Raises:
        MismatchError: The layer has an attribute of its own under a name of WTConv2d.
    """
    new = WTConv2d(
        structure.channels,
        structure.channels,
        structure.kernel_size,
        structure.stride,
        structure.bias,
        structure.levels,
        device="meta",
    )
    for name, parameter in structure.parameters.items():
        path, _, leaf = name.rpartition(".")
        new.get_submodule(path)._parameters[leaf] = parameter
    for name, value in _own_attributes(layer).items():
        if hasattr(new, name):
            raise MismatchError(f"it has an attribute {name} of its own, a name of WTConv2d")
        new.__dict__[name] = value
    new.train(layer.training)
    old_modules = dict(layer.named_modules())
    for name, child in new.named_modules():
        if name in old_modules:
            child.training = old_modules[name].training
    for hooks in (*HOOKS, "_is_full_backward_hook"):  # the objects that handles refer to
        if hooks in vars(layer):
            new.__dict__[hooks] = vars(layer)[hooks]
    return new


def _own_attributes(layer: nn.Module) -> dict[str, Any]:
    """Attributes that somebody gave the layer, such as a name or an index."""
    skipped = _REPLACED | set(vars(nn.Module()))
    return {name: value for name, value in vars(layer).items() if name not in skipped}
