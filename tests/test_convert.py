"""Laws of convert: equal results, the same objects, and a reason for everything left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer, randomize
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from upstream_layers import (
    Activated,
    BiasAfterScale,
    EarlyFused,
    Fused,
    Parts,
    Strided,
    reference_layer,
    run_fused,
)

import wtconv_ops
from wtconv_ops import WTConv2d, convert
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d


class Network(nn.Module):
    """Layers in a Sequential, in a ModuleList, and one that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), reference_layer(4, 3, wt_levels=3))
        self.blocks = nn.ModuleList(reference_layer(4, 5, wt_levels=i, seed=i) for i in (1, 2))
        self.shared = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stem(x)
        for block in self.blocks:
            y = y + block(y).tanh()
        return self.shared(y)


def gradients_of(module: nn.Module, input: Tensor) -> list[Tensor]:
    """Output, input gradient and parameter gradients; frozen parameters left out."""
    input = input.clone().requires_grad_()
    output = module(input)
    trainable = [p for p in module.parameters() if p.requires_grad]
    return [output, *torch.autograd.grad(output.square().sum(), [input, *trainable])]


# Equality


@pytest.mark.parametrize(("kernel_size", "bias"), [(3, True), (5, False)])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(13, 10), (7, 7), (16, 12), (1, 5)])
def test_converted_layer_and_gradients_equal_the_original(
    height: int, width: int, levels: int, kernel_size: int, bias: bool
) -> None:
    layer = reference_layer(4, kernel_size, wt_levels=levels, bias=bias).double()
    input = make_input(2, 4, height, width, dtype=torch.float64)
    expected = gradients_of(layer, input)
    report = convert(layer)
    assert isinstance(report.model, WTConv2d)
    for found, want in zip(gradients_of(report.model, input), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-11)


def test_converted_network_equals_the_original() -> None:
    model = Network()
    input = make_input(2, 3, 13, 11)
    expected = gradients_of(model, input)
    report = convert(model)
    assert report.model is model
    assert [entry.names for entry in report.swapped] == [
        ("stem.1",),
        ("blocks.0", "shared"),
        ("blocks.1",),
    ]
    assert report.left == ()
    assert model.shared is model.blocks[0]
    for found, want in zip(gradients_of(model, input), expected, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_stride_is_kept(stride: int) -> None:
    layer = randomize(Strided(3, stride, wt_levels=2)).double()
    input = make_input(1, 3, 13, 10, dtype=torch.float64)
    expected = layer(input)
    model: Any = convert(layer).model
    assert model.stride == stride
    torch.testing.assert_close(model(input), expected)


def test_fused_layer_is_swapped_on_any_device_and_its_keys_are_mapped() -> None:
    model = nn.Sequential(randomize(Fused(3)))
    input = make_input(1, 3, 13, 10)
    expected, state = run_fused(model[0], input), copy.deepcopy(model.state_dict())
    report = convert(model)
    torch.testing.assert_close(model(input), expected)
    assert report.renamed["0.wt_scales.1"] == "0.wavelet_scale.1.weight"
    assert report.renamed["0.base_bias"] == "0.base_conv.bias"
    assert set(report.renamed) == set(state)
    other = nn.Sequential(make_layer(3, wt_levels=2, seed=7))
    missing = other.load_state_dict({report.renamed.get(k, k): v for k, v in state.items()}, False)
    assert sorted(missing.missing_keys) == []
    torch.testing.assert_close(other(input), expected)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: randomize(BiasAfterScale(3)), "does not compute WTConv: it differs by"),
        (lambda: randomize(EarlyFused(3)), r"cannot be run to compare it \(these kernels need"),
    ],
)
def test_unproven_fused_layers_stay_unless_asked(
    layer: Callable[[], nn.Module], sentence: str
) -> None:
    model = nn.Sequential(layer())
    report = convert(model)
    assert report.swapped == ()
    assert sentence.replace("\\", "") in report.left[0].reason
    assert "unproven=True" in report.left[0].reason
    (entry,) = convert(model, unproven=True).swapped
    assert not entry.proven
    assert isinstance(model[0], WTConv2d)


def test_fused_layer_of_its_own_operations_is_swapped_where_they_agree() -> None:
    report = convert(randomize(BiasAfterScale(3, bias=False)))
    assert report.swapped[0].proven


# What is kept


def test_optimizer_made_before_goes_on() -> None:
    model = Network()
    twin = copy.deepcopy(model)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, twin)
    ]
    input = make_input(2, 3, 9, 6)
    for step in range(4):
        for module, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            module(input).square().mean().backward()
            optimizer.step()
        if step == 1:
            before = {n: p for n, p in model.named_parameters() if p.requires_grad}
            convert(model)
            after = dict(model.named_parameters())
            assert set(after) == set(before)
            assert all(after[name] is before[name] for name in after)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, twin.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_state_dict_keeps_keys_and_goes_both_ways() -> None:
    model, fresh = Network(), Network()
    original = copy.deepcopy(model.state_dict())
    convert(model)
    assert list(model.state_dict()) == list(original)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, original[name], rtol=0.0, atol=0.0)
    model.load_state_dict(original, strict=True)
    randomize(fresh, seed=9).load_state_dict(model.state_dict(), strict=True)
    input = make_input(1, 3, 9, 6)
    torch.testing.assert_close(fresh(input), model(input))


def test_hooks_fire_and_their_handles_still_remove_them() -> None:
    calls: list[str] = []
    layer = reference_layer(3)
    handles = [
        layer.register_forward_pre_hook(lambda *_: calls.append("pre")),
        layer.register_forward_hook(lambda *_, **__: calls.append("post"), with_kwargs=True),
        layer.register_full_backward_hook(lambda *_: calls.append("backward")),
        layer.register_state_dict_post_hook(lambda *_: calls.append("state_dict")),
    ]
    model = nn.Sequential(layer)
    convert(model)
    assert calls == []
    input = make_input(1, 3, 5, 5).requires_grad_()
    model(input).sum().backward()
    model.state_dict()
    assert calls == ["pre", "post", "backward", "state_dict"]
    for handle in handles:
        handle.remove()
    model(input)
    model.state_dict()
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_dtype_flags_and_attributes_are_kept(device: str, dtype: torch.dtype) -> None:
    layer = reference_layer(3, wt_levels=2).to(device, dtype).eval()
    layer.wavelet_convs[1].train()
    layer.base_conv.weight.requires_grad_(False)
    layer.depth = 7
    new: Any = convert(layer).model
    assert not new.training
    assert not new.base_conv.training
    assert new.wavelet_convs[1].training
    assert not new.base_conv.weight.requires_grad
    assert new.base_conv.bias.requires_grad
    assert new.depth == 7
    assert {(p.device.type, p.dtype) for p in new.parameters()} == {(device, dtype)}


def test_random_state_and_the_layer_are_untouched() -> None:
    layer = reference_layer(3, wt_levels=2)
    layer.do_nothing = lambda: None  # what cannot be pickled is carried along
    model, values = nn.Sequential(layer, Activated(3)), copy.deepcopy(layer.state_dict())
    state = torch.get_rng_state()
    convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, values[name])


def test_copies_of_a_converted_model_are_independent() -> None:
    model = Network()
    convert(model)
    twin, input = copy.deepcopy(model), make_input(1, 3, 7, 6)
    torch.testing.assert_close(twin(input), model(input), rtol=0.0, atol=0.0)
    assert twin.shared is twin.blocks[0]
    with torch.no_grad():
        model.shared.base_scale.weight.zero_()
    assert not torch.equal(twin(input), model(input))


def test_converting_twice_changes_nothing() -> None:
    model = Network()
    convert(model)
    again = convert(model)
    assert (again.swapped, again.left) == ((), ())


def test_wrapped_models_are_converted_inside() -> None:
    model = nn.DataParallel(Network())
    report = convert(model)
    assert len(report.swapped) == 3
    assert report.swapped[1].names == ("module.blocks.0", "module.shared")
    layer = nn.DataParallel(reference_layer(3))
    convert(layer)
    assert isinstance(layer.module, WTConv2d)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_model_follows_a_conversion_inside_it() -> None:
    model = Network()
    compiled = torch.compile(model, backend="eager")
    input = make_input(1, 3, 9, 6)
    expected = compiled(input)
    calls: list[int] = []
    convert(compiled)
    model.stem[1].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(compiled(input), expected)
    assert calls == [1]


# What is left alone


def changed(change: Callable[[Any], Any], **options: Any) -> Any:
    layer = reference_layer(3, wt_levels=2, **options)
    change(layer)
    return layer


def negate_one_filter(layer: Any) -> None:
    layer.wt_filter.data[5] *= -1


def swap_subbands(layer: Any) -> None:
    for filters in (layer.wt_filter, layer.iwt_filter):
        filters.data = filters.data.reshape(3, 4, 1, 2, 2)[:, [0, 2, 1, 3]].reshape(12, 1, 2, 2)


def replace_conv(layer: Any, **options: Any) -> None:
    settings = {"padding": 2, "groups": 3, **options}
    layer.base_conv = nn.Conv2d(3, 3, 5, **settings)


REASONS: list[tuple[Callable[[Any], Any], str]] = [
    (negate_one_filter, "wt_filter must be within 0.001 of the Haar filters"),
    (swap_subbands, "wt_filter must be within 0.001 of the Haar filters"),
    (lambda m: m.iwt_filter.data.mul_(2), "iwt_filter must be within 0.001 of the Haar"),
    (lambda m: m.wt_filter.data.mul_(torch.nan), "wt_filter must be within 0.001 of the Haar"),
    (lambda m: m.iwt_filter.requires_grad_(), "iwt_filter is trainable"),
    (lambda m: setattr(m, "wt_filter", None), "it has no wt_filter"),
    (lambda m: m.register_buffer("mask", torch.ones(1)), "of its own: mask"),
    (lambda m: setattr(m, "norm", nn.BatchNorm2d(3)), "of its own: norm"),
    (lambda m: setattr(m, "forward", m.forward), "its forward or __call__ is replaced"),
    (lambda m: m.compile(backend="eager"), "it is compiled in place"),
    (lambda m: setattr(m, "in_channels", 6), "in_channels is 6, the parameters have 3"),
    (lambda m: setattr(m, "stride", (2, 2)), "stride is (2, 2), not a positive int"),
    (lambda m: setattr(m, "stride", 2), "not the subsampling of stride 2"),
    (lambda m: setattr(m, "wt_filter_", 1) or replace_conv(m, stride=2), "has stride (2, 2)"),
    (lambda m: replace_conv(m, padding=0), "base_conv pads (0, 0) with zeros"),
    (lambda m: replace_conv(m, padding_mode="circular"), "with circular; it must keep the size"),
    (lambda m: replace_conv(m, groups=1), "base_conv is not depthwise: 3 to 3 channels in 1"),
    (lambda m: setattr(m, "base_conv", nn.Identity()), "base_conv is a Identity, not an nn.Con"),
    (lambda m: m.base_conv.register_forward_hook(print), "base_conv has hooks"),
    (lambda m: m.wavelet_scale[1].register_forward_pre_hook(print), "wavelet_scale.1 has hooks"),
    (lambda m: prune.random_unstructured(m.base_conv, "weight", 0.5), "base_conv has hooks"),
    (
        lambda m: parametrize.register_parametrization(m.base_conv, "weight", nn.Identity()),
        "base_conv is parametrized",
    ),
    (
        lambda m: parametrize.register_parametrization(m, "wt_filter", nn.Identity()),
        "it is parametrized",
    ),
    (lambda m: m.wavelet_scale.pop(1), "wavelet_convs and wavelet_scale differ in length"),
    (lambda m: m.base_scale.double(), "base_scale.weight differs from the base kernel in dtype"),
    (lambda m: m.to("meta"), "has no values yet"),
    (lambda m: m.wavelet_convs.__setitem__(0, nn.Conv2d(12, 12, 3, padding=1, groups=12)), "bias"),
    (lambda m: setattr(m, "reset_parameters", print), "an attribute reset_parameters of its own"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[r for _, r in REASONS])
def test_look_alikes_are_left_alone_with_the_reason(
    change: Callable[[Any], Any], reason: str
) -> None:
    model = nn.Sequential(changed(change), reference_layer(3))
    left = model[0]
    report = convert(model)
    assert model[0] is left
    assert isinstance(model[1], WTConv2d)
    assert report.left[0].names == ("0",)
    assert reason in report.left[0].reason
    assert reason in str(report)


def test_a_forward_of_its_own_is_noticed_by_running_it() -> None:
    model = nn.Sequential(Activated(3), Trained(3))
    report = convert(model)
    assert report.swapped == ()
    for entry in report.left:
        assert "its forward does not compute WTConv: it differs by" in entry.reason
    assert convert(model, unproven=True).swapped == ()


class Trained(Parts):
    """Differs from the reference layer in training only."""

    def forward(self, x: Tensor) -> Tensor:
        y = ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]
        return nn.functional.dropout(y, 0.1, self.training)


def test_compiled_and_scripted_parents_are_left_alone() -> None:
    compiled = torch.compile(reference_layer(3), backend="eager")
    reason = convert(nn.Sequential(compiled)).left[0].reason
    assert "the module around it is compiled" in reason
    assert convert(nn.Sequential(nn.Linear(2, 2))).left == ()


def test_report_is_a_table() -> None:
    model = nn.Sequential(reference_layer(3), changed(negate_one_filter))
    lines = str(convert(model)).splitlines()
    assert lines[0] == "convert: 1 swapped, 1 left alone"
    assert (
        lines[1]
        == "  0  swapped     reference layer, 3, 3, kernel_size=5, wt_levels=1, wt_type='db1'"
    )
    assert lines[2].startswith("  1  left alone  wt_filter must be within")
    assert "(the model)" in str(convert(reference_layer(3)))


def test_only_modules_are_taken() -> None:
    with pytest.raises(TypeError, match=r"^convert: model must be an nn.Module, got dict"):
        wtconv_ops.convert({})  # type: ignore[arg-type]
