"""Exported programs: any size and parity, saved, and loaded by another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import SIZES, export, make_images, make_model, run_in_new_process
from torch.testing import assert_close

from wtconv_ops import _library

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("ops")]
STRICT = pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])


def save(model: torch.nn.Module, folder: Path, strict: bool) -> Path:
    file = folder / "model.ep.pt2"
    torch.export.save(export(model, strict), file)
    return file


def test_sizes_cover_every_parity() -> None:
    parities = {(height % 2, width % 2) for _, height, width in SIZES}
    assert parities == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({batch for batch, _, _ in SIZES}) >= 3


@STRICT
@pytest.mark.parametrize("size", [(32, 48), (33, 47)], ids=["even", "odd"])
def test_program_runs_on_every_size_whatever_the_example(
    device: str, strict: bool, size: tuple[int, int]
) -> None:
    model = make_model(device)
    run = export(model, strict, size).module()
    for layout in (torch.contiguous_format, torch.channels_last):  # a graph holds for both
        for image in make_images(device, layout=layout):
            expected = model(image)
            assert_close(run(image), expected)
            assert run(image).stride() == expected.stride()


@pytest.mark.parametrize(
    ("strict", "library"),
    [(True, "wtconv_ops"), (False, str(_library.default_path()))],
    ids=["strict, import wtconv_ops", "non-strict, load_library"],
)
def test_saved_program_runs_in_a_new_process(tmp_path: Path, strict: bool, library: str) -> None:
    model, images = make_model(), make_images()
    file = save(model, tmp_path, strict)
    results, said = run_in_new_process(file, tmp_path, images, library)
    assert results is not None, said
    assert_close(results, [model(image).detach() for image in images])


def test_program_without_the_library_names_the_operator(tmp_path: Path) -> None:
    file = save(make_model(), tmp_path, False)
    results, said = run_in_new_process(file, tmp_path, make_images())
    assert results is None
    assert "failed to resolve torch.ops.wtconv.fused_forward.default" in said
    assert "not registered when deserializing" in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_program_keeps_its_dtype(device: str, dtype: torch.dtype) -> None:
    model = make_model(device).to(dtype)
    run = export(model).module()
    for image in make_images(device, dtype):
        assert_close(run(image), model(image))


class Autocast(torch.nn.Module):
    """A model that turns autocast on by itself."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.model, self.device = make_model(device), device

    def forward(self, image: torch.Tensor) -> Any:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model(image)


@STRICT
def test_program_keeps_its_autocast_region(device: str, strict: bool) -> None:
    model = Autocast(device)
    run = export(model, strict).module()
    for image in make_images(device):
        assert run(image).dtype == torch.bfloat16
        assert_close(run(image), model(image))
