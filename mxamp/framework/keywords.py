"""Hints for keyword arguments that other libraries have, and mxamp spells otherwise."""

import functools
import inspect
from typing import Any, Callable, TypeVar

from ..errors import ArgumentError

__all__ = ["hints_for_keywords"]

Function = TypeVar("Function", bound=Callable[..., Any])


def hints_for_keywords(**hints: str) -> Callable[[Function], Function]:
    """Return a decorator: a keyword that the function lacks, or has already, raises with its hint.

    >>> @hints_for_keywords(dtype="write target_dtype='float16'")
    ... def init(target_dtype=None): ...
    >>> init(dtype="float16")
    Traceback (most recent call last):
    mxamp.errors.ArgumentError: init takes no dtype here: write target_dtype='float16'
    """

    def decorate(function: Function) -> Function:
        places = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
        name = function.__qualname__.replace(".__init__", "")

        @functools.wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            for keyword in keywords:
                if keyword in hints and places.get(keyword, -1) < len(args):
                    raise ArgumentError(f"{name} takes no {keyword} here: {hints[keyword]}")
            return function(*args, **keywords)

        return wrapper  # type: ignore[return-value]

    return decorate
