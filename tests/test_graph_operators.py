"""The internal operators that compiled graphs call: the public ones, without autograd."""

from __future__ import annotations

import pytest
import torch
from samples import DTYPES, FEW, SAMPLES, Sample, flatten
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.usefixtures("ops")
SAMPLE = Sample(9, 6, 2, channels=3)


@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_forward_has_the_bits_of_the_public_operator_in_the_layout_asked_for(
    device: str, sample: Sample, channels_last: bool
) -> None:
    arguments = sample.make(device)
    ours = torch.ops.wtconv._graph_forward(*arguments, channels_last)
    theirs = torch.ops.wtconv.fused_forward(*arguments)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert ours.stride() == torch.empty(ours.shape, memory_format=layout).stride()
    assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("parameters", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_takes_parameters_of_another_dtype(
    device: str, dtype: torch.dtype, parameters: torch.dtype
) -> None:
    x, *rest = SAMPLE.make(device, parameters)
    x = x.to(dtype)
    ours = torch.ops.wtconv._graph_forward(x, *rest, False)
    assert_close(ours, torch.ops.wtconv._fused_forward(x, *rest), rtol=0, atol=0)


@pytest.mark.parametrize("sample", FEW, ids=str)
def test_backward_is_that_of_the_public_operator(device: str, sample: Sample) -> None:
    arguments = sample.make(device)
    grad_output = arguments[0].cos()
    mask = [i != 2 or sample.bias for i in range(4 + 2 * sample.levels)]
    ours = torch.ops.wtconv._graph_backward(grad_output, *arguments, mask)
    theirs = torch.ops.wtconv.fused_backward(grad_output, *arguments, mask)
    assert [t.stride() for t in ours] == [t.stride() for t in theirs]
    assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("sample", FEW, ids=str)
def test_opcheck(device: str, sample: Sample) -> None:
    arguments = sample.make(device)
    ops = torch.ops.wtconv
    mask = [i != 2 or sample.bias for i in range(4 + 2 * sample.levels)]
    for channels_last in (False, True):
        opcheck(ops._graph_forward.default, (*arguments, channels_last))
    opcheck(ops._graph_backward.default, (arguments[0].cos(), *arguments, mask))


def test_no_python_kernel_runs() -> None:
    """Dispatch from autograd falls through, so that no derivative is recorded either."""
    arguments = SAMPLE.make(requires_grad=True)
    assert not torch.ops.wtconv._graph_forward(*arguments, False).requires_grad
    for name in ("_graph_forward", "_graph_backward"):
        table = torch._C._dispatch_dump_table(f"wtconv::{name}")
        (row,) = [line for line in table.splitlines() if line.startswith("AutogradCPU")]
        assert "fallthrough" in row


def test_refusals_are_those_of_the_public_operator() -> None:
    x, weight, *rest = SAMPLE.make()
    with pytest.raises(RuntimeError, match=r"fused_forward: base_weight must be"):
        torch.ops.wtconv._graph_forward(x, weight[..., :2], *rest, False)


def test_flops_are_those_of_the_public_operators() -> None:
    arguments = SAMPLE.make()
    mask = [True] * len(flatten(arguments))
    ops, grad_output = torch.ops.wtconv, arguments[0].cos()
    counts = []
    for call in (
        lambda: ops.fused_forward(*arguments),
        lambda: ops._graph_forward(*arguments, True),
        lambda: ops.fused_backward(grad_output, *arguments, mask),
        lambda: ops._graph_backward(grad_output, *arguments, mask),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert counts[2] == counts[3] > 0
