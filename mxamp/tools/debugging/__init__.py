"""Tools to debug mixed precision, public as `amp.debugging`.

>>> import mxamp as amp
>>> with amp.debugging.operator_stats() as stats:
...     pass
>>> len(stats)
0

Operators and casts that ran     operator_stats, OperatorStats, OperatorCount, CastCount
First Inf or NaN of a run        check_numerics, NumericsCheck, Finding, NumericsError, Statistics
Errors against float32, by layer compare, Comparison, TensorError
Gradients and float16's range    gradient_histogram, GradientHistogram
A training run, step by step     trace, Trace, read_trace, TraceFile, TraceStep, TraceRecord
"""

from .gradients import GradientHistogram, gradient_histogram
from .numerics.findings import Finding, NumericsError
from .numerics.numerics import NumericsCheck, check_numerics
from .numerics.statistics import Statistics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .tensor_errors import Comparison, TensorError, compare
from .tracing.reading import TraceFile, read_trace
from .tracing.trace_steps import TraceRecord, TraceStep
from .tracing.tracing import Trace, trace

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
