"""A model to deploy, and a new process that runs what was saved of it.

    python saved_model.py FILE INPUTS OUTPUTS [LIBRARY]

The new process knows torch and, where LIBRARY names it, the operator library or, for the word
``wtconv_ops``, the Python package. INPUTS is a saved list of images; OUTPUTS receives the results.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import Tensor

DYNAMIC = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
CHANNELS = 4
# (batch, height, width): both parities of both sides, sides smaller than the pyramid is deep.
SIZES = [(1, 33, 47), (3, 20, 13), (2, 7, 30), (5, 2, 3), (1, 1, 1), (2, 64, 32)]


def make_model(device: str = "cpu", **options: Any) -> torch.nn.Module:
    """A layer with random parameters between pointwise operations."""
    from layer_cases import make_layer

    options = {"kernel_size": 5, "wt_levels": 3, **options}
    layer = make_layer(CHANNELS, **options)
    return torch.nn.Sequential(torch.nn.SiLU(), layer, torch.nn.GELU()).eval().to(device)


def export(
    model: torch.nn.Module,
    strict: bool = False,
    size: tuple[int, int] = (32, 48),
    layout: torch.memory_format = torch.contiguous_format,
) -> Any:
    """The model with batch, height and width left open."""
    parameter = next(model.parameters())
    example = torch.randn(2, CHANNELS, *size).to(parameter.device, parameter.dtype)
    example = example.contiguous(memory_format=layout)
    return torch.export.export(model, (example,), dynamic_shapes=(DYNAMIC,), strict=strict)


def make_images(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[Tensor]:
    """An image of every size."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(batch, CHANNELS, height, width) for batch, height, width in SIZES]
    images = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [image.contiguous(memory_format=layout) for image in images]


def run_command(
    command: list[str], folder: Path, images: list[Tensor], *libraries: str
) -> tuple[Any, str]:
    """Results of ``command INPUTS OUTPUTS [LIBRARY]``, None if it failed, and what it printed."""
    inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
    outputs.unlink(missing_ok=True)
    torch.save(images, inputs)
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parent.parent))
    done = subprocess.run(
        [*command, str(inputs), str(outputs), *libraries],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    if done.returncode != 0:
        return None, done.stderr
    return torch.load(outputs, weights_only=True), done.stderr


def run_in_new_process(
    file: Path, folder: Path, images: list[Tensor], *libraries: str
) -> tuple[Any, str]:
    """As :func:`run_command` with an exported program (.ep.pt2) or a package (.pt2)."""
    return run_command([sys.executable, __file__, str(file)], folder, images, *libraries)


def main(file: str, inputs: str, outputs: str, *libraries: str) -> None:
    """The new process; its convolutions on CUDA do not round to TF32."""
    torch.backends.cudnn.allow_tf32 = False
    for library in libraries:
        if library == "wtconv_ops":
            import wtconv_ops  # noqa: F401
        else:
            torch.ops.load_library(library)
    if file.endswith(".ep.pt2"):
        model: Any = torch.export.load(file).module()
    else:
        model = torch._inductor.aoti_load_package(file)
    with torch.no_grad():
        results = [model(image) for image in torch.load(inputs, weights_only=True)]
    assert ("wtconv_ops" in sys.modules) == ("wtconv_ops" in libraries)
    torch.save(results, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
