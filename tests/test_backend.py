"""Laws of torch.compile(backend="wtconv"): layers replaced, equal results, never a silent error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from layer_cases import make_input, randomize
from test_convert import Network, gradients_of, negate_one_filter, swap_subbands
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from upstream_layers import Strided, Variant, reference_layer

from wtconv_ops import _backend, _rewrite, convert
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")
FUSED = torch.ops.wtconv.fused_forward.default


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the backend says."""
    with caplog.at_level(logging.INFO, "wtconv_ops"):
        yield caplog


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that Inductor would get; they run as they are instead."""
    seen: list[Any] = []

    def keep(module: Any, inputs: Any, config_patches: Any) -> Any:
        module.patches = config_patches
        seen.append(module)
        return module.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", keep)
    return seen


def replaced(module: Any) -> int:
    """Number of fused operators in a graph and in the graphs that it checkpoints."""
    inner = [m for m in module.children() if isinstance(m, torch.fx.GraphModule)]
    return len(module.graph.find_nodes(op="call_function", target=FUSED)) + sum(
        map(replaced, inner)
    )


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="wtconv", fullgraph=True, **options)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Replaced and equal


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("levels", "kernel_size", "bias"),
    [(1, 1, True), (1, 4, True), (2, 5, False), (3, 3, True), (3, 5, True)],
)
def test_layers_are_replaced_and_equal_for_every_parity(
    graphs: list[Any], levels: int, kernel_size: int, bias: bool, dynamic: bool
) -> None:
    layer = reference_layer(3, kernel_size, wt_levels=levels, bias=bias).double()
    run = compiled(layer, dynamic=dynamic)
    for height, width in ((13, 10), (16, 16), (7, 9), (12, 6), (2, 3)):
        input = make_input(2, 3, height, width, dtype=torch.float64)
        torch.testing.assert_close(run(input), layer(input), rtol=1e-11, atol=1e-11)
    assert {replaced(graph) for graph in graphs} == {1}


@pytest.mark.smoke
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_with_inductor_equals_eager(dynamic: bool) -> None:
    model = Network()
    run = compiled(model, dynamic=dynamic)
    input = make_input(2, 3, 13, 10)
    for found, want in zip(gradients_of(run, input), gradients_of(model, input), strict=True):
        assert_same(found, want)


def test_optimizer_steps_equal_eager(graphs: list[Any]) -> None:
    input, results = make_input(2, 3, 9, 6), []
    for wrap in (lambda model: model, compiled):
        torch.manual_seed(0)
        model = Network()
        run = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            run(input).square().mean().backward()
            optimizer.step()
        results.append(list(model.parameters()))
    assert replaced(graphs[0]) == 4
    assert_same(*results)


@pytest.mark.parametrize("stride", [2, 3])
def test_subsampling_stays_behind_the_layer(graphs: list[Any], stride: int) -> None:
    layer = randomize(Strided(3, stride, wt_levels=2))
    input = make_input(1, 3, 13, 10)
    assert_same(compiled(layer)(input), layer(input))
    assert replaced(graphs[0]) == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_strides_of_the_output_stay(graphs: list[Any], layout: torch.memory_format) -> None:
    layer = reference_layer(8, wt_levels=2)
    input = make_input(2, 8, 6, 5).contiguous(memory_format=layout)
    found, expected = compiled(layer)(input), layer(input)
    assert replaced(graphs[0]) == 1
    assert found.stride() == expected.stride()
    assert_same(found, expected)


@pytest.mark.parametrize("within", [True, False], ids=["in the model", "around it"])
def test_dtype_under_autocast_stays_and_the_error_is_no_larger(
    graphs: list[Any], within: bool
) -> None:
    layer = reference_layer(8, wt_levels=2)
    input = make_input(2, 8, 13, 10)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            y: Tensor = layer(x)
        return y

    run = compiled(forward) if within else compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        found, same = run(input), (forward if within else layer)(input)
    assert replaced(graphs[0]) == 1
    assert found.dtype == same.dtype == torch.float32
    exact = reference_layer(8, wt_levels=2).double()(input.double())
    error, allowed = (float((y.double() - exact).detach().abs().max()) for y in (found, same))
    assert error <= 2 * allowed + torch.finfo(torch.bfloat16).eps * float(
        exact.detach().abs().max()
    )


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x.sin(), use_reentrant=False)
        return y.cos()


@pytest.mark.smoke
def test_layers_in_checkpointed_parts_are_replaced() -> None:
    model = Checkpointed(reference_layer(3, wt_levels=2))
    run = compiled(model)
    input = make_input(2, 3, 13, 10)
    for found, want in zip(gradients_of(run, input), gradients_of(model, input), strict=True):
        assert_same(found, want)
    model.layer.wt_filter.mul_(2)
    assert_same(run(input), model(input))


def test_exported_program_is_recognised(graphs: list[Any]) -> None:
    layer = reference_layer(3, wt_levels=3)
    input = make_input(2, 3, 13, 10)
    program = torch.export.export(layer, (input,)).module()
    assert_same(compiled(program)(input), layer(input))
    assert replaced(graphs[0]) == 1


class Peek(ReferenceWTConv2d):
    """Gives away an intermediate of the layer."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), F.conv2d(x, self.wt_filter, stride=2, groups=x.shape[1])


def test_intermediates_that_others_use_stay(graphs: list[Any]) -> None:
    layer = randomize(Peek(3, 3))
    input = make_input(1, 3, 8, 6)
    assert_same(compiled(layer)(input), layer(input))
    assert replaced(graphs[0]) == 1


# Left alone


def made_trainable(layer: Any) -> None:
    layer.wt_filter.requires_grad_()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (negate_one_filter, "its filter must be within 0.001 of the Haar filters"),
        (swap_subbands, "its filter must be within 0.001 of the Haar filters"),
        (lambda m: m.iwt_filter.data.mul_(2), "its filter must be within 0.001 of the Haar"),
        (lambda m: m.wt_filter.data.mul_(torch.nan), "its filter must be within 0.001 of"),
        (made_trainable, "its filters are trainable"),
    ],
)
def test_other_filters_are_left_alone(
    graphs: list[Any], log: Any, change: Callable[[Any], None], reason: str
) -> None:
    layers = [reference_layer(3, wt_levels=2), reference_layer(3, wt_levels=1)]
    change(layers[0])
    input = make_input(1, 3, 9, 6)
    model = nn.Sequential(*layers)
    torch.testing.assert_close(compiled(model)(input), model(input), equal_nan=True)
    assert replaced(graphs[0]) == 1
    assert log.messages[-1].startswith("backend wtconv: left 2 alone that look like WTConv:")
    assert reason in log.messages[-1]


def test_other_filters_are_not_served_by_a_cache_of_haar_ones() -> None:
    input = make_input(1, 3, 8, 6)
    for factor in (1.0, 2.0, 1.0):
        torch._dynamo.reset()
        layer = reference_layer(3)
        layer.wt_filter.data.mul_(factor)
        assert_same(compiled(layer)(input), layer(input))


@pytest.mark.parametrize(
    "variant",
    [
        *("pad with ones", "pad before", "dilated", "flipped bands", "doubled band", "high first"),
        *("crop", "write amid", "other input", "alpha"),
    ],
)
def test_other_operations_are_left_alone(graphs: list[Any], log: Any, variant: str) -> None:
    layer = randomize(Variant(variant))
    input = make_input(1, 3, 9, 7)
    torch.testing.assert_close(compiled(layer)(input.clone()), layer(input.clone()))
    assert replaced(graphs[0]) == 0
    assert log.messages[-1].startswith("backend wtconv: left 1 alone that look like WTConv:")


def test_the_unchanged_variant_is_replaced(graphs: list[Any]) -> None:
    layer = randomize(Variant("none"))
    input = make_input(1, 3, 9, 7)
    assert_same(compiled(layer)(input), layer(input))
    assert replaced(graphs[0]) == 1


def test_without_kernels_the_graph_stays(
    graphs: list[Any], log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernels(*_: Any, **__: Any) -> bool:
        raise RuntimeError("wtconv_ops: there are no kernels")

    monkeypatch.setattr(_rewrite, "can_run", no_kernels)
    layer, input = reference_layer(3), make_input(1, 3, 5, 5)
    assert_same(compiled(layer)(input), layer(input))
    assert log.messages == [
        "backend wtconv: left 1 alone that look like WTConv: wtconv_ops: there are no kernels"
    ]


def test_graphs_without_a_layer_are_compiled_as_they_are(graphs: list[Any], log: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(inplace=True))
    input = make_input(1, 3, 5, 5)
    assert_same(compiled(model)(input), model(input))
    assert (len(graphs), log.messages) == (1, [])


# Filters that change after the compilation


@pytest.mark.parametrize("training", [True, False])
def test_changed_filters_run_as_captured(graphs: list[Any], log: Any, training: bool) -> None:
    layer = reference_layer(3, wt_levels=2).requires_grad_(training)
    layer.wt_filter.requires_grad_(False)
    layer.iwt_filter.requires_grad_(False)
    run, input = compiled(layer), make_input(1, 3, 9, 6)
    haar = layer.wt_filter.clone()
    assert_same(run(input), layer(input))
    for change in (
        lambda: layer.wt_filter.mul_(2),
        lambda: layer.wt_filter.copy_(-haar),
        lambda: setattr(layer.wt_filter, "data", 3 * haar),
        lambda: layer.load_state_dict({**layer.state_dict(), "wt_filter": haar.flip(0)}),
    ):
        change()
        assert_same(run(input), layer(input))
        assert not torch.equal(layer.wt_filter, haar)
    assert sum("runs as captured from now on" in text for text in log.messages) == 1
    layer.wt_filter.copy_(haar)
    assert_same(run(input), layer(input))
    assert len(graphs) == 1


@pytest.mark.smoke
def test_changes_that_are_not_counted_give_nan() -> None:
    layer = reference_layer(3, wt_levels=2)
    run, input = compiled(layer), make_input(1, 3, 9, 6)
    assert_same(run(input), layer(input))
    for filters in (layer.wt_filter, layer.iwt_filter):
        filters.data.mul_(1.01)
        assert bool(run(input).isnan().all())
        filters.data.div_(1.01)
        assert_same(run(input), layer(input))


def test_filters_made_trainable_get_gradients(graphs: list[Any]) -> None:
    layer = reference_layer(3)
    run, input = compiled(layer), make_input(1, 3, 8, 6)
    run(input)
    layer.wt_filter.requires_grad_()
    for found, want in zip(gradients_of(run, input), gradients_of(layer, input), strict=True):
        assert_same(found, want)
    assert [replaced(graph) for graph in graphs] == [1, 0]


def test_one_graph_for_several_layers_checks_the_filters_of_each(graphs: list[Any]) -> None:
    layers = [reference_layer(3, seed=seed) for seed in range(3)]
    swap_subbands(layers[1])
    run, input = compiled(lambda layer, x: layer(x)), make_input(1, 3, 8, 6)
    for layer in (*layers, *layers):
        assert_same(run(layer, input), layer(input))


# The name


@pytest.mark.smoke
def test_backend_is_found_by_its_name() -> None:
    from torch._dynamo.backends.registry import lookup_backend

    assert "wtconv" in torch._dynamo.list_backends()
    assert lookup_backend("wtconv") is _backend.wtconv
    _backend.register()  # again, to no effect


def test_an_installed_entry_point_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    value = f"{_backend.__name__}:{_backend.wtconv.__name__}"
    entry = metadata.EntryPoint(_backend._NAME, value, _backend._GROUP)
    assert entry.load() is _backend.wtconv

    class Installed:
        entry_points = (entry,)

    monkeypatch.setattr(metadata, "distribution", lambda _: Installed())
    registry = torch._dynamo.backends.registry
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    _backend.register()
    assert registry._COMPILER_FNS == {}


def test_a_torch_without_the_registry_gives_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_: str) -> Any:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", not_installed)
    monkeypatch.delattr(torch._dynamo.backends.registry, "_COMPILER_FNS")
    with pytest.warns(RuntimeWarning, match=r"not available .* use wtconv_ops.convert\(model\)"):
        _backend.register()


def test_filters_in_buffers_are_recognised(graphs: list[Any]) -> None:
    layer = reference_layer(3, wt_levels=2)
    for name in ("wt_filter", "iwt_filter"):
        values = getattr(layer, name).data
        delattr(layer, name)
        layer.register_buffer(name, values)
    input = make_input(1, 3, 9, 6)
    with torch.inference_mode():
        assert_same(compiled(layer)(input), layer(input))
    assert replaced(graphs[0]) == 1
    assert convert(layer).swapped[0].proven


def test_mode_and_options_go_to_inductor(graphs: list[Any]) -> None:
    layer, input = reference_layer(3), make_input(1, 3, 5, 5)
    compiled(layer, mode="max-autotune-no-cudagraphs")(input)
    assert graphs[0].patches["max_autotune"] is True
    torch._dynamo.reset()
    compiled(layer, options={"epilogue-fusion": False})(input)
    assert graphs[1].patches == {"epilogue_fusion": False}
