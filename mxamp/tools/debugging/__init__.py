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
A run, step by step        trace, Trace, read_trace, TraceFile, TraceStep, TraceRecord
"""

from .comparing.comparison import Comparison, TensorError
from .comparing.gradients import gradient_histogram
from .comparing.histogram import GradientHistogram
from .comparing.side_by_side import compare
from .numerics.check import NumericsCheck, check_numerics
from .numerics.findings import Finding, NumericsError, Statistics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .trace_lines import TraceRecord, TraceStep
from .trace_reading import TraceFile, read_trace
from .trace_writing import Trace, trace

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
    "Trace",
    "TraceFile",
    "TraceRecord",
    "TraceStep",
    "check_numerics",
    "compare",
    "gradient_histogram",
    "operator_stats",
    "read_trace",
    "trace",
]
