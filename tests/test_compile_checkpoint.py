"""Activation checkpointing under torch.compile, and what a compiled block saves for backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from layer_cases import Block, make_input, make_layer, randomize
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")
FORWARDS = {torch.ops.wtconv.fused_forward.default, torch.ops.wtconv._fused_forward.default}
BACKWARD = torch.ops.wtconv.fused_backward.default
CHANNELS = 3


class Graphs:
    """A backend that runs the graphs of the min-cut partitioner as they are, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[fx.GraphModule] = []
        self.backward: list[fx.GraphModule] = []

        def keep(kept: list[fx.GraphModule]) -> Any:
            def compiler(graph: fx.GraphModule, _: Any) -> Any:
                kept.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        self.backend = aot_autograd(
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )


def count(graphs: list[fx.GraphModule]) -> int:
    """Number of calls of the layer's forward."""
    return sum(node.target in FORWARDS for graph in graphs for node in graph.graph.nodes)


def gradients(run: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    parameters = [x, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().mean(), parameters)]


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = layer, options

    def part(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.sin())
        return y.cos()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, x, **self.options)
        return y.sin()


@pytest.mark.parametrize("backend", ["graphs", "inductor"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_compiled_checkpoint_recomputes_the_layer(
    device: str, reentrant: bool, backend: str
) -> None:
    model = Checkpointed(make_layer(CHANNELS, 5, wt_levels=2), use_reentrant=reentrant).to(device)
    x = make_input(2, CHANNELS, 13, 10).to(device)
    graphs = Graphs()
    compiled = torch.compile(
        model, backend=graphs.backend if backend == "graphs" else backend, fullgraph=True
    )
    expected = gradients(lambda x: model.part(x).sin(), model, x)
    assert_close(gradients(compiled, model, x), expected)
    if backend == "graphs":
        assert (count(graphs.forward), count(graphs.backward)) == (1, 1)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_a_compiled_layer_within_an_eager_checkpoint(device: str, reentrant: bool) -> None:
    layer = make_layer(CHANNELS, 5, wt_levels=2).to(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = make_input(2, CHANNELS, 13, 10).to(device)

    def run(x: Tensor) -> Any:
        return checkpoint(compiled, x, use_reentrant=reentrant)

    def all_gradients(run: Any) -> list[Tensor]:
        layer.zero_grad()
        leaf = x.detach().requires_grad_()
        run(leaf).square().mean().backward()  # torch.autograd.grad does not go with reentrant ones
        return [t.grad.clone() for t in (leaf, *layer.parameters())]

    assert_close(all_gradients(run), all_gradients(layer))


def policy(save: bool) -> Any:
    """Contexts of a selective checkpoint that saves the layer's output, or nothing at all."""

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if save and op in FORWARDS:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, decide)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("save", [True, False], ids=["MUST_SAVE", "recomputed"])
def test_a_compiled_selective_checkpoint_saves_the_layer_if_asked(
    device: str, save: bool, autocast: bool
) -> None:
    layer = make_layer(CHANNELS, 5, wt_levels=2)
    model = Checkpointed(layer, use_reentrant=False, context_fn=policy(save)).to(device)
    x, graphs = make_input(2, CHANNELS, 13, 10).to(device), Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        found = gradients(compiled, model, x)
        expected = gradients(lambda x: model.part(x).sin(), model, x)
    assert_close(found, expected)
    assert (count(graphs.forward), count(graphs.backward)) == (1, 0 if save else 1)


# What is saved for backward


def origin(node: fx.Node) -> fx.Node:
    """The node of which ``node`` is a copy in another dtype."""
    while node.target is torch.ops.aten._to_copy.default:
        node = node.all_input_nodes[0]
    return node


def saved_for_the_layer(graphs: Graphs) -> list[str]:
    """What the backward of the layer reads: "input" for inputs of the forward graph, else names."""
    (forward,), (backward,) = graphs.forward, graphs.backward
    (output,) = forward.graph.find_nodes(op="output")
    returned = {node.name: node for node in output.args[0] if isinstance(node, fx.Node)}
    (call,) = backward.graph.find_nodes(op="call_function", target=BACKWARD)
    found = []
    for node in map(origin, call.all_input_nodes[1:]):  # without grad_output
        saved = returned.get(node.name) if node.op == "placeholder" else None
        is_input = saved is not None and origin(saved).op == "placeholder"
        found.append("input" if is_input else node.name)
    return found


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_compiled_block_saves_for_the_layer_its_input_and_parameters_only(
    device: str, layout: torch.memory_format, dynamic: bool, autocast: bool
) -> None:
    block = randomize(Block()).to(device)
    x = make_input(2, 8, 12, 10).to(device, memory_format=layout).requires_grad_()
    graphs = Graphs()
    compiled = torch.compile(block, backend=graphs.backend, fullgraph=True, dynamic=dynamic)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = compiled(x)
    y.square().mean().backward()
    parameters = len(list(block.conv.parameters()))
    assert saved_for_the_layer(graphs) == ["input"] * (1 + parameters)


def peak(step: Any, x: Tensor) -> int:
    """Bytes that a training step needs beyond what is there before it."""
    for _ in range(3):  # the first ones compile, and make the gradients
        step(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_peak_memory_of_a_compiled_block_is_that_of_eager(
    device: str, layout: torch.memory_format, autocast: bool
) -> None:
    block = randomize(Block()).to(device)
    x = torch.randn(16, 8, 128, 128, device=device).to(memory_format=layout).requires_grad_()

    def step_of(run: Any) -> Any:
        def step(x: Tensor) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = run(x)
            y.square().mean().backward()

        return step

    eager = peak(step_of(block), x)
    compiled = peak(step_of(torch.compile(block, fullgraph=True)), x)
    assert compiled <= 1.03 * eager
