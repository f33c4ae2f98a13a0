"""Results do not depend on the number of threads, nor on who else calls the operators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from samples import Arguments, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("ops")
# Enough work that more than one thread gets some: many tiles, many channel blocks, a large batch.
SAMPLES = [
    Sample(96, 64, 3, kernel_size=5, channels=17, batch=2),
    Sample(14, 15, 2, kernel_size=5, channels=150, batch=3),
    Sample(12, 12, 1, kernel_size=8, channels=9, batch=33, bias=False),
    Sample(64, 48, 2, kernel_size=7, channels=24, batch=2, layout="channels_last"),
]
DTYPES = [torch.float32, torch.float64, torch.float16]


def run(sample: Sample, arguments: Arguments) -> list[Tensor]:
    """Output and all gradients."""
    mask = [sample.bias or i != 2 for i in range(4 + 2 * sample.levels)]
    output = torch.ops.wtconv.fused_forward(*arguments)
    grads = torch.ops.wtconv.fused_backward(output.sin(), *arguments, mask)
    return [output, *grads]


def building_blocks(arguments: Arguments) -> list[Tensor]:
    x, _, _, _, weights, scales = arguments
    coefficients, low = torch.ops.wtconv.analysis_conv(x, weights[0], scales[0])
    return [coefficients, low, torch.ops.wtconv.synthesis(x, [coefficients])]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor], what: object) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: result {i} differs"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_number_of_threads_does_not_change_a_bit(sample: Sample, dtype: torch.dtype) -> None:
    arguments = sample.make(dtype=dtype)
    results = []
    for number in (1, 2, 4):
        torch.set_num_threads(number)
        results.append([*run(sample, arguments), *building_blocks(arguments)])
    assert_same_bits(results[1], results[0], "2 threads")
    assert_same_bits(results[2], results[0], "4 threads")


def test_calls_from_several_python_threads_do_not_disturb_each_other() -> None:
    torch.set_num_threads(1)
    calls = [(sample, sample.make(seed=seed)) for sample in SAMPLES for seed in range(3)]
    alone = [run(*call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda call: run(*call), calls))
    for ours, theirs, (sample, _) in zip(together, alone, calls, strict=True):
        assert_same_bits(ours, theirs, sample)


def test_batch_items_do_not_change_each_other() -> None:
    sample = SAMPLES[0]
    x, *rest = sample.make()
    whole = torch.ops.wtconv.fused_forward(x, *rest)
    for i in range(sample.batch):
        alone = torch.ops.wtconv.fused_forward(x[i : i + 1], *rest)
        torch.testing.assert_close(whole[i : i + 1], alone)
