"""What mixed precision does to a model, and why: public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

What ran, in which dtype   operator_stats, OperatorStats, OperatorCount, CastCount
Where values went wrong    check_numerics, NumericsCheck, Finding, NumericsError, Statistics
"""

from .findings import Finding, NumericsError
from .numerics import NumericsCheck, check_numerics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .statistics import Statistics

__all__ = [
    "CastCount",
    "Finding",
    "NumericsCheck",
    "NumericsError",
    "OperatorCount",
    "OperatorStats",
    "Statistics",
    "check_numerics",
    "operator_stats",
]
