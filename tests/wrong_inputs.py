"""Registry of wrong inputs: what is changed in good arguments, and the sentence that refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from samples import Sample

GOOD = Sample(6, 5, 2, channels=3)
CONVERT = "; convert one of them or use torch.autocast"
NAMES = ["input", "base_weight", "base_bias", "base_scale", "wavelet_weights", "wavelet_scales"]


@dataclass(frozen=True)
class Wrong:
    """A call that is refused: the op, what to change in good arguments, and the sentence."""

    op: str
    label: str
    change: Callable[[dict[str, Any]], Any]
    message: str
    compiles: bool = True

    def __str__(self) -> str:
        return f"{self.op}: {self.label}"


def good(op: str) -> dict[str, Any]:
    arguments = dict(zip(NAMES, GOOD.make(), strict=True))
    weights, scales = arguments["wavelet_weights"], arguments["wavelet_scales"]
    if op == "analysis_conv":
        return {"input": arguments["input"], "weight": weights[0], "scale": scales[0]}
    if op == "synthesis":
        levels = [torch.ones(2, 12, 3, 3), torch.ones(2, 12, 2, 2)]
        return {"base": arguments["input"], "coefficients": levels}
    if op == "fused_backward":
        grad_output = torch.ones(2, 3, 6, 5)
        return {"grad_output": grad_output, **arguments, "output_mask": [True] * 8}
    return arguments


def put(name: str, value: Any, index: int | None = None) -> Callable[[dict[str, Any]], Any]:
    def change(arguments: dict[str, Any]) -> None:
        new = value(arguments[name]) if callable(value) and index is None else value
        if index is None:
            arguments[name] = new
        else:
            levels = list(arguments[name])
            levels[index] = value(levels[index]) if callable(value) else value
            arguments[name] = levels

    return change


def said_by(op: str) -> str:
    """The name that the sentences of an op open with."""
    return "fused_forward" if op == "_fused_forward" else op


def of_map(op: str) -> list[Wrong]:
    """Rank, dtype and sizes of the input."""
    z = torch.zeros
    cases = [
        ("3-D", put("input", z(3, 6, 5)), "input must be 4-D [B, C, H, W], got [3, 6, 5]"),
        (
            "integer",
            put("input", z(2, 3, 6, 5, dtype=torch.int64)),
            "input must be float32, float64, float16 or bfloat16, got int64",
        ),
        (
            "complex",
            put("input", z(2, 3, 6, 5, dtype=torch.complex64)),
            "input must be float32, float64, float16 or bfloat16, got complex64",
        ),
        ("H = 0", put("input", z(2, 3, 0, 5)), "input must have C, H, W >= 1, got [2, 3, 0, 5]"),
        ("W = 0", put("input", z(2, 3, 6, 0)), "input must have C, H, W >= 1, got [2, 3, 6, 0]"),
        ("C = 0", put("input", z(2, 0, 6, 5)), "input must have C, H, W >= 1, got [2, 0, 6, 5]"),
    ]
    return [Wrong(op, label, change, f"{said_by(op)}: {text}") for label, change, text in cases]


def of_base(op: str) -> list[Wrong]:
    """Parameters of the base path."""
    z = torch.zeros
    weight = "base_weight must be [C, 1, k, k] with C = 3 and 1 <= k <= 31, got"
    cases = [
        (
            "channels",
            put("input", z(2, 4, 6, 5)),
            "input has 4 channels but base_weight has 3; WTConv keeps the channel count, "
            "use a 1x1 convolution to change it",
        ),
        ("dense weight", put("base_weight", z(3, 3, 3, 3)), f"{weight} [3, 3, 3, 3]"),
        ("oblong kernel", put("base_weight", z(3, 1, 3, 5)), f"{weight} [3, 1, 3, 5]"),
        ("k = 0", put("base_weight", z(3, 1, 0, 0)), f"{weight} [3, 1, 0, 0]"),
        ("k = 32", put("base_weight", z(3, 1, 32, 32)), f"{weight} [3, 1, 32, 32]"),
        ("3-D weight", put("base_weight", z(3, 3, 3)), f"{weight} [3, 3, 3]"),
        ("bias", put("base_bias", z(4)), "base_bias must be [C] = [3], got [4]"),
        ("2-D bias", put("base_bias", z(3, 1)), "base_bias must be [C] = [3], got [3, 1]"),
        (
            "scale",
            put("base_scale", z(3)),
            "base_scale must be [1, C, 1, 1] = [1, 3, 1, 1], got [3]",
        ),
        (
            "scale that would broadcast",
            put("base_scale", z(1, 1, 1, 1)),
            "base_scale must be [1, C, 1, 1] = [1, 3, 1, 1], got [1, 1, 1, 1]",
        ),
    ]
    return [Wrong(op, label, change, f"{said_by(op)}: {text}") for label, change, text in cases]


def of_levels(op: str) -> list[Wrong]:
    """Parameters of the wavelet path."""
    z = torch.zeros
    cases = [
        (
            "0 levels",
            lambda a: a.update(wavelet_weights=[], wavelet_scales=[]),
            "wavelet_weights must have 1 to 32 levels, got 0",
        ),
        (
            "33 levels",
            lambda a: a.update(
                wavelet_weights=a["wavelet_weights"][:1] * 33,
                wavelet_scales=a["wavelet_scales"][:1] * 33,
            ),
            "wavelet_weights must have 1 to 32 levels, got 33",
        ),
        (
            "list lengths",
            put("wavelet_scales", lambda scales: scales[:1]),
            "wavelet_weights and wavelet_scales must have the same length, got 2 and 1",
        ),
        (
            "kernel size of level 2",
            put("wavelet_weights", z(12, 1, 5, 5), 1),
            "wavelet_weights[1] must be [4*C, 1, k, k] = [12, 1, 3, 3], got [12, 1, 5, 5]",
        ),
        (
            "groups of level 1",
            put("wavelet_weights", z(3, 1, 3, 3), 0),
            "wavelet_weights[0] must be [4*C, 1, k, k] = [12, 1, 3, 3], got [3, 1, 3, 3]",
        ),
        (
            "scale of level 2",
            put("wavelet_scales", z(1, 3, 1, 1), 1),
            "wavelet_scales[1] must be [1, 4*C, 1, 1] = [1, 12, 1, 1], got [1, 3, 1, 1]",
        ),
    ]
    return [Wrong(op, label, change, f"{said_by(op)}: {text}") for label, change, text in cases]


def of_devices(op: str) -> list[Wrong]:
    """Every parameter on another device than the input."""
    names = ["base_weight", "base_bias", "base_scale", "wavelet_weights", "wavelet_scales"]
    cases = []
    for name in names:
        index = 1 if name.startswith("wavelet") else None
        shown = name if index is None else f"{name}[1]"
        text = f"{said_by(op)}: {shown} must be on the device of input, cpu, got meta"
        change = put(name, lambda tensor: tensor.to("meta"), index)
        cases.append(Wrong(op, f"device of {name}", change, text, compiles=False))
    return cases


def shared(op: str) -> list[Wrong]:
    """Rules that fused_forward, _fused_forward and fused_backward have in common."""
    return [*of_map(op), *of_base(op), *of_levels(op), *of_devices(op)]


def mixed_dtypes(op: str) -> list[Wrong]:
    """Parameters share the dtype of base_weight."""
    said = said_by(op)
    text = "must have the dtype of base_weight, float32, got"
    return [
        Wrong(
            op,
            "integer weight",
            put("base_weight", lambda t: t.int()),
            f"{said}: base_weight must be float32, float64, float16 or bfloat16, got int32",
        ),
        Wrong(
            op,
            "half bias",
            put("base_bias", lambda t: t.half()),
            f"{said}: base_bias {text} float16",
        ),
        Wrong(
            op,
            "double scale",
            put("wavelet_scales", lambda t: t.double(), 1),
            f"{said}: wavelet_scales[1] {text} float64",
        ),
    ]


def strict_dtypes() -> list[Wrong]:
    said = "must have the dtype of input, float32, got"
    return [
        Wrong(
            "fused_forward",
            f"dtype of {name}",
            put(name, lambda t: t.to(torch.bfloat16), index),
            f"fused_forward: {shown} {said} bfloat16{CONVERT}",
        )
        for name, index, shown in [
            ("base_weight", None, "base_weight"),
            ("base_bias", None, "base_bias"),
            ("base_scale", None, "base_scale"),
            ("wavelet_weights", 1, "wavelet_weights[1]"),
            ("wavelet_scales", 0, "wavelet_scales[0]"),
        ]
    ]


def of_backward() -> list[Wrong]:
    op = "fused_backward"
    return [
        Wrong(
            op,
            "shape of grad_output",
            put("grad_output", torch.ones(2, 3, 6, 4)),
            f"{op}: grad_output must be [2, 3, 6, 5] like input, got [2, 3, 6, 4]",
        ),
        Wrong(
            op,
            "dtype of grad_output",
            put("grad_output", lambda t: t.double()),
            f"{op}: grad_output must have the dtype of input, float32, got float64",
        ),
        Wrong(
            op,
            "device of grad_output",
            put("grad_output", lambda t: t.to("meta")),
            f"{op}: grad_output must be on the device of input, cpu, got meta",
            compiles=False,
        ),
        Wrong(
            op,
            "short mask",
            put("output_mask", [True] * 5),
            f"{op}: output_mask must have 4 + 2*levels = 8 entries, got 5",
        ),
        Wrong(
            op,
            "gradient of a missing bias",
            put("base_bias", lambda t: None),
            f"{op}: output_mask asks for base_bias, but base_bias is None",
        ),
    ]


def of_analysis_conv() -> list[Wrong]:
    z = torch.zeros
    weight = (
        "analysis_conv: weight must be [4*C, 1, k, k] with 4*C = 12 and 1 <= k <= 31, "
        "got [3, 1, 3, 3]"
    )
    a = "analysis_conv"
    return [
        Wrong(
            a,
            "3-D",
            put("input", z(3, 6, 5)),
            f"{a}: input must be 4-D [B, C, H, W], got [3, 6, 5]",
        ),
        Wrong(a, "weight", put("weight", z(3, 1, 3, 3)), weight),
        Wrong(
            a,
            "scale",
            put("scale", z(12)),
            f"{a}: scale must be [1, 4*C, 1, 1] = [1, 12, 1, 1], got [12]",
        ),
        Wrong(
            a,
            "dtype",
            put("scale", lambda t: t.double()),
            f"{a}: scale must have the dtype of input, float32, got float64{CONVERT}",
        ),
        Wrong(
            a,
            "device",
            put("weight", lambda t: t.to("meta")),
            f"{a}: weight must be on the device of input, cpu, got meta",
            compiles=False,
        ),
    ]


def of_synthesis() -> list[Wrong]:
    z = torch.zeros
    s = "synthesis"
    return [
        Wrong(s, "2-D", put("base", z(6, 5)), f"{s}: base must be 4-D [B, C, H, W], got [6, 5]"),
        Wrong(
            s,
            "integer",
            put("base", z(2, 3, 6, 5, dtype=torch.int32)),
            f"{s}: base must be float32, float64, float16 or bfloat16, got int32",
        ),
        Wrong(
            s,
            "0 levels",
            put("coefficients", lambda c: []),
            f"{s}: coefficients must have 1 to 32 levels, got 0",
        ),
        Wrong(
            s,
            "size of level 2",
            put("coefficients", z(2, 12, 1, 2), 1),
            f"{s}: coefficients[1] must be [B, 4*C, ceil(H/4), ceil(W/4)] = [2, 12, 2, 2], "
            "got [2, 12, 1, 2]",
        ),
        Wrong(
            s,
            "dtype",
            put("coefficients", lambda t: t.double(), 0),
            f"{s}: coefficients[0] must have the dtype of base, float32, got float64{CONVERT}",
        ),
        Wrong(
            s,
            "device",
            put("coefficients", lambda t: t.to("meta"), 1),
            f"{s}: coefficients[1] must be on the device of base, cpu, got meta",
            compiles=False,
        ),
    ]


WRONG = [
    *shared("fused_forward"),
    *strict_dtypes(),
    *shared("_fused_forward"),
    *mixed_dtypes("_fused_forward"),
    *shared("fused_backward"),
    *mixed_dtypes("fused_backward"),
    *of_backward(),
    *of_analysis_conv(),
    *of_synthesis(),
]
