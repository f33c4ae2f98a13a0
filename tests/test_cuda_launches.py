"""What backward passes launch: kernels for what is wanted, nothing else, by the profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import make_layer
from samples import Sample, many_tiles
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.usefixtures("ops"),
    pytest.mark.parametrize("device", ["cuda"]),
]


ROLES = {"finish": "sums", "lowpass": "low-pass", "wide_lowpass": "low-pass"}


def launched(call: Callable[[], Any]) -> list[str]:
    """The kernels of ours that a call launches, with their template arguments."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
    return [name for name in names if "wtconv::" in name]


def roles(kernels: list[str]) -> Counter[str]:
    """How many are of the operator, of weight gradients, their sums, low-pass bands."""
    found = [re.search(r"wtconv::.*?(\w+)_kernel", name) for name in kernels]
    names = [kernel[1] for kernel in found if kernel]
    assert len(names) == len(kernels), kernels
    return Counter(
        "weights" if name.endswith("weight_grad") else ROLES.get(name, "operator") for name in names
    )


def backward(sample: Sample, device: str, dtype: torch.dtype, mask: list[bool]) -> list[str]:
    arguments = sample.make(device, dtype)
    grad_output = torch.randn(sample.input_shape, device=device).to(arguments[0])
    if sample.layout == "channels_last":
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
    return launched(lambda: torch.ops.wtconv.fused_backward(grad_output, *arguments, mask))


SMALL = Sample(7, 7, 2, kernel_size=5, channels=32, batch=4, layout="channels_last")
PLANES = Sample(28, 28, 4, kernel_size=5, channels=4, batch=5)
LARGE = Sample(130, 136, 1, kernel_size=5, channels=3)
TILES = Sample(130, 136, 3, kernel_size=5, channels=3)
SAMPLES = [
    (SMALL, torch.float16),
    (PLANES, torch.float16),
    (PLANES, torch.float32),
    (LARGE, torch.float32),
    (TILES, torch.float16),
]
SAMPLE = pytest.mark.parametrize(("sample", "dtype"), SAMPLES, ids=str)


@pytest.mark.parametrize(
    ("sample", "dtype", "kernels"),
    [
        # All gradients in one launch; their partial sums in another.
        (PLANES, torch.float32, {"weights": 1, "sums": 1}),
        (LARGE, torch.float32, {"weights": 1, "sums": 1}),
        # All levels in one launch.
        (PLANES, torch.float16, {"weights": 1, "sums": 1, "operator": 1}),
        (SMALL, torch.float16, {"weights": 1, "sums": 1, "operator": 1}),
        (LARGE, torch.float16, {"weights": 1, "sums": 1, "operator": 1}),
        # Two levels and the third.
        (TILES, torch.float16, {"weights": 2, "sums": 1, "operator": 1}),
    ],
    ids=str,
)
def test_all_gradients(
    device: str, sample: Sample, dtype: torch.dtype, kernels: dict[str, int]
) -> None:
    mask = [True] * (4 + 2 * sample.levels)
    assert roles(backward(sample, device, dtype, mask)) == kernels


@SAMPLE
def test_frozen_parameters_cost_nothing(device: str, sample: Sample, dtype: torch.dtype) -> None:
    mask = [True] + [False] * (3 + 2 * sample.levels)
    assert roles(backward(sample, device, dtype, mask)) == {"operator": 1}


def test_levels_past_two_of_many_small_planes_have_a_launch(device: str) -> None:
    sample = Sample(28, 28, 4, kernel_size=5, channels=128, batch=64)
    wanted = [True] * (4 + 2 * sample.levels)
    kernels = backward(sample, device, torch.float16, wanted)
    assert roles(kernels) == {"weights": 2, "sums": 1, "operator": 1}
    assert roles(backward(sample, device, torch.float32, wanted)) == {"weights": 1, "sums": 1}


def test_third_level_of_many_tiles_has_a_launch_of_the_operator(device: str) -> None:
    """On the band that the weight gradients leave; without them it forms the band, too."""
    sample = many_tiles(130, 200)
    others = [True] * (3 + 2 * sample.levels)
    kernels = backward(sample, device, torch.float16, [True, *others])
    assert roles(kernels) == {"weights": 2, "sums": 1, "operator": 2}
    alone = backward(sample, device, torch.float16, [True] + [False] * len(others))
    assert roles(alone) == {"operator": 2}
    assert set(alone) - set(kernels)


@SAMPLE
def test_first_layer_forms_no_input_gradient(
    device: str, sample: Sample, dtype: torch.dtype
) -> None:
    wanted = [True] * (3 + 2 * sample.levels)
    kernels = backward(sample, device, dtype, [False, *wanted])
    assert roles(kernels) == {"weights": 2 if sample is TILES else 1, "sums": 1}
    # The launch that gives all gradients is another one.
    assert set(backward(sample, device, dtype, [True, *wanted])) - set(kernels)


def test_levels_past_the_last_wanted_one_are_not_launched(device: str) -> None:
    mask = [False, True, True, True] + [False] * 2 * TILES.levels
    assert roles(backward(TILES, device, torch.float16, mask)) == {"weights": 1, "sums": 1}


@SAMPLE
def test_nothing_wanted_launches_nothing(device: str, sample: Sample, dtype: torch.dtype) -> None:
    assert not backward(sample, device, dtype, [False] * (4 + 2 * sample.levels))


def test_layer_with_frozen_parameters(device: str) -> None:
    layer = make_layer(3, 5, wt_levels=1).to(device)
    x = torch.randn(2, 3, 130, 136, device=device, requires_grad=True)
    output = layer(x)
    grad = torch.randn_like(output)

    def call() -> None:
        output.backward(grad, retain_graph=True)

    everything = launched(call)
    assert roles(everything) == {"weights": 1, "sums": 1}
    output = layer.requires_grad_(False)(x)
    assert roles(launched(call)) == {"operator": 1}
    output = layer.requires_grad_(True)(x.detach())
    first_layer = launched(call)
    assert roles(first_layer) == {"weights": 1, "sums": 1}
    assert set(everything) - set(first_layer)
