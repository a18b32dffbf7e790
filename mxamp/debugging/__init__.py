"""What mixed precision does to a model, and why: public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

What ran, in which dtype   operator_stats, OperatorStats, OperatorCount, CastCount
Where it goes wrong        compare, Comparison, TensorError
How large gradients are    gradient_histogram, GradientHistogram
"""

from .comparison import Comparison, TensorError
from .gradients import gradient_histogram
from .histogram import GradientHistogram
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .side_by_side import compare

__all__ = [
    "CastCount",
    "Comparison",
    "GradientHistogram",
    "OperatorCount",
    "OperatorStats",
    "TensorError",
    "compare",
    "gradient_histogram",
    "operator_stats",
]
