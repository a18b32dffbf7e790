"""Text for messages: counts with nouns, abbreviated values, and lists of names."""

import inspect
from typing import Any, Iterable, Sequence

import numpy as np

from .machine import dtype_name

#: The longest value that a message shows.
_LONGEST = 80

#: The names that a message lists before it counts the rest.
_NAMES = 3


def counted(count: int, noun: str) -> str:
    """Return a count with its noun as text, in the plural unless the count is 1.

    >>> counted(1, "operator"), counted(2000, "operator")
    ('1 operator', '2,000 operators')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_of(allowed: Iterable[Any]) -> str:
    """Return the allowed values as text for an error message: "'a', 'b' or 'c'".

    >>> one_of(["cpu", "gpu"]), one_of(["a", "b", "c"])
    ("'cpu' or 'gpu'", "'a', 'b' or 'c'")
    """
    *others, last = map(repr, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def shortened(names: Sequence[str], most: int = _NAMES) -> str:
    """Return a list of names as text, cut after `most`: "a, b and 2 others".

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 others'
    """
    first, others = ", ".join(names[:most]), len(names) - most
    return f"{first} and {counted(others, 'other')}" if others > 0 else first


def shown(value: object) -> str:
    """Return a short description of a value for messages; of an array, its shape and dtype.

    >>> import mxnet as mx
    >>> shown("int8"), shown(np.float16), shown(dict), shown([mx.nd.ones(2)])
    ("'int8'", 'float16', 'the class dict', 'a list')
    """
    if isinstance(value, np.dtype) or (inspect.isclass(value) and issubclass(value, np.generic)):
        return dtype_name(value)
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if inspect.isroutine(value) or inspect.ismodule(value):
        return f"the {'module' if inspect.ismodule(value) else 'function'} {value.__name__}"
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOUaeiou" or kind.lower() == "ndarray" else "a"
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic):
        return f"{article} {kind} of shape {value.shape} in {dtype_name(value.dtype)}"
    text = " ".join(repr(value).split())
    if isinstance(value, str) or (len(text) <= _LONGEST and "<" not in text):
        return text[:_LONGEST]
    return f"{article} {kind}"
