"""The errors mxamp raises: what was given, what is allowed, and what to do."""

import difflib
from typing import Iterable

__all__ = ["AmpError", "ArgumentError", "InstallError", "StateError", "UnknownNameError", "unknown"]


class AmpError(Exception):
    """Base class of every error that mxamp raises on purpose."""


class ArgumentError(AmpError, ValueError):
    """An argument, a list or a file holds something that mxamp can't take."""


class UnknownNameError(ArgumentError):
    """A name that is not there: an operator, a layer, an argument."""


class StateError(AmpError, RuntimeError):
    """A call that is fine in itself came at the wrong moment."""


class InstallError(AmpError, ImportError):
    """MXNet can't be imported here as it is installed."""


def unknown(kind: str, name: str, candidates: Iterable[str], hint: str = "") -> UnknownNameError:
    """Return the error for a `name` that is none of `candidates`, with the closest ones.

    >>> print(unknown("operator", "Convolutoin", ["Convolution", "Pooling"]))
    unknown operator 'Convolutoin'; the closest is 'Convolution'
    """
    close = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    found = ""
    if close:
        found = f"; the closest {'is' if len(close) == 1 else 'are'} " + ", ".join(map(repr, close))
    return UnknownNameError(f"unknown {kind} {name!r}{found}{'. ' + hint if hint else ''}")
