"""Errors for unknown keyword arguments, which suggest the right argument."""

import functools
import inspect
from typing import Any, Callable, Iterable, TypeVar

from ..errors import ArgumentError, UnknownNameError, closest
from .data import own_tables

Function = TypeVar("Function", bound=Callable[..., Any])


def checked_call(function: Function) -> Function:
    """Decorate a function so that an unknown keyword raises an error with the right keyword.

    That is the advice of lists/spellings.toml for users of other libraries, about all of their
    arguments at once, else the closest parameter. Every other call that does not fit raises
    Python's own `TypeError`.

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
            name = function.__qualname__.rpartition("<locals>.")[2].replace(".__init__", "")
            names = sorted(inspect.signature(function).parameters.keys() - {"self", "cls"})
            unknown = {*keywords} - {*names} if isinstance(error, TypeError) else ()
            given = [*(one for one in args if isinstance(one, str)), *keywords]
            advice = own_tables("spellings").get(name, {})
            wrong = [one for one in given if one in advice or one in unknown]
            if wrong:
                said = "; ".join(f"{one!r}{hint(name, one, names)}" for one in wrong)
                raise UnknownNameError(f"unknown argument of {name} {said}") from None
            raise

    return wrapper  # type: ignore[return-value]


def hint(owner: str, name: str, candidates: Iterable[str]) -> str:
    """Return the end of an unknown-name error message: what to write, or the closest names.

    It is the advice of lists/spellings.toml to users of other libraries, else the closest names.

    >>> hint("module 'mxamp'", "is_autocast_enabled", []), hint("", "iint", ["init", "decorate"])
    (': write amp.is_enabled()', "; the closest is 'init'")
    """
    advice = own_tables("spellings").get(owner, {}).get(name)
    return f": {advice}" if advice else closest(name, candidates)
