"""The public name of the debugging tools: `amp.debugging` and `import mxamp.debugging`."""

from .tools import debugging as _tools
from .tools.debugging import *  # noqa: F403

__doc__ = _tools.__doc__  # noqa: A001
__all__ = _tools.__all__


def __dir__() -> "list[str]":
    return sorted(__all__)
