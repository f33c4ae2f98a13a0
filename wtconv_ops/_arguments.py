"""Checks of plain Python arguments: the sentences for integers out of range."""

from __future__ import annotations

import operator
from typing import Any

_LARGEST = 2**31 - 1


def require_int(owner: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int between ``low`` and ``high``.

    Args:
        owner: Who asks, such as ``WTConv2d``; opens the sentence.
        name: Name of the argument.
        value: An int or an object that is one losslessly (``numpy.int64``); not a bool.
        low: Smallest value allowed.
        high: Largest value allowed; None for 2**31 - 1, with which no product of sizes overflows.

    Raises:
        TypeError: Not an int.
        ValueError: Out of range.
    """
    number = None if isinstance(value, bool) else _index(value)
    largest = _LARGEST if high is None else high
    if number is not None and low <= number <= largest:
        return number
    # Written only now: compiled code cannot format a symbolic value.
    beyond = number is not None and number > largest
    allowed = f"an int from {low} to {largest}" if high or beyond else f"an int >= {low}"
    kind = TypeError if number is None else ValueError
    raise kind(f"{owner}: {name} must be {allowed}, got {value!r}")


def _index(value: Any) -> int | None:
    """``value`` as an int; None if it is not one losslessly."""
    try:
        return operator.index(value)
    except TypeError:
        return None
