"""Show by running it that a layer computes Algorithm 1 of the paper.

The structure of a layer does not say what its ``forward`` does. It is run here on random inputs
with random parameters, in training and in evaluation mode, at sizes that are odd at different
levels, and compared with :mod:`wtconv_ops.reference`. Random parameters show more than equal
outputs: a bias that is added after the scale differs as soon as the scale is not 1. Nothing of the
layer changes, its hooks do not run, and the random state is put back.
"""

from __future__ import annotations

import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import reference
from ._structure import FILTERS, HOOKS, Structure
from .nn import haar_filters

_CASES = (((13, 10), True), ((9, 16), False))
# Largest error allowed over the largest value. float32 on a GPU may be TF32; elsewhere float64 is
# slow for as many groups as channels, and not needed.
_ON_CUDA = {torch.float64: 1e-9, torch.float32: 1e-2}
_ELSEWHERE = {torch.float32: 1e-4}
# What the fused layer asks of its kernels.
_KERNELS = ("scaled_depthwise_conv", "wavelet_branch")


class UnprovenError(Exception):
    """The forward of a layer cannot be run here; the text says why."""


def kernels_of(module: nn.Module) -> Any:
    """The kernels that a fused layer holds and reaches by name; None if it holds none."""
    kernels = vars(module).get("_haar")
    return kernels if all(hasattr(kernels, name) for name in _KERNELS) else None


def difference(module: nn.Module, structure: Structure) -> float | None:
    """How far the layer is from Algorithm 1.

    Kernels that a fused layer holds are replaced by plain PyTorch operations of the same
    definition, so that its ``forward`` runs on any device.

    Args:
        module: The layer.
        structure: Its structure.

    Returns:
        None if it computes Algorithm 1, else the largest error over the largest value.

    Raises:
        UnprovenError: Its forward raises.
    """
    reason = ""
    on_cuda = structure.parameters["base_conv.weight"].is_cuda
    for dtype, tolerance in (_ON_CUDA if on_cuda else _ELSEWHERE).items():
        try:
            errors = [_error(module, structure, dtype, *case) for case in _CASES]
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            continue
        worst = max(errors)
        return None if worst <= tolerance else worst
    raise UnprovenError(reason)


def _error(
    module: nn.Module, structure: Structure, dtype: torch.dtype, size: tuple[int, int], train: bool
) -> float:
    """Largest error over the largest value; infinite for another shape or NaN."""
    device = structure.parameters["base_conv.weight"].device
    generator = torch.Generator("cpu").manual_seed(sum(size))

    def draw(*shape: int) -> Tensor:
        values = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        signs = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
        return (signs * values).to(device, dtype)

    drawn: dict[int, Tensor] = {}  # a parameter that several levels share has one value
    values = {
        name: drawn.setdefault(id(p), draw(*p.shape)) for name, p in structure.parameters.items()
    }
    input = draw(2, structure.channels, *size)
    with _quiet(device):
        found = _run(module, structure, values, input, train)
        levels = range(structure.levels)
        expected = reference.wtconv2d(
            input,
            values["base_conv.weight"],
            values.get("base_conv.bias"),
            values["base_scale.weight"],
            [values[f"wavelet_convs.{i}.weight"] for i in levels],
            [values[f"wavelet_scale.{i}.weight"] for i in levels],
            structure.stride,
        )
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != dtype:
        return float("inf")
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """No gradients, autocast, warnings or change of the random state."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=devices),
        torch.autocast(device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _run(
    module: nn.Module, structure: Structure, values: dict[str, Tensor], input: Tensor, train: bool
) -> Any:
    """The layer without its hooks, on other parameters and exact filters."""
    clone = object.__new__(type(module))
    clone.__dict__.update(vars(module), training=train)
    clone.__dict__.update({name: OrderedDict() for name in HOOKS})
    tensors = {structure.names[name]: value for name, value in values.items()}
    if structure.kind == "reference":
        filters = haar_filters(structure.channels, input.device, input.dtype)
        tensors.update(dict.fromkeys(FILTERS, filters))
    elif kernels_of(module) is not None:
        clone.__dict__["_haar"] = _STANDINS
    if "stride_filter" in module._parameters or "stride_filter" in module._buffers:
        tensors["stride_filter"] = getattr(module, "stride_filter").to(input.dtype)  # noqa: B009
    return torch.func.functional_call(clone, tensors, (input,), tie_weights=False)


def _scaled_depthwise_conv(
    x: Tensor, weight: Tensor, scale: Tensor, padding: int = 1, bias: Tensor | None = None
) -> Tensor:
    """s * (W conv x + b)."""
    return scale * F.conv2d(x, weight, bias, padding=padding, groups=weight.shape[0])


def _wavelet_branch(
    x: Tensor, base_out: Tensor, weights: list[Tensor], scales: list[Tensor], kernel_size: int
) -> Tensor:
    """The base path plus the wavelet path of Algorithm 1."""
    channels = x.shape[1]
    weight, scale = (
        x.new_zeros(channels, 1, kernel_size, kernel_size),
        x.new_zeros(1, channels, 1, 1),
    )
    return base_out + reference.wtconv2d(x, weight, None, scale, weights, scales)


_STANDINS = types.SimpleNamespace(
    scaled_depthwise_conv=_scaled_depthwise_conv, wavelet_branch=_wavelet_branch
)
