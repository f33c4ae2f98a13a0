"""Wrong inputs: one sentence naming op, argument, expected and got; eager, fake and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from samples import Sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from wrong_inputs import WRONG, Wrong, good

pytestmark = pytest.mark.usefixtures("ops")


def wrong_arguments(case: Wrong) -> list[Any]:
    arguments = good(case.op)
    case.change(arguments)
    return list(arguments.values())


def overload(case: Wrong) -> Any:
    return getattr(torch.ops.wtconv, case.op).default


def error_of(op: Any, arguments: list[Any]) -> str:
    with pytest.raises(RuntimeError) as error:
        op(*arguments)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_eager_and_fake_say_the_same_sentence(case):
    arguments = wrong_arguments(case)
    assert error_of(overload(case), arguments) == case.message
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        assert error_of(overload(case), fake) == case.message


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_arguments_that_require_grad_do_not_change_the_sentence(case):
    def track(tensor):
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    arguments = tree_map_only(torch.Tensor, track, wrong_arguments(case))
    assert error_of(overload(case), arguments) == case.message


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "case", [case for case in WRONG if case.compiles and not case.op.startswith("_")], ids=str
)
def test_compiler_error_contains_the_sentence(case):
    arguments = wrong_arguments(case)
    compiled = torch.compile(overload(case), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as error:  # noqa: PT011 (the compiler wraps it)
        compiled(*arguments)
    assert case.message in str(error.value)


@pytest.mark.usefixtures("fresh_compiler")
def test_symbolic_sizes_are_printed_as_numbers():
    arguments = good("fused_forward")
    arguments["base_weight"] = torch.zeros(5, 1, 3, 3)
    op = torch.ops.wtconv.fused_forward.default
    compiled = torch.compile(op, backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(Exception, match="input has 3 channels but base_weight has 5;"):
        compiled(*arguments.values())


def test_text_of_some_errors(ops):
    x, weight, bias, scale, weights, scales = Sample(8, 8, 2, channels=32, kernel_size=5).make()
    op = ops.fused_forward
    assert_expected_inline(
        "\n".join(
            [
                error_of(op, [x[:, :3], weight, bias, scale, weights, scales]),
                error_of(op, [x[0], weight, bias, scale, weights, scales]),
                error_of(op, [x.half(), weight, bias, scale, weights, scales]),
                error_of(op, [x, weight, bias, scale, [weights[0], weights[0][:32]], scales]),
            ]
        ),
        """\
fused_forward: input has 3 channels but base_weight has 32; WTConv keeps the channel count, use a 1x1 convolution to change it
fused_forward: input must be 4-D [B, C, H, W], got [32, 8, 8]
fused_forward: base_weight must have the dtype of input, float16, got float32; convert one of them or use torch.autocast
fused_forward: wavelet_weights[1] must be [4*C, 1, k, k] = [128, 1, 5, 5], got [32, 1, 5, 5]""",  # noqa: E501
    )


def test_devices_in_a_fake_mode():
    arguments = good("fused_forward")
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        fake["base_scale"] = torch.empty(1, 3, 1, 1, device="cuda:0")
        message = error_of(torch.ops.wtconv.fused_forward.default, list(fake.values()))
    assert message == "fused_forward: base_scale must be on the device of input, cpu, got cuda:0"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_out_of_memory_has_its_type_and_leaves_nothing(device: str, requires_grad: bool) -> None:
    channels = 1024
    x = torch.zeros(1, 1, 1, 1, device=device).expand(2**20, channels, 64, 64)
    weight = torch.zeros(channels, 1, 3, 3, device=device, requires_grad=requires_grad)
    weights = [torch.zeros(4 * channels, 1, 3, 3, device=device)]
    scale, scales = torch.ones(1, channels, 1, 1, device=device), [weights[0][:, :, :1, :1]]
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with pytest.raises(torch.OutOfMemoryError, match=r"wtconv: out of memory: .*\[1048576, 1024"):
        torch.ops.wtconv.fused_forward(
            x, weight, None, scale, weights, [scales[0].reshape(1, -1, 1, 1)]
        )
    if device == "cuda":
        assert torch.cuda.memory_allocated() == before
