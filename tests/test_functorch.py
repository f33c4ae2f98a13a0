"""torch.func transforms of the operators equal those of the reference."""

from __future__ import annotations

import pytest
import torch
from samples import Sample, flatten, fused, plain
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import wtconv_ops

pytestmark = pytest.mark.usefixtures("ops")
SAMPLE = Sample(3, 4, 2, kernel_size=2)
NO_BIAS = Sample(3, 4, 2, bias=False)
EVERY = tuple(range(8))
COPIES = 3


def tensors(sample=SAMPLE, device="cpu", seed=0, dtype=torch.float64):
    return flatten(sample.make(device, dtype, seed=seed))


def stacked(sample=SAMPLE, device="cpu"):
    """COPIES of every argument along a new first dimension."""
    copies = [tensors(sample, device, seed) for seed in range(COPIES)]
    return [None if one[0] is None else torch.stack(one) for one in zip(*copies, strict=True)]


def numbers(sample=SAMPLE):
    return tuple(i for i in EVERY if sample.bias or i != 2)


def cubed(function):
    return lambda *flat: (function(*flat) ** 3).sum()


def assert_same(transform):
    assert_close(transform(fused), transform(plain))


@pytest.mark.parametrize("sample", [SAMPLE, NO_BIAS], ids=str)
def test_grad_and_vjp(device, sample):
    flat = tensors(sample, device)
    assert_same(lambda f: grad(cubed(f), argnums=numbers(sample))(*flat))
    assert_same(lambda f: vjp(lambda *x: f(*x, *flat[1:]), flat[0])[1](torch.ones_like(flat[0])))


def test_jvp_and_forward_over_reverse(device):
    flat = tensors(device=device)
    tangents = tuple(tensors(device=device, seed=5))
    assert_same(lambda f: jvp(f, tuple(flat), tangents))
    assert_same(lambda f: jvp(grad(cubed(f), argnums=EVERY), tuple(flat), tangents))
    assert_same(lambda f: jvp(lambda s: f(*flat[:7], s), (flat[7],), (tangents[7],)))


def test_jacobians_and_hessian(device):
    flat = tensors(device=device)
    assert_same(lambda f: jacrev(f, argnums=EVERY)(*flat))
    assert_same(lambda f: jacfwd(f, argnums=EVERY)(*flat))
    assert_same(lambda f: hessian(cubed(f), argnums=(0, 1, 3, 5))(*flat))
    assert_same(lambda f: jacrev(jacrev(cubed(f), argnums=(0, 2, 4)), argnums=(0, 1, 6))(*flat))


def test_per_sample_gradients(device):
    flat = tensors(device=device)
    flat[0] = torch.stack([flat[0], flat[0].sin(), 2 * flat[0]])
    in_dims = (0, *[None] * 7)
    assert_same(lambda f: vmap(grad(cubed(f), argnums=EVERY), in_dims)(*flat))
    assert_same(lambda f: vmap(f, in_dims)(*flat))
    assert_same(lambda f: vmap(grad(cubed(f)), in_dims)(*flat))
    assert_same(lambda f: grad(lambda *a: vmap(f, in_dims)(*a).pow(3).sum(), argnums=EVERY)(*flat))


@pytest.mark.parametrize("sample", [SAMPLE, NO_BIAS], ids=str)
def test_ensembles_over_weights(device, sample):
    flat = stacked(sample, device)
    in_dims = tuple(None if tensor is None else 0 for tensor in flat)
    assert_same(lambda f: vmap(f, in_dims)(*flat))
    shared = [flat[0][0], *flat[1:]]
    in_dims = (None, *in_dims[1:])
    assert_same(lambda f: vmap(f, in_dims)(*shared))
    assert_same(lambda f: vmap(grad(cubed(f), argnums=numbers(sample)), in_dims)(*shared))


@pytest.mark.parametrize("mapped", range(8))
def test_any_one_argument_can_be_mapped(device, mapped):
    flat, copies = tensors(device=device), stacked(device=device)
    flat[mapped] = copies[mapped].movedim(0, -1)
    in_dims = tuple(-1 if i == mapped else None for i in range(8))
    assert_same(lambda f: vmap(f, in_dims, out_dims=2)(*flat))
    assert_same(lambda f: vmap(grad(cubed(f), argnums=EVERY), in_dims)(*flat))


def test_nested_transforms(device):
    flat, copies = tensors(device=device), stacked(device=device)

    def grid(f):
        return vmap(lambda *w: vmap(lambda x: f(x, *w))(copies[0]))(*copies[1:])

    def columns(f):
        return vmap(lambda x: jvp(lambda x: f(x, *flat[1:]), (x,), (x.cos(),)))(copies[0])

    assert_same(grid)
    assert_same(columns)


def test_transforms_inside_plain_autograd(device):
    flat = [tensor.requires_grad_() for tensor in tensors(device=device)]

    def outer(f):
        inner = grad(cubed(f), argnums=(0, 4))(*flat)
        return torch.autograd.grad(sum(g.square().sum() for g in inner), flat)

    assert_same(outer)


def test_building_blocks_under_transforms(device):
    x, _, _, _, (w1, _), (s1, _) = SAMPLE.make(device, torch.float64)
    xs = torch.stack([x, x.sin()])

    def block(x, weight, scale):
        level, low = torch.ops.wtconv.analysis_conv(x, weight, scale)
        return torch.ops.wtconv.synthesis(x, [level]).pow(2).sum() + low.sin().sum()

    each = vmap(grad(block, argnums=(0, 1, 2)), (0, None, None))(xs, w1, s1)
    for i in range(2):
        leaf = [tensor.detach().clone().requires_grad_() for tensor in (xs[i], w1, s1)]
        assert_close([g[i] for g in each], list(torch.autograd.grad(block(*leaf), leaf)))


def test_autocast_under_transforms(device):
    flat = tensors(device=device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        grads = grad(lambda *a: fused(*a).float().sum(), argnums=EVERY)(*flat)
        mapped = vmap(fused)(*[torch.stack([tensor, tensor]) for tensor in flat])
        single = fused(*flat)
    assert {g.dtype for g in grads} == {torch.float32}
    assert mapped.dtype == single.dtype == torch.bfloat16
    assert_close(mapped[1], single)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_autograd_functional(device, strategy):
    flat = tensors(Sample(3, 2, 1), device)

    def jacobian(f):
        return torch.autograd.functional.jacobian(f, tuple(flat), vectorize=True, strategy=strategy)

    assert_same(jacobian)
    if strategy == "reverse-mode":
        assert_same(
            lambda f: torch.autograd.functional.hessian(
                lambda *a: cubed(f)(*a, *flat[4:]), tuple(flat[:4]), vectorize=True
            )
        )


def test_batched_gradients(device):
    flat = [tensor.requires_grad_() for tensor in tensors(device=device)]

    def batched(f):
        output = f(*flat)
        cotangents = torch.stack([output.detach(), output.detach().sin()])
        return torch.autograd.grad(output, flat, cotangents, is_grads_batched=True)

    assert_same(batched)


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_layer_under_vmap(device, layout, stride, levels):
    layer = wtconv_ops.WTConv2d(3, 3, 5, stride=stride, wt_levels=levels).to(device)
    images = [torch.randn(2, 3, 7, 6, device=device).contiguous(memory_format=layout)] * 2
    stacked, expected = torch.stack(images), torch.stack([layer(image) for image in images])
    assert_close(vmap(layer)(stacked), expected)
    mapped = torch.compile(
        lambda x: vmap(lambda image: layer(image))(x), backend="aot_eager", fullgraph=True
    )
    assert_close(mapped(stacked), expected)
    jacobian = torch.autograd.functional.jacobian
    assert_close(
        jacobian(layer, images[0], vectorize=True, strategy="forward-mode"),
        jacobian(layer, images[0]),
    )
