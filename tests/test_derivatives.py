"""Derivatives of the fused operator: right, only where asked for, repeatable, any gradient strides.

float64 where numbers are compared, so that only a wrong formula can fail; finite differences in all
types.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from samples import SAMPLES, Sample, flatten, fused, lay_out, leaves, plain, present, with_grad
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("ops")
SMALL = [Sample(3, 4, 1, kernel_size=2, batch=1), Sample(3, 2, 2, batch=1, bias=False)]
TRAIN = Sample(7, 10, 2, channels=3)
DIFFERENCES = [
    Sample(75, 136, 3, kernel_size=5),
    Sample(28, 27, 4, kernel_size=4, channels=9, layout="channels_last"),
    Sample(28, 28, 4, kernel_size=5, channels=9, batch=9),
]


class Calls(TorchDispatchMode):
    """Records the calls of our operators and the output masks of fused_backward."""

    def __init__(self):
        super().__init__()
        self.names, self.masks = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "wtconv":
            self.names.append(func._opname)
            if func is torch.ops.wtconv.fused_backward.default:
                self.masks.append(list(args[7]))
        return func(*args, **(kwargs or {}))


def gradients(function, flat, loss):
    inputs = [tensor for tensor in flat if tensor is not None]
    return torch.autograd.grad(loss(function(*flat)), inputs)


def assert_same_gradients(sample, loss, device="cpu", layout=None):
    """Gradients of a loss through the operator equal those through the reference."""
    flat = flatten(with_grad(sample).make(device, torch.float64, requires_grad=True))
    if layout is not None:
        flat[0] = lay_out(flat[0].detach(), layout).requires_grad_()
    assert_close(gradients(fused, flat, loss), gradients(plain, flat, loss))


@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_gradcheck_reverse_and_forward(device, sample):
    flat = flatten(sample.make(device, torch.float64, requires_grad=True))
    assert gradcheck(fused, flat, check_forward_ad=True, check_undefined_grad=True)


@pytest.mark.parametrize("sample", SMALL, ids=str)
def test_gradgradcheck(device, sample):
    flat = flatten(sample.make(device, torch.float64, requires_grad=True))
    assert gradgradcheck(fused, flat, check_fwd_over_rev=True, fast_mode=True)
    assert gradgradcheck(fused, flat, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("live", ["input", "weights", "scales", "one level"])
def test_gradcheck_of_masked_backward(ops, live):
    sample = Sample(3, 2, 2, batch=1)
    flat = flatten(sample.make("cpu", torch.float64, requires_grad=True))
    chosen = {"input": [0], "weights": [1, 2, 4, 5], "scales": [3, 6, 7], "one level": [5]}[live]
    mask = [i in chosen for i in range(8)]
    grad_output = torch.randn_like(flat[0]).requires_grad_()

    def backward(grad_output, x, weight, bias, scale, w1, w2, s1, s2):
        outputs = ops.fused_backward(grad_output, x, weight, bias, scale, [w1, w2], [s1, s2], mask)
        return tuple(output for output in outputs if output.shape != (0,))

    assert gradcheck(backward, (grad_output, *flat), fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(backward, (grad_output, *flat), fast_mode=True)


def test_third_derivatives_equal_reference(device):
    flat = flatten(Sample(5, 3, 2, batch=1).make(device, torch.float64, requires_grad=True))
    results = []
    for function in (fused, plain):
        value = function(*flat).square().log1p().sum()
        for _ in range(2):
            grads = torch.autograd.grad(value, flat, create_graph=True)
            value = sum(grad.square().log1p().sum() for grad in grads)
        results.append(torch.autograd.grad(value, flat))
    assert_close(*results)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_gradients_equal_reference(device, sample):
    assert_same_gradients(sample, lambda y: (y * y).sum(), device, with_grad(sample).layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sample", DIFFERENCES, ids=str)
def test_gradients_are_finite_differences(device, sample, dtype):
    """<F(a + d) - F(a - d), g> = <2 d, dF/da^T g> for steps of any size: F is affine in each a."""
    flat = flatten(sample.make(device, dtype, requires_grad=True))
    grad_output = torch.randn_like(flat[0])
    grads = torch.autograd.grad(fused(*flat), flat, grad_output)
    for i, (tensor, grad) in enumerate(zip(flat, grads, strict=True)):
        step = torch.randn_like(tensor)
        above, below = (tensor + step).detach(), (tensor - step).detach()
        ends = [fused(*flat[:i], end, *flat[i + 1 :]).detach().double() for end in (above, below)]
        change = ends[0] - ends[1]
        expected = (grad.double() * (above.double() - below.double())).sum()
        eps, size = torch.finfo(dtype).eps, float(change.norm() * grad_output.double().norm())
        # Of the product of both norms little is left, and roundings of many numbers cancel.
        actual = (change * grad_output.double()).sum()
        assert_close(actual, expected, rtol=8 * eps, atol=eps / 16 * size)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_adjoint_law(ops, sample):
    """<F x, g> = <x, F^T g> without a bias."""
    sample = replace(with_grad(sample), bias=False)
    x, weight, _, scale, weights, scales = sample.make("cpu", torch.float64)
    grad_output = torch.randn(x.shape, dtype=x.dtype)
    mask = [True] + [False] * (3 + 2 * sample.levels)
    arguments = (x, weight, None, scale, weights, scales)
    grad_input = ops.fused_backward(grad_output, *arguments, mask)[0]
    forward = ops.fused_forward(*arguments)
    size = float(forward.norm() * grad_output.norm())
    assert_close((forward * grad_output).sum(), (x * grad_input).sum(), rtol=0, atol=1e-14 * size)


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("size", [(8, 8), (13, 10), (1, 7)])
def test_gradient_of_input_is_the_operator_with_rotated_kernels(ops, size, kernel_size):
    sample = Sample(*size, 3, kernel_size=kernel_size, bias=False)
    x, weight, _, scale, weights, scales = sample.make("cpu", torch.float64)
    grad_output = torch.randn_like(x)
    mask = [True] + [False] * 9
    rotated = [tensor.flip(2, 3) for tensor in weights]
    assert_close(
        ops.fused_backward(grad_output, x, weight, None, scale, weights, scales, mask)[0],
        ops.fused_forward(grad_output, weight.flip(2, 3), None, scale, rotated, scales),
    )


@pytest.mark.parametrize("index", [3, 6, 7], ids=["base_scale", "level 1", "level 2"])
def test_zero_scale_stops_weight_gradient_but_not_scale_gradient(device, index):
    flat = flatten(TRAIN.make(device, torch.float64, requires_grad=True))
    with torch.no_grad():
        flat[index][0, 1] = 0.0
    ours = gradients(fused, flat, lambda y: y.square().sum())
    assert_close(ours, gradients(plain, flat, lambda y: y.square().sum()))
    weight = {3: 1, 6: 4, 7: 5}[index]
    assert not ours[weight][1].any()
    assert ours[weight][0].all()
    assert ours[index][0, 1].item() != 0.0


LOSSES = {
    "sum": lambda y: y.sum(),
    "cat channels": lambda y: torch.cat([y, 2 * y], 1).square().sum(),
    "cat batch": lambda y: torch.cat([y, y.sin()], 0).square().sum(),
    "slice": lambda y: y[:, :, ::2].sin().sum(),
    "slice with offset": lambda y: y[1:, :, 1:, 2:].exp().sum(),
    "permute": lambda y: (y.permute(0, 2, 3, 1).contiguous().sin()).sum(),
    "expand": lambda y: y.unsqueeze(0).expand(3, -1, -1, -1, -1).sin().sum(),
    "mean of rows": lambda y: y.mean(3).square().sum(),
    "channels_last": lambda y: y.to(memory_format=torch.channels_last).square().sum(),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_arrive_with_any_strides(device, loss, layout):
    assert_same_gradients(TRAIN, LOSSES[loss], device, layout)


@pytest.mark.parametrize(
    "layout", ["channels_last", "sliced", "sliced_channels_last", "offset", "expanded", "permuted"]
)
def test_backward_reads_grad_output_of_any_layout(device, layout):
    arguments = TRAIN.make(device, torch.float64)
    values = lay_out(torch.randn_like(arguments[0]), layout)
    mask = [True] * 8
    assert_close(
        torch.ops.wtconv.fused_backward(values, *arguments, mask),
        torch.ops.wtconv.fused_backward(values.contiguous().clone(), *arguments, mask),
        rtol=0,
        atol=1e-12,
    )


FROZEN = {
    "input only": [0],
    "first layer": [1, 2, 3, 4, 5, 6, 7],
    "scales only": [3, 6, 7],
    "one level": [5, 7],
    "one weight": [4],
    "bias only": [2],
}


@pytest.mark.parametrize("trained", FROZEN)
def test_only_gradients_asked_for_are_computed(device, trained):
    flat = flatten(TRAIN.make(device, torch.float64))
    for i in FROZEN[trained]:
        flat[i].requires_grad_()
    with Calls() as calls:
        fused(*flat).square().sum().backward()
    assert calls.masks == [[i in FROZEN[trained] for i in range(8)]]
    ours = [tensor.grad for tensor in flat]
    for tensor in flat:
        tensor.grad = None
    plain(*flat).square().sum().backward()
    assert [grad is None for grad in ours] == [i not in FROZEN[trained] for i in range(8)]
    for grad, tensor in zip(ours, flat, strict=True):
        if grad is not None:
            assert_close(grad, tensor.grad)


def test_nothing_asked_for_runs_no_backward(device):
    flat = flatten(TRAIN.make(device, torch.float64, requires_grad=True))
    other = torch.ones_like(flat[0], requires_grad=True)
    with Calls() as calls:
        torch.autograd.grad((fused(*flat) + other).sum(), other)
        with torch.no_grad():
            assert not fused(*flat).requires_grad
        assert not fused(*[tensor.detach() for tensor in flat]).requires_grad
    assert calls.masks == []


def test_only_input_and_parameters_are_saved(device):
    flat = flatten(TRAIN.make(device, torch.float32, requires_grad=True))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            fused(*flat)
        assert saved == []
        fused(*flat)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in flat]


def test_changing_a_saved_tensor_is_noticed(device):
    flat = flatten(TRAIN.make(device, torch.float32, requires_grad=True))
    output = fused(*flat)
    with torch.no_grad():
        flat[4].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_saved_tensors_are_freed(device):
    flat = flatten(TRAIN.make(device, torch.float32, requires_grad=True))
    flat[0] = flat[0].detach() + 1.0
    alive = weakref.ref(flat[0])
    output = fused(*flat)
    flat[0] = None
    output.sum().backward()
    assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_backward_is_bitwise_repeatable(device, layout, dtype):
    sample = Sample(28, 28, 3, kernel_size=5, channels=6, batch=4, layout=layout)
    flat = flatten(sample.make(device, dtype, requires_grad=True))
    grad_output = torch.randn_like(flat[0])
    runs = [torch.autograd.grad(fused(*flat), flat, grad_output) for _ in range(10)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_empty_batch_gives_zero_weight_gradients(device):
    flat = flatten(Sample(6, 5, 2, batch=0).make(device, torch.float32, requires_grad=True))
    output = fused(*flat)
    output.sum().backward()
    assert output.shape == flat[0].shape
    for tensor in flat:
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_missing_tangents_and_undefined_gradients(device):
    flat = flatten(TRAIN.make(device, torch.float64))
    with torch.autograd.forward_ad.dual_level():
        for chosen in ([0], [2], [5], [3, 7]):
            tangents = {i: torch.randn_like(flat[i]) for i in chosen}
            duals = [
                torch.autograd.forward_ad.make_dual(t, tangents[i]) if i in tangents else t
                for i, t in enumerate(flat)
            ]
            ours, theirs = (
                torch.autograd.forward_ad.unpack_dual(f(*duals)).tangent for f in (fused, plain)
            )
            assert_close(ours, theirs)


def test_building_blocks_have_derivatives(device):
    x, _, _, _, weights, scales = TRAIN.make(device, torch.float64, requires_grad=True)
    ops = torch.ops.wtconv
    sample = Sample(3, 2, 1, batch=1, channels=1)
    small = sample.make(device, torch.float64, requires_grad=True)

    def chain(x, weight, scale):
        level, low = ops.analysis_conv(x, weight, scale)
        return ops.synthesis(x, [level]), low

    arguments = (small[0], small[4][0], small[5][0])
    assert gradcheck(chain, arguments, check_forward_ad=True)
    assert gradgradcheck(chain, arguments, fast_mode=True)

    level, low = ops.analysis_conv(x, weights[0], scales[0])
    deeper, _ = ops.analysis_conv(low, weights[1], scales[1])
    chained = ops.synthesis(torch.zeros_like(x), [level, deeper])
    zero = torch.zeros(3, 1, 3, 3, dtype=x.dtype, device=x.device)
    scale = torch.ones(1, 3, 1, 1, dtype=x.dtype, device=x.device)
    whole = ops.fused_forward(x, zero, None, scale, weights, scales)
    inputs = [x, *weights, *scales]
    assert_close(chained, whole)
    assert_close(
        torch.autograd.grad(chained.square().sum(), inputs),
        torch.autograd.grad(whole.square().sum(), inputs),
    )


def test_gradients_are_dense_and_like_their_tensors(device):
    arguments = leaves(TRAIN.make(device), torch.float32)
    fused(*flatten(arguments)).sum().backward()
    for tensor in present(arguments):
        assert tensor.grad.is_contiguous()
        assert tensor.grad.dtype == tensor.dtype
