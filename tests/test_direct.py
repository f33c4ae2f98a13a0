"""Calls that skip the dispatcher: only where it would lead nowhere else, and with equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from layer_cases import make_input, make_layer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wtconv_ops import WTConv2d, functional
from wtconv_ops._direct import begins_at_autograd

pytestmark = pytest.mark.usefixtures("ops")


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def leaves(layer: WTConv2d) -> list[Tensor]:
    return [make_input(2, 3, 9, 7).requires_grad_(), *layer.parameters()]


@pytest.mark.smoke
def test_plain_call_begins_at_autograd() -> None:
    tensors = (*leaves(make_layer(3)), None)
    assert begins_at_autograd(tensors)
    with torch.no_grad():
        assert begins_at_autograd(tensors)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu"),
        FunctionMode,
        DispatchMode,
        FakeTensorMode,
        torch.inference_mode,
        torch._C._AutoDispatchBelowAutograd,
        lambda: torch.device("cpu"),
    ],
)
def test_what_comes_before_autograd_sends_a_call_through_the_dispatcher(
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    tensors = leaves(make_layer(3))
    with context():
        assert not begins_at_autograd(tensors)
    assert begins_at_autograd(tensors)


@pytest.mark.smoke
def test_transforms_traces_and_subclasses_send_a_call_through_the_dispatcher() -> None:
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(begins_at_autograd((x, None)))
        return x.sum()

    x = make_input(2, 3, 9, 7)
    torch.func.grad(call)(x)
    torch.func.vmap(call)(x)
    torch.func.jvp(call, (x,), (x,))
    torch.jit.trace(call, (x,), check_trace=False)
    call(x.as_subclass(Subclass))
    assert seen == [False] * 5
    assert not begins_at_autograd((x, x.as_subclass(Subclass)))


@contextmanager
def through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(functional, "begins_at_autograd", lambda _: False)
        yield


def test_direct_call_gives_what_the_dispatcher_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(3, wt_levels=3)
    tensors = leaves(layer)

    def run() -> list[Tensor]:
        output = layer(tensors[0])
        with torch.no_grad():
            constant = layer(tensors[0])
        assert type(output.grad_fn).__name__ == "FusedForwardBackward"
        assert not constant.requires_grad
        gradients = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(gradients[0].square().sum(), tensors, materialize_grads=True)
        return [output, constant, *gradients, *second]

    results = run()
    with through_the_dispatcher(monkeypatch):
        expected = run()
    torch.testing.assert_close(results, expected, rtol=0.0, atol=0.0)


def test_call_below_autograd_has_no_graph() -> None:
    layer = make_layer(3)
    with torch._C._AutoDispatchBelowAutograd():
        assert not layer(make_input(2, 3, 9, 7)).requires_grad


def test_layer_reads_what_an_attribute_of_a_submodule_stands_for() -> None:
    layer = make_layer(3, wt_levels=2)
    x = make_input(2, 3, 9, 7)
    output = layer(x)
    shadowed: list[nn.Module] = [layer.base_conv, layer.wavelet_convs[1], layer.wavelet_scale[0]]
    for module in shadowed:
        module.__dict__["weight"] = 2 * module.weight  # found before the parameter
    doubled = layer(x)
    assert not torch.equal(doubled, output)
    for module in shadowed:
        module.register_parameter("copy", nn.Parameter(module.__dict__.pop("weight").detach()))
    torch.testing.assert_close(layer(x), output, rtol=0.0, atol=0.0)
    for module in shadowed:
        del module.weight
        module.register_buffer("weight", module.copy.detach())  # no parameter any more
    torch.testing.assert_close(layer(x), doubled, rtol=0.0, atol=0.0)
