"""Tools to debug mixed precision, public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

Operators and casts that ran     operator_stats, OperatorStats, OperatorCount, CastCount
First Inf or NaN of a run        check_numerics, NumericsCheck, Finding, NumericsError, Statistics
Errors against float32, by layer compare, Comparison, TensorError
The report of each step          on_step
"""

from .findings import Finding, NumericsError, Statistics
from .numerics import NumericsCheck, check_numerics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .steps import on_step
from .tensor_errors import Comparison, TensorError, compare

__all__ = [
    "CastCount",
    "Comparison",
    "Finding",
    "NumericsCheck",
    "NumericsError",
    "OperatorCount",
    "OperatorStats",
    "Statistics",
    "TensorError",
    "check_numerics",
    "compare",
    "on_step",
    "operator_stats",
]
