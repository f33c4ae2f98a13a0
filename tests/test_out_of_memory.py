"""A failed allocation is torch.OutOfMemoryError, or has the words that batch-size finders know."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from wtconv_ops import WTConv2d, _errors

pytestmark = pytest.mark.usefixtures("ops", "fresh_compiler")
CHANNELS = 1024
WORDS = {"cpu": "DefaultCPUAllocator: can't allocate memory", "cuda": "CUDA out of memory."}


def map_of(device: str, channels: int = CHANNELS, size: int = 64) -> Tensor:
    """A map of 2^20 images in the memory of one number; no result of its size fits anywhere."""
    return torch.zeros(1, 1, 1, 1, device=device).expand(2**20, channels, size, size)


def arguments(device: str) -> tuple[Any, ...]:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=device)

    weights, scales = [zeros(4 * CHANNELS, 1, 3, 3)], [zeros(1, 4 * CHANNELS, 1, 1)]
    return (
        (map_of(device), zeros(CHANNELS, 1, 3, 3), None, zeros(1, CHANNELS, 1, 1)),
        weights,
        scales,
    )


def forward(device: str, op: Any = None) -> Any:
    base, weights, scales = arguments(device)
    return (op or torch.ops.wtconv.fused_forward)(*base, weights, scales)


def backward(device: str) -> Any:
    base, weights, scales = arguments(device)
    mask = [True, True, False, True, True, True]
    return torch.ops.wtconv.fused_backward(base[0], *base, weights, scales, mask)


def gradient(device: str) -> Any:
    """The forward does not run: its result alone would fail."""
    from wtconv_ops._autograd import call_backward

    (x, *base), weights, scales = arguments(device)
    with torch._C._AutoDispatchBelowAutograd():
        return call_backward(x, x, [*base, *weights, *scales], [True] * 2 + [False] + [True] * 3)


def jvp(device: str) -> Any:
    (x, *base), weights, scales = arguments(device)
    op = torch.ops.wtconv.fused_forward
    return torch.func.jvp(lambda x: op(x, *base, weights, scales), (x,), (x,))


def dual(device: str) -> Any:
    (x, *base), weights, scales = arguments(device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        return torch.ops.wtconv.fused_forward(dual, *base, weights, scales)


def vmap(device: str) -> Any:
    (x, *base), weights, scales = arguments(device)
    op = torch.ops.wtconv.fused_forward
    return torch.func.vmap(lambda x: op(x, *base, weights, scales))(x[:, None])


def layer(device: str) -> WTConv2d:
    return WTConv2d(CHANNELS, CHANNELS, 3, bias=False, device=device)


def inference(device: str) -> Any:
    with torch.inference_mode():
        return layer(device)(map_of(device))


def training(device: str) -> Any:
    return layer(device)(map_of(device))


def compiled(device: str, backend: str) -> Any:
    return torch.compile(layer(device), backend=backend, fullgraph=True)(map_of(device))


def compiled_inference(device: str) -> Any:
    with torch.inference_mode():
        return compiled(device, "inductor")


def graph_backward(device: str) -> Any:
    (x, *base), weights, scales = arguments(device)
    mask = [True, True, False, True, True, True]
    return torch.ops.wtconv._graph_backward.default(x, x, *base, weights, scales, mask)


def synthesis(device: str) -> Any:
    return torch.ops.wtconv.synthesis(map_of(device), [map_of(device, 4 * CHANNELS, 32)])


def analysis(device: str) -> Any:
    _, weights, scales = arguments(device)
    return torch.ops.wtconv.analysis_conv(map_of(device), weights[0], scales[0])


TYPED: dict[str, Callable[[str], Any]] = {
    "forward": forward,
    "_fused_forward": lambda device: forward(device, torch.ops.wtconv._fused_forward),
    "backward": backward,
    "gradient in autograd": gradient,
    "jvp": jvp,
    "forward-mode AD": dual,
    "vmap": vmap,
    "layer in inference mode": inference,
    "layer in training": training,
    "synthesis": synthesis,
    "analysis_conv": analysis,
    "compiled without Inductor": lambda device: compiled(device, "aot_eager"),
    "compiled": lambda device: compiled(device, "inductor"),
    "compiled in inference mode": compiled_inference,
    "backward of compiled graphs": graph_backward,
}


def allocated(device: str) -> int:
    """Bytes in use, without what the compiler and reference cycles hold."""
    torch._dynamo.reset()
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@pytest.mark.parametrize("call", TYPED)
def test_a_failed_allocation_has_its_type_and_leaves_nothing(device: str, call: str) -> None:
    before = allocated(device)
    with pytest.raises(torch.OutOfMemoryError, match=r"^wtconv: out of memory: ") as error:
        TYPED[call](device)
    assert WORDS[device] in str(error.value)
    assert "a tensor of shape [1048576, " in str(error.value)
    del error
    assert allocated(device) == before


def test_a_direct_call_in_inference_mode_has_the_words_of_torch(device: str) -> None:
    """No Python frame of the package is around it."""
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"^wtconv: out of") as error:
        forward(device)
    assert WORDS[device] in str(error.value)
    assert len(error.value.args) == 1  # the finders read the first argument of such errors


def test_a_refused_call_keeps_no_tensor_alive() -> None:
    """No reference cycle through the error: memory is free before the garbage collector runs."""
    (_, *base), weights, scales = arguments("cpu")
    x = torch.zeros(1, 2, 3, 3)
    alive = weakref.ref(x)
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="input has 2 channels"):
            torch.ops.wtconv.fused_forward(x, *base, weights, scales)
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_other_errors_stay_the_same_objects() -> None:
    for error in (RuntimeError("CUDA error"), torch.OutOfMemoryError("wtconv: out of memory")):
        with pytest.raises(RuntimeError) as raised:
            _errors.reraise(error)
        assert raised.value is error
