"""``python -m bench host --compiled``: what ``torch.compile`` adds to the time of a call.

A layer, and a network of `LAYERS` of them one after the other, run eagerly and compiled on the
input of :mod:`bench.host`; the time of the network is divided by its layers. A compiled call checks
its guards once, then runs all layers without their Python: a network pays for that once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from statistics import median
from timeit import timeit
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.cuda_check import check, exact_results
from bench.cuda_run import DTYPES
from bench.cuda_timing import Call
from bench.host import CALLS_PER_SAMPLE, FORWARD, SIZE, TRAINING, HostRow, HostSettings
from bench.timing import forward_call, threads, training_call
from wtconv_ops import WTConv2d
from wtconv_ops.demo.network import randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d
from wtconv_ops.demo.timing import processor_name

LAYERS = 4
LAYER, NETWORK = "layer", f"layer of {LAYERS}"
EAGER, COMPILED = "eager", "compiled"
MODES = (FORWARD, TRAINING)
SUBJECTS = {LAYER: 1, NETWORK: LAYERS}
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
    cuda = device.type == "cuda"
    return [
        HostRow(
            device=device.type,
            machine=torch.cuda.get_device_name(device) if cuda else processor_name(),
            torch=torch.__version__,
            threads=settings.threads,
            shape="x".join(map(str, SIZE)),
            kernel_size=settings.kernel_size,
            levels=levels,
            dtype=dtype,
            call=", ".join(key),
            median_ms=median(values),
            fastest_ms=min(values),
            rounds=settings.rounds,
        )
        for key, values in _samples(calls, settings.rounds, device).items()
    ]


def _calls(
    kernel_size: int, levels: int, device: torch.device, dtype: torch.dtype
) -> dict[_Key, Call]:
    """What is timed at one number of levels, compiled anew."""
    torch.compiler.reset()  # graphs of other levels would stand in the way of every call
    channels = SIZE[1]
    reference = ReferenceWTConv2d(channels, channels, kernel_size, wt_levels=levels)
    randomise(reference, seed=levels)
    layer = WTConv2d(channels, channels, kernel_size, wt_levels=levels)
    layer.load_state_dict(reference.state_dict())
    layer.to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    image, grad_output = (
        torch.randn(SIZE, generator=generator).to(device, dtype) for _ in range(2)
    )
    compiled = _compile(layer)
    exact = exact_results(reference.to(device, dtype), image, grad_output)
    check(f"wtconv_ops compiled on {device} {dtype} L{levels}", compiled, image, exact)
    network = nn.Sequential(*(copy.deepcopy(layer) for _ in range(LAYERS)))
    models = {
        (LAYER, EAGER): layer,
        (LAYER, COMPILED): compiled,
        (NETWORK, EAGER): network,
        (NETWORK, COMPILED): _compile(network),
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


def _samples(calls: dict[_Key, Call], rounds: int, device: torch.device) -> dict[_Key, list[float]]:
    """Ms per layer, one value for each round; as many layers in the samples of all calls."""
    numbers = {key: CALLS_PER_SAMPLE // SUBJECTS[key[1]] for key in calls}
    for key, call in calls.items():
        for _ in range(numbers[key]):
            call()
    samples: dict[_Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            samples[key].append(timeit(call, number=numbers[key]) * 1e3 / CALLS_PER_SAMPLE)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return samples


def print_compiled_host(rows: Sequence[HostRow], console: Console) -> None:
    """Print one line for each device, dtype, number of levels and mode."""
    table = Table(
        title=f"time of one layer, alone and in a network of {LAYERS}, until the call returns, ms"
    )
    for name in ("device", "dtype", "levels", "mode"):
        table.add_column(name, no_wrap=True)
    for subject in SUBJECTS:
        for name in (EAGER, COMPILED, "difference"):
            table.add_column(f"{subject}, {name}", justify="right")
    times = {(r.device, r.dtype, r.levels, r.call): r.median_ms for r in rows}
    for device, dtype, levels in dict.fromkeys((r.device, r.dtype, r.levels) for r in rows):
        for mode in MODES:
            values: list[float] = []
            for subject in SUBJECTS:
                eager, compiled = (
                    times[device, dtype, levels, f"{mode}, {subject}, {variant}"]
                    for variant in (EAGER, COMPILED)
                )
                values += [eager, compiled, compiled - eager]
            shown = (f"{value:.4f}" for value in values)
            table.add_row(device, dtype, str(levels), mode, *shown)
    console.print(table)
