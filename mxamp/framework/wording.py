"""Words for messages: counts, values, and lists of names."""

import inspect
import reprlib
from typing import Any, Iterable, Sequence

import numpy as np

from .machine import dtype_name

__all__ = ["counted", "one_of", "shortened", "shown"]

#: The longest value that a message shows.
_LONGEST = 80

#: The names that a message lists before it counts the rest.
_NAMES = 3


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, in the plural unless the count is 1.

    >>> counted(1, "operator"), counted(2, "operator"), counted(1, "loss", "losses")
    ('1 operator', '2 operators', '1 loss')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def one_of(allowed: Iterable[Any]) -> str:
    """Return values as text: their `repr`, separated by commas and "or".

    >>> one_of(["cpu", "gpu"]), one_of(["a", "b", "c"])
    ("'cpu' or 'gpu'", "'a', 'b' or 'c'")
    """
    *others, last = map(repr, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def shortened(names: Sequence[str], most: int = _NAMES) -> str:
    """Return the first `most` names and the number of the rest, as text.

    >>> shortened(["a", "b", "c", "d", "e"])
    'a, b, c and 2 others'
    """
    first, others = ", ".join(names[:most]), len(names) - most
    return f"{first} and {counted(others, 'other')}" if others > 0 else first


def shown(value: Any) -> str:
    """Return a value as short text on one line, for messages; dtypes and classes by name.

    >>> import numpy as np
    >>> shown("int8"), shown(np.float16), shown(np.dtype([("bfloat16", np.uint16)])), shown(dict)
    ("'int8'", 'float16', 'bfloat16', 'the class dict')
    """
    return _ShortRepr().repr(value)


class _ShortRepr(reprlib.Repr):
    """The formatter of `shown`."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST

    def repr_instance(self, value: Any, _level: int) -> str:
        """Return the short form of an object without a literal."""
        if isinstance(value, np.dtype) or (isinstance(value, type) and _is_numpy_type(value)):
            return dtype_name(value)
        if isinstance(value, type):
            return f"the class {value.__name__}"
        if inspect.isroutine(value):
            return f"the function {value.__name__}"
        if inspect.ismodule(value):
            return f"the module {value.__name__}"
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return _array_text(value)
        text = " ".join(repr(value).split())
        return text if len(text) <= _LONGEST and not text.startswith("<") else _instance_text(value)

    repr_type = repr_function = repr_module = repr_instance


def _is_numpy_type(kind: type) -> bool:
    return issubclass(kind, np.generic)


def _array_text(value: Any) -> str:
    """Return an array as its class, shape and dtype; a NumPy number with its value."""
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value})"
    size = "x".join(map(str, value.shape))
    axes = f"of {size}" if size else "without axes"
    return f"{_instance_text(value)} {axes} in {dtype_name(value.dtype)}"


def _instance_text(value: Any) -> str:
    """Return "a" or "an" with the name of the value's class."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' or name.lower() == 'ndarray' else 'a'} {name}"
