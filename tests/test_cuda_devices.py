"""Calls on a GPU that is not the current one, and on two GPUs at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import why_no_kernels
from samples import Arguments, Sample
from torch import Tensor

from wtconv_ops import WTConv2d

# Planes on chip, tiles of large planes, tiles with levels past theirs, the kernel for any size.
SAMPLES = [
    Sample(14, 14, 3, kernel_size=5),
    Sample(96, 80, 3, kernel_size=5),
    Sample(96, 80, 5, kernel_size=5),
    Sample(28, 28, 2, kernel_size=5, channels=8, layout="channels_last"),
    Sample(20, 33, 2, kernel_size=11),
]
DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def second(ops: object) -> str:
    """The second GPU."""
    reason = why_no_kernels("cuda")
    if reason is not None:
        pytest.skip(reason)
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: torch.cuda.device_count() is 1")
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("two kinds of GPU: their results need not have the same bits")
    return "cuda:1"


def results(arguments: Arguments, grad_output: Tensor) -> list[Tensor]:
    """Output, then the gradients of everything, on the CPU."""
    mask = [True] * (4 + 2 * len(arguments[4]))
    output = torch.ops.wtconv.fused_forward(*arguments)
    gradients = torch.ops.wtconv.fused_backward(grad_output, *arguments, mask)
    assert all(tensor.device == arguments[0].device for tensor in (output, *gradients))
    return [tensor.cpu() for tensor in (output, *gradients)]


def results_on(device: str, sample: Sample, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(sample.input_shape, generator=generator).to(device, dtype)
    return results(sample.make(device, dtype), grad_output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_another_device_than_the_current_one(
    second: str, sample: Sample, dtype: torch.dtype
) -> None:
    expected = results_on("cuda:0", sample, dtype)
    found = results_on(second, sample, dtype)
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_threads_on_two_devices(second: str, sample: Sample) -> None:
    devices = ["cuda:0", second] * 8
    with ThreadPoolExecutor(len(devices)) as pool:
        all_results = list(pool.map(lambda d: results_on(d, sample, torch.float32), devices))
    for found in all_results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, all_results[0], strict=True))


def test_a_layer_trains_on_another_device(second: str) -> None:
    torch.manual_seed(0)
    layer = WTConv2d(8, 8, 5, wt_levels=2)
    image = torch.randn(2, 8, 33, 40)
    outputs = []
    for device in ("cuda:0", second):
        layer.to(device).zero_grad()
        layer(image.to(device)).square().sum().backward()
        outputs.append([parameter.grad.cpu() for parameter in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_tensors_of_two_devices_are_refused(second: str) -> None:
    x, *parameters = SAMPLES[0].make("cuda:0")
    with pytest.raises(RuntimeError, match="device"):
        torch.ops.wtconv.fused_forward(x.to(second), *parameters)
