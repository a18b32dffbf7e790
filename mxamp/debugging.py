"""The public name of the debugging tools: `amp.debugging` and `import mxamp.debugging`."""

from .tools import debugging as _tools
from .tools.debugging import *  # noqa: F403

__doc__ = _tools.__doc__  # noqa: A001
__all__ = _tools.__all__


_TRACE = "on_step(trainer, function); examples/tensorboard.py shows a run in TensorBoard"
#: Names of mxamp 1.0, and what to use instead.
_GONE = {
    "trace": _TRACE,
    "read_trace": _TRACE,
    "gradient_histogram": "a histogram of exponents, as in examples/tensorboard.py",
    **dict.fromkeys(("CastCount", "OperatorCount", "OperatorStats"), "what operator_stats() gives"),
    **dict.fromkeys(("Comparison", "TensorError"), "what compare(...) returns"),
    **dict.fromkeys(("Finding", "NumericsCheck", "Statistics"), "what check_numerics() gives"),
}


def __getattr__(name: str) -> object:
    if name in _GONE:
        raise AttributeError(f"amp.debugging.{name} is gone; use {_GONE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted(__all__)
