"""ONNX: standard operators only, equal under onnxruntime at every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_model import CHANNELS, export, make_images, make_model
from test_decompositions import Staged
from torch import Tensor
from torch.testing import assert_close

import wtconv_ops

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytestmark = pytest.mark.usefixtures("ops")


def convert(program: Any, file: Path) -> Path:
    """The ONNX file of a decomposed program."""
    plain = program.run_decompositions(wtconv_ops.decompositions())
    torch.onnx.export(plain, dynamo=True, verbose=False).save(str(file))
    return file


def run(file: Path, images: list[Tensor]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(file))
    (input,) = session.get_inputs()
    return [torch.from_numpy(session.run(None, {input.name: x.numpy()})[0]) for x in images]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(export(make_model()), tmp_path_factory.mktemp("onnx") / "model.onnx")


def test_every_node_is_a_standard_operator(file: Path) -> None:
    model = onnx.load(file)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert [opset.domain for opset in model.opset_import] == [""]
    assert not model.functions


def test_sizes_stay_open(file: Path) -> None:
    graph = onnx.load(file).graph
    for value in (*graph.input, *graph.output):
        batch, channels, height, width = value.type.tensor_type.shape.dim
        assert channels.dim_value == CHANNELS
        assert all(side.dim_param for side in (batch, height, width))


def test_onnxruntime_equals_the_model_at_every_size(file: Path) -> None:
    images = make_images()
    assert_close(run(file, images), [make_model()(image).detach() for image in images])


def test_half_precision(tmp_path: Path) -> None:
    model, images = make_model().half(), make_images(dtype=torch.float16)
    results = run(convert(export(model), tmp_path / "half.onnx"), images)
    for result, image in zip(results, images, strict=True):
        want = model(image).detach()
        atol = 2 * torch.finfo(want.dtype).eps * float(want.abs().max())
        assert_close(result, want, rtol=0.0, atol=atol)


def test_building_blocks(tmp_path: Path) -> None:
    model, images = Staged(), make_images()
    results = run(convert(export(model), tmp_path / "staged.onnx"), images)
    assert_close(results, [model(image).detach() for image in images])


def test_program_that_is_not_decomposed_is_refused_by_name() -> None:
    with pytest.raises(Exception, match=r"No ONNX function found for .*wtconv\.fused_forward"):
        torch.onnx.export(export(make_model()), dynamo=True, verbose=False)
