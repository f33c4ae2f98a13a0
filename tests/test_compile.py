"""torch.compile and torch.export: one graph, no breaks, no guards on parity, equal to eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from samples import Sample, flatten, fused, leaves, unflatten
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")
SAMPLE = Sample(13, 10, 3, kernel_size=5, channels=3)


class Layer(nn.Module):
    """The operator with its parameters, between pointwise operations."""

    def __init__(self, sample: Sample = SAMPLE, requires_grad: bool = True) -> None:
        super().__init__()
        _, weight, bias, scale, weights, scales = sample.make()
        self.weight, self.scale = nn.Parameter(weight), nn.Parameter(scale)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.weights, self.scales = nn.ParameterList(weights), nn.ParameterList(scales)
        self.requires_grad_(requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.wtconv.fused_forward(
            x.sin(), self.weight, self.bias, self.scale, list(self.weights), list(self.scales)
        )
        return y.relu() + x


def image(*shape: int, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator).requires_grad_(requires_grad)


def counting(module: Any, **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(module, backend=counter, fullgraph=True, **options), counter


def train(module: Any, x: Tensor) -> list[Any]:
    module.zero_grad()
    y = module(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.smoke
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_equals_eager(device: str, layout: torch.memory_format, dynamic: bool) -> None:
    layer = Layer().to(device)
    compiled, counter = counting(layer, dynamic=dynamic)
    results = []
    for function in (layer, compiled):
        x = image(2, 3, 13, 10).to(device, memory_format=layout).requires_grad_()
        results.append(train(function, x))
    assert_close(*results)
    assert counter.frame_count == 1


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "frozen", "autocast"])
def test_inference_equals_eager(device: str, mode: str) -> None:
    contexts: dict[str, Callable[[], Any]] = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "frozen": torch.enable_grad,
        "autocast": lambda: torch.autocast(device, torch.bfloat16),
    }
    layer = Layer(requires_grad=mode != "frozen").to(device)
    compiled, counter = counting(layer)
    x = image(2, 3, 13, 10).to(device)
    with contexts[mode]():
        assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.smoke
def test_inductor_equals_eager(device: str) -> None:
    layer = Layer(Sample(7, 6, 2, channels=3)).to(device)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for size in ((7, 6), (6, 7)):
        x, same = (image(2, 3, *size).to(device).requires_grad_() for _ in range(2))
        assert_close(train(compiled, x), train(layer, same))


def test_no_graph_breaks() -> None:
    explanation = torch._dynamo.explain(Layer())(image(2, 3, 13, 10))
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0


def graphs_for(sizes: Iterable[tuple[int, int]], training: bool, **options: Any) -> int:
    """Number of graphs that these sizes need."""
    layer = Layer(requires_grad=training)
    compiled, counter = counting(layer, **options)
    for height, width in sizes:
        x = image(1, 3, height, width)
        y = compiled(x)
        assert_close(y, layer(x))
        if training:
            y.sum().backward()
    return counter.frame_count


TRAINING = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])


@TRAINING
def test_dynamic_sizes_of_any_parity_share_a_graph(training: bool) -> None:
    sizes = [(height, 16 + 5 * height // 2 % 24) for height in range(16, 40)]
    assert {(h % 2, w % 2) for h, w in sizes} == set(itertools.product((0, 1), repeat=2))
    assert graphs_for(sizes, training, dynamic=True) == 1


@TRAINING
def test_dynamic_sizes_need_two_graphs_at_most_when_the_first_image_is_square(
    training: bool,
) -> None:
    sizes = [(16, 16), *itertools.product(range(16, 40, 5), range(17, 40, 6)), (21, 21)]
    assert graphs_for(sizes, training, dynamic=True) <= 2


@TRAINING
def test_automatic_dynamic_sizes_need_two_graphs(training: bool) -> None:
    sizes = [(size, size + size % 3) for size in range(16, 40)]
    assert graphs_for(sizes, training) == 2  # static, both sizes dynamic


def test_sizes_that_change_one_after_the_other_need_three_graphs() -> None:
    sizes = [*((size, 16) for size in range(16, 28)), *((16, size) for size in range(17, 28))]
    assert graphs_for(sizes, True) == 3  # static, one size dynamic, both


def test_batches_share_a_graph() -> None:
    layer = Layer()
    compiled, counter = counting(layer, dynamic=True)
    for batch in range(1, 9):
        x = image(batch, 3, 9, 6)
        assert_close(compiled(x), layer(x))
    assert counter.frame_count <= 2


def test_marked_dynamic_dimensions_stay_dynamic() -> None:
    layer = Layer()
    compiled, counter = counting(layer)
    for shape in ((2, 3, 13, 10), (3, 3, 14, 9), (4, 3, 16, 16)):
        x = image(*shape)
        for dim in (0, 2, 3):
            torch._dynamo.mark_dynamic(x, dim)
        assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_empty_batch_under_compile() -> None:
    layer = Layer()
    compiled, _ = counting(layer, dynamic=True)
    compiled(image(2, 3, 9, 6)).sum().backward()
    layer.zero_grad()
    y = compiled(image(0, 3, 9, 6))
    y.sum().backward()
    assert y.shape == (0, 3, 9, 6)
    assert not any(torch.count_nonzero(p.grad) for p in layer.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in layer.parameters())


LOSSES = {
    "sum": lambda y: y.sum(),
    "cat": lambda y: torch.cat([y, y.cos()], 0).square().sum(),
    "slice": lambda y: y[:, :, ::2, 1:].square().sum(),
    "permute": lambda y: y.permute(0, 2, 3, 1).contiguous().exp().sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_strides_under_compile(loss: str) -> None:
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        flat = flatten(leaves(SAMPLE.make(), torch.float64))
        wrap(lambda *flat: LOSSES[loss](fused(*flat)))(*flat).backward()
        results.append([tensor.grad for tensor in flat])
    assert_close(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_equals_plain(reentrant: bool) -> None:
    layer = Layer()
    checkpointed: Any = nn.Module()
    checkpointed.forward = lambda x: checkpoint(layer, x, use_reentrant=reentrant)
    checkpointed.parameters = layer.parameters
    checkpointed.zero_grad = layer.zero_grad
    x, same = (image(2, 3, 13, 10, requires_grad=True) for _ in range(2))
    assert_close(train(layer, x), train(checkpointed, same))


def test_checkpoint_under_compile() -> None:
    layer = Layer()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False).square().mean()

    x, same = (image(2, 3, 13, 10, requires_grad=True) for _ in range(2))
    compiled(x).backward()
    layer(same).square().mean().backward()
    assert_close(x.grad, same.grad)


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.PREFER_RECOMPUTE, 2)],
    ids=["save", "recompute"],
)
def test_selective_checkpoint_sees_the_operator(policy: CheckpointPolicy, forwards: int) -> None:
    from test_derivatives import Calls

    def decide(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        ours = op is torch.ops.wtconv.fused_forward.default
        return policy if ours else CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer()
    x = image(2, 3, 13, 10, requires_grad=True)
    with Calls() as calls:
        y = checkpoint(
            layer,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(decide),
        )
        y.sum().backward()
    assert calls.names.count("fused_forward") == forwards


def test_compiled_training_saves_no_coefficients() -> None:
    """Saved for backward: what eager saves, and what the pointwise neighbours need."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        compiled(image(2, 3, 32, 32, requires_grad=True))
    maps = [t for t in saved if t.dim() == 4 and t.shape[-2:] == (32, 32)]
    assert all(t.shape == (2, 3, 32, 32) for t in maps)
    assert len(maps) <= 3  # x, sin(x), output or mask of relu
    assert all(t.shape[-1] in (1, 5, 32) for t in saved if t.dim() == 4)


def test_compiled_transforms() -> None:
    flat = flatten(Sample(5, 4, 1).make(dtype=torch.float64))
    batch = torch.stack([flat[0], flat[0].sin()])

    def loss(*flat: Tensor) -> Tensor:
        return fused(*flat).pow(3).sum()

    every = tuple(range(6))
    in_dims = (0, *[None] * 5)
    for transform, arguments in (
        (torch.func.grad(loss, argnums=every), flat),
        (torch.func.vmap(torch.func.grad(loss, argnums=every), in_dims), [batch, *flat[1:]]),
        (lambda *a: torch.func.jvp(loss, a, tuple(t.cos() for t in a)), flat),
    ):
        compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
        assert_close(compiled(*arguments), transform(*arguments))


@pytest.mark.smoke
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_export_with_dynamic_sizes_of_any_parity(bias: bool, strict: bool) -> None:
    layer = Layer(Sample(32, 48, 3, bias=bias)).eval()
    height, width = Dim("height", min=2, max=1024), Dim("width", min=2, max=1024)
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim.STATIC, 2: height, 3: width}
    program = export(layer, (image(2, 2, 32, 48),), dynamic_shapes=(sizes,), strict=strict)
    nodes = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert nodes.count(torch.ops.wtconv.fused_forward.default) == 1
    assert torch.ops.wtconv.fused_forward.default in [
        n.target for n in program.run_decompositions().graph.nodes
    ]
    assert not program.constants
    assert set(program.state_dict) == set(layer.state_dict())
    exported = program.module()
    for shape in ((2, 2, 33, 47), (1, 2, 21, 20), (3, 2, 7, 9), (5, 2, 2, 2)):
        assert_close(exported(image(*shape)), layer(image(*shape)))


def test_building_blocks_under_compile() -> None:
    def chain(x: Tensor, w1: Tensor, s1: Tensor, w2: Tensor, s2: Tensor) -> Any:
        level, low = torch.ops.wtconv.analysis_conv(x, w1, s1)
        deeper, _ = torch.ops.wtconv.analysis_conv(low, w2, s2)
        return torch.ops.wtconv.synthesis(x, [level, deeper])

    compiled, counter = counting(chain, dynamic=True)
    for height, width in ((9, 6), (8, 7), (12, 12)):
        _, _, _, _, weights, scales = Sample(height, width, 2).make()
        arguments = (image(2, 2, height, width), weights[0], scales[0], weights[1], scales[1])
        assert_close(compiled(*arguments), chain(*arguments))
    assert counter.frame_count == 1


def test_first_call_inside_compile_registers_everything() -> None:
    arguments = Sample(6, 7, 1).make()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*flatten(arguments)), fused(*flatten(unflatten(flatten(arguments)))))
