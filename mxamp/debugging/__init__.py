"""What mixed precision does to a model, and why: public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

What ran, in which dtype   operator_stats, OperatorStats, OperatorCount, CastCount
Where values went wrong    check_numerics, NumericsCheck, Finding, NumericsError, Statistics
How far it is from float32 compare, Comparison, TensorError
How large gradients are    gradient_histogram, GradientHistogram
"""

from .comparison import Comparison, TensorError
from .findings import Finding, NumericsError
from .gradients import gradient_histogram
from .histogram import GradientHistogram
from .numerics import NumericsCheck, check_numerics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .side_by_side import compare
from .statistics import Statistics

__all__ = [
    "CastCount",
    "Comparison",
    "Finding",
    "GradientHistogram",
    "NumericsCheck",
    "NumericsError",
    "OperatorCount",
    "OperatorStats",
    "Statistics",
    "TensorError",
    "check_numerics",
    "compare",
    "gradient_histogram",
    "operator_stats",
]
