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
from .numerics.check import NumericsCheck, check_numerics
from .numerics.findings import Finding, NumericsError, Statistics
from .operator_counts import CastCount, OperatorCount, OperatorStats, operator_stats
from .tensor_errors import Comparison, TensorError, compare
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
