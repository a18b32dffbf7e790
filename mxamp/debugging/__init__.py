"""What mixed precision does to a model, and why: public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

What ran, in which dtype   operator_stats, OperatorStats, OperatorCount, CastCount
A run, step by step        trace, Trace, read_trace, TraceFile, TraceStep, TraceRecord
"""

from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .reading import TraceFile, read_trace
from .trace_steps import TraceRecord, TraceStep
from .tracing import Trace, trace

__all__ = [
    "CastCount",
    "OperatorCount",
    "OperatorStats",
    "Trace",
    "TraceFile",
    "TraceRecord",
    "TraceStep",
    "operator_stats",
    "read_trace",
    "trace",
]
