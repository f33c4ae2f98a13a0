"""Laws of the plain-PyTorch reference, checked against loops and dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from layer_cases import SHAPES, arguments, make_input, make_layer, reference_run
from torch import Tensor

from wtconv_ops import reference

# Signs of the pixels a, b, c, d of a 2x2 block in LL, LH, HL, HH.
SIGNS = [[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]
KERNEL_SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31]


def pixel(plane: list[list[float]], y: int, x: int) -> float:
    inside = 0 <= y < len(plane) and 0 <= x < len(plane[0])
    return plane[y][x] if inside else 0.0


def loop_analysis(plane: list[list[float]]) -> list[list[list[float]]]:
    """Four subbands of one plane, block by block."""
    height, width = math.ceil(len(plane) / 2), math.ceil(len(plane[0]) / 2)
    bands = []
    for signs in SIGNS:
        band = [[0.0] * width for _ in range(height)]
        for y in range(height):
            for x in range(width):
                block = [pixel(plane, 2 * y + i, 2 * x + j) for i in (0, 1) for j in (0, 1)]
                band[y][x] = 0.5 * sum(s * p for s, p in zip(signs, block, strict=True))
        bands.append(band)
    return bands


def loop_convolve(plane: list[list[float]], kernel: list[list[float]]) -> list[list[float]]:
    """Cross-correlation that keeps the size, tap by tap."""
    k = len(kernel)
    before = (k - 1) // 2
    return [
        [
            sum(
                kernel[i][j] * pixel(plane, y + i - before, x + j - before)
                for i in range(k)
                for j in range(k)
            )
            for x in range(len(plane[0]))
        ]
        for y in range(len(plane))
    ]


def loop_wtconv(
    plane: list[list[float]],
    base: tuple[list[list[float]], float, float],
    levels: list[tuple[list[list[list[float]]], list[float]]],
) -> list[list[float]]:
    """One channel of the operator in nested loops over lists of numbers.

    Args:
        plane: H x W.
        base: kernel, bias and scale of the base path.
        levels: per level the kernels and scales of the four subbands.
    """
    filtered, lowpass = [], plane
    for kernels, scales in levels:
        bands = loop_analysis(lowpass)
        lowpass = bands[0]
        filtered.append(
            [
                [[s * value for value in row] for row in loop_convolve(band, kernel)]
                for band, kernel, s in zip(bands, kernels, scales, strict=True)
            ]
        )
    kernel, bias, scale = base
    output = [[scale * (value + bias) for value in row] for row in loop_convolve(plane, kernel)]
    for y in range(len(plane)):
        for x in range(len(plane[0])):
            for level, bands in enumerate(filtered, start=1):
                # Pixel of the 2x2 block, one level above the coefficients of this level.
                i, j = y // 2 ** (level - 1) % 2, x // 2 ** (level - 1) % 2
                for signs, band in zip(SIGNS, bands, strict=True):
                    value = band[y // 2**level][x // 2**level]
                    output[y][x] += signs[2 * i + j] * value / 2**level
    return output


def assert_equal_fp64(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("height", "width", "levels"), [(1, 1, 2), (3, 5, 1), (6, 7, 3)])
def test_wtconv2d_equals_nested_loops(
    height: int, width: int, levels: int, kernel_size: int
) -> None:
    layer = make_layer(2, kernel_size, wt_levels=levels, dtype=torch.float64)
    input = make_input(2, 2, height, width, dtype=torch.float64)
    weight, bias, scale, weights, scales = arguments(layer)
    expected = torch.empty_like(input)
    for b in range(2):
        for c in range(2):
            bands = slice(4 * c, 4 * c + 4)
            expected[b, c] = torch.tensor(
                loop_wtconv(
                    input[b, c].tolist(),
                    (weight[c, 0].tolist(), bias[c].item(), scale[0, c, 0, 0].item()),
                    [
                        (w[bands, 0].tolist(), s[0, bands, 0, 0].tolist())
                        for w, s in zip(weights, scales, strict=True)
                    ],
                ),
                dtype=torch.float64,
            )
    assert_equal_fp64(reference.wtconv2d(input, *arguments(layer)), expected)


def dense_matrix(function: object, shape: tuple[int, ...]) -> Tensor:
    """Matrix of a linear function of a tensor of ``shape``, one unit vector at a time."""
    size = math.prod(shape)
    units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    return torch.stack([function(unit).flatten() for unit in units], dim=1)  # type: ignore[operator]


def correlation_matrix(kernel: Tensor, height: int, width: int) -> Tensor:
    """Zero-padded cross-correlation of an H x W plane, written entry by entry."""
    k = kernel.shape[-1]
    matrix = torch.zeros(height * width, height * width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            for i in range(k):
                for j in range(k):
                    v, u = y + i - (k - 1) // 2, x + j - (k - 1) // 2
                    if 0 <= v < height and 0 <= u < width:
                        matrix[y * width + x, v * width + u] = kernel[i, j]
    return matrix


def analysis_matrix(height: int, width: int) -> Tensor:
    """Haar analysis of an H x W plane, written entry by entry: rows (s, y, x)."""
    h, w = math.ceil(height / 2), math.ceil(width / 2)
    matrix = torch.zeros(4, h, w, height, width, dtype=torch.float64)
    for s, signs in enumerate(SIGNS):
        for y in range(h):
            for x in range(w):
                for i in (0, 1):
                    for j in (0, 1):
                        if 2 * y + i < height and 2 * x + j < width:
                            matrix[s, y, x, 2 * y + i, 2 * x + j] = 0.5 * signs[2 * i + j]
    return matrix.reshape(4 * h * w, height * width)


@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 6), (7, 3)])
def test_wtconv2d_is_the_sum_of_transposed_analysis_times_filter_times_analysis(
    height: int, width: int, kernel_size: int
) -> None:
    levels = 2
    layer = make_layer(1, kernel_size, wt_levels=levels, dtype=torch.float64, bias=False)
    weight, _, scale, weights, scales = arguments(layer)
    expected = scale.item() * correlation_matrix(weight[0, 0], height, width)
    to_lowpass = torch.eye(height * width, dtype=torch.float64)
    h, w = height, width
    for level_weight, level_scale in zip(weights, scales, strict=True):
        to_bands = analysis_matrix(h, w) @ to_lowpass
        h, w = math.ceil(h / 2), math.ceil(w / 2)
        filters = torch.zeros(4 * h * w, 4 * h * w, dtype=torch.float64)
        for s in range(4):
            block = slice(s * h * w, (s + 1) * h * w)
            matrix = correlation_matrix(level_weight[s, 0], h, w)
            filters[block, block] = level_scale[0, s, 0, 0] * matrix
        expected = expected + to_bands.T @ filters @ to_bands
        to_lowpass = to_bands[: h * w]
    actual = dense_matrix(
        lambda unit: reference.wtconv2d(unit[None], *arguments(layer)), (1, height, width)
    )
    assert_equal_fp64(actual.detach(), expected.detach())


def test_analysis_orders_the_subbands_ll_lh_hl_hh() -> None:
    block = torch.tensor([[1.0, 2.0], [5.0, 9.0]], dtype=torch.float64)
    a, b, c, d = block.flatten().tolist()
    bands = reference.haar_analysis(block[None, None]).flatten().tolist()
    assert bands == [
        0.5 * (a + b + c + d),
        0.5 * (a + b - c - d),
        0.5 * (a - b + c - d),
        0.5 * (a - b - c + d),
    ]


def test_lh_sees_vertical_change_and_hl_horizontal_change() -> None:
    ramp = torch.arange(8, dtype=torch.float64)
    down = reference.haar_analysis(ramp[:, None].expand(8, 8)[None, None])[0, 0]
    across = reference.haar_analysis(ramp.expand(8, 8)[None, None])[0, 0]
    assert_equal_fp64(down[1], torch.full((4, 4), -1.0, dtype=torch.float64))
    assert_equal_fp64(across[2], torch.full((4, 4), -1.0, dtype=torch.float64))
    assert torch.count_nonzero(down[2:]) == 0
    assert torch.count_nonzero(across[[1, 3]]) == 0


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 7), (8, 8), (9, 6), (6, 9), (13, 11)])
def test_synthesis_inverts_analysis(height: int, width: int) -> None:
    input = make_input(2, 3, height, width, dtype=torch.float64)
    bands = reference.haar_analysis(input)
    assert_equal_fp64(reference.haar_synthesis(bands, (height, width)), input)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 6), (5, 3)])
def test_synthesis_is_the_transpose_of_analysis(height: int, width: int) -> None:
    h, w = math.ceil(height / 2), math.ceil(width / 2)
    forward = dense_matrix(lambda u: reference.haar_analysis(u[None]), (1, height, width))
    back = dense_matrix(lambda u: reference.haar_synthesis(u[None], (height, width)), (1, 4, h, w))
    assert_equal_fp64(back, forward.T)
    assert_equal_fp64(forward, analysis_matrix(height, width))


@pytest.mark.parametrize("kernel_size", KERNEL_SIZES)
@pytest.mark.parametrize(("height", "width", "levels"), SHAPES[:10])
def test_staged_form_equals_algorithm_1(
    height: int, width: int, levels: int, kernel_size: int
) -> None:
    layer = make_layer(3, kernel_size, wt_levels=levels, dtype=torch.float64)
    input = make_input(2, 3, height, width, dtype=torch.float64)
    weight, bias, scale, weights, scales = arguments(layer)
    lowpass, coefficients = input, []
    for w, s in zip(weights, scales, strict=True):
        bands, lowpass = reference.analysis_conv(lowpass, w, s)
        coefficients.append(bands)
    base = reference.wtconv2d(input, weight, bias, scale, [], [])
    assert_equal_fp64(
        reference.synthesis(base, coefficients), reference.wtconv2d(input, *arguments(layer))
    )


def test_even_kernel_pads_one_less_on_the_left_and_top() -> None:
    weight = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    weight[0, 0, 0, 0] = 1.0
    input = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    input[0, 0, 2, 2] = 1.0
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    output = reference.wtconv2d(input, weight, None, one, [], [])
    assert output.nonzero().tolist() == [[0, 0, 3, 3]]


@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize(("height", "width"), [(13, 10), (1, 1)])
def test_stride_keeps_every_stride_th_pixel(height: int, width: int, stride: int) -> None:
    layer = make_layer(2, 3, wt_levels=2, dtype=torch.float64)
    input = make_input(1, 2, height, width, dtype=torch.float64)
    full = reference.wtconv2d(input, *arguments(layer))
    strided = reference.wtconv2d(input, *arguments(layer), stride)
    assert strided.shape[2:] == (math.ceil(height / stride), math.ceil(width / stride))
    assert_equal_fp64(strided, full[:, :, ::stride, ::stride])


def test_empty_batch_gives_an_empty_output_and_zero_gradients() -> None:
    layer = make_layer(2, 3, wt_levels=2)
    output = reference.wtconv2d(torch.empty(0, 2, 5, 6), *arguments(layer))
    assert output.shape == (0, 2, 5, 6)
    torch.autograd.backward(output.sum())
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert torch.count_nonzero(parameter.grad) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_step_keeps_the_dtype(dtype: torch.dtype) -> None:
    layer = make_layer(2, 3, wt_levels=2, dtype=dtype)
    input = make_input(1, 2, 5, 6, dtype=dtype)
    _, _, _, weights, scales = arguments(layer)
    coefficients, lowpass = reference.analysis_conv(input, weights[0], scales[0])
    restored = reference.synthesis(input, [coefficients])
    for result in (reference.wtconv2d(input, *arguments(layer)), coefficients, lowpass, restored):
        assert result.dtype == dtype


def test_analysis_and_synthesis_do_not_overflow_where_the_result_fits() -> None:
    input = torch.tensor([[[[30000.0, 30000.0], [30000.0, 30000.0]]]], dtype=torch.float16)
    bands = reference.haar_analysis(input)
    assert bands[0, 0, 0].item() == 60000.0
    torch.testing.assert_close(reference.haar_synthesis(bands, (2, 2)), input)


def flat_run(x: Tensor, w: Tensor, b: Tensor, s: Tensor, w1: Tensor, s1: Tensor) -> Tensor:
    return reference.wtconv2d(x, w, b, s, [w1], [s1])


def test_first_and_second_derivatives_are_right_in_both_modes() -> None:
    layer = make_layer(2, 3, wt_levels=1, dtype=torch.float64)
    weight, bias, scale, weights, scales = arguments(layer)
    inputs = (
        make_input(1, 2, 5, 6, dtype=torch.float64).requires_grad_(),
        *(t.detach().clone().requires_grad_() for t in (weight, bias, scale, *weights, *scales)),
    )
    assert torch.autograd.gradcheck(flat_run, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(flat_run, inputs, fast_mode=True)


def synthesize(base: Tensor, *coefficients: Tensor) -> Tensor:
    return reference.synthesis(base, coefficients)


def test_derivatives_of_the_closed_form_are_right() -> None:
    inputs = (
        make_input(1, 1, 3, 5, dtype=torch.float64).requires_grad_(),
        make_input(1, 4, 2, 3, dtype=torch.float64, seed=3).requires_grad_(),
        make_input(1, 4, 1, 2, dtype=torch.float64, seed=4).requires_grad_(),
    )
    assert torch.autograd.gradcheck(synthesize, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(synthesize, inputs)


def test_vmap_over_the_input_equals_a_loop() -> None:
    layer = make_layer(2, 3, wt_levels=2, dtype=torch.float64)
    inputs = make_input(3, 1, 2, 5, 6, dtype=torch.float64)
    run = partial(reference_run, layer)
    expected = torch.stack([run(x) for x in inputs])
    assert_equal_fp64(torch.func.vmap(run)(inputs), expected)


def test_compiling_for_any_size_gives_one_graph() -> None:
    layer = make_layer(2, 3, wt_levels=3)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(reference_run, dynamic=True, fullgraph=True, backend=count)
    for size in range(16, 30):
        input = make_input(2, 2, size, 45 - size)
        torch.testing.assert_close(compiled(layer, input), reference_run(layer, input))
    assert len(graphs) == 1
