"""WTConvNeXt: timm's ConvNeXt with a WTConv layer in place of every depthwise convolution.

Stem, blocks, stages, head, stochastic depth, gradient checkpointing and feature extraction are
timm's own. Added here: the layer, its initialisation, which parameters are not decayed, and the
three model sizes.

Source: Finder et al., "Wavelet Convolutions for Large Receptive Fields", ECCV 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.convnext import ConvNeXt
from torch import nn

from ..nn import WTConv2d
from .checkpoint import checkpoint_filter_fn

__all__ = ["WTConvNeXt"]  # register_model adds the entry points

KERNEL_SIZE = 5
LEVELS = (5, 4, 3, 2)
_STAGES = 4
_INITIAL_STD = 0.02  # as timm draws the convolutions of ConvNeXt


class WTConvNeXt(ConvNeXt):
    """ConvNeXt whose spatial mixing is WTConv, images [B, in_chans, H, W] to [B, num_classes].

    ``forward_features`` returns [B, dims[-1], H // 32, W // 32]. ``forward_intermediates``,
    ``features_only=True``, ``reset_classifier`` and ``set_grad_checkpointing`` are those of timm's
    ConvNeXt: index 0 of the intermediates is the first stage, not the stem. Names and shapes in
    ``state_dict`` are those of the original model.

    Args:
        in_chans: Channels of the image, >= 1.
        num_classes: Outputs of the classifier; 0 leaves it out.
        kernel_sizes: Side of the depthwise kernels, one for all stages or one for each of four.
        wt_levels: Haar levels of the layers, one for all stages or one for each of four.
        wtconv_class: Constructor of the layer, called as ``wtconv_class(channels, channels,
            kernel_size=..., bias=..., wt_levels=...)``; None: :class:`wtconv_ops.WTConv2d`.
        **convnext: Every other argument of ``timm.models.convnext.ConvNeXt``. Dilation, which
            ``output_stride`` 8 and 16 bring, does not apply to the WTConv layers.

    Raises:
        ValueError: ``wt_levels`` is neither one number nor four, or out of the layer's range.

    Source: Finder et al., ECCV 2024; Liu et al., "A ConvNet for the 2020s", 2022.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        kernel_sizes: int | Sequence[int] = KERNEL_SIZE,
        wt_levels: int | Sequence[int] = LEVELS,
        wtconv_class: Callable[..., nn.Module] | None = None,
        **convnext: Any,
    ) -> None:
        levels = (wt_levels,) * _STAGES if isinstance(wt_levels, int) else tuple(wt_levels)
        if len(levels) != _STAGES:
            raise ValueError(
                f"WTConvNeXt: wt_levels must be one number or {_STAGES}, one for each stage, got "
                f"{wt_levels!r}"
            )
        super().__init__(in_chans, num_classes, kernel_sizes=kernel_sizes, **convnext)
        layer = WTConv2d if wtconv_class is None else wtconv_class
        for stage, stage_levels in zip(self.stages, levels, strict=True):
            for block in stage.blocks:
                block.conv_dw = _wtconv_in_place_of(block.conv_dw, stage_levels, layer)

    def no_weight_decay(self) -> set[str]:
        """Names of the scales of the WTConv layers, which timm's optimisers do not decay."""
        scales = (".base_scale.", ".wavelet_scale.")
        return {name for name, _ in self.named_parameters() if any(s in name for s in scales)}


def _wtconv_in_place_of(
    conv: nn.Conv2d, levels: int, wtconv_class: Callable[..., nn.Module]
) -> nn.Module:
    """WTConv layer of the channels, kernel size, bias, device and dtype of ``conv``."""
    with conv.weight.device:
        layer = wtconv_class(
            conv.in_channels,
            conv.out_channels,
            kernel_size=conv.kernel_size[0],
            bias=conv.bias is not None,
            wt_levels=levels,
        )
    layer.to(dtype=conv.weight.dtype)
    for module in layer.modules():
        if isinstance(module, nn.Conv2d):
            trunc_normal_(module.weight, std=_INITIAL_STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return layer


def _default_cfg() -> dict[str, Any]:
    """How images are prepared, and the layers that depend on input channels and classes."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
    }


default_cfgs = generate_default_cfgs(
    {f"wtconvnext_{size}": _default_cfg() for size in ("tiny", "small", "base")}
)


def _create(
    variant: str, pretrained: bool, size: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> nn.Module:
    """Build a variant the way timm builds its own; ``kwargs`` of the user override ``size``."""
    model: nn.Module = build_model_with_cfg(
        WTConvNeXt,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **{**size, **kwargs},
    )
    return model


@register_model
def wtconvnext_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """WTConvNeXt-T: depths 3, 3, 9, 3, widths 96 to 768, levels 5, 4, 3, 2; 30.4 M parameters.

    Args:
        pretrained: Load the weights that ``pretrained_cfg_overlay={"file": ...}`` names; none are
            published through timm.
        **kwargs: As for ``timm.create_model`` and :class:`WTConvNeXt`.

    Returns:
        A :class:`WTConvNeXt`, or with ``features_only=True`` timm's wrapper around it.
    """
    size = {"depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)}
    return _create("wtconvnext_tiny", pretrained, size, kwargs)


@register_model
def wtconvnext_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """WTConvNeXt-S: depths 3, 3, 27, 3, widths 96 to 768, levels 5, 4, 3, 2; 54.0 M parameters.

    Args and result as of :func:`wtconvnext_tiny`.
    """
    size = {"depths": (3, 3, 27, 3), "dims": (96, 192, 384, 768)}
    return _create("wtconvnext_small", pretrained, size, kwargs)


@register_model
def wtconvnext_base(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """WTConvNeXt-B: depths 3, 3, 27, 3, widths 128 to 1024, levels 5, 4, 3, 2; 93.7 M parameters.

    Args and result as of :func:`wtconvnext_tiny`.
    """
    size = {"depths": (3, 3, 27, 3), "dims": (128, 256, 512, 1024)}
    return _create("wtconvnext_base", pretrained, size, kwargs)
