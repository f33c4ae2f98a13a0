"""WTConv2d: the layer, with the signature, names and shapes of the original implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from . import functional
from ._arguments import require_int
from ._checks import DTYPES, MAX_KERNEL_SIZE, MAX_LEVELS

__all__ = ["WTConv2d"]

_FILTERS = ("wt_filter", "iwt_filter")
_LEGACY = ("stride_filter",)  # ones, in checkpoints of strided layers written before Nov. 2024
_HAAR_TOLERANCE = 1e-3
_INITIAL_BASE_SCALE = 1.0
_INITIAL_WAVELET_SCALE = 0.1
_ORIGINAL = "the reference implementation, https://github.com/BGU-CS-VIL/WTConv"


class WTConv2d(nn.Module):
    """Y = s0 * (W0 conv X + b) + sum over levels of synthesis(s_l * (W_l conv analysis(X))).

    A depthwise convolution whose receptive field grows as k * 2**levels while its parameters grow
    with the number of levels. Signature, semantics and ``state_dict`` are those of the original
    layer; checkpoints go both ways. The depthwise convolutions and the scales are submodules that
    only hold parameters: the layer reads them at every call and never calls the submodules. Their
    forward pre-hooks run, without arguments, as some recompute a parameter (pruning, weight norm);
    their forward hooks do not. A convolution can only be replaced by one with the same ``forward``.

    Args:
        in_channels: Number of channels C, >= 1.
        out_channels: Must equal ``in_channels``.
        kernel_size: k of every depthwise kernel, 1 to 31, odd or even.
        stride: Keep every stride-th row and column of the result, 1 to 2**31 - 1.
        bias: Whether the base convolution has a bias.
        wt_levels: Number of wavelet levels, 0 to 32; 0 is the scaled base convolution alone.
        wt_type: ``'db1'`` or its other name ``'haar'``.
        device: Device of the parameters.
        dtype: dtype of the parameters: float32, float64, float16 or bfloat16. Default: torch's.

    Shape:
        Input [B, C, H, W] with B >= 0, H, W >= 1; output [B, C, ceil(H/stride), ceil(W/stride)] in
        the dtype and layout of the input, under autocast in the autocast dtype.

    Attributes:
        base_conv: W0, b: weight [C, 1, k, k], bias [C].
        base_scale: s0: weight [1, C, 1, 1].
        wavelet_convs: Per level W_l: weight [4*C, 1, k, k]; subband s of channel c is 4*c + s.
        wavelet_scale: Per level s_l: weight [1, 4*C, 1, 1].

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range, or ``in_channels != out_channels``.
        NotImplementedError: A wavelet other than Haar.

    Equivalent to:
        >>> wtconv_ops.reference.wtconv2d(
        ...     x, layer.base_conv.weight, layer.base_conv.bias, layer.base_scale.weight,
        ...     [conv.weight for conv in layer.wavelet_convs],
        ...     [scale.weight for scale in layer.wavelet_scale], layer.stride)

    Source: Finder et al., "Wavelet Convolutions for Large Receptive Fields", ECCV 2024.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 5,
        stride: int = 1,
        bias: bool = True,
        wt_levels: int = 1,
        wt_type: str = "db1",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_channels = require_int("WTConv2d", "in_channels", in_channels, 1)
        self.out_channels = require_int("WTConv2d", "out_channels", out_channels, 1)
        self.kernel_size = require_int("WTConv2d", "kernel_size", kernel_size, 1, MAX_KERNEL_SIZE)
        self.stride = require_int("WTConv2d", "stride", stride, 1)
        self.dilation = 1
        self.wt_levels = require_int("WTConv2d", "wt_levels", wt_levels, 0, MAX_LEVELS)
        self.wt_type = _require_haar(wt_type)
        if self.in_channels != self.out_channels:
            raise ValueError(
                f"WTConv2d: out_channels must equal in_channels = {in_channels}, got "
                f"{out_channels}; use a 1x1 convolution to change the channel count"
            )
        if not isinstance(bias, bool):
            raise TypeError(f"WTConv2d: bias must be a bool, got {bias!r}")
        if dtype is not None and dtype not in DTYPES:
            raise TypeError(
                f"WTConv2d: dtype must be float32, float64, float16 or bfloat16, got {dtype}"
            )
        channels, bands = self.in_channels, 4 * self.in_channels
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.base_conv = _depthwise(channels, self.kernel_size, bias, place)
        self.base_scale = _Scale(channels, _INITIAL_BASE_SCALE, place)
        self.wavelet_convs = nn.ModuleList(
            _depthwise(bands, self.kernel_size, False, place) for _ in range(self.wt_levels)
        )
        self.wavelet_scale = nn.ModuleList(
            _Scale(bands, _INITIAL_WAVELET_SCALE, place) for _ in range(self.wt_levels)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            x: [B, C, H, W], dtype of the parameters (any floating dtype under autocast).

        Returns:
            [B, C, ceil(H/stride), ceil(W/stride)].

        Raises:
            TypeError: An input that is not a tensor, or a replaced convolution.
            RuntimeError: An input of the wrong rank, size, dtype or device; a forward pre-hook of
                a convolution that changes its input.
        """
        # nn.Module's search for each parameter takes longer than the kernel on a small input.
        read = getattr if torch.compiler.is_compiling() else _read
        conv, scale = read(self, "base_conv"), read(self, "base_scale")
        if _replaced(conv):
            _refuse_replacement("base_conv", conv)
        if conv._forward_pre_hooks or scale._forward_pre_hooks:
            _run_pre_hooks(conv, scale)
        weights, scales = [], []
        for module in read(self, "wavelet_convs"):
            if _replaced(module):
                _refuse_replacement("a module of wavelet_convs", module)
            if module._forward_pre_hooks:
                _run_pre_hooks(module)
            weights.append(read(module, "weight"))
        for module in read(self, "wavelet_scale"):
            if module._forward_pre_hooks:
                _run_pre_hooks(module)
            scales.append(read(module, "weight"))
        weight, bias = read(conv, "weight"), read(conv, "bias")
        return functional.wtconv2d(
            x, weight, bias, read(scale, "weight"), weights, scales, self.stride
        )

    def reset_parameters(self) -> None:
        """Draw the kernels and the bias as ``nn.Conv2d`` does; set the scales to 1 and 0.1."""
        for module in (self.base_conv, self.base_scale, *self.wavelet_convs, *self.wavelet_scale):
            module.reset_parameters()

    def extra_repr(self) -> str:
        """Constructor arguments, for ``repr``."""
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        if self.stride != 1:
            text += f", stride={self.stride}"
        if self.base_conv.bias is None:
            text += ", bias=False"
        return f"{text}, wt_levels={self.wt_levels}, wt_type={self.wt_type!r}"

    @property
    def wt_filter(self) -> Tensor:
        """The analysis filters, exactly ±½, [4*C, 1, 2, 2]; made at each access, never stored."""
        like = self.base_conv.weight
        return haar_filters(self.in_channels, like.device, like.dtype)

    @wt_filter.setter
    def wt_filter(self, value: Tensor) -> None:
        self._accept_filter("wt_filter", value)

    @property
    def iwt_filter(self) -> Tensor:
        """The synthesis filters, [4*C, 1, 2, 2]: equal to ``wt_filter``, as Haar is symmetric."""
        return self.wt_filter

    @iwt_filter.setter
    def iwt_filter(self, value: Tensor) -> None:
        self._accept_filter("iwt_filter", value)

    def _accept_filter(self, name: str, value: Tensor) -> None:
        """Let ``functional_call`` and others assign Haar filters; refuse all others."""
        problem = _filter_problem(name, value, self.in_channels)
        if problem is not None:
            raise ValueError(f"WTConv2d: {problem}")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Add the filters, which the original layer stores as parameters and loads strictly."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _FILTERS:
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take the filters out of a checkpoint after checking that they are Haar's."""
        error_msgs.extend(_pop_filters(state_dict, prefix, self.in_channels))
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


class _Scale(nn.Module):
    """s * x: one learned factor for each channel.

    Args:
        channels: Number of channels n, >= 1.
        initial: Value to begin with.
        place: device and dtype of the weight.

    Attributes:
        weight: s, [1, n, 1, 1].
    """

    def __init__(self, channels: int, initial: float, place: Mapping[str, Any]) -> None:
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.full((1, channels, 1, 1), initial, **place))

    def reset_parameters(self) -> None:
        """Set every factor to its initial value."""
        nn.init.constant_(self.weight, self.initial)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` [B, n, H, W] by the scale."""
        return self.weight * input

    def extra_repr(self) -> str:
        """Number of channels and the initial value, for ``repr``."""
        return f"{self.weight.shape[1]}, initial={self.initial}"


_PLAIN_CLASSES = frozenset({WTConv2d, nn.Conv2d, _Scale})


def _read(module: nn.Module, name: str) -> Any:
    """``getattr`` of a parameter or submodule, straight from where nn.Module keeps it.

    In another class (parametrized, sharded, a subclass) the name may stand for anything.
    """
    if type(module) in _PLAIN_CLASSES:
        own = module.__dict__
        if name not in own:
            if name in own["_parameters"]:
                return own["_parameters"][name]
            if name in own["_modules"]:
                return own["_modules"][name]
    return getattr(module, name)


def haar_filters(
    channels: int, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The filters ½ [±1 ±1; ±1 ±1] of LL, LH, HL, HH, repeated for each channel.

    Args:
        channels: C, >= 1.
        device: Device of the result.
        dtype: Floating dtype of the result; ±½ is exact in all of them.

    Returns:
        [4*C, 1, 2, 2].

    Source: the WTConv paper, eq. butterfly.
    """
    plus, minus = [1.0, 1.0], [1.0, -1.0]
    rows = torch.tensor([plus, minus, plus, minus], device=device, dtype=dtype)
    columns = torch.tensor([plus, plus, minus, minus], device=device, dtype=dtype)
    signs = columns.unsqueeze(1) * rows.unsqueeze(2)
    return (0.5 * signs).unsqueeze(1).repeat(channels, 1, 1, 1)


def _replaced(module: nn.Module) -> bool:
    """Whether a module stands in for a convolution. Its class decides: one guard when compiled."""
    return type(module) is not nn.Conv2d and type(module).forward is not nn.Conv2d.forward


def _refuse_replacement(name: str, module: nn.Module) -> NoReturn:
    """Say that the layer would not call the module that stands in for a convolution."""
    raise TypeError(
        f"WTConv2d: {name} must be an nn.Conv2d with the forward of nn.Conv2d, of which the layer "
        f"reads the parameters and calls nothing, got {type(module).__name__}; adapt its weight "
        "with torch.nn.utils.parametrize instead"
    )


def _run_pre_hooks(*modules: nn.Module) -> None:
    """Run the forward pre-hooks, some of which recompute a parameter; there is no input."""
    for module in modules:
        for key, hook in tuple(module._forward_pre_hooks.items()):
            with_kwargs = key in module._forward_pre_hooks_with_kwargs
            empty: tuple[Any, ...] = ((), {}) if with_kwargs else ()
            result = hook(module, (), {}) if with_kwargs else hook(module, ())
            if result is not None and result != empty:
                raise RuntimeError(
                    "WTConv2d: a forward pre-hook of a submodule must not change its input, which "
                    "the layer does not pass to it; register the hook on the layer"
                )


def _depthwise(channels: int, kernel_size: int, bias: bool, place: Mapping[str, Any]) -> nn.Conv2d:
    """Depthwise convolution that keeps the size; holds parameters only."""
    return nn.Conv2d(
        channels, channels, kernel_size, padding="same", groups=channels, bias=bias, **place
    )


def _require_haar(wt_type: Any) -> str:
    """Return ``wt_type`` if it names the Haar wavelet."""
    if not isinstance(wt_type, str):
        raise TypeError(f"WTConv2d: wt_type must be 'db1' or 'haar', got {wt_type!r}")
    if wt_type not in ("db1", "haar"):
        raise NotImplementedError(
            f"WTConv2d: wt_type must be 'db1' or 'haar', got {wt_type!r}; "
            f"other wavelets run in {_ORIGINAL}"
        )
    return wt_type


def _pop_filters(state_dict: dict[str, Any], prefix: str, channels: int) -> list[str]:
    """Remove the fixed filters from ``state_dict``; returns what is wrong with them."""
    problems = []
    for name in _FILTERS:
        value = state_dict.pop(prefix + name, None)
        if value is not None:
            problems.append(_filter_problem(prefix + name, value, channels))
    for name in _LEGACY:
        value = state_dict.pop(prefix + name, None)
        if value is not None:
            problems.append(_legacy_problem(prefix + name, value))
    return [problem for problem in problems if problem is not None]


def _filter_problem(name: str, value: Any, channels: int) -> str | None:
    """Why ``value`` is not the Haar filter bank; None if it is, or if its values do not exist."""
    expected = [4 * channels, 1, 2, 2]
    if not isinstance(value, Tensor) or list(value.shape) != expected:
        got = list(value.shape) if isinstance(value, Tensor) else repr(value)
        return (
            f"{name} must be the Haar filters [4*C, 1, 2, 2] = {expected}, got {got}; "
            f"other wavelets run in {_ORIGINAL}"
        )
    return _value_problem(name, value, channels) if _has_values(value) else None


def _value_problem(name: str, value: Tensor, channels: int) -> str | None:
    """Why the numbers of ``value`` [4*C, 1, 2, 2] are not those of the Haar filters."""
    values = _full(value).detach().to("cpu", torch.float64)
    error = float((values - haar_filters(channels, values.device, values.dtype)).abs().max())
    if error <= _HAAR_TOLERANCE:
        return None
    return (
        f"{name} must be within {_HAAR_TOLERANCE} of the Haar filters (±0.5), got a difference "
        f"of {error:.3g}; other wavelets run in {_ORIGINAL}"
    )


def _legacy_problem(name: str, value: Any) -> str | None:
    """Why ``value`` is not the all-ones subsampling filter of old checkpoints; None if it is."""
    if not isinstance(value, Tensor):
        return f"{name} must be a tensor of ones, got {value!r}"
    if not _has_values(value) or bool((_full(value).detach() == 1).all()):
        return None
    return f"{name} must be a tensor of ones (plain subsampling), got other values"


def _has_values(value: Tensor) -> bool:
    """Whether numbers can be read from ``value``: not on meta, and not under FakeTensorMode."""
    return not value.is_meta and detect_fake_mode((value,)) is None


def _full(value: Tensor) -> Tensor:
    """The whole tensor, also where ``value`` is sharded over processes."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()
