"""Checks of plain Python arguments: the sentences for integers out of range."""

from __future__ import annotations

import operator
from typing import Any


def require_int(owner: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int between ``low`` and ``high``.

    Args:
        owner: Who asks, such as ``WTConv2d``; opens the sentence.
        name: Name of the argument.
        value: An int or an object that is one losslessly (``numpy.int64``); not a bool.
        low: Smallest value allowed.
        high: Largest value allowed; None for no limit.

    Raises:
        TypeError: Not an int.
        ValueError: Out of range.
    """
    allowed = f"an int >= {low}" if high is None else f"an int from {low} to {high}"
    sentence = f"{owner}: {name} must be {allowed}, got {value!r}"
    if isinstance(value, bool):
        raise TypeError(sentence)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(sentence) from None
    if number < low or (high is not None and number > high):
        raise ValueError(sentence)
    return number
