"""Findings of `check_numerics`: an operator, its tensor, and the tensor's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ...errors import AmpError
from ...framework.machine import BFLOAT16, dtype_name
from ...framework.patching import original
from ...policy.values import RANGES

_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
    "vanish": "loses most of its values to zero",
    "dead": "is all zero",
}

# Below all patches: mxamp's asnumpy() casts bfloat16 to float32.
_asnumpy = original(NDArray, "asnumpy")


def values_of(array: NDArray) -> Any:
    """Return an array's values as NumPy's; bfloat16 as float32, of the same values."""
    values = _asnumpy(array)
    if values.dtype != BFLOAT16:
        return values
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(array.shape)


@dataclass(frozen=True)
class Statistics:
    """Counts and range of a tensor; `minimum`, `maximum` and `mean` are of its finite values.

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
    size : int
        The number of values.
    nan : int
        The number of values that are NaN.
    inf : int
        The number of infinite values.
    zero : int
        The number of zeros.
    subnormal : int
        The number of values that are subnormal in the dtype.
    minimum : float, optional
        The least finite value; None without any.
    maximum : float, optional
        The largest finite value.
    mean : float, optional
        The mean of the finite values.
    """

    dtype: str
    shape: tuple[int, ...]
    size: int
    nan: int
    inf: int
    zero: int
    subnormal: int
    minimum: float | None
    maximum: float | None
    mean: float | None

    @classmethod
    def of(cls, array: NDArray) -> Statistics:
        """Return the statistics of an array; waits for it."""
        return cls.of_values(dtype_name(array.dtype), values_of(array))

    @classmethod
    def of_values(cls, dtype: str, values: Any) -> Statistics:
        """Return the statistics of a NumPy array that holds the values of a tensor of `dtype`."""
        finite = values[np.isfinite(values)].astype(np.float64)
        nan = int(np.isnan(values).sum())
        tiny = RANGES[dtype].smallest if dtype in RANGES else float(np.finfo(np.float64).tiny)
        size = np.abs(finite)
        some = finite.size > 0
        return cls(
            dtype,
            values.shape,
            values.size,
            nan,
            values.size - nan - finite.size,
            int((size == 0).sum()),
            int(((size > 0) & (size < tiny)).sum()),
            float(finite.min()) if some else None,
            float(finite.max()) if some else None,
            float(finite.mean()) if some else None,
        )

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nan or self.inf)

    def __str__(self) -> str:
        counts = [(self.nan, "NaN"), (self.inf, "Inf"), (self.zero, "zero")]
        parts = [f"{n} {what}" for n, what in (*counts, (self.subnormal, "subnormal")) if n]
        if self.zero == self.size:
            parts = ["all zero"]
        elif self.minimum is not None:
            parts.append(f"from {self.minimum:.4g} to {self.maximum:.4g}, mean {self.mean:.4g}")
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}: {', '.join(parts)}"


@dataclass(frozen=True)
class Finding:
    """An operator where values went wrong.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0]))
    >>> check.first.kind, check.first.operator, check.first.tensor
    ('nonfinite', 'log', 'output')

    Parameters
    ----------
    kind : str
        "nonfinite" (Inf or NaN from finite values), "input" (an input or a parameter was not
        finite before anything was computed with it), "overflow" (finite values became infinite in
        a cast, or would in the low dtype), "vanish" (most became zero there) or "dead" (a layer's
        output is zero everywhere).
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
        The operator's tensor that `statistics` describe, such as "output".
    dtype : str
        The dtype of the tensor.
    statistics : Statistics
        The counts and range of the tensor.
    detail : str
        More on the finding, such as the largest value of the dtype; may be "".
    inputs : tuple of (str, Statistics)
        The names and statistics of the operator's inputs, for a forward finding.
    """

    kind: str
    phase: str
    step: int
    block: str
    node: str
    operator: str
    tensor: str
    dtype: str
    statistics: Statistics
    detail: str = ""
    inputs: tuple[tuple[str, Statistics], ...] = ()

    def __str__(self) -> str:
        block = f" in block {self.block!r}" if self.block else ""
        backward = "the backward pass of " if self.phase == "backward" else ""
        detail = f"; {self.detail}" if self.detail else ""
        detail += "".join(f"; {name}: {found}" for name, found in self.inputs)
        return (
            f"step {self.step}: {backward}{self.node!r} ({self.operator}{block}) "
            f"{_KINDS[self.kind]}: {self.tensor} is {self.statistics}{detail}"
        )


class NumericsError(AmpError, ArithmeticError):
    """Raised by `check_numerics`; `finding` describes the operator whose values went wrong.

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
