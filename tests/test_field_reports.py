"""What users of WTConv have run into, as laws: the reports that concern the layer.

Number and order as in the reports; operator, compiler and export reports have their own files.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_cases import (
    arguments,
    assert_layer_follows_reference,
    gradients,
    make_input,
    make_layer,
    reference_run,
)
from torch import Tensor, nn

from wtconv_ops import WTConv2d

ROOT = Path(__file__).resolve().parents[1]
DOUBLE = torch.float64


# 1. The gradient of a weight has the factor of its scale.


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_weight_gradients_carry_the_scale(levels: int) -> None:
    for dtype in (torch.float32, DOUBLE):
        layer = make_layer(17, 5, wt_levels=levels, dtype=dtype)
        assert_layer_follows_reference(layer, make_input(2, 17, 12, 12, dtype=dtype))


def test_zero_scale_gives_zero_weight_gradient_and_a_scale_gradient() -> None:
    layer = make_layer(4, 5, wt_levels=2, dtype=DOUBLE)
    with torch.no_grad():
        layer.base_scale.weight[0, 1] = 0.0
        layer.wavelet_scale[1].weight[0, 6] = 0.0
    input = make_input(2, 4, 12, 12, dtype=DOUBLE)
    assert_layer_follows_reference(layer, input)
    found = gradients(layer, input, lambda module, x: module(x))
    assert torch.count_nonzero(found["base_conv.weight"][1]) == 0
    assert torch.count_nonzero(found["wavelet_convs.1.weight"][6]) == 0
    assert found["base_conv.bias"][1] == 0.0
    assert found["base_scale.weight"][0, 1, 0, 0] != 0.0
    assert found["wavelet_scale.1.weight"][0, 6, 0, 0] != 0.0


# 2. The bias stands inside the base scale.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("levels", [0, 1])
def test_bias_is_scaled_and_enters_the_scale_gradient(levels: int, bias: bool) -> None:
    layer = make_layer(3, 3, wt_levels=levels, bias=bias, dtype=DOUBLE)
    with torch.no_grad():
        layer.base_scale.weight.fill_(2.0)
    input = make_input(2, 3, 8, 8, dtype=DOUBLE)
    assert_layer_follows_reference(layer, input)
    if bias:
        zero = torch.zeros_like(input)
        found = gradients(layer, zero, lambda module, x: module(x))
        expected = 2.0 * layer.base_conv.bias[:, None, None].expand(3, 8, 8)
        torch.testing.assert_close(found["output"][0], expected)
        received = found["base_scale.weight"].flatten() / layer.base_conv.bias
        torch.testing.assert_close(received, found["base_conv.bias"] / 2.0)


# 3. Odd sizes that appear at an inner level only.

INNER_ODD = [(56, 56, 5), (28, 28, 4), (14, 14, 3), (7, 7, 2), (13, 10, 3), (1, 7, 3), (2, 2, 5)]
ONE_ODD = [(9, 8, 2), (8, 9, 2), (6, 4, 2), (4, 6, 2)]


@pytest.mark.parametrize(("height", "width", "levels"), INNER_ODD + ONE_ODD)
def test_odd_sizes_at_inner_levels_pad_with_zeros(height: int, width: int, levels: int) -> None:
    layer = make_layer(3, 5, wt_levels=levels, dtype=DOUBLE)
    assert_layer_follows_reference(layer, make_input(2, 3, height, width, dtype=DOUBLE))


@pytest.mark.parametrize("kernel_size", [4, 5])
@pytest.mark.parametrize(("height", "width", "levels"), INNER_ODD + ONE_ODD)
def test_input_gradient_is_the_adjoint(
    height: int, width: int, levels: int, kernel_size: int
) -> None:
    layer = make_layer(3, kernel_size, wt_levels=levels, bias=False, dtype=DOUBLE)
    input = make_input(2, 3, height, width, dtype=DOUBLE)
    found = gradients(layer, input, lambda module, x: module(x))
    cotangent = make_input(2, 3, height, width, dtype=DOUBLE, seed=2)
    left, right = (found["output"] * cotangent).sum(), (input * found["input"]).sum()
    scale = float(found["output"].norm() * cotangent.norm())
    torch.testing.assert_close(left, right, rtol=0.0, atol=1e-12 * scale)


# 5. Parameters that are replaced are the ones that count.


def test_assigned_state_is_used() -> None:
    trained = make_layer(3, wt_levels=2)
    layer = WTConv2d(3, 3, wt_levels=2, device="meta")
    layer.load_state_dict(trained.state_dict(), assign=True, strict=True)
    input = make_input(2, 3, 9, 6)
    torch.testing.assert_close(layer(input), trained(input), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("with_filters", [True, False])
def test_functional_call_follows_the_replaced_weights(with_filters: bool) -> None:
    layer, other = make_layer(3, wt_levels=2), make_layer(3, wt_levels=2, seed=7)
    state = dict(other.state_dict()) if with_filters else dict(other.named_parameters())
    input = make_input(2, 3, 9, 6)
    before = layer(input)
    output = torch.func.functional_call(layer, state, (input,))
    torch.testing.assert_close(output, other(input), rtol=0.0, atol=0.0)
    torch.testing.assert_close(layer(input), before, rtol=0.0, atol=0.0)


def test_functional_call_refuses_other_filters() -> None:
    layer = make_layer(3, wt_levels=1)
    state = {name: 2 * value for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"wt_filter must be within 0\.001 of the Haar filters"):
        torch.func.functional_call(layer, state, (make_input(1, 3, 5, 5),))


def test_replica_with_plain_tensors_for_parameters_is_used() -> None:
    # DataParallel replicas carry tensors that are not parameters as plain attributes.
    layer = make_layer(3, wt_levels=1)
    replica = copy.deepcopy(layer)
    for module, twin in zip(layer.modules(), replica.modules(), strict=True):
        for name, parameter in list(module.named_parameters(recurse=False)):
            del twin._parameters[name]
            setattr(twin, name, 2 * parameter)
    input = make_input(1, 3, 5, 5)
    doubled = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    output = replica(input)
    torch.testing.assert_close(output, doubled(input), rtol=0.0, atol=0.0)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_parametrized_weights_are_used() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer = make_layer(3, wt_levels=1)
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        expected.base_conv.weight.mul_(2)
    nn.utils.parametrize.register_parametrization(layer.base_conv, "weight", Doubled())
    input = make_input(1, 3, 5, 5)
    torch.testing.assert_close(layer(input), expected(input), rtol=0.0, atol=0.0)


# 7. Checkpoint keys.


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def test_checkpoint_with_the_old_stride_filter_loads_strictly() -> None:
    layer, trained = WTConv2d(3, 3, stride=2), make_layer(3, stride=2)
    state = dict(trained.state_dict())
    state["stride_filter"] = torch.ones(3, 1, 1, 1)
    layer.load_state_dict(state, strict=True)
    input = make_input(1, 3, 9, 6)
    torch.testing.assert_close(layer(input), trained(input), rtol=0.0, atol=0.0)
    state["stride_filter"] = torch.full((3, 1, 1, 1), 0.5)
    with pytest.raises(RuntimeError, match="stride_filter must be a tensor of ones"):
        layer.load_state_dict(state, strict=True)


def test_checkpoint_without_filters_loads_strictly() -> None:
    layer, trained = WTConv2d(3, 3), make_layer(3)
    layer.load_state_dict(dict(trained.named_parameters()), strict=True)
    input = make_input(1, 3, 9, 6)
    torch.testing.assert_close(layer(input), trained(input), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("base_scale.weight", "base_scale"),
        lambda name: name.replace("wavelet_scale.0.weight", "wavelet_scales.0"),
        lambda name: name.replace("base_conv.weight", "base_weight"),
        lambda name: name.replace("wavelet_convs.0.weight", "wt_weights.0"),
        lambda name: "_orig_mod." + name,
        lambda name: "module." + name,
    ],
)
def test_checkpoint_with_other_names_is_refused_with_a_list_of_them(rename: object) -> None:
    layer = make_layer(3)
    state = {rename(name): value for name, value in layer.state_dict().items()}  # type: ignore[operator]
    changed = sorted(set(state) - set(layer.state_dict()))
    with pytest.raises(RuntimeError, match="Unexpected key") as error:
        layer.load_state_dict(state, strict=True)
    assert all(f'"{name}"' in str(error.value) for name in changed)


def test_checkpoint_of_a_compiled_or_wrapped_layer_loads_into_its_like() -> None:
    trained = make_layer(3)
    input = make_input(1, 3, 9, 6)
    compiled: Any = torch.compile(WTConv2d(3, 3), backend="eager")
    compiled.load_state_dict(prefixed(trained.state_dict(), "_orig_mod."), strict=True)
    torch.testing.assert_close(compiled(input), trained(input), rtol=0.0, atol=0.0)
    wrapped = nn.DataParallel(WTConv2d(3, 3)).cpu()  # it moves to a GPU where there is one
    wrapped.load_state_dict(prefixed(trained.state_dict(), "module."), strict=True)
    torch.testing.assert_close(wrapped.module(input), trained(input), rtol=0.0, atol=0.0)


# 8. Names and types that training recipes look for.


def test_recipes_find_scales_by_name_and_convolutions_by_type() -> None:
    network = nn.Sequential(make_layer(3, wt_levels=2), nn.Conv2d(3, 3, 1))
    scales = {n for n, _ in network.named_parameters() if "wavelet_scale" in n or "base_scale" in n}
    assert scales == {
        "0.base_scale.weight",
        "0.wavelet_scale.0.weight",
        "0.wavelet_scale.1.weight",
    }
    assert all(network.get_parameter(name).dim() == 4 for name in scales)
    convolutions = {n for n, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert convolutions == {"0.base_conv", "0.wavelet_convs.0", "0.wavelet_convs.1", "1"}


def test_initialising_by_type_reaches_the_weights_that_count() -> None:
    layer = make_layer(16, 7, wt_levels=1)

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    torch.manual_seed(0)
    layer.apply(initialise)
    for weight in (layer.base_conv.weight, layer.wavelet_convs[0].weight):
        torch.testing.assert_close(float(weight.detach().std()), 0.02, rtol=0.1, atol=0.0)
    input = make_input(1, 16, 5, 5)
    torch.testing.assert_close(layer(input), reference_run(layer, input))


# 9. Copies (more in test_module_state.py).


def test_saved_layer_works_in_a_fresh_process(tmp_path: Path) -> None:
    layer = make_layer(3, wt_levels=2, stride=2)
    input = make_input(2, 3, 9, 6)
    expected = layer(input)
    expected.sum().backward()
    torch.save((layer, input, expected.detach()), tmp_path / "layer.pt")
    program = (
        "import torch\n"
        f"layer, input, expected = torch.load({str(tmp_path / 'layer.pt')!r}, weights_only=False)\n"
        "torch.testing.assert_close(layer(input), expected, rtol=0.0, atol=0.0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=300)


# 10. Even kernels.


@pytest.mark.parametrize("levels", [0, 1])
def test_even_kernel_pads_one_less_on_the_left_and_top(levels: int) -> None:
    layer = WTConv2d(1, 1, 4, wt_levels=levels, bias=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.base_conv.weight[0, 0, 0, 0] = 1.0
        layer.base_scale.weight.fill_(1.0)
    input = torch.zeros(1, 1, 8, 8)
    input[0, 0, 2, 2] = 1.0
    assert layer(input).nonzero().tolist() == [[0, 0, 3, 3]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kernel_size", [2, 4, 8])
@pytest.mark.parametrize("levels", [0, 2])
def test_even_kernels_give_no_warning(levels: int, kernel_size: int) -> None:
    make_layer(2, kernel_size, wt_levels=levels)(make_input(1, 2, 7, 7))


# 11. More levels than the map allows.


@pytest.mark.parametrize(
    ("size", "levels"), [(1, 3), (7, 5), (2, 5), (8, 0), (9, 6), (9, 7), (3, 32)]
)
def test_any_number_of_levels_runs_on_any_map(size: int, levels: int) -> None:
    layer = make_layer(2, 3, wt_levels=levels, dtype=DOUBLE)
    assert_layer_follows_reference(layer, make_input(2, 2, size, size, dtype=DOUBLE))


# 12. Stride.


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize(("height", "width"), [(13, 10), (1, 1), (56, 56)])
def test_stride_subsamples_the_sum_of_both_paths(
    height: int, width: int, levels: int, stride: int
) -> None:
    layer = make_layer(2, 5, stride=stride, wt_levels=levels, dtype=DOUBLE)
    input = make_input(2, 2, height, width, dtype=DOUBLE)
    assert_layer_follows_reference(layer, input)
    full = reference_run(layer, input)
    torch.testing.assert_close(layer(input), full[:, :, ::stride, ::stride])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("stride", [2, 3])
def test_stride_keeps_dtype_and_size(stride: int, dtype: torch.dtype) -> None:
    layer = make_layer(2, 5, stride=stride, dtype=dtype)
    output = layer(make_input(2, 2, 13, 10, dtype=dtype))
    assert output.dtype == dtype
    assert output.shape[2:] == {2: (7, 5), 3: (5, 4)}[stride]


def test_pixels_that_stride_drops_get_no_gradient() -> None:
    layer = make_layer(2, 1, stride=2, wt_levels=0)
    input = make_input(1, 2, 13, 10).requires_grad_()
    layer(input).sum().backward()
    assert input.grad is not None
    assert torch.count_nonzero(input.grad[:, :, ::2, ::2]) == 2 * 7 * 5
    assert torch.count_nonzero(input.grad) == 2 * 7 * 5


# 13. Wrong channel count.


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_wrong_channel_count_names_both_and_the_way_out(place: str) -> None:
    layer = WTConv2d(32, 32, device=place)
    sentence = "input has 3 channels but base_weight has 32; .* use a 1x1 convolution"
    with pytest.raises(RuntimeError, match=sentence):
        layer(torch.ones(1, 3, 8, 8, device=place))


def test_compiler_reports_the_wrong_channel_count_in_the_same_words() -> None:
    layer = torch.compile(WTConv2d(32, 32), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="input has 3 channels but base_weight has 32"):
        layer(torch.ones(1, 3, 8, 8))


# 14. Other wavelets.


def test_directions_of_lh_and_hl_are_those_of_the_wavelet_path() -> None:
    for band, varies in ((1, "rows"), (2, "columns")):
        layer: Any = WTConv2d(1, 1, 1, bias=False)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.wavelet_convs[0].weight[band] = 1.0
            layer.wavelet_scale[0].weight[0, band] = 1.0
        ramp = torch.arange(8.0)
        rows = ramp[:, None].expand(8, 8)[None, None]
        same, other = (rows, rows.mT) if varies == "rows" else (rows.mT, rows)
        pattern = torch.tensor([-0.5, 0.5]).repeat(4)
        expected = pattern[:, None].expand(8, 8)[None, None]
        expected = expected if varies == "rows" else expected.mT
        torch.testing.assert_close(layer(same), expected)
        assert torch.count_nonzero(layer(other)) == 0


def test_parameters_go_to_the_operator_in_the_order_of_its_schema() -> None:
    layer = make_layer(2, 3, wt_levels=2)
    weight, bias, scale, weights, scales = arguments(layer)
    assert weight.shape == (2, 1, 3, 3)
    assert bias.shape == (2,)
    assert scale.shape == (1, 2, 1, 1)
    assert [w.shape for w in weights] == [(8, 1, 3, 3)] * 2
    assert [s.shape for s in scales] == [(1, 8, 1, 1)] * 2
