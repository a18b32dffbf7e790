"""Errors for unknown keyword arguments that name the right one."""

import functools
import inspect
from typing import Any, Callable, TypeVar

from ..errors import ArgumentError, UnknownNameError, unknown
from .data import own_tables

Function = TypeVar("Function", bound=Callable[..., Any])


def checked_call(function: Function) -> Function:
    """Decorate a function: an unknown keyword raises `UnknownNameError` with the right name.

    That is the advice of lists/spellings.toml for users of other libraries, else the closest
    parameter. Every other call that does not fit raises Python's own `TypeError`.

    >>> @checked_call
    ... def init(target_dtype=None, policy=None): ...
    >>> init(polcy="float16")
    Traceback (most recent call last):
    mxamp.errors.UnknownNameError: unknown argument of init 'polcy'; the closest is 'policy'
    """

    @functools.wraps(function)
    def wrapper(*args: object, **keywords: object) -> object:
        try:
            return function(*args, **keywords)
        except (TypeError, ArgumentError) as error:
            parameters = sorted(inspect.signature(function).parameters.keys() - {"self", "cls"})
            name = function.__qualname__.rpartition("<locals>.")[2].replace(".__init__", "")
            advice = own_tables("spellings").get(name, {})
            for given in (*(one for one in args if isinstance(one, str)), *keywords):
                if given in advice:
                    said = f"unknown argument of {name} {given!r}: {advice[given]}"
                    raise UnknownNameError(said) from None
            for keyword in keywords if isinstance(error, TypeError) else ():
                if keyword not in parameters:
                    raise unknown(f"argument of {name}", keyword, parameters) from None
            raise

    return wrapper  # type: ignore[return-value]
