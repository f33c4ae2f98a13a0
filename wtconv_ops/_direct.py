"""Whether a call may begin at the autograd kernel of an operator.

From Python an operator goes through the dispatcher to its Python kernel for autograd, which goes
through it once more to the kernel of the device. On a small input the first way takes a fifth of a
forward pass. It leads to that kernel unless something in the dispatcher comes before autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import DispatchKey, Tensor, nn
from torch.overrides import has_torch_function_unary

_PLAIN = frozenset({Tensor, nn.Parameter, type(None)})
_AUTOGRAD = DispatchKey.AutogradFunctionality
_tracing_state = torch._C._get_tracing_state
_transforms_active = torch._C._are_functorch_transforms_active
# Private: in a torch that lacks one of them every call goes through the dispatcher.
_autocast_enabled: Any = getattr(torch._C, "_is_any_autocast_enabled", None)
_dispatch_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_is_excluded: Any = getattr(torch._C, "_dispatch_tls_is_dispatch_key_excluded", None)
_KNOWN = None not in (_autocast_enabled, _dispatch_modes, _is_excluded)


def begins_at_autograd(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the dispatcher would call the autograd kernel first, for a call with ``tensors``.

    False under a torch.func transform, autocast, a mode (of functions or of the dispatcher), a
    trace, below autograd (also in inference mode), and with a subclass of Tensor.
    """
    return _KNOWN and not (
        has_torch_function_unary(tensors[0])
        or _tracing_state() is not None
        or _transforms_active()
        or _dispatch_modes()
        or _autocast_enabled()
        or _is_excluded(_AUTOGRAD)
        or not _PLAIN.issuperset(map(type, tensors))
    )
