"""Laws of the multi-level Haar transform ``dwt2d`` and its inverse ``idwt2d``."""

from __future__ import annotations

import math

import pytest
import torch
from layer_cases import make_input

from wtconv_ops import dwt2d, idwt2d

SIZES = [(1, 1), (1, 7), (3, 5), (8, 8), (13, 10), (14, 6), (33, 20)]


@pytest.mark.parametrize("levels", [1, 2, 3, 6, 32])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_idwt2d_restores_every_size_at_every_level(height: int, width: int, levels: int) -> None:
    input = make_input(2, 3, height, width, dtype=torch.float64)
    lowpass, details = dwt2d(input, levels)
    restored = idwt2d(lowpass, details, size=(height, width))
    torch.testing.assert_close(restored, input, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_sizes_halve_rounding_up(height: int, width: int, levels: int) -> None:
    lowpass, details = dwt2d(make_input(2, 3, height, width), levels)
    assert len(details) == levels
    for level, bands in enumerate(details, start=1):
        h, w = math.ceil(height / 2**level), math.ceil(width / 2**level)
        assert bands.shape == (2, 3, 3, h, w)
    assert lowpass.shape == (2, 3, *details[-1].shape[3:])


def test_transform_keeps_the_energy_where_nothing_is_padded() -> None:
    input = make_input(1, 2, 16, 24, dtype=torch.float64)
    lowpass, details = dwt2d(input, levels=3)
    energy = lowpass.square().sum() + sum(bands.square().sum() for bands in details)
    torch.testing.assert_close(energy, input.square().sum(), rtol=1e-12, atol=0.0)


def test_lowpass_of_a_constant_doubles_at_each_level_and_details_vanish() -> None:
    lowpass, details = dwt2d(torch.full((1, 1, 32, 32), 3000.0), levels=5)
    torch.testing.assert_close(lowpass, torch.full((1, 1, 1, 1), 96000.0))
    assert all(torch.count_nonzero(bands) == 0 for bands in details)


def test_details_are_lh_hl_hh() -> None:
    block = torch.tensor([[1.0, 2.0], [5.0, 9.0]])[None, None]
    _, (bands,) = dwt2d(block)
    assert bands.flatten().tolist() == [-5.5, -2.5, 1.5]


def test_default_size_is_even() -> None:
    lowpass, details = dwt2d(make_input(1, 1, 13, 10), levels=2)
    restored = idwt2d(lowpass, details)
    assert restored.shape == (1, 1, 14, 10)
    torch.testing.assert_close(restored[:, :, 13], torch.zeros(1, 1, 10), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_the_inverse_is_exact_where_coefficients_are(dtype: torch.dtype) -> None:
    integers = torch.arange(84).reshape(1, 2, 7, 6) * 29 % 8 - 4
    input = (4 * integers).to(dtype)  # every coefficient is exact in 8 bits
    lowpass, details = dwt2d(input, levels=2)
    restored = idwt2d(lowpass, details, size=(7, 6))
    assert {t.dtype for t in (lowpass, *details, restored)} == {dtype}
    torch.testing.assert_close(restored, input, rtol=0.0, atol=0.0)


def test_empty_batch_passes() -> None:
    lowpass, details = dwt2d(torch.empty(0, 2, 5, 6), levels=2)
    assert idwt2d(lowpass, details, size=(5, 6)).shape == (0, 2, 5, 6)


def test_outputs_share_no_memory_with_the_input() -> None:
    input = make_input(1, 1, 4, 4)
    lowpass, details = dwt2d(input)
    before = details[0].clone()
    lowpass.zero_()
    input.zero_()
    torch.testing.assert_close(details[0], before)


def test_derivatives_are_right() -> None:
    input = make_input(1, 2, 5, 3, dtype=torch.float64).requires_grad_()

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        lowpass, details = dwt2d(x, levels=2)
        return idwt2d(lowpass.square(), [bands.square() for bands in details], size=(5, 3))

    assert torch.autograd.gradcheck(there_and_back, (input,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(there_and_back, (input,))


@pytest.mark.parametrize(
    ("input", "levels", "error", "sentence"),
    [
        (torch.ones(4, 4), 1, ValueError, r"input must be 4-D \[B, C, H, W\], got \[4, 4\]"),
        (torch.ones(1, 1, 4, 4).long(), 1, TypeError, "floating dtype, got torch.int64"),
        (torch.ones(1, 1, 0, 4), 1, ValueError, r"H, W >= 1, got \[1, 1, 0, 4\]"),
        (torch.ones(1, 1, 4, 4), 0, ValueError, "levels must be an int from 1 to 32, got 0"),
        (torch.ones(1, 1, 4, 4), 33, ValueError, "levels must be an int from 1 to 32, got 33"),
        (torch.ones(1, 1, 4, 4), 1.0, TypeError, "levels must be an int from 1 to 32, got 1.0"),
        (torch.ones(1, 1, 4, 4), True, TypeError, "levels must be an int from 1 to 32, got True"),
    ],
)
def test_dwt2d_names_what_is_wrong(
    input: torch.Tensor, levels: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"^dwt2d: .*{sentence}"):
        dwt2d(input, levels)


def bands_of(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.ones(1, 2, 3, height, width) for height, width in sizes]


LOW = torch.ones(1, 2, 2, 2)


@pytest.mark.parametrize(
    ("lowpass", "details", "size", "error", "sentence"),
    [
        (LOW, [], None, ValueError, "details must have 1 to 32 levels, got 0"),
        (LOW[0], bands_of((2, 2)), None, ValueError, r"lowpass must be 4-D .*got \[2, 2, 2\]"),
        (LOW, [LOW], None, ValueError, r"details\[0\] must be 5-D .*got \[1, 2, 2, 2\]"),
        (LOW.double(), bands_of((2, 2)), None, TypeError, r"details\[0\] must have the dtype"),
        (LOW, bands_of((2, 3)), None, ValueError, r"details\[0\] must be .*\[1, 2, 3, 2, 2\]"),
        (LOW, bands_of((6, 4), (2, 2)), None, ValueError, r"height and width of details\[0\]"),
        (LOW, bands_of((2, 2)), (5, 4), ValueError, r"size must be one of 3, 4 by .*got \[5, 4\]"),
        (LOW, bands_of((2, 2)), (2, 4), ValueError, r"size must be one of 3, 4 by .*got \[2, 4\]"),
        (LOW, bands_of((2, 2)), 4, TypeError, r"size must be \(H, W\), got 4"),
        (LOW, bands_of((2, 2)), (4,), TypeError, r"size must be \(H, W\), got \(4,\)"),
        (LOW, bands_of((2, 2)), (3.5, 4), TypeError, r"size.* must be an int >= 1, got 3.5"),
    ],
)
def test_idwt2d_names_what_is_wrong(
    lowpass: torch.Tensor,
    details: list[torch.Tensor],
    size: tuple[int, int],
    error: type[Exception],
    sentence: str,
) -> None:
    with pytest.raises(error, match=f"^idwt2d: .*{sentence}"):
        idwt2d(lowpass, details, size)
