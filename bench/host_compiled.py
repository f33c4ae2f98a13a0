"""``python -m bench host --compiled``: what ``torch.compile`` adds to the time of a call.

A layer, and networks of several of them one after the other, run eagerly and compiled on the input
of :mod:`bench.host`; the time of a network is divided by its layers. A compiled call checks its
guards once, then runs all layers without their Python: a network pays for that once. A depthwise
convolution beside them shows what torch alone adds; without ``size_asserts``, Inductor does not
check the sizes and strides of every input and of every operator's output.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.cuda_check import check
from bench.cuda_run import DTYPES
from bench.cuda_timing import Call
from bench.host import FORWARD, TRAINING, HostRow, HostSettings, inputs, row_of, samples_of
from bench.timing import forward_call, threads, training_call
from wtconv_ops import WTConv2d

LAYER, CONVOLUTION = "layer", "convolution"
NETWORKS = {f"layer of {layers}": layers for layers in (4, 18)}  # WTConvNeXt-T has 18
EAGER, COMPILED, UNCHECKED = "eager", "compiled", "no size_asserts"
VARIANTS = (EAGER, COMPILED, UNCHECKED)
MODES = (FORWARD, TRAINING)
SUBJECTS = {LAYER: 1, **NETWORKS, CONVOLUTION: 1}
_Key = tuple[str, str, str]  # mode, subject, variant


def run(settings: HostSettings, progress: Callable[[str], None]) -> list[HostRow]:
    """Check the compiled layer against fp64, then time eager and compiled calls in turn.

    Returns:
        Rows whose ``call`` is "mode, subject, variant", with the ms of one layer.

    Raises:
        bench.cuda_check.NumbersDifferError: the compiled layer is too far from fp64.
    """
    rows: list[HostRow] = []
    with threads(settings.threads):
        for device in settings.devices:
            for dtype in settings.dtypes:
                for levels in settings.levels:
                    progress(f"{device} {dtype} L{levels} compiled")
                    rows += _measure(settings, torch.device(device), dtype, levels)
    torch.compiler.reset()
    return rows


def _measure(
    settings: HostSettings, device: torch.device, dtype: str, levels: int
) -> list[HostRow]:
    layer, image, grad_output, exact = inputs(settings.kernel_size, levels, device, DTYPES[dtype])
    samples: dict[_Key, list[float]] = {}
    for subject, model in _models(layer).items():
        torch.compiler.reset()  # graphs of modules share a list, which is short
        variants = {name: _compile(model, name) for name in VARIANTS}
        if subject == LAYER:
            for name in (COMPILED, UNCHECKED):
                text = f"wtconv_ops {name} on {device} {dtype} L{levels}"
                check(text, variants[name], image, exact)
        calls = {
            (mode, subject, name): _call(mode, variant, image, grad_output)
            for mode in MODES
            for name, variant in variants.items()
        }
        samples |= samples_of(calls, settings.rounds, device, SUBJECTS[subject])
    return [
        row_of(settings, device, dtype, levels, ", ".join(key), samples[key])
        for key in itertools.product(MODES, SUBJECTS, VARIANTS)
    ]


def _models(layer: WTConv2d) -> dict[str, nn.Module]:
    """The subjects by name; the convolution is as wide as ``layer``."""
    models: dict[str, nn.Module] = {LAYER: layer}
    for name, layers in NETWORKS.items():
        models[name] = nn.Sequential(*(copy.deepcopy(layer) for _ in range(layers)))
    channels, size = layer.in_channels, layer.base_conv.kernel_size
    convolution = nn.Conv2d(channels, channels, size, padding="same", groups=channels)
    models[CONVOLUTION] = convolution.to(layer.base_conv.weight)
    return models


def _compile(model: nn.Module, variant: str) -> nn.Module:
    if variant == EAGER:
        return model
    options = {"size_asserts": variant == COMPILED}
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False, options=options))


def _call(mode: str, model: nn.Module, image: Tensor, grad_output: Tensor) -> Call:
    if mode == FORWARD:
        return forward_call(model, image)
    return training_call(model, image, grad_output)


def print_compiled_host(rows: Sequence[HostRow], console: Console) -> None:
    """Print one line for each device, dtype, number of levels, mode and subject."""
    table = Table(title="time of one layer until the call returns, ms")
    for name in ("device", "dtype", "levels", "mode", "subject"):
        table.add_column(name, no_wrap=True)
    for name in (EAGER, COMPILED, "difference", UNCHECKED):
        table.add_column(name, justify="right")
    times = {(r.device, r.dtype, r.levels, r.call): r.median_ms for r in rows}
    for device, dtype, levels in dict.fromkeys((r.device, r.dtype, r.levels) for r in rows):
        for mode, subject in itertools.product(MODES, SUBJECTS):
            eager, compiled, unchecked = (
                times[device, dtype, levels, f"{mode}, {subject}, {variant}"]
                for variant in VARIANTS
            )
            shown = (f"{value:.4f}" for value in (eager, compiled, compiled - eager, unchecked))
            table.add_row(device, dtype, str(levels), mode, subject, *shown)
    console.print(table)
