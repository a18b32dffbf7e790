"""Attribute values of operators, which MXNet stores as text: parse and compare them."""

from __future__ import annotations

import ast
import math
import re
from ctypes import c_float
from typing import Any, Mapping

#: The largest finite number of each dtype, and the smallest that has all its digits.
RANGES: Mapping[str, tuple[float, float]] = {
    "float16": (65504.0, 2.0**-14),
    "bfloat16": ((2 - 2.0**-7) * 2.0**127, 2.0**-126),
    "float32": ((2 - 2.0**-23) * 2.0**127, 2.0**-126),
}

# Old models, saved by Python 2, have (3L, 3L).
_LONG = re.compile(r"(?<=\d)L")

_WORDS: Mapping[str, Any] = {"true": 1, "false": 0, "none": None}


def same_value(one: str, other: str) -> bool:
    """Return whether two texts of an attribute mean the same value to MXNet.

    >>> same_value("True", "1"), same_value("(1, 1)", "[1,1]"), same_value("0.1", "0.100000001")
    (True, True, True)
    """
    return one == other or _parse_value(one) == _parse_value(other)


def is_true(text: str) -> bool:
    """Return whether the text of an attribute means True to MXNet.

    >>> is_true("True"), is_true("true"), is_true("1"), is_true("False")
    (True, True, True, False)
    """
    return text.lower() in ("true", "1")


def flattens_data(attrs: Mapping[str, str]) -> bool:
    """Return whether a `FullyConnected` with these attributes flattens its data to a matrix."""
    return is_true(attrs.get("flatten", "True"))


def out_of_range(text: str, dtype: str) -> bool:
    """Return whether `text` is a number that overflows or loses digits in `dtype`.

    Below the smallest normal number, digits are lost: float16 makes 1.19e-7 of 1e-7. Infinity,
    zero and texts that are not numbers are not out of range.
    """
    try:
        size = abs(float(text))
    except ValueError:
        return False
    largest, smallest = RANGES[dtype]
    return largest < size < math.inf or 0 < size < smallest


def _parse_value(text: str) -> object:
    """Return an attribute's text as None, a number, a tuple or, failing these, a string."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        if text.startswith(("(", "[")):
            return _as_in_mxnet(ast.literal_eval(_LONG.sub("", text)))
        return _as_in_mxnet(float(text))
    except (SyntaxError, ValueError):
        return text


def _as_in_mxnet(value: object) -> object:
    """Return a parsed attribute value as MXNet reads it: lists as tuples, floats in float32."""
    if isinstance(value, (list, tuple)):
        items = tuple(_as_in_mxnet(item) for item in value)
        return items[0] if len(items) == 1 else items
    if isinstance(value, float) and not value.is_integer():
        return c_float(value).value  # MXNet prints 0.1 as 0.100000001
    return value


def parse_integers(text: str) -> list[int]:
    """Return the integers in an attribute's text, such as those of a shape "(1, 3)".

    >>> parse_integers("(0, 1)"), parse_integers("[2L,]"), parse_integers("None")
    ([0, 1], [2], [])
    """
    return [int(number) for number in re.findall(r"-?\d+", str(text))]
