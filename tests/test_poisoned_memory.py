"""No result depends on uninitialised memory or on what lies around a view.

New memory is NaN (bytes: 255, which read as a float is NaN too) and every argument lies inside a
larger tensor of NaN, so that one wrong read or one element left unwritten shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from budget import relative_error
from memory import embed
from rounding import assert_follows_reference
from samples import DTYPES, LAYOUTS, SAMPLES, Arguments, Sample, flatten, lay_out, unflatten
from torch import Tensor

from wtconv_ops import reference

pytestmark = pytest.mark.usefixtures("ops", "poisoned")
SMALL = Sample(5, 6, 2, channels=3)
# Several tiles with halos, a partial block of channels after a full one, both kernel parities.
LARGE = [
    Sample(70, 33, 1, kernel_size=4, channels=19),
    Sample(48, 40, 2, kernel_size=5, channels=17, batch=1, bias=False),
    Sample(33, 21, 3, kernel_size=9, channels=5, batch=3),
]
# order and steps in memory, or a layout of the registry
VIEWS: dict[str, dict[str, Any]] = {
    "nchw": {},
    "nhwc": {"order": (0, 2, 3, 1)},
    "every second row": {"steps": (1, 1, 2, 1)},
    "every second column": {"steps": (1, 1, 1, 2)},
    "every second channel": {"order": (0, 2, 3, 1), "steps": (1, 2, 1, 1)},
    "transposed": {"order": (0, 1, 3, 2)},
    "rows outermost": {"order": (2, 0, 3, 1)},
}


def surrounded(arguments: Arguments, view: dict[str, Any]) -> Arguments:
    """Arguments inside NaN: the input as ``view`` says, parameters dense and shifted."""
    x, *parameters = arguments
    shifted = unflatten(
        [
            None if t is None else embed(t.flatten(), margin=3).view(t.shape)
            for t in flatten((x, *parameters))
        ]
    )
    return (embed(x, **view), *shifted[1:])


def by_flag(outputs: Sequence[Tensor], levels: int) -> list[Tensor]:
    """Outputs of fused_backward, the stacks of levels taken apart: one for each flag."""
    *base, weights, scales = outputs
    apart = [t if t.shape != (0,) else [t] * levels for t in (weights, scales)]
    return [*base, *apart[0], *apart[1]]


def assert_equal(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape
    assert relative_error(ours, exact) <= 16 * torch.finfo(ours.dtype).eps  # false for NaN


def test_new_memory_is_poisoned() -> None:
    assert torch.empty(5).isnan().all()
    assert torch.empty(5, dtype=torch.bfloat16).isnan().all()
    assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_forward_and_backward_read_only_the_views(
    device: str, view: str, dtype: torch.dtype
) -> None:
    for sample in [SMALL, *LARGE]:
        arguments = sample.make(device, dtype)
        grad_output = torch.randn(sample.input_shape).to(device, dtype)
        inside = surrounded(arguments, VIEWS[view])
        mask = [sample.bias or i != 2 for i in range(4 + 2 * sample.levels)]
        output = torch.ops.wtconv.fused_forward(*inside)
        grads = torch.ops.wtconv.fused_backward(embed(grad_output, **VIEWS[view]), *inside, mask)
        assert_follows_reference([output, *by_flag(grads, sample.levels)], arguments, grad_output)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_element_of_the_registry_is_written(device: str, sample: Sample) -> None:
    arguments = sample.make(device)
    grad_output = lay_out(torch.randn(sample.input_shape).to(device), sample.layout)
    mask = [sample.bias or i != 2 for i in range(4 + 2 * sample.levels)]
    outputs = [
        torch.ops.wtconv.fused_forward(*arguments),
        *torch.ops.wtconv.fused_backward(grad_output, *arguments, mask),
    ]
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_output_mask_writes_what_it_asks_for_and_nothing_else(
    device: str, dtype: torch.dtype, layout: str
) -> None:
    arguments = replace(SMALL, layout=layout).make(device, dtype)
    grad_output = lay_out(torch.randn(SMALL.input_shape).to(device, dtype), layout)
    output = torch.ops.wtconv.fused_forward(*arguments)
    whole = by_flag(torch.ops.wtconv.fused_backward(grad_output, *arguments, [True] * 8), 2)
    assert_follows_reference([output, *whole], arguments, grad_output)
    for mask in itertools.product([False, True], repeat=8):
        outputs = torch.ops.wtconv.fused_backward(grad_output, *arguments, list(mask))
        live = [*mask[:4], mask[4] or mask[5], mask[6] or mask[7]]
        assert [tuple(output.shape) != (0,) for output in outputs] == live
        for i, (ours, wanted) in enumerate(zip(by_flag(outputs, 2), mask, strict=True)):
            if wanted:
                assert torch.equal(ours, whole[i]), f"mask {mask}, output {i}"
            else:
                assert not ours.any(), f"mask {mask}, output {i}"


@pytest.mark.parametrize("asked", range(6))
def test_empty_batch_gives_zeros_whatever_is_asked_for(device: str, asked: int) -> None:
    sample = Sample(5, 6, 1, batch=0)
    arguments = sample.make(device)
    mask = [i == asked for i in range(6)]
    outputs = torch.ops.wtconv.fused_backward(arguments[0].clone(), *arguments, mask)
    assert outputs[asked].shape != (0,)
    assert all(not output.any() for output in outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_building_blocks_read_only_the_views(device: str, view: str, dtype: torch.dtype) -> None:
    ops = torch.ops.wtconv
    for sample in [SMALL, *LARGE]:
        arguments = sample.make(device, dtype)
        x, _, _, _, weights, scales = surrounded(arguments, VIEWS[view])
        coefficients, low = ops.analysis_conv(x, weights[0], scales[0])
        exact = [t.double() for t in (arguments[0], arguments[4][0], arguments[5][0])]
        for ours, theirs in zip((coefficients, low), reference.analysis_conv(*exact), strict=True):
            assert_equal(ours, theirs)
        restored = ops.synthesis(x, [embed(coefficients, **VIEWS[view])])
        assert_equal(restored, reference.synthesis(exact[0], [coefficients.double()]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_building_blocks_write_every_element_in_every_layout(device: str, layout: str) -> None:
    sample = Sample(7, 10, 3, channels=3, layout=layout)
    x, _, _, _, weights, scales = sample.make(device)
    coefficients, low = [], x
    for weight, scale in zip(weights, scales, strict=True):
        level, low = torch.ops.wtconv.analysis_conv(low, weight, scale)
        assert level.isfinite().all()
        assert low.isfinite().all()
        coefficients.append(lay_out(level, layout))
    assert torch.ops.wtconv.synthesis(x, coefficients).isfinite().all()
