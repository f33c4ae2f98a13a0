"""Laws of the layer: construction, parameters, state_dict, copies, dtypes, layouts, bad input."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from budget import assert_within_budget
from layer_cases import (
    SHAPES,
    arguments,
    assert_layer_follows_reference,
    make_input,
    make_layer,
    reference_run,
)
from torch import Tensor

import wtconv_ops
from wtconv_ops import WTConv2d, functional, wtconv2d

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(params=["kernel", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the operator's kernel and on the plain PyTorch path."""
    if request.param == "plain":
        monkeypatch.setattr(functional, "_kernels_serve", lambda *_: False)
    elif not wtconv_ops.can_run("cpu", torch.float32, 5, 1):
        pytest.skip("the operator library is not installed")
    return str(request.param)


# Construction


def test_parameters_have_the_names_and_shapes_of_the_original() -> None:
    layer = WTConv2d(3, 3, kernel_size=5, wt_levels=2)
    shapes = {name: list(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "wt_filter": [12, 1, 2, 2],
        "iwt_filter": [12, 1, 2, 2],
        "base_conv.weight": [3, 1, 5, 5],
        "base_conv.bias": [3],
        "base_scale.weight": [1, 3, 1, 1],
        "wavelet_convs.0.weight": [12, 1, 5, 5],
        "wavelet_convs.1.weight": [12, 1, 5, 5],
        "wavelet_scale.0.weight": [1, 12, 1, 1],
        "wavelet_scale.1.weight": [1, 12, 1, 1],
    }
    trainable = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == set(shapes) - {"wt_filter", "iwt_filter"}


def test_image_has_the_name_of_the_original_in_calls_by_keyword() -> None:
    layer, image = make_layer(3, wt_levels=2), make_input(1, 3, 9, 6)
    assert list(inspect.signature(WTConv2d.forward).parameters) == ["self", "x"]
    torch.testing.assert_close(layer(x=image), layer(image), rtol=0.0, atol=0.0)


def test_scales_start_at_one_and_a_tenth() -> None:
    layer: Any = WTConv2d(3, 3, wt_levels=2)
    assert bool((layer.base_scale.weight == 1.0).all())
    for scale in layer.wavelet_scale:
        torch.testing.assert_close(scale.weight, torch.full_like(scale.weight, 0.1))


def test_reset_parameters_equals_a_new_layer() -> None:
    layer = make_layer(3, wt_levels=2)
    torch.manual_seed(5)
    layer.reset_parameters()
    torch.manual_seed(5)
    fresh = WTConv2d(3, 3, wt_levels=2)
    for got, want in zip(layer.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0)


def test_repr_shows_the_arguments() -> None:
    layer = WTConv2d(3, 3, kernel_size=7, stride=2, bias=False, wt_levels=2, wt_type="haar")
    assert layer.extra_repr() == (
        "3, 3, kernel_size=7, stride=2, bias=False, wt_levels=2, wt_type='haar'"
    )
    assert WTConv2d(3, 3).extra_repr() == "3, 3, kernel_size=5, wt_levels=1, wt_type='db1'"
    assert (layer.in_channels, layer.out_channels, layer.dilation) == (3, 3, 1)


def test_haar_and_db1_are_the_same_layer() -> None:
    haar, db1 = make_layer(3, wt_type="haar"), make_layer(3, wt_type="db1")
    input = make_input(1, 3, 7, 6)
    torch.testing.assert_close(haar(input), db1(input), rtol=0.0, atol=0.0)


def test_integers_of_other_libraries_are_taken() -> None:
    layer = WTConv2d(np.int64(3), np.int64(3), np.int32(5), wt_levels=np.int64(2))
    assert (layer.in_channels, layer.kernel_size, layer.wt_levels) == (3, 5, 2)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"in_channels": 0}, ValueError, "in_channels must be an int >= 1, got 0"),
        ({"in_channels": -4}, ValueError, "in_channels must be an int >= 1, got -4"),
        ({"in_channels": True}, TypeError, "in_channels must be an int >= 1, got True"),
        ({"out_channels": 8}, ValueError, "in_channels = 4, got 8; use a 1x1 convolution"),
        ({"kernel_size": 0}, ValueError, "kernel_size must be an int from 1 to 31, got 0"),
        ({"kernel_size": 32}, ValueError, "kernel_size must be an int from 1 to 31, got 32"),
        ({"kernel_size": (3, 3)}, TypeError, r"an int from 1 to 31, got \(3, 3\)"),
        ({"kernel_size": 5.0}, TypeError, "an int from 1 to 31, got 5.0"),
        ({"kernel_size": math.nan}, TypeError, "an int from 1 to 31, got nan"),
        ({"kernel_size": math.inf}, TypeError, "an int from 1 to 31, got inf"),
        ({"kernel_size": "5"}, TypeError, "an int from 1 to 31, got '5'"),
        ({"stride": 0}, ValueError, "stride must be an int >= 1, got 0"),
        ({"stride": -1}, ValueError, "stride must be an int >= 1, got -1"),
        ({"stride": (2, 2)}, TypeError, r"stride must be an int >= 1, got \(2, 2\)"),
        ({"wt_levels": -1}, ValueError, "wt_levels must be an int from 0 to 32, got -1"),
        ({"wt_levels": 33}, ValueError, "wt_levels must be an int from 0 to 32, got 33"),
        ({"wt_levels": None}, TypeError, "wt_levels must be an int from 0 to 32, got None"),
        ({"bias": "no"}, TypeError, "bias must be a bool, got 'no'"),
        ({"dtype": torch.int64}, TypeError, "dtype must be float32, .* got torch.int64"),
        ({"dtype": torch.complex64}, TypeError, "dtype must be float32, .* got torch.complex64"),
        ({"wt_type": "db2"}, NotImplementedError, "'db2'; other wavelets .* reference implement"),
        ({"wt_type": "sym2"}, NotImplementedError, "'sym2'; other wavelets .* reference implem"),
        ({"wt_type": 1}, TypeError, "wt_type must be 'db1' or 'haar', got 1"),
    ],
)
def test_constructor_names_what_is_wrong(
    options: dict[str, object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"^WTConv2d: .*{sentence}"):
        WTConv2d(**{"in_channels": 4, "out_channels": 4, **options})  # type: ignore[arg-type]


# Values


@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize(("height", "width", "levels"), SHAPES)
def test_layer_and_gradients_follow_the_reference(
    path: str, height: int, width: int, levels: int, kernel_size: int
) -> None:
    layer = make_layer(17, kernel_size, wt_levels=levels)
    assert_layer_follows_reference(layer, make_input(2, 17, height, width))


@pytest.mark.parametrize("dtype", [torch.float64, *HALF])
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_every_dtype_follows_the_reference(path: str, levels: int, dtype: torch.dtype) -> None:
    layer = make_layer(17, 5, wt_levels=levels, dtype=dtype)
    assert_layer_follows_reference(layer, make_input(2, 17, 13, 10, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("levels", [0, 2])
def test_every_kernel_size_follows_the_reference(
    path: str, levels: int, bias: bool, dtype: torch.dtype
) -> None:
    for kernel_size in range(1, 32):
        layer = make_layer(17, kernel_size, wt_levels=levels, bias=bias, dtype=dtype)
        assert_layer_follows_reference(layer, make_input(2, 17, 9, 6, dtype=dtype))


@pytest.mark.parametrize("levels", [0, 2])
def test_functional_form_equals_the_layer(path: str, levels: int) -> None:
    layer = make_layer(3, wt_levels=levels, stride=2)
    input = make_input(2, 3, 9, 6)
    output = wtconv2d(input, *arguments(layer), stride=2)
    torch.testing.assert_close(output, layer(input), rtol=0.0, atol=0.0)
    torch.testing.assert_close(output, reference_run(layer, input, stride=2))


def test_training_and_evaluation_are_the_same(path: str) -> None:
    layer = make_layer(3, wt_levels=2)
    input = make_input(2, 3, 9, 6)
    torch.testing.assert_close(layer.train()(input), layer.eval()(input), rtol=0.0, atol=0.0)


def test_plain_path_does_not_overflow_where_the_result_fits(path: str) -> None:
    layer = make_layer(1, 1, wt_levels=5, bias=False, dtype=torch.float16)
    with torch.no_grad():
        layer.base_conv.weight.fill_(0.5)
        layer.base_scale.weight.fill_(0.5)
        for conv, scale in zip(layer.wavelet_convs, layer.wavelet_scale, strict=True):
            conv.weight.fill_(0.25)
            scale.weight.fill_(0.5)
    input = torch.full((1, 1, 64, 64), 3000.0, dtype=torch.float16)
    expected = torch.full_like(input, 3000.0 * (0.25 + 5 * 0.125))
    torch.testing.assert_close(layer(input), expected)


# dtype and layout of the output


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_gives_the_autocast_dtype_and_float32_gradients(
    path: str, input_dtype: torch.dtype, dtype: torch.dtype, levels: int
) -> None:
    layer = make_layer(8, wt_levels=levels)
    input = make_input(2, 8, 9, 6, dtype=input_dtype).requires_grad_()
    with torch.autocast("cpu", dtype):
        output = layer(input)
    assert output.dtype == dtype
    output.float().square().sum().backward()
    assert input.grad is not None
    assert input.grad.dtype == input_dtype
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    rounded = input.detach().to(dtype)
    exact = reference_run(copy.deepcopy(layer).double(), rounded.double())
    same = reference_run(copy.deepcopy(layer).to(dtype), rounded)
    assert_within_budget(output, same, exact.detach(), "output")


@pytest.mark.parametrize("levels", [0, 2])
def test_disabled_inner_autocast_keeps_float32(path: str, levels: int) -> None:
    layer = make_layer(3, wt_levels=levels)
    input = make_input(2, 3, 9, 6)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert layer(input).dtype == torch.float32


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_output_has_the_layout_of_the_input(
    path: str, stride: int, kernel_size: int, levels: int
) -> None:
    layer = make_layer(3, kernel_size, wt_levels=levels, stride=stride)
    input = make_input(2, 3, 9, 6)
    planar = layer(input)
    assert planar.is_contiguous()
    interleaved = layer(input.contiguous(memory_format=torch.channels_last))
    assert interleaved.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(interleaved, planar)
    layer = layer.to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(input), planar)


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_empty_batch_has_the_layout_of_the_input(path: str, stride: int, levels: int) -> None:
    layer = make_layer(3, 3, wt_levels=levels, stride=stride)
    for layout in (torch.contiguous_format, torch.channels_last):
        input = torch.empty(0, 3, 9, 6, memory_format=layout, requires_grad=True)
        output = layer(input)
        assert output.stride() == torch.empty(output.shape, memory_format=layout).stride()
        (gradient,) = torch.autograd.grad(output, input, torch.empty_like(output))
        assert gradient.stride() == input.stride()


@pytest.mark.parametrize("levels", [0, 2])
def test_any_strides_give_the_same_values(path: str, levels: int) -> None:
    layer = make_layer(3, wt_levels=levels)
    wide = make_input(2, 5, 11, 13)
    views = [wide[:, 1:4, 2:, ::2], wide.transpose(2, 3)[:, 1:4], wide[:1, :3].expand(2, 3, 11, 13)]
    for view in views:
        torch.testing.assert_close(layer(view), layer(view.contiguous()))


@pytest.mark.parametrize("levels", [0, 2])
def test_empty_batch_gives_zero_gradients(path: str, levels: int) -> None:
    layer = make_layer(3, wt_levels=levels)
    input = torch.empty(0, 3, 9, 6, requires_grad=True)
    output = layer(input)
    assert output.shape == (0, 3, 9, 6)
    output.sum().backward()
    for tensor in (input, *layer.parameters()):
        assert tensor.grad is not None
        assert torch.count_nonzero(tensor.grad) == 0


# Errors of the call


def wrong_inputs() -> list[tuple[Tensor, str]]:
    good = make_input(2, 4, 9, 6)
    return [
        (good[0], r"input must be 4-D \[B, C, H, W\], got \[4, 9, 6\]"),
        (good.long(), "input must be float32, float64, float16 or bfloat16, got int64"),
        (good[:, :3], "input has 3 channels but base_weight has 4; .* a 1x1 convolution"),
        (good[:, :, :0], r"input must have C, H, W >= 1, got \[2, 4, 0, 6\]"),
        (good[:, :0], r"input must have C, H, W >= 1, got \[2, 0, 9, 6\]"),
        (good.bfloat16(), "must have the dtype of input, bfloat16, got float32; .*autocast"),
        (good.double(), "must have the dtype of input, float64, got float32; .*autocast"),
    ]


@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize("levels", [0, 2])
def test_call_names_what_is_wrong_with_the_input(path: str, levels: int, case: int) -> None:
    input, sentence = wrong_inputs()[case]
    layer = make_layer(4, wt_levels=levels)
    with pytest.raises(RuntimeError, match=f"fused_forward: .*{sentence}"):
        layer(input)


@pytest.mark.parametrize(
    ("stride", "error"), [(0, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_functional_form_refuses_a_wrong_stride(stride: int, error: type[Exception]) -> None:
    layer = make_layer(4)
    with pytest.raises(error, match=r"^wtconv2d: stride must be an int >= 1, got"):
        wtconv2d(make_input(1, 4, 5, 5), *arguments(layer), stride=stride)


def test_scales_without_weights_are_refused(path: str) -> None:
    weight, bias, scale, _, scales = arguments(make_layer(4))
    with pytest.raises(RuntimeError, match="wavelet_weights must have 1 to 32 levels, got 0"):
        wtconv2d(make_input(1, 4, 5, 5), weight, bias, scale, [], scales)
