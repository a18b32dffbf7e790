"""Results of `check_numerics`: the operator with Inf or NaN, and its tensors' statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import AmpError
from .observing import Observed

_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
}


@dataclass(frozen=True)
class Statistics:
    """Counts of Inf and NaN in a tensor, and the range and mean of its finite values.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 0.5, 1.0]))
    >>> statistics = check.first.statistics
    >>> statistics.nan, statistics.maximum
    (1, 0.0)

    Parameters
    ----------
    dtype : str
        The dtype of the tensor.
    shape : tuple of int
        Its shape.
    nan : int
        The number of values that are NaN.
    inf : int
        The number of infinite values.
    negative : int
        How many of these are -Inf.
    minimum : float, optional
        The least finite value; None without any.
    maximum : float, optional
        The largest finite value.
    mean : float, optional
        The mean of the finite values.
    """

    dtype: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    negative: int
    minimum: float | None
    maximum: float | None
    mean: float | None

    @classmethod
    def of(cls, tensor: Observed) -> Statistics:
        """Return the `Statistics` of a tensor that was observed in a run."""
        values = tensor.values
        finite = values[np.isfinite(values)].astype(np.float64)
        nan = int(np.isnan(values).sum())
        inf = values.size - nan - finite.size, int((values == -np.inf).sum())
        of_finite = [float(f(finite)) if finite.size else None for f in (np.min, np.max, np.mean)]
        return cls(tensor.dtype, values.shape, nan, *inf, *of_finite)

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "Inf": self.inf - self.negative, "-Inf": self.negative}
        parts = [f"{n} {what}" for what, n in counts.items() if n]
        if self.minimum is not None:
            parts.append(f"from {self.minimum:.4g} to {self.maximum:.4g}, mean {self.mean:.4g}")
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}: {', '.join(parts)}"


@dataclass(frozen=True)
class Finding:
    """An operator with Inf or NaN in its values, as `check_numerics` reports it.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    >>> check.first.kind, check.first.operator, check.first.tensor
    ('nonfinite', 'log', 'output')

    Parameters
    ----------
    kind : str
        "nonfinite" (Inf or NaN from finite values), "input" (an input or a parameter was not
        finite before anything was computed with it) or "overflow" (finite values became infinite
        in a cast or in 16 bits).
    phase : str
        "forward" or "backward".
    step : int
        The training step, from 1 where the check began; an update ends it.
    block : str
        The Gluon block; "" outside of blocks.
    node : str
        The graph node; for an eager call the block, or without one the operator.
    operator : str
        The name of the operator.
    tensor : str
        The operator's tensor that `statistics` describe, such as "output" or "gradient of data".
    statistics : Statistics
        The counts and range of the tensor.
    inputs : tuple of (str, Statistics)
        The names and statistics of the operator's inputs, for a forward finding.
    cure : str
        What to change: the precision, the learning rate, the data or the model.
    fp32_layers : tuple of str
        In a graph, the operators to keep in float32 if precision is the cause, as `fp32_layers` of
        a policy: the operator itself, or the 16-bit operators next to a cast.
    """

    kind: str
    phase: str
    step: int
    block: str
    node: str
    operator: str
    tensor: str
    statistics: Statistics
    inputs: tuple[tuple[str, Statistics], ...] = ()
    cure: str = ""
    fp32_layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        block = f" in block {self.block!r}" if self.block else ""
        backward = "the backward pass of " if self.phase == "backward" else ""
        inputs = "".join(f"; {name}: {found}" for name, found in self.inputs)
        return (
            f"step {self.step}: {backward}{self.node!r} ({self.operator}{block}) "
            f"{_KINDS[self.kind]}: {self.tensor} is {self.statistics}{inputs}; {self.cure}"
        )


class NumericsError(AmpError, ArithmeticError):
    """Raised by `check_numerics` at Inf or NaN; `finding` describes the operator.

    >>> import mxnet as mx, mxamp as amp
    >>> try:
    ...     with amp.debugging.check_numerics():
    ...         _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    ... except amp.debugging.NumericsError as error:
    ...     print(error.finding.operator, error.finding.statistics.nan)
    log 1

    Parameters
    ----------
    finding : Finding
        The operator, its block, and the statistics of its values.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding
