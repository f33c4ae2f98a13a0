"""opcheck over the registry, and fake sizes, strides and dtypes against the real ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from samples import DTYPES, FEW, SAMPLES, Sample, with_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from wtconv_ops import _inductor

QUICK = ["test_schema", "test_autograd_registration", "test_faketensor"]
AOT = ["test_aot_dispatch_dynamic"]
pytestmark = pytest.mark.usefixtures("ops")


def mask_of(sample: Sample, *, only: int | None = None) -> list[bool]:
    entries = 4 + 2 * sample.levels
    mask = [only is None or i == only for i in range(entries)]
    mask[2] = mask[2] and sample.bias
    return mask


def calls(sample: Sample, device: str, dtype: torch.dtype, requires_grad: bool):
    """Every operator on one sample: (overload, arguments)."""
    arguments = sample.make(device, dtype, requires_grad=requires_grad)
    grad_output = torch.randn_like(arguments[0]).requires_grad_(requires_grad)
    x, _, _, _, weights, scales = arguments
    ops = torch.ops.wtconv
    coefficients, low = [], x.detach()
    for weight, scale in zip(weights, scales, strict=True):
        level, low = ops.analysis_conv(low, weight.detach(), scale.detach())
        coefficients.append(level.requires_grad_(requires_grad))
    return [
        (ops.fused_forward.default, arguments),
        (ops._fused_forward.default, arguments),
        (ops.fused_backward.default, (grad_output, *arguments, mask_of(sample))),
        (ops.analysis_conv.default, (x, weights[0], scales[0])),
        (ops.synthesis.default, (x, coefficients)),
    ]


def test_every_operator_is_checked(ops):
    """Those of compiled graphs in test_graph_operators.py, all others here."""
    here = {op.name() for op, _ in calls(FEW[0], "cpu", torch.float32, False)}
    graph = {f"wtconv::{name}" for name in _inductor.GRAPH_OPS}
    registry = torch._C._dispatch_get_all_op_names()
    assert here | graph == {name for name in registry if name.startswith("wtconv::")}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_registration_is_right(device, sample, requires_grad):
    if requires_grad:
        sample = with_grad(sample)
    for op, arguments in calls(sample, device, torch.float32, requires_grad):
        opcheck(op, arguments, test_utils=QUICK)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_registration_is_right_in_every_dtype(device, dtype):
    for op, arguments in calls(Sample(5, 6, 2, layout="channels_last"), device, dtype, True):
        opcheck(op, arguments, test_utils=QUICK)


@pytest.mark.smoke
@pytest.mark.parametrize("requires_grad", [False, True], ids=["nograd", "grad"])
@pytest.mark.parametrize("sample", FEW, ids=str)
def test_aot_dispatch_equals_eager(device, sample, requires_grad):
    utils = [*AOT, "test_aot_dispatch_static"] if sample is FEW[0] else AOT
    for op, arguments in calls(sample, device, torch.float32, requires_grad):
        if op is not torch.ops.wtconv._fused_forward.default:  # test_mixed_dtypes_pass_opcheck
            opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("parameters", [torch.float32, torch.float64], ids=str)
def test_mixed_dtypes_pass_opcheck(device, parameters):
    sample = Sample(5, 6, 1)
    x, *rest = sample.make(device, parameters, requires_grad=True)
    x = x.detach().to(torch.bfloat16).requires_grad_()
    ops = torch.ops.wtconv
    opcheck(ops._fused_forward.default, (x, *rest), test_utils=[*QUICK, *AOT])
    backward = (torch.randn_like(x), x, *rest, mask_of(sample))
    opcheck(ops.fused_backward.default, backward, test_utils=[*QUICK, *AOT])


@pytest.mark.parametrize("only", range(8))
def test_masked_outputs_pass_opcheck(device, only):
    sample = Sample(5, 6, 2)
    arguments = sample.make(device)
    mask = mask_of(sample, only=only)
    outputs = torch.ops.wtconv.fused_backward(torch.ones_like(arguments[0]), *arguments, mask)
    live = only if only < 4 else 4 + (only - 4) // 2
    assert [tuple(output.shape) == (0,) for output in outputs] == [i != live for i in range(6)]
    opcheck(
        torch.ops.wtconv.fused_backward.default,
        (torch.ones_like(arguments[0]), *arguments, mask),
        test_utils=QUICK,
    )


def described(tensors):
    tensors = tensors if isinstance(tensors, tuple) else (tensors,)
    return [(tuple(t.shape), t.stride(), t.dtype, t.device, t.storage_offset()) for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_fake_outputs_equal_real_outputs(device, sample, dtype):
    for op, arguments in calls(sample, device, dtype, False):
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        assert described(fake) == described(real), op


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced_channels_last"])
@pytest.mark.parametrize("size", [(5, 6), (1, 6), (5, 1), (1, 1)], ids=str)
def test_an_empty_batch_has_the_strides_of_a_larger_one(device, size, layout):
    strides = []
    for batch in (0, 2):
        sample = Sample(*size, 2, channels=3, batch=batch, layout=layout)
        outputs = [op(*arguments) for op, arguments in calls(sample, device, torch.float32, False)]
        strides.append([t.stride() for t in torch.utils._pytree.tree_leaves(outputs)])
    assert strides[0] == strides[1]


def test_fake_sizes_equal_real_sizes_for_every_small_size(ops):
    for height, width in itertools.product((1, 2, 3, 4, 5, 7, 16, 33), (1, 2, 6, 9)):
        for op, arguments in calls(Sample(height, width, 3), "cpu", torch.float32, False):
            meta = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda tensor: tensor.to("meta"), arguments
            )
            fake, real = op(*meta), op(*arguments)
            shapes = [d[:2] for d in described(fake)], [d[:2] for d in described(real)]
            assert shapes[0] == shapes[1], op


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_outputs_alias_no_input(device, sample):
    for op, arguments in calls(sample, device, torch.float32, False):
        inputs = [t for t in torch.utils._pytree.tree_leaves(arguments) if torch.is_tensor(t)]
        used = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
        outputs = op(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        owned = [t.untyped_storage().data_ptr() for t in outputs if t.numel()]
        assert used.isdisjoint(owned)
        assert len(set(owned)) == len(owned)
