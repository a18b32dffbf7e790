"""Checks of numbers that users give."""

import math
import numbers
from typing import Any

from ..errors import ArgumentError
from ..framework.wording import shown

__all__ = ["count", "positive_count", "positive_number"]


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a positive finite float."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ArgumentError(f"{name} must be a positive finite number, not {shown(value)}")
    return float(value)


def count(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int of at least `least`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < least:
        raise ArgumentError(
            f"{name} must be a whole number of at least {least}, not {shown(value)}"
        )
    return int(value)


def positive_count(name: str, value: Any) -> int:
    """Return `value` as an int of at least 1."""
    return count(name, value, least=1)
