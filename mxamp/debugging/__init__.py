"""What mixed precision does to a model, and why: public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

What ran, in which dtype   operator_stats, OperatorStats, OperatorCount, CastCount
"""

from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats

__all__ = ["CastCount", "OperatorCount", "OperatorStats", "operator_stats"]
