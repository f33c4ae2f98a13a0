"""Memory that shows when it is read: NaN in new tensors and around the values of a view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["embed", "poisoned_memory"]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in floating tensors and the largest integer in others."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def embed(
    values: Tensor,
    order: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    margin: int | Sequence[int] = 1,
) -> Tensor:
    """The values as a view of a larger tensor that is NaN everywhere else.

    Args:
        values: Any shape and floating dtype.
        order: Dimensions from the outermost in memory to the innermost; as in ``values`` if None.
        steps: Distance of neighbours along each dimension, in places of the larger tensor; 1 if
            None.
        margin: NaN places before and after the values along every dimension, or along each.
    """
    order = range(values.dim()) if order is None else order
    steps = [1] * values.dim() if steps is None else steps
    around = [margin] * values.dim() if isinstance(margin, int) else margin
    shape, inside = [], []
    for d in order:
        extent = max(0, (values.shape[d] - 1) * steps[d] + 1)
        shape.append(extent + 2 * around[d])
        inside.append(slice(around[d], extent + around[d], steps[d]))
    view = values.new_full(shape, torch.nan)[tuple(inside)]
    view.copy_(values.permute(tuple(order)))
    return view.permute([list(order).index(d) for d in range(values.dim())])
