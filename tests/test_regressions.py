"""Laws at the edges: strange dtypes, sizes, hooks, modes and transforms. One test for each."""

from __future__ import annotations

import warnings

import pytest
import torch
from budget import assert_within_budget
from layer_cases import arguments, assert_layer_follows_reference, make_input, make_layer
from samples import Sample, fused, leaves, present
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune, weight_norm

from wtconv_ops import WTConv2d, _checks, functional, reference

LARGE = [2**31, 2**62, 2**63 - 1, 2**70]
NOT_FLOATING = [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]
INPUT_SENTENCE = "fused_forward: input must be float32, float64, float16 or bfloat16, got"


@pytest.mark.parametrize("dtype", NOT_FLOATING, ids=str)
@pytest.mark.parametrize("call", ["layer", "operator", "plain"])
def test_autocast_refuses_an_input_that_is_not_floating(ops, monkeypatch, dtype, call):
    layer = make_layer(4, 3)
    x = torch.ones(1, 4, 5, 6).to(dtype)
    if call == "plain":
        monkeypatch.setattr(functional, "_kernels_serve", lambda *_: False)
    run = ops.fused_forward if call == "operator" else functional.wtconv2d
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=INPUT_SENTENCE):
        run(x, *arguments(layer))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_refuses_parameters_that_are_not_floating(ops, fresh_compiler, compiled):
    x, *parameters = Sample(5, 6, 1).make()
    parameters[2] = torch.ones(1, 2, 1, 1, dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        output: Tensor = ops.fused_forward(x, *parameters)
        return output

    if compiled:
        run = torch.compile(run, backend="aot_eager")
    said = "base_scale must have the dtype of base_weight, float32, got int32"
    with torch.autocast("cpu"), pytest.raises(Exception, match=said):
        run(x)


def test_autocast_of_synthesis_refuses_integers(ops):
    base, details = torch.ones(1, 1, 4, 4), [torch.ones(1, 4, 2, 2).int()]
    said = r"coefficients\[0\] must have the dtype of base, float32, got int32"
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=said):
        ops.synthesis(base, details)


@pytest.mark.parametrize("stride", LARGE)
def test_stride_beyond_every_size_is_refused(stride):
    x = torch.ones(1, 2, 5, 6)
    layer = make_layer(2, 3)
    said = "stride must be an int from 1 to 2147483647, got"
    with pytest.raises(ValueError, match=said):
        WTConv2d(2, 2, stride=stride)
    for run in (functional.wtconv2d, reference.wtconv2d):
        with pytest.raises(ValueError, match=said):
            run(x, *arguments(layer), stride)


def test_largest_stride_keeps_one_pixel():
    layer = make_layer(2, 3, stride=2**31 - 1)
    assert_layer_follows_reference(layer.double(), make_input(2, 2, 9, 7, dtype=torch.float64))
    assert layer(torch.ones(2, 2, 9, 7).double()).shape == (2, 2, 1, 1)


def test_stride_of_compiled_code_may_be_symbolic(ops, fresh_compiler):
    parameters = arguments(make_layer(2, 3))
    compiled = torch.compile(functional.wtconv2d, backend="aot_eager", fullgraph=True, dynamic=True)
    for stride in (2, 3):
        x = make_input(2, 2, 9, 8)
        expected = reference.wtconv2d(x, *parameters, stride)
        torch.testing.assert_close(compiled(x, *parameters, stride), expected)


@pytest.mark.parametrize("channels", LARGE)
def test_channels_beyond_every_memory_are_refused(channels):
    with pytest.raises(ValueError, match="in_channels must be an int from 1 to 2147483647, got"):
        WTConv2d(channels, channels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_staged_operators_round_alike_with_and_without_derivatives(ops, dtype):
    x = make_input(2, 3, 9, 6, dtype=dtype)
    weight, scale = make_input(12, 1, 3, 3, dtype=dtype), make_input(1, 12, 1, 1, dtype=dtype)
    recorded = ops.analysis_conv(x, weight.clone().requires_grad_(), scale)
    for ours, kernel, same, exact in zip(
        recorded,
        ops.analysis_conv(x, weight, scale),
        reference.analysis_conv(x, weight, scale),
        reference.analysis_conv(x.double(), weight.double(), scale.double()),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert_within_budget(ours, same, exact, "recorded")
        torch.testing.assert_close(ours, kernel, rtol=torch.finfo(dtype).eps, atol=1e-6)
    coefficients = recorded[0].detach()
    output = ops.synthesis(x.clone().requires_grad_(), [coefficients])
    kernel = ops.synthesis(x, [coefficients])
    torch.testing.assert_close(output, kernel, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_staged_lowpass_in_float16_overflows_only_where_the_result_does(ops):
    x = torch.full((1, 1, 4, 4), 4e4, dtype=torch.float16)
    weight = torch.full((4, 1, 3, 3), 1e-3, dtype=torch.float16, requires_grad=True)
    coefficients, _ = ops.analysis_conv(x, weight, torch.ones(1, 4, 1, 1).half())
    assert coefficients.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_parameters_recomputed_by_pre_hooks_follow_every_step(ops, fresh_compiler, compiled):
    layer = make_layer(3, 3, wt_levels=2)
    prune.random_unstructured(layer.base_conv, "weight", 0.5)
    prune.random_unstructured(layer.wavelet_convs[1], "weight", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm(layer.wavelet_convs[0])
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = make_input(1, 3, 7, 6)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()
    output = run(x)
    for conv in (layer.base_conv, *layer.wavelet_convs):
        conv(torch.zeros(1, conv.in_channels, 3, 3))  # recomputes the weight
    torch.testing.assert_close(output, reference.wtconv2d(x, *arguments(layer)))


def test_pre_hook_that_changes_the_input_of_a_convolution_is_refused():
    layer = make_layer(2, 3)
    x = make_input(1, 2, 5, 4)
    expected = layer(x)
    handle = layer.base_conv.register_forward_pre_hook(lambda module, inputs: None)
    torch.testing.assert_close(layer(x), expected, rtol=0.0, atol=0.0)
    handle.remove()
    handle = layer.base_conv.register_forward_pre_hook(
        lambda module, inputs, options: (inputs, options), with_kwargs=True
    )
    torch.testing.assert_close(layer(x), expected, rtol=0.0, atol=0.0)
    handle.remove()
    layer.wavelet_convs[0].register_forward_pre_hook(lambda module, inputs: (x,))
    with pytest.raises(RuntimeError, match="pre-hook of a submodule must not change its input"):
        layer(x)


class _Adapter(nn.Module):
    """Stands in for a convolution and shows its parameters."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias


class _Quantised(nn.Conv2d):
    """A convolution that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.round())


def test_replaced_convolution_is_refused():
    x = make_input(1, 2, 5, 4)
    layer = make_layer(2, 3)
    layer.base_conv = _Adapter(layer.base_conv)
    with pytest.raises(TypeError, match=r"base_conv must be an nn.Conv2d .* got _Adapter"):
        layer(x)
    layer = make_layer(2, 3)
    layer.wavelet_convs[0] = _Quantised(8, 8, 3, padding=1, groups=8, bias=False)
    with pytest.raises(TypeError, match=r"of wavelet_convs must be an .* got _Quantised"):
        layer(x)


def test_checkpoint_loads_under_another_default_device():
    saved = make_layer(2, 3).state_dict()
    with torch.device("meta"):
        layer = WTConv2d(2, 2, 3)
        layer.load_state_dict(saved, assign=True)
    assert layer.base_conv.weight.device.type == "cpu"


def test_checkpoint_loads_in_fake_mode():
    with FakeTensorMode():
        layer = WTConv2d(2, 2, 3)
        ones = {"stride_filter": torch.ones(2, 1, 1, 1)}
        layer.load_state_dict({**layer.state_dict(), **ones})


@pytest.mark.slow
def test_plain_path_trains_compiled_with_dynamic_sizes(monkeypatch, fresh_compiler):
    monkeypatch.setattr(functional, "_kernels_serve", lambda *_: False)
    layer = make_layer(2, 3)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    parameters = list(layer.parameters())
    for shape in ((2, 2, 9, 7), (3, 2, 6, 8)):
        x = make_input(*shape)
        found = torch.autograd.grad(compiled(x).square().sum(), parameters)
        expected = torch.autograd.grad(layer(x).square().sum(), parameters)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_make_fx_traces_symbolic_sizes(ops):
    arguments = present(Sample(7, 6, 1).make())
    half = arguments[:4]

    def run(*flat: Tensor) -> Tensor:
        return functional.wtconv2d(*flat[:4], [flat[4]], [flat[5]])

    graph = make_fx(run, tracing_mode="symbolic")(*half, arguments[4], arguments[5])
    other = Sample(9, 11, 1).make(seed=1)
    torch.testing.assert_close(graph(*present(other)), reference.wtconv2d(*other))


@pytest.mark.parametrize("argument", range(6))
def test_vectorized_forward_mode_jacobian_is_the_reverse_mode_one(ops, argument):
    flat = list(present(Sample(3, 4, 1, kernel_size=2).make(dtype=torch.float64)))

    def run(tensor: Tensor) -> Tensor:
        return fused(*flat[:argument], tensor, *flat[argument + 1 :])

    jacobian = torch.autograd.functional.jacobian
    forward = jacobian(run, flat[argument], vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(forward, jacobian(run, flat[argument]))


def test_vmap_over_nothing_gives_nothing(ops):
    flat = present(Sample(5, 6, 2).make(requires_grad=True))
    x = torch.randn(0, *flat[0].shape, requires_grad=True)
    output = vmap(lambda item: fused(item, *flat[1:]))(x)
    assert output.shape == x.shape
    gradients = torch.autograd.grad(output.sum(), [x, *flat[1:]])
    assert [g.shape for g in gradients] == [x.shape, *(t.shape for t in flat[1:])]
    assert all(g.eq(0).all() for g in gradients)
    scales = flat[3].new_zeros(0, *flat[3].shape)
    assert vmap(lambda s: fused(*flat[:3], s, *flat[4:]))(scales).shape == x.shape


@pytest.mark.parametrize(
    ("argument", "shape", "said"),
    [
        (2, (3, 1, 4), r"base_bias must be \[C\] = \[4\], got \[1, 4\]"),
        (2, (3,), r"base_bias must be \[C\] = \[4\], got \[\]"),
        (3, (3, 4), r"base_scale must be \[1, C, 1, 1\] = \[1, 4, 1, 1\], got \[4\]"),
        (3, (3, 2, 2, 1, 1), r"= \[1, 4, 1, 1\], got \[2, 2, 1, 1\]"),
        (5, (3, 16), r"wavelet_scales\[0\] must be \[1, 4\*C, 1, 1\] = .*, got \[16\]"),
    ],
)
def test_vmap_names_the_shape_of_one_item(ops, argument, shape, said):
    flat = present(Sample(5, 6, 1, channels=4).make())
    with pytest.raises(RuntimeError, match=said):
        vmap(lambda item: fused(*flat[:argument], item, *flat[argument + 1 :]))(torch.ones(shape))


@pytest.mark.parametrize("dtype", [*NOT_FLOATING, torch.uint16, torch.int64], ids=str)
def test_kernel_and_fake_impl_name_dtypes_alike(ops, dtype):
    _, *parameters = Sample(5, 6, 1).make()
    x = torch.ones(2, 2, 5, 6).to(dtype)
    said = []
    for device in ("cpu", "meta"):
        moved = [
            p if p is None else [t.to(device) for t in p] if isinstance(p, list) else p.to(device)
            for p in parameters
        ]
        with pytest.raises(RuntimeError) as caught:
            ops.fused_forward(x.to(device), *moved)
        said.append(str(caught.value).splitlines()[0])
    assert said[0] == said[1]
    assert said[0].endswith(_checks.dtype_name(dtype))


@pytest.mark.parametrize("input", [None, [1.0], 3, "x"], ids=str)
def test_input_that_is_no_tensor_is_a_type_error(input):
    with pytest.raises(TypeError, match="wtconv2d: input must be a Tensor, got"):
        make_layer(2, 3)(input)


def test_recorded_gradients_may_be_modified_in_place(ops):
    _, *parameters = leaves(Sample(5, 6, 2).make(), torch.float64)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    flat = present([x, *parameters])[1:]

    def gradients() -> tuple[Tensor, ...]:
        loss = ops.fused_forward(x, *parameters).square().sum()
        return torch.autograd.grad(loss, flat, create_graph=True)

    doubled = [gradient.mul_(2) for gradient in gradients()]
    expected = [gradient * 2 for gradient in gradients()]
    torch.testing.assert_close(doubled, expected, rtol=0.0, atol=0.0)
    second = torch.autograd.grad(sum(g.square().sum() for g in doubled), flat)
    same = torch.autograd.grad(sum(g.square().sum() for g in expected), flat)
    torch.testing.assert_close(second, same)


@pytest.mark.parametrize("stride", [1, 2])
def test_checks_say_nothing_under_jit_trace(ops, stride):
    layer = make_layer(2, 3, stride=stride)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, make_input(1, 2, 7, 6))
    x = make_input(2, 2, 8, 5)
    torch.testing.assert_close(traced(x), layer(x), rtol=0.0, atol=0.0)
