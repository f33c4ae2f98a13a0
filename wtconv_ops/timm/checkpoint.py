"""Checkpoints of the original WTConvNeXt and of its fused variants for the models of timm."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from timm.models import load_state_dict
from torch import nn

from .._checkpoint import WRAPPERS, original_state_dict

__all__ = ["checkpoint_filter_fn", "load_checkpoint"]

# Where training scripts put the weights, averaged ones first, as timm looks for them.
_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model")


def load_checkpoint(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    bias_after_scale: bool | None = None,
) -> None:
    """Load a checkpoint of WTConvNeXt into ``model``, strictly.

    Args:
        model: A :class:`~wtconv_ops.timm.WTConvNeXt`, possibly compiled or in
            DistributedDataParallel.
        checkpoint: Path of a file that timm reads (``torch.save`` or safetensors), or a state dict,
            or what a training script saved around one. Names may be those of the original model
            or of its fused variants, with ``module.`` and ``_orig_mod.`` in any order.
        bias_after_scale: True for a fused variant that adds the base bias after the base scale
            (Triton, Metal and the first CUDA one), False for one that does not. None: as False,
            with a warning where it matters. Not used with the names of the original model.

    Raises:
        FileNotFoundError: No file at the path.
        TypeError: ``checkpoint`` is neither a path nor a mapping.
        RuntimeError: Names left over or missing, shapes that differ, filters other than Haar's:
            the message lists all of them.
    """
    if isinstance(checkpoint, (str, os.PathLike)):
        path = os.fspath(checkpoint)
        if not os.path.isfile(path):  # noqa: PTH113
            raise FileNotFoundError(f"load_checkpoint: no file at {path}")
        checkpoint = load_state_dict(path)
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            f"load_checkpoint: checkpoint must be a path or a state dict, got "
            f"{type(checkpoint).__name__}"
        )
    model = _unwrapped(model)
    model.load_state_dict(
        checkpoint_filter_fn(checkpoint, model, bias_after_scale=bias_after_scale), strict=True
    )


def checkpoint_filter_fn(
    state_dict: Mapping[str, Any], model: nn.Module, *, bias_after_scale: bool | None = None
) -> dict[str, Any]:
    """Bring the names of a checkpoint to those of ``model``, or refuse it.

    timm calls it for ``pretrained=True``; it also fits ``timm.models.load_checkpoint(model, path,
    filter_fn=checkpoint_filter_fn)``. The names of the classifier may be left over or missing, as
    timm drops or keeps them by the number of classes; the Haar filters may be missing.

    Args:
        state_dict: Values by name, or what a training script saved around them.
        model: The model to load into.
        bias_after_scale: As for :func:`load_checkpoint`.

    Returns:
        A new dict with the names of ``model``.

    Raises:
        RuntimeError: Names left over or missing; the message lists all of them.
    """
    for container in _CONTAINERS:
        if isinstance(state_dict.get(container), Mapping):
            state_dict = state_dict[container]
            break
    renamed = original_state_dict(state_dict, bias_after_scale)
    classifier = str(getattr(model, "pretrained_cfg", {}).get("classifier", "head.fc"))
    optional = {f"{classifier}.weight", f"{classifier}.bias"}
    unknown = renamed.keys() - model.state_dict().keys() - optional
    missing = dict(model.named_parameters()).keys() - renamed.keys() - optional
    if unknown or missing:
        parts = [_listed("left over", unknown), _listed("missing", missing)]
        raise RuntimeError(
            f"checkpoint: the names must be those of {type(model).__name__} or of a fused WTConv "
            f"variant, {'; '.join(part for part in parts if part)}"
        )
    return renamed


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers whose names are taken off a checkpoint."""
    for wrapper in WRAPPERS:
        inner = getattr(model, wrapper, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return model


def _listed(what: str, names: Iterable[str]) -> str:
    """``what: name, name``, or nothing without names."""
    listed = ", ".join(sorted(map(str, names)))
    return f"{what}: {listed}" if listed else ""
