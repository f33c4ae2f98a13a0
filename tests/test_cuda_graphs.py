"""CUDA graphs: captured by hand, as the first CUDA call, by make_graphed_callables, by Inductor."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from layer_cases import Block, make_input, make_layer, randomize
from readme import ROOT
from torch import Tensor, nn
from torch.testing import assert_close

from bench.graph_trace import replay_gap_us
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

pytestmark = [
    pytest.mark.usefixtures("ops", "fresh_compiler"),
    pytest.mark.parametrize("device", ["cuda"]),
]

# (channels, height, width, levels, dtype, layout): planes on chip, tiles, deep levels, any dtype.
CASES = [
    (6, 14, 14, 3, torch.float32, torch.contiguous_format),
    (8, 57, 41, 2, torch.float16, torch.channels_last),
    (4, 150, 131, 1, torch.float32, torch.channels_last),
    (4, 150, 131, 5, torch.float32, torch.contiguous_format),
    (16, 160, 128, 5, torch.bfloat16, torch.contiguous_format),
    (3, 33, 20, 2, torch.float64, torch.contiguous_format),
]


def ids(case: Any) -> str:
    channels, height, width, levels, dtype, layout = case
    last = "-NHWC" if layout is torch.channels_last else ""
    return f"{channels}x{height}x{width}-L{levels}-{str(dtype).removeprefix('torch.')}{last}"


CASE = pytest.mark.parametrize("case", CASES, ids=ids)
Case = tuple[int, int, int, int, torch.dtype, torch.memory_format]


def made(case: Case, device: str) -> tuple[Any, Callable[[int], Tensor]]:
    """The layer of a case, and a function that draws its inputs."""
    channels, height, width, levels, dtype, layout = case
    layer = make_layer(channels, 5, wt_levels=levels).to(device, dtype)

    def draw(seed: int) -> Tensor:
        x = make_input(2, channels, height, width, seed=seed)
        return x.to(device, dtype, memory_format=layout)

    return layer, draw


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], grad_outputs=y.detach().cos())]


def infer(layer: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [layer(x)]


@pytest.mark.parametrize("run", [infer, step], ids=["forward", "forward and backward"])
@CASE
def test_replay_with_new_data_has_the_bits_of_eager(device: str, case: Case, run: Any) -> None:
    layer, draw = made(case, device)
    static = draw(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(layer, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(layer, static)
    for seed in (1, 2, 3):
        static.copy_(draw(seed))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.25)
        graph.replay()
        replayed = [output.detach().clone() for output in outputs]
        assert_close(replayed, [t.detach() for t in run(layer, static)], rtol=0, atol=0)


FIRST_CALL = """
    import sys
    import torch
    sys.path.insert(0, {tests!r})
    from test_cuda_graphs import CASES, infer, made, step
    run, (layer, draw) = {run}, made(CASES[{case}], "cuda")
    static, later = draw(0), draw(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the library has not seen the device before
        outputs = run(layer, static)
    static.copy_(later)
    graph.replay()
    replayed = [output.detach().clone() for output in outputs]
    eager = [output.detach() for output in run(layer, static)]
    torch.testing.assert_close(replayed, eager, rtol=0, atol=0)
    print("equal")
"""


@pytest.mark.parametrize("run", ["infer", "step"], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("case", [0, 1, 4], ids=[ids(CASES[i]) for i in (0, 1, 4)])
def test_capture_may_be_the_first_cuda_call(
    device: str, case: int, run: str, tmp_path: Path
) -> None:
    script = tmp_path / "first.py"
    text = FIRST_CALL.format(tests=str(ROOT / "tests"), run=run, case=case)
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@CASE
def test_make_graphed_callables_equals_eager(device: str, case: Case) -> None:
    layer, draw = made(case, device)
    twin, _ = made(case, device)
    graphed = torch.cuda.make_graphed_callables(layer, (draw(0).requires_grad_(),))
    for seed in (1, 2):
        results = []
        for run, module in ((graphed, layer), (twin, twin)):
            module.zero_grad()
            x = draw(seed).requires_grad_()
            y = run(x)
            y.backward(y.detach().cos())
            gradients = [p.grad.clone() for p in module.parameters()]
            results.append([y.detach().clone(), x.grad.clone(), *gradients])
        assert_close(*results, rtol=0, atol=0)


def reference_of(block: Block) -> Block:
    """A block of the same values with the reference layer."""
    twin = Block()
    conv = block.conv
    twin.conv = ReferenceWTConv2d(  # type: ignore[assignment]
        conv.in_channels, conv.in_channels, conv.kernel_size, wt_levels=conv.wt_levels
    )
    twin.load_state_dict(block.state_dict())
    return twin.to(block.gamma.device)


def train(run: Any, block: Block, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """The loss of each of 5 steps, and the parameters after them."""
    like = block.gamma
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for seed in range(5):
        x = make_input(2, 8, 28, 28, seed=seed).to(like, memory_format=layout)
        optimizer.zero_grad(set_to_none=True)
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    trained = [p.detach().flatten() for p in block.parameters() if p.requires_grad]
    return torch.stack(losses), torch.cat(trained)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_five_steps_under_reduce_overhead_record_graphs_and_equal_eager(
    device: str,
    layout: torch.memory_format,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kernel runs in a CUDA graph: nothing is skipped, and trees have a graph each way."""
    from torch._inductor import cudagraph_trees

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the reference
    block = randomize(Block()).to(device)
    reference, exact = reference_of(block), reference_of(block).double()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    with caplog.at_level(logging.WARNING):
        losses, trained = train(compiled, block, layout)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert not [text for text in caplog.messages if "skipping cudagraphs" in text.lower()]
    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id >= 2  # one of the forward, one of the backward
    (_, same), (true_losses, truth) = (train(one, one, layout) for one in (reference, exact))
    assert_close(losses.double(), true_losses, rtol=1e-5, atol=0)
    assert_within_budget(trained, same, truth, "parameters")


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_replayed_kernels_of_a_block_follow_within_two_microseconds(
    device: str, layout: torch.memory_format, training: bool
) -> None:
    block = randomize(Block(96)).to(device)
    x = make_input(8, 96, 56, 56).to(device, memory_format=layout).requires_grad_(training)
    leaves = [x, *block.parameters()]
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)

    def call() -> None:
        with torch.set_grad_enabled(training):
            y = compiled(x)
        if training:
            torch.autograd.grad(y.square().mean(), leaves)

    for _ in range(3):  # compiles, records, replays
        call()
    gap = replay_gap_us(call, torch.device(device))
    assert gap is not None, "no launch of two kernels in the trace: nothing was replayed"
    assert gap <= 2.0, f"{gap:.2f} µs between two kernels of a graph"
