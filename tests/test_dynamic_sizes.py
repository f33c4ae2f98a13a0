"""Laws of the layer under torch.compile and torch.export with sizes left open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer
from torch import Tensor
from torch.export import Dim

import wtconv_ops
from wtconv_ops import functional

LAYOUTS = [torch.contiguous_format, torch.channels_last]
Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., object]]


def counting_backend(graphs: list[torch.fx.GraphModule]) -> Backend:
    """Backend that runs the graph as it is and keeps it in ``graphs``."""

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    return backend


def require_kernels() -> None:
    if not wtconv_ops.can_run("cpu", torch.float32, 5, 1):
        pytest.skip("the operator library is not installed")


@pytest.fixture(params=["kernel", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test on the operator's kernel and on the plain PyTorch path."""
    if request.param == "plain":
        monkeypatch.setattr(functional, "_kernels_serve", lambda *_: False)
    else:
        require_kernels()
    return str(request.param)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("levels", [0, 3])
def test_sizes_of_any_parity_share_one_graph(
    path: str, levels: int, stride: int, layout: torch.memory_format
) -> None:
    layer = make_layer(2, 5, wt_levels=levels, stride=stride)
    graphs: list[torch.fx.GraphModule] = []
    backend = counting_backend(graphs)
    compiled: Any = torch.compile(layer, dynamic=True, fullgraph=True, backend=backend)
    sizes = [(height, 16 + 5 * height // 2 % 24) for height in range(16, 40)]
    assert {(height % 2, width % 2) for height, width in sizes} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for height, width in sizes:
        input = make_input(2, 2, height, width).contiguous(memory_format=layout)
        torch.testing.assert_close(compiled(input), layer(input), check_stride=True)
    assert len(graphs) == 1


def test_batches_of_any_size_need_two_graphs_at_most(path: str) -> None:
    layer = make_layer(2, 5, wt_levels=3)
    graphs: list[torch.fx.GraphModule] = []
    backend = counting_backend(graphs)
    compiled: Any = torch.compile(layer, dynamic=True, fullgraph=True, backend=backend)
    for batch in range(1, 9):
        input = make_input(batch, 2, 13, 10)
        torch.testing.assert_close(compiled(input), layer(input))
    assert len(graphs) <= 2


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiled_layer_follows_autocast(path: str, dtype: torch.dtype, levels: int) -> None:
    layer = make_layer(2, 5, wt_levels=levels)
    compiled: Any = torch.compile(layer, fullgraph=True, backend=counting_backend([]))
    input = make_input(2, 2, 13, 10)
    assert compiled(input).dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert compiled(input).dtype == dtype
        torch.testing.assert_close(compiled(input), layer(input))


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("levels", "stride"), [(0, 1), (3, 1), (3, 2)])
def test_exported_layer_runs_on_other_sizes(
    levels: int, stride: int, strict: bool, layout: torch.memory_format
) -> None:
    require_kernels()
    layer = make_layer(2, 5, wt_levels=levels, stride=stride)
    smallest = 2 * stride - 1  # a result of one pixel is a case of its own for the exporter
    sizes = {
        0: Dim("batch", min=1, max=64),
        2: Dim("height", min=max(2, smallest), max=1024),
        3: Dim("width", min=max(2, smallest), max=1024),
    }
    example = make_input(2, 2, 32, 48).contiguous(memory_format=layout)
    program = torch.export.export(layer, (example,), dynamic_shapes=(sizes,), strict=strict)
    for height, width in [(33, 47), (21, 20), (7, 9), (3, 1024)]:
        input = make_input(3, 2, height, width).contiguous(memory_format=layout)
        torch.testing.assert_close(program.module()(input), layer(input), check_stride=True)


@pytest.mark.usefixtures("ops", "fresh_compiler")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dim", [0, 2, 3], ids=["batch", "height", "width"])
def test_a_view_whose_size_is_data_is_compiled(dim: int, training: bool) -> None:
    """The strides of such a view say its layout; whether it is contiguous nobody knows."""
    layer = make_layer(3, 5, wt_levels=2)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def first(input: Tensor, size: Tensor) -> Any:
        length: Any = size.item()
        torch._check(length >= 1)
        torch._check(length <= input.shape[dim])
        return layer(input.narrow(dim, 0, length))

    input = make_input(4, 3, 13, 10).requires_grad_(training)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for size in (1, 2, 4):
            output = first(input, torch.tensor(size))
            torch.testing.assert_close(output, layer(input.narrow(dim, 0, size)))
            if training:
                output.sum().backward()
