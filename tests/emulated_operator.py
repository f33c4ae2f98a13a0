"""Random calls of the operators whose CUDA code computes on the CPU (emulator.operator_library).

That library defines the operators, and wtconv_ops loads its own where none has: the process must
load it before it imports this module.
"""

from __future__ import annotations

import ctypes

import rounding
import torch
from memory import poisoned_memory
from random_cases import random_case
from rounding import assert_follows_reference
from samples import Arguments
from torch import Tensor


def gradients(arguments: Arguments, grad_output: Tensor, mask: list[bool]) -> list[Tensor]:
    outputs = torch.ops.wtconv.fused_backward(grad_output, *arguments, mask)
    return [*outputs[:4], *outputs[4].unbind(), *outputs[5].unbind()]


def check(arguments: Arguments, grad_output: Tensor) -> None:
    """Every result is the reference's; what is wanted alone has the same bits as among others."""
    mask = [arguments[2] is not None or i != 2 for i in range(4 + 2 * len(arguments[4]))]
    with poisoned_memory():
        output = torch.ops.wtconv._fused_forward(*arguments)
        found = gradients(arguments, grad_output, mask)
        (of_input, *_) = gradients(arguments, grad_output, [i == 0 for i in range(len(mask))])
        (_, *others) = gradients(arguments, grad_output, [False, *mask[1:]])
    for i, (alone, among) in enumerate(zip([of_input, *others], found, strict=True)):
        assert torch.equal(alone, among), f"gradient {i} has other bits alone"
    wanted = (result if asked else None for result, asked in zip(found, mask, strict=True))
    assert_follows_reference([output, *wanted], arguments, grad_output)


def main(library: str, dtype: str, first: str, end: str) -> None:
    """Cases `first` to `end` - 1 of random_cases.py."""
    multiprocessors = ctypes.c_int.in_dll(ctypes.CDLL(library), "multiprocessors").value
    rounding.gpu_multiprocessors = lambda x: multiprocessors
    for n in range(int(first), int(end)):
        case = random_case("emulator", getattr(torch, dtype), n)
        try:
            check(*case.make("cpu"))
        except Exception as error:
            raise AssertionError(f"case {n}: {case}") from error
