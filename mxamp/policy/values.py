"""Parse and compare operators' attribute values, which MXNet keeps as text."""

from __future__ import annotations

import ast
import math
import re
from ctypes import c_float
from typing import Any, Mapping, NamedTuple


class _Range(NamedTuple):
    """The largest and smallest magnitudes that a dtype holds at full precision."""

    largest: float
    smallest: float  #: normal number: below it, digits are lost


#: The largest finite number of each dtype, and the smallest that has all its digits.
RANGES: Mapping[str, _Range] = {
    "float16": _Range(65504.0, 2.0**-14),
    "bfloat16": _Range((2 - 2.0**-7) * 2.0**127, 2.0**-126),
    "float32": _Range((2 - 2.0**-23) * 2.0**127, 2.0**-126),
}

# Old models, saved by Python 2, have (3L, 3L).
_LONG = re.compile(r"(?<=\d)L")

_WORDS: Mapping[str, Any] = {"true": 1, "false": 0, "none": None}


def same_value(one: str, other: str) -> bool:
    """Return whether MXNet parses two attribute texts to the same value.

    >>> same_value("True", "1"), same_value("(1, 1)", "[1,1]"), same_value("0.1", "0.100000001")
    (True, True, True)
    """
    return one == other or _equal_values(_parse_value(one), _parse_value(other))


def is_true(text: str) -> bool:
    """Return whether an attribute's text is true to MXNet: "True", "true" or "1".

    >>> is_true("True"), is_true("true"), is_true("1"), is_true("False")
    (True, True, True, False)
    """
    return text.lower() in ("true", "1")


def flattens_data(attrs: Mapping[str, str]) -> bool:
    """Return whether a `FullyConnected` with these attributes flattens its data to a matrix."""
    return is_true(attrs.get("flatten", "True"))


def out_of_range(text: str, dtype: str) -> bool:
    """Return whether `text` is a number that overflows, vanishes or loses digits in `dtype`.

    Below the smallest normal number, digits are lost: float16 makes 1.19e-7 of 1e-7. Infinity,
    zero and texts that are not numbers are not out of range.
    """
    value = _parse_value(text)
    if not isinstance(value, (int, float)):
        return False
    size, held = abs(value), RANGES[dtype]
    return held.largest < size < math.inf or 0 < size < held.smallest


def _parse_value(text: str) -> object:
    """Parse an attribute's text to None, a number (booleans are 0 and 1), a tuple, or a string."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        if text.startswith(("(", "[")):
            return _as_tuples(ast.literal_eval(_LONG.sub("", text)))
        return float(text)
    except (SyntaxError, ValueError):
        return text


def _as_tuples(value: object) -> object:
    """Return nested lists as tuples, and a one-item list as its item, as MXNet reads them."""
    if not isinstance(value, (list, tuple)):
        return value
    items = tuple(_as_tuples(item) for item in value)
    return items[0] if len(items) == 1 else items


def _equal_values(one: object, other: object) -> bool:
    """Return whether two parsed attribute values are equal; fractions are compared in float32."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal_values, one, other))
    if isinstance(one, float) and isinstance(other, float) and not one.is_integer():
        # MXNet stores fractions as float32, and prints 0.1 as 0.100000001.
        return one == other or c_float(one).value == c_float(other).value
    return bool(one == other)


def parse_integers(text: str) -> list[int]:
    """Return the integers in the text of a shape or a list of axes; an empty list for "None".

    >>> parse_integers("(0, 1)"), parse_integers("[2L,]"), parse_integers("None")
    ([0, 1], [2], [])
    """
    return [int(number) for number in re.findall(r"-?\d+", str(text))]
