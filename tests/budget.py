"""The error budget: how far a result may be from the exact one.

    error of ours against fp64  <=  2 * error of the same-dtype reference + eps(dtype) * max|y|

in the max norm and in the 2-norm of the whole tensor. Stated here and nowhere else.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_within_budget", "budget", "relative_error"]


def budget(reference_same_dtype: Tensor, exact_fp64: Tensor, order: float) -> float:
    """Largest error allowed in the norm of ``order`` (2 or inf)."""
    error = _norm(reference_same_dtype.double() - exact_fp64, order)
    floor = torch.finfo(reference_same_dtype.dtype).eps * _norm(exact_fp64, float("inf"))
    return 2.0 * error + floor


def assert_within_budget(
    ours: Tensor, reference_same_dtype: Tensor, exact_fp64: Tensor, name: str = "result"
) -> None:
    """Check shape, dtype and both norms of ``ours``.

    Args:
        ours: The result, any floating dtype.
        reference_same_dtype: The same computed by the plain reference in the dtype of ``ours``.
        exact_fp64: The same computed in float64 from the same rounded inputs.
        name: What is compared; opens the message.
    """
    assert exact_fp64.dtype == torch.float64, f"{name}: the exact result must be float64"
    assert ours.dtype == reference_same_dtype.dtype, (
        f"{name}: dtype must be {reference_same_dtype.dtype}, got {ours.dtype}"
    )
    assert ours.shape == exact_fp64.shape == reference_same_dtype.shape, (
        f"{name}: shape must be {list(exact_fp64.shape)}, got {list(ours.shape)}"
    )
    assert bool(torch.isfinite(exact_fp64).all()), f"{name}: the exact result is not finite"
    difference = ours.detach().double() - exact_fp64
    for order, label in ((float("inf"), "max norm"), (2.0, "2-norm")):
        error = _norm(difference, order)
        allowed = budget(reference_same_dtype.detach(), exact_fp64, order)
        assert error <= allowed, (  # also false for NaN
            f"{name}: error {error:.3e} exceeds the budget {allowed:.3e} in the {label}"
        )


def relative_error(ours: Tensor, exact_fp64: Tensor) -> float:
    """2-norm of ``ours - exact`` over the 2-norm of ``exact``; 0 for equal empty tensors."""
    error = _norm(ours.detach().double() - exact_fp64, 2.0)
    return error / max(_norm(exact_fp64, 2.0), torch.finfo(torch.float64).tiny)


def _norm(values: Tensor, order: float) -> float:
    values = values.detach()
    return float(torch.linalg.vector_norm(values, order)) if values.numel() else 0.0
