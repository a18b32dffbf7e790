"""Attribute values of operators, which MXNet keeps as text, and the ranges of dtypes."""

import ast
import math
import re
import struct
from typing import Any, List, Mapping, NamedTuple

__all__ = [
    "INFINITE_FROM",
    "RANGES",
    "flattens",
    "integers",
    "is_dilated",
    "is_true",
    "kernel_axes",
    "out_of_range",
    "same_value",
]


class _Range(NamedTuple):
    largest: float
    smallest: float  #: normal number: below it, digits are lost


#: The largest finite number of each dtype, and the smallest that has all its digits.
RANGES: Mapping[str, _Range] = {
    "float16": _Range(65504.0, 2.0**-14),
    "bfloat16": _Range((2 - 2.0**-7) * 2.0**127, 2.0**-126),
    "float32": _Range((2 - 2.0**-23) * 2.0**127, 2.0**-126),
}

#: The least number of each dtype that rounds to infinity: half a step above the largest.
INFINITE_FROM: Mapping[str, float] = {
    "float16": 65520.0,
    "bfloat16": (2 - 2.0**-8) * 2.0**127,
}

# Old models, saved by Python 2, have (3L, 3L).
_LONG = re.compile(r"(?<=\d)L")

_WORDS: Mapping[str, Any] = {"true": 1, "false": 0, "none": None}


def same_value(one: str, other: str) -> bool:
    """Return whether two texts are the same value to MXNet.

    >>> same_value("True", "1"), same_value("(1, 1)", "[1,1]"), same_value("0.1", "0.100000001")
    (True, True, True)
    """
    return one == other or _equal(_parsed(one), _parsed(other))


def is_true(text: str) -> bool:
    """Return whether MXNet reads a text as true: "True", or "true" or "1" from other languages.

    >>> is_true("True"), is_true("true"), is_true("1"), is_true("False")
    (True, True, True, False)
    """
    return text.lower() in ("true", "1")


def flattens(attrs: Mapping[str, str]) -> bool:
    """Return whether a dense layer flattens its data to a matrix."""
    return is_true(attrs.get("flatten", "True"))


def out_of_range(text: str, dtype: str) -> bool:
    """Return whether a number becomes infinite or zero in a dtype, or loses digits.

    Below the smallest normal number, digits are lost: float16 makes 1.19e-7 of 1e-7. Infinity,
    zero and texts that are not numbers are not out of range.
    """
    value = _parsed(text)
    if not isinstance(value, (int, float)):
        return False
    size, held = abs(value), RANGES[dtype]
    return held.largest < size < math.inf or 0 < size < held.smallest


def _parsed(text: str) -> Any:
    """Return a text's value: None, a number (booleans are 0 and 1), a tuple, or the text."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return float(text)
    except ValueError:
        pass
    if text[:1] not in ("(", "["):
        return text
    try:
        return _flat(ast.literal_eval(_LONG.sub("", text)))
    except (SyntaxError, ValueError):
        return text


def _flat(value: Any) -> Any:
    """Return lists as tuples; to MXNet, a list of one item is the item."""
    if not isinstance(value, (list, tuple)):
        return value
    items = tuple(_flat(item) for item in value)
    return items[0] if len(items) == 1 else items


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float) and not one.is_integer():
        return one == other or _single(one) == _single(other)
    return bool(one == other)


def _single(value: float) -> float:
    """Round to float32, as MXNet stores `float` parameters: it prints 0.1 as 0.100000001."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return value


def kernel_axes(attributes: Mapping[str, Any]) -> int:
    """Return how many axes the kernel of a convolution or a pooling has; 0 without one.

    >>> kernel_axes({"kernel": "(3, 3, 3)"})
    3
    """
    return len(_numbers(attributes.get("kernel", "()")))


def is_dilated(attributes: Mapping[str, Any]) -> bool:
    """Return whether the kernel of a convolution is dilated.

    >>> is_dilated({"dilate": "(2, 2)"})
    True
    """
    return any(number != "1" for number in _numbers(attributes.get("dilate", "()")))


def integers(text: str) -> List[int]:
    """Return the numbers of a shape or a list of axes; none for "None".

    >>> integers("(0, 1)"), integers("[2L,]"), integers("None")
    ([0, 1], [2], [])
    """
    return [] if text == "None" else [int(number) for number in _numbers(text)]


def _numbers(given: Any) -> List[str]:
    inner = _LONG.sub("", str(given).strip("()[] ,"))
    return [number.strip() for number in inner.split(",")] if inner else []
