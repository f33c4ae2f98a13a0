"""``python -m bench host --compiled``: what ``torch.compile`` adds to the time of a call.

A layer, and a network of `LAYERS` of them one after the other, run eagerly and compiled on the
input of :mod:`bench.host`; the time of the network is divided by its layers. A compiled call checks
its guards once, then runs all layers without their Python: a network pays for that once. A
depthwise convolution beside them shows what torch alone adds.
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

LAYERS = 4
LAYER, NETWORK, CONVOLUTION = "layer", f"layer of {LAYERS}", "convolution"
EAGER, COMPILED = "eager", "compiled"
MODES = (FORWARD, TRAINING)
SUBJECTS = {LAYER: 1, NETWORK: LAYERS, CONVOLUTION: 1}
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
    calls = _calls(settings.kernel_size, levels, device, DTYPES[dtype])
    layers = {key: SUBJECTS[key[1]] for key in calls}
    return [
        row_of(settings, device, dtype, levels, ", ".join(key), values)
        for key, values in samples_of(calls, settings.rounds, device, layers).items()
    ]


def _calls(
    kernel_size: int, levels: int, device: torch.device, dtype: torch.dtype
) -> dict[_Key, Call]:
    """What is timed at one number of levels, compiled anew."""
    torch.compiler.reset()  # graphs of other levels would stand in the way of every call
    layer, image, grad_output, exact = inputs(kernel_size, levels, device, dtype)
    compiled = _compile(layer)
    check(f"wtconv_ops compiled on {device} {dtype} L{levels}", compiled, image, exact)
    network = nn.Sequential(*(copy.deepcopy(layer) for _ in range(LAYERS)))
    channels = image.shape[1]
    convolution = nn.Conv2d(
        channels, channels, kernel_size, padding="same", groups=channels, device=device, dtype=dtype
    )
    models = {
        (LAYER, EAGER): layer,
        (LAYER, COMPILED): compiled,
        (NETWORK, EAGER): network,
        (NETWORK, COMPILED): _compile(network),
        (CONVOLUTION, EAGER): convolution,
        (CONVOLUTION, COMPILED): _compile(convolution),
    }
    return {
        (mode, *key): _call(mode, model, image, grad_output)
        for mode in MODES
        for key, model in models.items()
    }


def _compile(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, fullgraph=True, dynamic=False))


def _call(mode: str, model: nn.Module, image: Tensor, grad_output: Tensor) -> Call:
    if mode == FORWARD:
        return forward_call(model, image)
    return training_call(model, image, grad_output)


def print_compiled_host(rows: Sequence[HostRow], console: Console) -> None:
    """Print one line for each device, dtype, number of levels, mode and subject."""
    table = Table(title="time of one layer until the call returns, ms")
    for name in ("device", "dtype", "levels", "mode", "subject"):
        table.add_column(name, no_wrap=True)
    for name in (EAGER, COMPILED, "difference"):
        table.add_column(name, justify="right")
    times = {(r.device, r.dtype, r.levels, r.call): r.median_ms for r in rows}
    for device, dtype, levels in dict.fromkeys((r.device, r.dtype, r.levels) for r in rows):
        for mode, subject in itertools.product(MODES, SUBJECTS):
            eager, compiled = (
                times[device, dtype, levels, f"{mode}, {subject}, {variant}"]
                for variant in (EAGER, COMPILED)
            )
            shown = (f"{value:.4f}" for value in (eager, compiled, compiled - eager))
            table.add_row(device, dtype, str(levels), mode, subject, *shown)
    console.print(table)
