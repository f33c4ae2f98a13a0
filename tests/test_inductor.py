"""What Inductor makes of the layer: one extern call, no copies, layouts that suit the users."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from expecttest import assert_expected_inline
from layer_cases import Block, randomize
from torch import Tensor, nn
from torch._inductor import config, custom_graph_pass, lowering
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch._inductor.virtualized import V
from torch.testing import assert_close

from bench.generated_code import calls, copies
from wtconv_ops import WTConv2d, _inductor

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("ops", "fresh_compiler")]

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
TRAINING = pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
CHANNELS = 8


class Around(nn.Module):
    """The layer between two functions."""

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.before, self.after = WTConv2d(CHANNELS, CHANNELS, 3), before, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.conv(self.before(x)))


def image(layout: str = "NCHW", device: str = "cpu", size: tuple[int, int] = (6, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, CHANNELS, *size, generator=generator)
    return x.to(device, memory_format=LAYOUTS[layout])


def step(module: Any, x: Tensor, training: bool) -> list[Tensor]:
    """Output; in training the gradients of the input and of every parameter too."""
    if not training:
        with torch.no_grad():
            return [module(x)]
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


def compiled_step(module: nn.Module, x: Tensor, training: bool) -> tuple[list[Tensor], list[str]]:
    """Results of a compiled step, and the code of each graph, made anew."""
    compiled = torch.compile(module, fullgraph=True, dynamic=False)
    with fresh_cache():
        results, codes = run_and_get_code(step, compiled, x, training)
    return results, [code[code.index("def call(") :] for code in codes]


def code_of(module: nn.Module, x: Tensor) -> str:
    """The code of the one graph, for which no compiler and no kernel runs."""
    codes: list[str] = []

    def stop(code: str) -> None:
        codes.append(code[code.index("def call(") :])
        raise InterruptedError

    with (
        patch.object(GraphLowering, "save_output_code", stop),
        fresh_cache(),
        torch.no_grad(),
        pytest.raises(Exception, match="InterruptedError"),
    ):
        torch.compile(module, fullgraph=True, dynamic=False)(x)
    (code,) = codes
    return code


def call_of_layer(code: str) -> str:
    """The name of the operator that the graph calls for the layer, and its last argument."""
    (call,) = re.findall(r"= torch\.ops\.wtconv\.(.+)\)", code)
    return f"{call.partition('.')[0]}({call.rpartition(', ')[2]})"


@LAYOUT
@TRAINING
def test_block_is_one_extern_call_without_copies(device: str, layout: str, training: bool) -> None:
    block = randomize(Block(CHANNELS)).to(device)
    x = image(layout, device)
    results, codes = compiled_step(block, x, training)
    expected = step(block, x, training)
    assert_close(results, expected)
    assert [t.stride() for t in results] == [t.stride() for t in expected]
    names = [calls(code) for code in codes]
    ours = [[name for name in graph if name.startswith("_graph")] for graph in names]
    assert ours == [["_graph_forward"], ["_graph_backward"]][: 1 + training]
    assert not any(copies(graph) for graph in names)
    assert call_of_layer(codes[0]) == "_graph_forward(True)"
    # The bias of a product belongs to it or to the kernel after it.
    kinds = [re.sub("fused .*", "fused", name).replace("addmm", "mm") for name in names[0]]
    assert_expected_inline(
        "\n".join(kinds),
        """\
_graph_forward
fused
mm
fused
mm
fused""",
    )


@LAYOUT
@TRAINING
def test_layer_is_one_extern_call_alone(device: str, layout: str, training: bool) -> None:
    layer = randomize(WTConv2d(CHANNELS, CHANNELS, 3, wt_levels=2)).to(device)
    x = image(layout, device)
    results, codes = compiled_step(layer, x, training)
    expected = step(layer, x, training)
    assert_close(results, expected)
    assert [t.stride() for t in results] == [t.stride() for t in expected]
    assert calls(codes[0]) == ["_graph_forward"]
    assert call_of_layer(codes[0]) == f"_graph_forward({layout == 'NHWC'})"
    if training:  # the kernels of the loss, and the operator
        assert [name for name in calls(codes[1]) if "fused" not in name] == ["_graph_backward"]
        assert not copies(calls(codes[1]))


def identity(x: Tensor) -> Tensor:
    return x


def to_rows(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


# Functions before and after the layer, and whether its output is channels_last for an input that
# is not, and for one that is.
NEIGHBOURS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool, bool]] = {
    "pointwise": (torch.sin, torch.sin, False, True),
    "sum over channels": (identity, lambda y: to_rows(y).sum(-1), True, True),
    "another dtype": (identity, lambda y: to_rows(y.double()).sum(-1), True, True),
    "returned": (identity, to_rows, False, True),
    "returned and read": (identity, lambda y: (y, to_rows(y).sum(-1)), False, True),
    "other permutation": (identity, lambda y: y.permute(0, 3, 1, 2).sum(-1), False, True),
    "flattened": (torch.sin, lambda y: y.flatten(1).cos(), False, True),
    "slice": (lambda x: x[:, :, 1:, 2:], torch.sin, False, True),
    "expanded": (lambda x: x[:1].expand(2, -1, -1, -1), torch.sin, False, True),
}


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
@LAYOUT
def test_users_choose_the_layout(layout: str, neighbours: str) -> None:
    before, after, *channels_last = NEIGHBOURS[neighbours]
    code = code_of(Around(before, after), image(layout))
    assert call_of_layer(code) == f"_graph_forward({channels_last[layout == 'NHWC']})"
    assert not [name for name in copies(calls(code)) if neighbours != "flattened"]


def test_inspection_finds_the_copy_of_an_output_that_is_needed_in_both_layouts() -> None:
    weight = torch.ones(CHANNELS, CHANNELS)
    both = Around(identity, lambda y: (y, to_rows(y).reshape(-1, CHANNELS) @ weight))
    assert len(copies(calls(code_of(both, image())))) == 1


def test_one_dynamic_graph_serves_sizes_of_all_parities() -> None:
    """In training too: what is saved for backward keeps strides that are no numbers."""
    block = randomize(Block(CHANNELS))
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for training in (True, False):
        with torch._dynamo.config.patch(error_on_recompile=False):
            step(compiled, image(), training)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in ((7, 6), (9, 9), (8, 12)):
                x = image(size=size)
                assert_close(step(compiled, x, training), step(block, x, training))


def test_packages_call_the_public_operator() -> None:
    """They outlive the version of the library that made them."""
    ops = torch.ops.wtconv
    graph: Any = SimpleNamespace(aot_mode=True)
    with V.set_graph_handler(graph):
        forward = _inductor._plan_forward(ops._fused_forward.default, "input", "weight")
        backward = _inductor._plan_backward(ops.fused_backward.default, "grad", "input")
    assert forward == (ops._fused_forward.default, ("input", "weight"))
    assert backward == (ops.fused_backward.default, ("grad", "input"))


class CountingPass(CustomGraphPass):
    """A pass of a user."""

    def __init__(self, name: Any = "theirs") -> None:
        self.name, self.graphs = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> Any:
        return self.name


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a process that has not compiled an operator yet."""
    ours = [getattr(torch.ops.wtconv, name).default for name in ("fused_forward", "_fused_forward")]
    ours.append(torch.ops.wtconv.fused_backward.default)
    kept = {op: lowering.lowerings.pop(op) for op in ours if op in lowering.lowerings}
    for name in ("installed", "lowered", "warned"):
        monkeypatch.setattr(_inductor._State, name, False)
    with config.patch(post_grad_custom_pre_pass=None):
        yield
    for op in ours:
        lowering.lowerings.pop(op, None)
    lowering.lowerings.update(kept)


def code_of_layer() -> str:
    torch._dynamo.reset()
    layer = randomize(WTConv2d(CHANNELS, CHANNELS, 3))
    (y,), (code,) = compiled_step(layer, image(), False)
    assert_close(y, layer(image()))
    return call_of_layer(code).partition("(")[0]


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("slots", ["list", "one slot"])
def test_passes_of_users_stay(slots: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if slots == "one slot":  # torch 2.11 and 2.12
        monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    elif not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("this torch holds one pass")
    theirs = CountingPass()
    config.post_grad_custom_pre_pass = theirs
    _inductor.install()
    chained: Any = config.post_grad_custom_pre_pass
    if slots == "list":
        assert chained[0] is theirs
        assert chained[1].uuid() == _inductor.uuid()
        assert code_of_layer() == "_graph_forward"
    else:
        assert chained.uuid() == ("theirs", _inductor.uuid())
        chained(torch.fx.Graph())
        config.post_grad_custom_pre_pass = None
        config.post_grad_custom_pre_pass = CountingPass(None)
        _inductor._State.installed = False
        _inductor.install()
        assert config.post_grad_custom_pre_pass.uuid() is None  # theirs cannot be cached
    assert theirs.graphs >= 1


def test_no_internal_operator_without_the_uuid_in_the_cache_key() -> None:
    assert code_of_layer() == "_graph_forward"
    with config.patch(post_grad_custom_pre_pass=CountingPass()):
        assert code_of_layer() == "fused_forward"
    assert code_of_layer() == "_graph_forward"


def refuse_once(module: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Make the next call of a function fail; Inductor calls the same ones for any operator."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(module, name, original)
            raise TypeError(f"{name} takes other arguments here")

        monkeypatch.setattr(module, name, refuse)

    return apply


def no_graph(node: torch.fx.Node) -> Any:
    raise AttributeError("the graph has other attributes")


MOVED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pass": lambda monkeypatch: monkeypatch.delattr(custom_graph_pass, "CustomGraphPass"),
    "registration": refuse_once(lowering, "register_lowering"),
    "realized inputs": refuse_once(lowering, "add_needs_realized_inputs"),
    "graph": lambda monkeypatch: monkeypatch.setattr(_inductor, "_readers", no_graph),
    "slot": lambda monkeypatch: monkeypatch.setattr(_inductor, "_SLOT", "another_name"),
    "operators": lambda monkeypatch: monkeypatch.setattr(_inductor, "GRAPH_OPS", ("_missing",)),
}


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize("moved", MOVED)
def test_a_moved_interface_leaves_the_plain_operator_and_one_warning(
    moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MOVED[moved](monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [code_of_layer() for _ in range(2)]
    ours = [str(warning.message) for warning in caught if "wtconv_ops" in str(warning.message)]
    assert names == ["fused_forward"] * 2
    assert len(ours) == 1, ours
    assert "plain custom operators" in ours[0]
