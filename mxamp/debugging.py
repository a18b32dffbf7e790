"""Tools to debug mixed precision, public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats.operators)
0

Operators and casts that ran     operator_stats
First Inf or NaN of a run        check_numerics, NumericsError
Errors against float32, by layer compare
The report of each step          on_step
"""

from typing import NoReturn

from .framework.keywords import hint
from .tools.debugging.findings import NumericsError
from .tools.debugging.numerics import check_numerics
from .tools.debugging.operator_counts import operator_stats
from .tools.debugging.steps import on_step
from .tools.debugging.tensor_errors import compare

__all__ = ["NumericsError", "check_numerics", "compare", "on_step", "operator_stats"]


def __dir__() -> "list[str]":
    return sorted(__all__)


def __getattr__(name: str) -> NoReturn:
    owner = f"module {__name__!r}"
    raise AttributeError(f"{owner} has no attribute {name!r}{hint(owner, name, __all__)}")
