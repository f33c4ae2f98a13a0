"""FlopCounterMode counts the operators as it counts the depthwise convolutions of the reference."""

from __future__ import annotations

import pytest
import torch
from samples import Sample, flatten, fused, plain
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("ops")
CASES = [
    Sample(13, 10, 3, kernel_size=5),
    Sample(8, 8, 1, kernel_size=4),
    Sample(7, 7, 2, bias=False),
]
TRAINED = {
    "all": range(10),
    "input": [0],
    "parameters": range(1, 10),
    "base scale": [3],
    "level 1": [4],
}


def flops(function, flat, backward=True):
    with FlopCounterMode(display=False) as counter:
        output = function(*flat)
        if backward and output.requires_grad:
            output.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("sample", CASES, ids=str)
def test_forward_flops_equal_reference(sample):
    flat = flatten(sample.make())
    assert flops(fused, flat) == flops(plain, flat) > 0


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("sample", CASES, ids=str)
def test_training_flops_equal_reference(sample, trained):
    counts = []
    for function in (fused, plain):
        flat = flatten(sample.make())
        for i, tensor in enumerate(flat):
            if tensor is not None and i in TRAINED[trained]:
                tensor.requires_grad_()
        counts.append(flops(function, flat))
    assert counts[0] == counts[1]


def test_forward_is_counted_once_when_it_will_be_differentiated():
    flat, tracked = flatten(CASES[0].make()), flatten(CASES[0].make(requires_grad=True))
    assert flops(fused, tracked, backward=False) == flops(fused, flat)


def test_depthwise_convolutions_are_counted_and_haar_steps_are_not():
    sample = Sample(12, 8, 2, kernel_size=3, channels=2, batch=1)
    pixels = 12 * 8 + 4 * (6 * 4) + 4 * (3 * 2)  # base path, then four bands of each level
    assert flops(fused, flatten(sample.make())) == 2 * 3 * 3 * 2 * pixels


def test_autocast_and_building_blocks_are_counted():
    sample = Sample(13, 10, 2)
    arguments = sample.make()
    with torch.autocast("cpu", torch.bfloat16):
        assert flops(fused, flatten(arguments)) == flops(plain, flatten(arguments))
    x, weight, _, _, weights, scales = arguments

    def staged(*flat):
        level, low = torch.ops.wtconv.analysis_conv(x, weights[0], scales[0])
        deeper, _ = torch.ops.wtconv.analysis_conv(low, weights[1], scales[1])
        base = torch.nn.functional.conv2d(x, weight, padding=1, groups=2)
        return torch.ops.wtconv.synthesis(base, [level, deeper])

    assert flops(staged, []) == flops(plain, flatten(arguments))
