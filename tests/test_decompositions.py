"""The decompositions equal the operators, and leave no operator in a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samples import DTYPES, SAMPLES, Sample, flatten, unflatten
from saved_model import CHANNELS, DYNAMIC, export, make_images, make_model
from test_library import run_python
from test_opcheck import calls, mask_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import wtconv_ops

pytestmark = pytest.mark.usefixtures("ops")
BIG = [Sample(1, 2, 32, bias=False), Sample(3, 5, 2, kernel_size=6, channels=1)]


@pytest.fixture(autouse=True)
def full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions on CUDA that do not round to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def assert_same(ours: Any, operator: Any) -> None:
    """Equal to 32 roundings of what the kernels compute in, and two of the dtype.

    The first of the largest of all results: in the gradient of a scale, most terms may cancel.
    """
    sizes = [float(want.abs().max()) for want in as_tuple(operator) if want.numel() > 0]
    largest = max(sizes, default=0.0)
    for got, want in zip(as_tuple(ours), as_tuple(operator), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        computed = torch.promote_types(want.dtype, torch.float32)
        allowed = 32 * torch.finfo(computed).eps * largest
        if computed != want.dtype and want.numel() > 0:
            allowed += 2 * torch.finfo(want.dtype).eps * float(want.abs().max())
        assert_close(got, want, rtol=0.0, atol=allowed)


def namespaces(graph: torch.fx.GraphModule) -> set[str]:
    """Namespaces of the operators in a graph and in the graphs inside it."""
    found = set()
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
            found |= {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)}
    return found


def test_every_operator_has_one() -> None:
    defined = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("wtconv:")}
    assert {str(op._schema.name) for op in wtconv_ops.decompositions()} == defined
    assert len(defined) >= 5


@pytest.mark.parametrize("channels_last", [False, True])
def test_operator_of_compiled_graphs_has_the_layout_it_names(channels_last: bool) -> None:
    arguments = (*Sample(5, 6, 2).make(), channels_last)
    op = torch.ops.wtconv._graph_forward.default
    expected, plain = op(*arguments), wtconv_ops.decompositions()[op](*arguments)
    assert_close(plain, expected)
    assert plain.stride() == expected.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", [*SAMPLES, *BIG], ids=str)
def test_equal_to_the_operator(device: str, sample: Sample, dtype: torch.dtype) -> None:
    table = wtconv_ops.decompositions()
    for op, arguments in calls(sample, device, dtype, False):
        ours, operator = table[op](*arguments), op(*arguments)
        assert_same(ours, operator)
        for got, want in zip(as_tuple(ours), as_tuple(operator), strict=True):
            assert want.dim() != 4 or got.is_contiguous() == want.is_contiguous()


def test_parameters_may_have_a_dtype_of_their_own(device: str) -> None:
    sample = Sample(7, 6, 2)
    x, *parameters = sample.make(device)
    x = x.bfloat16()
    ops, table = torch.ops.wtconv, wtconv_ops.decompositions()
    for op, arguments in (
        (ops._fused_forward.default, (x, *parameters)),
        (ops.fused_backward.default, (x.sin(), x, *parameters, mask_of(sample))),
    ):
        assert_same(table[op](*arguments), op(*arguments))


def test_half_precision_holds_lowpass_bands_beyond_its_range(device: str) -> None:
    x, *parameters, scales = Sample(128, 128, 7).make(device, torch.float16)
    x = torch.full_like(x, 1000.0)  # 128000 in the lowpass band of level 7
    arguments = (x, *parameters, [scale / 1000 for scale in scales])
    op = torch.ops.wtconv.fused_forward.default
    assert bool(op(*arguments).isfinite().all())
    assert_same(wtconv_ops.decompositions()[op](*arguments), op(*arguments))


@pytest.mark.parametrize("only", range(8))
def test_backward_gives_what_is_asked_for(only: int) -> None:
    sample = Sample(5, 6, 2)
    arguments = sample.make()
    op = torch.ops.wtconv.fused_backward.default
    call = (arguments[0].sin(), *arguments, mask_of(sample, only=only))
    assert_same(wtconv_ops.decompositions()[op](*call), op(*call))


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("size", [(32, 48), (33, 47), (2, 3)], ids=str)
def test_decomposed_program_runs_on_every_size_whatever_the_example(
    device: str, size: tuple[int, int], strict: bool
) -> None:
    model = make_model(device)
    program = export(model, strict, size)
    assert namespaces(program.graph_module) >= {"wtconv"}
    program = program.run_decompositions(wtconv_ops.decompositions())
    assert namespaces(program.graph_module) == {"aten"}
    assert not program.constants
    run = program.module()
    for image in make_images(device):
        assert_close(run(image), model(image))


@pytest.mark.smoke
def test_joins_the_default_table_and_keeps_channels_last(device: str) -> None:
    model, layout = make_model(device), torch.channels_last
    table = torch.export.default_decompositions()
    table.update(wtconv_ops.decompositions())
    program = export(model, layout=layout).run_decompositions(table)
    assert namespaces(program.graph_module) == {"aten"}
    run = program.module()
    for image in make_images(device, layout=layout):
        assert_close(run(image), model(image))
        assert run(image).is_contiguous(memory_format=layout)


class Staged(torch.nn.Module):
    """The building blocks, two levels."""

    def __init__(self) -> None:
        super().__init__()
        _, _, _, _, weights, scales = Sample(1, 1, 2, channels=CHANNELS).make()
        self.weights, self.scales = torch.nn.ParameterList(weights), torch.nn.ParameterList(scales)

    def forward(self, x: Tensor) -> Any:
        ops = torch.ops.wtconv
        first, low = ops.analysis_conv(x, self.weights[0], self.scales[0])
        second, _ = ops.analysis_conv(low, self.weights[1], self.scales[1])
        return ops.synthesis(x, [first, second])


class Autocast(torch.nn.Module):
    """The layer in an autocast region of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model[1](x)


@pytest.mark.parametrize("make", [Staged, Autocast])
def test_other_operators_leave_the_graph_too(make: Any) -> None:
    model = make()
    program = export(model).run_decompositions(wtconv_ops.decompositions())
    assert namespaces(program.graph_module) == {"aten"}
    run = program.module()
    for image in make_images()[:3]:  # between building blocks torch.export keeps that sides are > 1
        got, want = run(image), model(image)
        assert got.dtype == want.dtype
        atol = 0.02 * float(want.detach().abs().max()) if want.dtype == torch.bfloat16 else 1e-5
        assert_close(got, want, rtol=1e-5, atol=atol)


@pytest.mark.smoke
def test_backward_leaves_a_traced_training_step() -> None:
    """One symbolic graph of the gradients, for sizes of every parity."""

    def gradients(*flat: Tensor) -> Any:
        leaves = [tensor.detach().requires_grad_() for tensor in flat]
        output = torch.ops.wtconv.fused_forward(*unflatten(leaves))
        return torch.autograd.grad(output.square().sum(), leaves)

    def traced_with(table: Any) -> torch.fx.GraphModule:
        flat = flatten(Sample(12, 10, 2).make(dtype=torch.float64))
        return make_fx(gradients, decomposition_table=table, tracing_mode="symbolic")(*flat)

    assert "wtconv" in namespaces(traced_with({}))
    graph = traced_with(wtconv_ops.decompositions())
    assert namespaces(graph) == {"aten"}
    for height, width in ((12, 10), (13, 8), (9, 11), (6, 7)):
        flat = flatten(Sample(height, width, 2).make(dtype=torch.float64))
        assert_close(graph(*flat), gradients(*flat))


def test_sizes_left_open_are_those_of_the_model() -> None:
    assert set(DYNAMIC) == {0, 2, 3}
    program = export(make_model()).run_decompositions(wtconv_ops.decompositions())
    (image,) = (node for node in program.graph.nodes if node.name == "input")
    open_sizes = [isinstance(size, torch.SymInt) for size in image.meta["val"].shape]
    assert open_sizes == [True, False, True, True]


def test_empty_without_the_library(tmp_path: Path) -> None:
    code = """
        import warnings
        warnings.simplefilter("ignore")
        import wtconv_ops
        assert wtconv_ops.decompositions() == {}
    """
    assert run_python(code, tmp_path, library=None) == ""
