"""Planes and batches of the sizes that the kernels treat apart: outputs, gradients, repeatability.

On a GPU: whole planes of 7..64 pixels, several to a tile, with part of a tile left empty; tiles of
large planes with one to three levels on chip and more through the low-pass band; every unrolled
kernel size; inputs whose rows are and are not pieces of 16 bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from budget import assert_within_budget, relative_error
from layer_cases import FORWARD_BAR, GRADIENT_BAR
from samples import Sample, lay_out, many_tiles, with_grad
from test_accuracy import ours_same_exact

pytestmark = pytest.mark.usefixtures("ops", "poisoned")

PLANES = [
    Sample(7, 7, 2, kernel_size=5, batch=70),
    Sample(8, 5, 3, kernel_size=3, batch=33),
    Sample(14, 13, 3, kernel_size=5, batch=17),
    Sample(28, 30, 4, kernel_size=5, batch=5),
    Sample(56, 60, 5, kernel_size=5, channels=1),
    Sample(64, 64, 6, channels=1),
    Sample(31, 20, 2, kernel_size=7, batch=4),
]
TILES = [
    Sample(65, 72, 1, kernel_size=5),
    Sample(72, 80, 2, kernel_size=7, channels=1),
    Sample(70, 78, 2, kernel_size=5, channels=1),
    Sample(130, 67, 3, kernel_size=5, channels=1),
    Sample(133, 72, 4, kernel_size=5, batch=1),
    Sample(133, 144, 5, kernel_size=5, channels=1),
    Sample(96, 136, 2, kernel_size=9, channels=1, batch=1),
    Sample(70, 128, 5, batch=1),
    Sample(64, 65, 2, kernel_size=5, batch=3, bias=False),
    Sample(300, 264, 5, kernel_size=5, channels=1, batch=1),  # whose low-pass band is a large plane
]
LAYOUTS = ["contiguous", "channels_last", "offset", "sliced"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sample", PLANES + TILES, ids=str)
def test_float32_output_and_gradients(device: str, sample: Sample, layout: str) -> None:
    case = replace(sample, layout=layout)
    ours, _, exact = ours_same_exact(case, device, torch.float32)
    errors = [relative_error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert errors[0] <= FORWARD_BAR
    assert max(errors[1:]) <= GRADIENT_BAR


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sample", PLANES + TILES, ids=str)
def test_half_output_and_gradients(
    device: str, sample: Sample, layout: str, dtype: torch.dtype
) -> None:
    # Of few numbers the reference may round every one right by luck.
    case = replace(sample, layout=layout, channels=9)
    for i, (ours, same, exact) in enumerate(
        zip(*ours_same_exact(case, device, dtype), strict=True)
    ):
        assert_within_budget(ours, same, exact, f"result {i}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sample", [PLANES[0], PLANES[3], TILES[4]], ids=str)
def test_gradients_are_the_same_bits_again(device: str, sample: Sample, dtype: torch.dtype) -> None:
    arguments = with_grad(sample).make(device, dtype)
    grad_output = torch.randn(sample.input_shape, device=device).to(dtype)
    mask = [True] * (4 + 2 * sample.levels)

    def gradients() -> list[torch.Tensor]:
        return list(torch.ops.wtconv.fused_backward(grad_output, *arguments, mask))

    first = gradients()
    for _ in range(48 if device == "cuda" else 4):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    if device == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            last = gradients()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sample", [*PLANES[:4], TILES[0], *TILES[2:6]], ids=str)
def test_gradients_do_not_depend_on_what_else_is_wanted(
    device: str, sample: Sample, dtype: torch.dtype
) -> None:
    """The input gradient takes a band that the weight gradients leave, or their launch gives it."""
    assert_independent_of_the_mask(device, sample, dtype)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("height", "width", "layout"),
    [(130, 200, "contiguous"), (67, 131, "contiguous"), (70, 264, "offset"), (280, 72, "sliced")],
)
def test_three_levels_of_many_tiles(
    device: str, height: int, width: int, layout: str, dtype: torch.dtype
) -> None:
    """The input gradient takes the third level from a band, whether or not it is left for it."""
    sample = many_tiles(height, width, layout)
    assert_independent_of_the_mask(device, sample, dtype)
    for i, (ours, same, exact) in enumerate(
        zip(*ours_same_exact(sample, device, dtype), strict=True)
    ):
        assert_within_budget(ours, same, exact, f"result {i}")


def assert_independent_of_the_mask(device: str, sample: Sample, dtype: torch.dtype) -> None:
    arguments = with_grad(sample).make(device, dtype)
    grad_output = torch.randn(sample.input_shape, device=device).to(dtype)
    count = 4 + 2 * sample.levels

    def gradients(mask: list[bool]) -> list[torch.Tensor]:
        return list(torch.ops.wtconv.fused_backward(grad_output, *arguments, mask))

    everything = gradients([True] * count)
    assert torch.equal(gradients([True] + [False] * (count - 1))[0], everything[0])
    weights = gradients([False] + [True] * (count - 1))
    assert all(torch.equal(a, b) for a, b in zip(weights[1:], everything[1:], strict=True))
    none = [False] * sample.levels
    base = [True] * 3 + none + none
    last = [False] * 3 + none[1:] + [True] + none
    for input_wanted, wanted in itertools.product((False, True), (base, last)):
        mask = [input_wanted, *wanted]
        some = gradients(mask)
        for output in [i for i in range(4) if mask[i]]:
            assert torch.equal(some[output], everything[output])
        if wanted is last:
            assert torch.equal(some[4][-1], everything[4][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_infinity_stays_near(device: str, levels: int, dtype: torch.dtype) -> None:
    """An infinite pixel reaches the outputs whose taps, or products on tensor cores, meet it."""
    x, *parameters = Sample(192, 192, levels, kernel_size=5, batch=1).make(device, dtype)
    x[0, 0, 96, 100] = torch.inf
    output = torch.ops.wtconv.fused_forward(x, *parameters)
    rows, cols = 10 * levels, 16 * levels
    near = torch.zeros_like(output, dtype=torch.bool)
    near[0, 0, 96 - rows : 97 + rows, 100 - cols : 101 + cols] = True
    assert not bool(torch.isfinite(output[0, 0, 96, 100]))
    assert bool(torch.isfinite(output[~near]).all())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_more_elements_than_32_bits_count(device: str, layout: str) -> None:
    """2^31 and more elements of float16: the last items equal those of a call of their own."""
    if device == "cpu":
        pytest.skip("12 GB of memory")
    sample = Sample(512, 512, 2, kernel_size=5, channels=16, batch=1)
    x, *parameters = sample.make(device, torch.float16)
    batch = 2**31 // x.numel() + 2
    images = torch.empty((batch, *x.shape[1:]), dtype=x.dtype, device=device).contiguous(
        memory_format=torch.channels_last if "last" in layout else torch.contiguous_format
    )
    images[:-2] = 0
    images[-2:] = torch.cat([x, x.flip(-1)])
    output = torch.ops.wtconv.fused_forward(images, *parameters)
    expected = torch.ops.wtconv.fused_forward(lay_out(images[-2:].clone(), layout), *parameters)
    assert torch.equal(output[-2:], expected)
