"""Names of WTConv parameters in checkpoints, brought to those of the original layer.

| original layer, and ours  | fused: CUDA, Triton | fused: Metal, first CUDA |
|---------------------------|---------------------|--------------------------|
| base_conv.weight          | base_weight         | base_conv.weight         |
| base_conv.bias            | base_bias           | base_conv.bias           |
| base_scale.weight         | base_scale          | base_scale               |
| wavelet_convs.{i}.weight  | wt_weights.{i}      | wavelet_convs.{i}.weight |
| wavelet_scale.{i}.weight  | wt_scales.{i}       | wavelet_scales.{i}       |
| wt_filter, iwt_filter     | none                | none                     |

The original layer and the fused CUDA layer compute s * (w conv x + b) in the base path; the Triton
and Metal layers and the first CUDA layer compute s * (w conv x) + b. Their b is our s * b.

Source: BGU-CS-VIL/WTConv, ``wtconv/`` and ``fast_wtconv/``, pull requests 50 and 53.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel and model averages; torch.compile
_FUSED = tuple(
    (re.compile(rf"(^|\.){fused}$"), rf"\1{original}")
    for fused, original in (
        ("base_weight", "base_conv.weight"),
        ("base_bias", "base_conv.bias"),
        ("base_scale", "base_scale.weight"),
        (r"wt_weights\.(\d+)", r"wavelet_convs.\2.weight"),
        (r"(?:wt_scales|wavelet_scales)\.(\d+)", r"wavelet_scale.\2.weight"),
    )
)
_SCALE = "base_scale.weight"


def original_name(name: str) -> str:
    """``name`` without the parts that wrappers add, in the original layer's spelling."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for pattern, replacement in _FUSED:
        name, found = pattern.subn(replacement, name)
        if found:
            break
    return name


def original_state_dict(
    state_dict: Mapping[str, Any], bias_after_scale: bool | None = None
) -> dict[str, Any]:
    """Rename the entries of a checkpoint to the names of the original layer.

    Args:
        state_dict: Values by name; any model with WTConv layers in it.
        bias_after_scale: Whether layers with the names of a fused variant added the base bias after
            the base scale; their bias is then divided by the scale. None: no, and one warning where
            the answer changes the result.

    Returns:
        A new dict; values are shared, except for divided biases.

    Raises:
        RuntimeError: Two names become the same, or a bias would be divided by a scale of zero.
    """
    renamed: dict[str, Any] = {}
    came_from: dict[str, str] = {}
    fused: list[str] = []
    for name, value in state_dict.items():
        new = original_name(name)
        if new in renamed:
            raise RuntimeError(
                f"checkpoint: {came_from[new]} and {name} are both {new}; keep one of them"
            )
        renamed[new], came_from[new] = value, name
        if new.endswith(_SCALE) and name.endswith("base_scale"):
            fused.append(new.removesuffix(_SCALE))
    _settle_biases(renamed, fused, bias_after_scale)
    return renamed


def _settle_biases(state: dict[str, Any], layers: list[str], after_scale: bool | None) -> None:
    """Divide the biases of ``layers`` by the scales, or warn that it may have to be done."""
    for layer in layers:
        scale, bias = state[layer + _SCALE], state.get(layer + "base_conv.bias")
        if not isinstance(scale, Tensor) or not isinstance(bias, Tensor) or scale.is_meta:
            continue
        factors = scale.detach().flatten()
        if factors.shape != bias.shape:
            continue  # loading says which shapes are wrong
        if after_scale is None:
            if not bool(((factors == 1) | (bias == 0)).all()):
                warnings.warn(
                    f"checkpoint: {layer}base_scale has the name of a fused WTConv variant, some "
                    "of which add the bias after the scale (Triton, Metal, the first CUDA one); "
                    "loaded as if it were scaled: pass bias_after_scale=True to load_checkpoint "
                    "if one of them was trained, False if not",
                    stacklevel=5,
                )
                return
        elif after_scale:
            if bool(((factors == 0) & (bias != 0)).any()):
                raise RuntimeError(
                    f"checkpoint: {layer}base_scale must not be 0 where the bias is added after "
                    "it, as the original layer cannot express that; load it in the variant that "
                    "trained it"
                )
            divisors = factors.masked_fill(factors == 0, 1)
            state[layer + "base_conv.bias"] = bias / divisors.to(bias)
