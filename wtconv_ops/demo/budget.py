"""How far from the fp64 result a result may be.

    error(ours) <= 2 * error(reference of the same dtype) + eps(dtype) * max|y|

in the max norm and in the 2-norm of the whole tensor, all errors against an fp64 run. The bound
is measured from the arithmetic the reference itself does, so nothing is chosen by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Errors of one result against fp64, and what they may be."""

    max_error: float
    max_allowed: float
    norm_error: float
    norm_allowed: float

    @property
    def within(self) -> bool:
        """Whether both norms are inside the budget; NaN never is."""
        return self.max_error <= self.max_allowed and self.norm_error <= self.norm_allowed

    def __str__(self) -> str:
        """Both errors with what they may be."""
        return (
            f"max error {self.max_error:.2e} (budget {self.max_allowed:.2e}), "
            f"2-norm error {self.norm_error:.2e} (budget {self.norm_allowed:.2e})"
        )


def judge(result: Tensor, reference: Tensor, exact: Tensor) -> Verdict:
    """Compare ``result`` with ``exact`` under the budget that ``reference`` sets.

    Args:
        result: any floating dtype, the shape of ``exact``.
        reference: the same quantity from the plain reference, in the dtype of ``result``.
        exact: float64.

    Raises:
        ValueError: shapes or dtypes do not go together.
    """
    if result.shape != exact.shape or reference.shape != exact.shape:
        raise ValueError(
            f"judge: shapes must be equal, got {list(result.shape)}, "
            f"{list(reference.shape)}, {list(exact.shape)}"
        )
    if result.dtype != reference.dtype or exact.dtype != torch.float64:
        raise ValueError(
            f"judge: result and reference must have one dtype and exact float64, got "
            f"{result.dtype}, {reference.dtype}, {exact.dtype}"
        )
    ours = result.double() - exact
    theirs = reference.double() - exact
    floor = torch.finfo(result.dtype).eps * _max(exact)
    return Verdict(
        max_error=_max(ours),
        max_allowed=2.0 * _max(theirs) + floor,
        norm_error=float(ours.norm()),
        norm_allowed=2.0 * float(theirs.norm()) + floor,
    )


def _max(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
