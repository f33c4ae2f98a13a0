"""Autocast: only the input is cast, the output has the autocast dtype, gradients keep theirs."""

from __future__ import annotations

import pytest
import torch
from budget import assert_within_budget
from samples import Sample, flatten, fused, leaves, plain, present, unflatten

pytestmark = pytest.mark.usefixtures("ops")
HALVES = [torch.float16, torch.bfloat16]
SAMPLE = Sample(13, 10, 2, kernel_size=5)


def arguments_for(device, input_dtype, parameter_dtype=torch.float32):
    x, *rest = SAMPLE.make(device, parameter_dtype, requires_grad=True)
    return x.detach().to(input_dtype).requires_grad_(), *rest


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("input_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_output_has_autocast_dtype_and_gradients_their_own(
    device, dtype, input_dtype, compiled, fresh_compiler
):
    arguments = arguments_for(device, input_dtype)
    flat = flatten(arguments)
    function = torch.compile(fused, backend="aot_eager", fullgraph=True) if compiled else fused
    with torch.autocast(device, dtype):
        output = function(*flat)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    assert flat[0].grad.dtype == input_dtype
    assert {tensor.grad.dtype for tensor in flat[1:]} == {torch.float32}

    rounded = [flat[0].detach().to(dtype), *flat[1:]]  # what the kernel sees
    exact = plain(*flatten(leaves(unflatten(rounded), torch.float64)))
    same = plain(*[tensor.detach().to(dtype) for tensor in rounded])
    assert_within_budget(output, same, exact.detach())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_are_within_budget(device, dtype):
    arguments = arguments_for(device, torch.float32)
    flat = flatten(arguments)
    with torch.autocast(device, dtype):
        output = fused(*flat)
    cotangent = torch.randn_like(output)
    ours = torch.autograd.grad(output, flat, cotangent)
    rounded = unflatten([flat[0].detach().to(dtype), *flat[1:]])
    exact, same = leaves(rounded, torch.float64), leaves(rounded, dtype)
    for_exact = torch.autograd.grad(plain(*flatten(exact)), flatten(exact), cotangent.double())
    for_same = torch.autograd.grad(plain(*flatten(same)), flatten(same), cotangent)
    for i, (a, b, c) in enumerate(zip(ours, for_same, for_exact, strict=True)):
        assert_within_budget(a.to(dtype), b, c, f"gradient {i}")


def test_only_the_input_is_cast(device):
    flat = flatten(arguments_for(device, torch.float32))
    saved = []
    with (
        torch.autocast(device, torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        fused(*flat)
    assert [tensor.dtype for tensor in saved] == [torch.bfloat16] + [torch.float32] * 7
    assert [t.data_ptr() for t in saved[1:]] == [t.data_ptr() for t in flat[1:]]


def test_float64_stays(device):
    flat = flatten(arguments_for(device, torch.float64, torch.float64))
    with torch.autocast(device, torch.bfloat16):
        assert fused(*flat).dtype == torch.float64
    flat = flatten(arguments_for(device, torch.float64, torch.float32))
    with (
        torch.autocast(device, torch.bfloat16),
        pytest.raises(RuntimeError, match="base_weight must have the dtype of input, float64"),
    ):
        fused(*flat)


def test_nested_disabled_region_keeps_float32(device):
    flat = flatten(arguments_for(device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        with torch.autocast(device, enabled=False):
            assert fused(*flat).dtype == torch.float32
        assert fused(*flat).dtype == torch.bfloat16


def test_parameters_of_different_dtypes_meet_in_float32(device):
    flat = flatten(arguments_for(device, torch.float32))
    flat[1] = flat[1].detach().bfloat16().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        output = fused(*flat)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert flat[1].grad.dtype == torch.bfloat16
    assert flat[4].grad.dtype == torch.float32


def test_double_backward_inside_autocast(device):
    flat = flatten(arguments_for(device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        output = fused(*flat)
        grads = torch.autograd.grad(output.float().square().sum(), flat, create_graph=True)
        torch.autograd.grad(sum(g.float().square().sum() for g in grads), flat)
    assert {g.dtype for g in grads} == {torch.float32}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_grad_scaler_trains(device, dtype):
    flat = flatten(arguments_for(device, torch.float32))
    optimizer = torch.optim.SGD(flat[1:], lr=1e-4)
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = fused(*flat).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_building_blocks(device):
    x, _, _, _, weights, scales = arguments_for(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        level, low = torch.ops.wtconv.analysis_conv(x, weights[0], scales[0])
        output = torch.ops.wtconv.synthesis(x, [level])
    assert level.dtype == low.dtype == torch.bfloat16
    assert output.dtype == torch.float32
    output.sum().backward()
    assert {tensor.grad.dtype for tensor in (x, weights[0], scales[0])} == {torch.float32}


def test_mixed_dtypes_without_autocast_are_refused(device):
    flat = flatten(arguments_for(device, torch.bfloat16))
    with pytest.raises(RuntimeError) as error:
        fused(*flat)
    assert str(error.value).startswith(
        "fused_forward: base_weight must have the dtype of input, bfloat16, got float32; "
        "convert one of them or use torch.autocast"
    )


def test_every_parameter_gets_a_gradient_from_a_half_input(device):
    arguments = arguments_for(device, torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        fused(*flatten(arguments)).float().square().sum().backward()
    assert all(tensor.grad.float().abs().sum() > 0 for tensor in present(arguments))
