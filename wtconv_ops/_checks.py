"""Shape, dtype and device rules of the operators and their error sentences.

Every rule stands here once for Python: fake impls, the functional form, the layer and the doctor
read it from here. The C++ kernels say the same sentences in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_KERNEL_SIZE = 31
MAX_LEVELS = 32
DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
DTYPES = tuple(DTYPE_NAMES)
_DTYPE_WORDS = "float32, float64, float16 or bfloat16"
_NAMED_DTYPES = {
    *DTYPE_NAMES.values(),
    *("bool", "uint8", "int8", "int16", "int32", "int64", "complex32", "complex64", "complex128"),
}
_CONVERT = "; convert one of them or use torch.autocast"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``; dtypes that the kernels have no name for share one."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _NAMED_DTYPES else "another dtype"


def _fail(message: str) -> NoReturn:
    raise RuntimeError(message)


def certainly(condition: Any) -> bool:
    """Truth of a size comparison; False where a data-dependent size leaves it open."""
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return bool(guard_or_false(condition))
    return bool(untraced(condition))


def untraced(size: Any) -> Any:
    """A size or comparison as a plain number where ``torch.jit.trace`` makes it a tensor.

    A trace holds for one set of parameters, and no check of theirs is part of it: the warning
    that a tensor becomes a Python number would be false.
    """
    if not isinstance(size, Tensor):
        return size
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return size.item()
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def _has_shape(tensor: Tensor, expected: Sequence[Any]) -> bool:
    """Whether no size of ``tensor`` certainly differs from ``expected``."""
    shape = tensor.shape
    return len(shape) == len(expected) and not any(
        certainly(got != want) for got, want in zip(shape, expected, strict=True)
    )


def _number(size: Any) -> str:
    """A size as the kernel prints it: a symbolic one as the value it was traced with."""
    if isinstance(size, torch.SymInt) and size.node.has_hint():
        return str(size.node.hint)
    return str(size)


def _text(shape: Sequence[Any]) -> str:
    return "[" + ", ".join(_number(size) for size in shape) + "]"


def next_size(size: Any) -> Any:
    """Height or width one level down: ceil(size / 2). Symbolic sizes stay symbolic."""
    return (size + 1) // 2


def _check_map(op: str, name: str, tensor: Tensor) -> None:
    """A 4-D floating-point map with C, H, W >= 1."""
    if tensor.dim() != 4:
        _fail(f"{op}: {name} must be 4-D [B, C, H, W], got {_text(tensor.shape)}")
    if tensor.dtype not in DTYPES:
        _fail(f"{op}: {name} must be {_DTYPE_WORDS}, got {dtype_name(tensor.dtype)}")
    if any(certainly(size < 1) for size in tensor.shape[1:]):
        _fail(f"{op}: {name} must have C, H, W >= 1, got {_text(tensor.shape)}")


def _is_depthwise(weight: Tensor) -> bool:
    """Whether ``weight`` is [n, 1, k, k] with a kernel size the operators take."""
    if weight.dim() != 4:
        return False
    _, one, height, width = weight.shape
    return (
        not certainly(one != 1)
        and not certainly(height != width)
        and not certainly(height < 1)
        and not certainly(height > MAX_KERNEL_SIZE)
    )


def _check_same_device(op: str, owner: str, tensor: Tensor, name: str, other: Tensor) -> None:
    if other.device != tensor.device:
        _fail(f"{op}: {name} must be on the device of {owner}, {tensor.device}, got {other.device}")


def _check_same_dtype(
    op: str, owner: str, tensor: Tensor, name: str, other: Tensor, hint: str = ""
) -> None:
    if other.dtype != tensor.dtype:
        _fail(
            f"{op}: {name} must have the dtype of {owner}, {dtype_name(tensor.dtype)}, "
            f"got {dtype_name(other.dtype)}{hint}"
        )


def _parameters(
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and their names in the order of the schema."""
    yield "base_weight", base_weight
    if base_bias is not None:
        yield "base_bias", base_bias
    yield "base_scale", base_scale
    for i, weight in enumerate(wavelet_weights):
        yield f"wavelet_weights[{i}]", weight
    for i, scale in enumerate(wavelet_scales):
        yield f"wavelet_scales[{i}]", scale


def _check_base(
    op: str, channels: Any, base_weight: Tensor, base_bias: Tensor | None, base_scale: Tensor
) -> None:
    """The parameters of the base path."""
    if _is_depthwise(base_weight) and certainly(base_weight.shape[0] != channels):
        _fail(
            f"{op}: input has {_number(channels)} channels but base_weight has "
            f"{_number(base_weight.shape[0])}; "
            "WTConv keeps the channel count, use a 1x1 convolution to change it"
        )
    if not _is_depthwise(base_weight):
        _fail(
            f"{op}: base_weight must be [C, 1, k, k] with C = {_number(channels)} and "
            f"1 <= k <= {MAX_KERNEL_SIZE}, got {_text(base_weight.shape)}"
        )
    if base_bias is not None and not _has_shape(base_bias, [channels]):
        _fail(f"{op}: base_bias must be [C] = {_text([channels])}, got {_text(base_bias.shape)}")
    if not _has_shape(base_scale, [1, channels, 1, 1]):
        _fail(
            f"{op}: base_scale must be [1, C, 1, 1] = {_text([1, channels, 1, 1])}, "
            f"got {_text(base_scale.shape)}"
        )


def check_same_length(
    op: str, wavelet_weights: Sequence[Tensor], wavelet_scales: Sequence[Tensor]
) -> None:
    """A scale for every weight.

    Raises:
        RuntimeError: The lengths differ.
    """
    if len(wavelet_weights) != len(wavelet_scales):
        _fail(
            f"{op}: wavelet_weights and wavelet_scales must have the same length, "
            f"got {len(wavelet_weights)} and {len(wavelet_scales)}"
        )


def _check_levels(
    op: str,
    channels: Any,
    kernel_size: Any,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
) -> None:
    """The parameters of the wavelet path."""
    levels = len(wavelet_weights)
    if not 1 <= levels <= MAX_LEVELS:
        _fail(f"{op}: wavelet_weights must have 1 to {MAX_LEVELS} levels, got {levels}")
    check_same_length(op, wavelet_weights, wavelet_scales)
    weight_shape = [4 * channels, 1, kernel_size, kernel_size]
    scale_shape = [1, 4 * channels, 1, 1]
    for i, (weight, scale) in enumerate(zip(wavelet_weights, wavelet_scales, strict=True)):
        if not _has_shape(weight, weight_shape):
            _fail(
                f"{op}: wavelet_weights[{i}] must be [4*C, 1, k, k] = {_text(weight_shape)}, "
                f"got {_text(weight.shape)}"
            )
        if not _has_shape(scale, scale_shape):
            _fail(
                f"{op}: wavelet_scales[{i}] must be [1, 4*C, 1, 1] = {_text(scale_shape)}, "
                f"got {_text(scale.shape)}"
            )


def check_fused(
    op: str,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    *,
    mixed: bool = False,
) -> None:
    """Check the arguments that fused_forward and fused_backward share.

    Args:
        op: Name to open the sentence with.
        input: [B, C, H, W], float32, float64, float16 or bfloat16, any strides.
        base_weight: [C, 1, k, k], 1 <= k <= 31.
        base_bias: [C] or None.
        base_scale: [1, C, 1, 1].
        wavelet_weights: Per level [4*C, 1, k, k]; 1 to 32 levels.
        wavelet_scales: Per level [1, 4*C, 1, 1].
        mixed: Parameters share a floating dtype of their own instead of the dtype of ``input``.

    Raises:
        RuntimeError: The first rule that is broken, in the words of the kernel.
    """
    _check_map(op, "input", input)
    channels = input.shape[1]
    _check_base(op, channels, base_weight, base_bias, base_scale)
    _check_levels(op, channels, base_weight.shape[2], wavelet_weights, wavelet_scales)
    parameters = list(
        _parameters(base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales)
    )
    if mixed:
        if base_weight.dtype not in DTYPES:
            _fail(f"{op}: base_weight must be {_DTYPE_WORDS}, got {dtype_name(base_weight.dtype)}")
        for name, parameter in parameters[1:]:
            _check_same_dtype(op, "base_weight", base_weight, name, parameter)
    else:
        for name, parameter in parameters:
            _check_same_dtype(op, "input", input, name, parameter, _CONVERT)
    for name, parameter in parameters:
        _check_same_device(op, "input", input, name, parameter)


def check_fused_backward(
    grad_output: Tensor,
    input: Tensor,
    base_weight: Tensor,
    base_bias: Tensor | None,
    base_scale: Tensor,
    wavelet_weights: Sequence[Tensor],
    wavelet_scales: Sequence[Tensor],
    output_mask: Sequence[bool],
) -> None:
    """Check the arguments of fused_backward; shapes and dtypes as in :func:`check_fused`.

    Args:
        grad_output: Like ``input``, any strides.
        input: [B, C, H, W].
        base_weight: [C, 1, k, k].
        base_bias: [C] or None.
        base_scale: [1, C, 1, 1].
        wavelet_weights: Per level [4*C, 1, k, k].
        wavelet_scales: Per level [1, 4*C, 1, 1].
        output_mask: 4 + 2 * levels flags.

    Raises:
        RuntimeError: The first rule that is broken, in the words of the kernel.
    """
    op = "fused_backward"
    check_fused(
        op, input, base_weight, base_bias, base_scale, wavelet_weights, wavelet_scales, mixed=True
    )
    if not _has_shape(grad_output, input.shape):
        _fail(
            f"{op}: grad_output must be {_text(input.shape)} like input, "
            f"got {_text(grad_output.shape)}"
        )
    _check_same_dtype(op, "input", input, "grad_output", grad_output)
    _check_same_device(op, "input", input, "grad_output", grad_output)
    entries = 4 + 2 * len(wavelet_weights)
    if len(output_mask) != entries:
        _fail(
            f"{op}: output_mask must have 4 + 2*levels = {entries} entries, got {len(output_mask)}"
        )
    if base_bias is None and output_mask[2]:
        _fail(f"{op}: output_mask asks for base_bias, but base_bias is None")


def check_analysis_conv(input: Tensor, weight: Tensor, scale: Tensor) -> None:
    """Check the arguments of analysis_conv.

    Args:
        input: [B, C, H, W], float32, float64, float16 or bfloat16, any strides.
        weight: [4*C, 1, k, k], 1 <= k <= 31.
        scale: [1, 4*C, 1, 1].

    Raises:
        RuntimeError: The first rule that is broken, in the words of the kernel.
    """
    op = "analysis_conv"
    _check_map(op, "input", input)
    bands = 4 * input.shape[1]
    if not _is_depthwise(weight) or certainly(weight.shape[0] != bands):
        _fail(
            f"{op}: weight must be [4*C, 1, k, k] with 4*C = {_number(bands)} and "
            f"1 <= k <= {MAX_KERNEL_SIZE}, got {_text(weight.shape)}"
        )
    scale_shape = [1, bands, 1, 1]
    if not _has_shape(scale, scale_shape):
        _fail(
            f"{op}: scale must be [1, 4*C, 1, 1] = {_text(scale_shape)}, got {_text(scale.shape)}"
        )
    for name, parameter in (("weight", weight), ("scale", scale)):
        _check_same_dtype(op, "input", input, name, parameter, _CONVERT)
    for name, parameter in (("weight", weight), ("scale", scale)):
        _check_same_device(op, "input", input, name, parameter)


def check_synthesis(base: Tensor, coefficients: Sequence[Tensor]) -> None:
    """Check the arguments of synthesis.

    Args:
        base: [B, C, H, W], float32, float64, float16 or bfloat16, any strides.
        coefficients: Per level l = 1, 2, ... [B, 4*C, ceil(H/2^l), ceil(W/2^l)]; 1 to 32 levels.

    Raises:
        RuntimeError: The first rule that is broken, in the words of the kernel.
    """
    op = "synthesis"
    _check_map(op, "base", base)
    if not 1 <= len(coefficients) <= MAX_LEVELS:
        _fail(f"{op}: coefficients must have 1 to {MAX_LEVELS} levels, got {len(coefficients)}")
    batch, channels, height, width = base.shape
    for i, level in enumerate(coefficients):
        height, width = next_size(height), next_size(width)
        expected = [batch, 4 * channels, height, width]
        if not _has_shape(level, expected):
            step = 2 ** (i + 1)
            _fail(
                f"{op}: coefficients[{i}] must be [B, 4*C, ceil(H/{step}), ceil(W/{step})] = "
                f"{_text(expected)}, got {_text(level.shape)}"
            )
    for i, level in enumerate(coefficients):
        _check_same_dtype(op, "base", base, f"coefficients[{i}]", level, _CONVERT)
    for i, level in enumerate(coefficients):
        _check_same_device(op, "base", base, f"coefficients[{i}]", level)
