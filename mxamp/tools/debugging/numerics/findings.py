"""What `check_numerics` finds, as values."""

from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ....errors import AmpError
from ....framework.machine import BFLOAT16, dtype_name
from ....framework.patching import original
from ....policy.values import RANGES

__all__ = [
    "Finding",
    "NumericsError",
    "Statistics",
    "values_of",
]

_SHORT = {"minimum": "min", "maximum": "max"}

# As MXNet made it: under mxamp bfloat16 comes as float32, by way of a cast.
_asnumpy = original(NDArray, "asnumpy")


@dataclass(frozen=True)
class Statistics:
    """Counts and range of a tensor; `minimum`, `maximum` and `mean` are of its finite values."""

    dtype: str
    shape: Tuple[int, ...]
    size: int
    nan: int
    inf: int
    zero: int
    subnormal: int
    minimum: Optional[float]
    maximum: Optional[float]
    mean: Optional[float]

    @classmethod
    def of(cls, array: NDArray) -> "Statistics":
        """Return the statistics of an array; waits for it."""
        dtype, values = dtype_name(array.dtype), values_of(array)
        finite = values[np.isfinite(values)].astype(np.float64)
        nan = int(np.isnan(values).sum())
        tiny = RANGES[dtype].smallest if dtype in RANGES else float(np.finfo(np.float64).tiny)
        size = np.abs(finite)
        extremes = (
            (float(finite.min()), float(finite.max()), float(finite.mean()))
            if finite.size
            else (None, None, None)
        )
        return cls(
            dtype,
            array.shape,
            values.size,
            nan,
            values.size - nan - finite.size,
            int((size == 0).sum()),
            int(((size > 0) & (size < tiny)).sum()),
            *extremes,
        )

    @property
    def finite(self) -> bool:
        """Whether all values are."""
        return not (self.nan or self.inf)

    @property
    def nonzero(self) -> int:
        """How many values are not zero, NaN and Inf among them."""
        return self.size - self.zero

    def to_dict(self) -> Dict[str, Any]:
        """Return it as a dict for JSON."""
        data = {**asdict(self), "shape": list(self.shape)}
        return {_SHORT.get(name, name): value for name, value in data.items()}

    def __str__(self) -> str:
        parts = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "Inf")) if n]
        if self.zero == self.size:
            parts.append("all zero")
        elif self.zero:
            parts.append(f"{self.zero} zero")
        parts += [f"{self.subnormal} subnormal"] if self.subnormal else []
        if self.minimum is not None and self.zero != self.size:
            parts.append(f"from {self.minimum:.4g} to {self.maximum:.4g}, mean {self.mean:.4g}")
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.dtype} {shape}: {', '.join(parts)}"


def values_of(array: NDArray) -> Any:
    """Return an array's values as NumPy's; bfloat16 as float32, of the same values."""
    values = _asnumpy(array)
    if values.dtype != BFLOAT16:
        return values
    bits = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).reshape(array.shape)


_KINDS = {
    "nonfinite": "makes values that are not finite",
    "input": "reads values that are not finite already",
    "overflow": "overflows",
    "vanish": "loses most of its values to zero",
    "dead": "is all zero",
}


@dataclass(frozen=True)
class Finding:
    """An operator where values went wrong.

    `kind` is "nonfinite" (Inf or NaN from finite values), "input" (an input or a parameter was not
    finite before anything was computed with it), "overflow" (finite values became infinite in a
    cast, or would in the low dtype), "vanish" (most became zero there) or "dead" (a layer's
    output is zero everywhere). `tensor` says which of the operator's tensors `statistics` are of.
    """

    kind: str
    phase: str  #: "forward" or "backward"
    step: int  #: updates that had been made before, since the check began
    block: str  #: the Gluon block, "" where there is none
    node: str  #: the graph node; of an eager call, the block and the operator
    operator: str
    tensor: str
    dtype: str  #: of the tensor
    statistics: Statistics
    detail: str = ""

    def to_dict(self) -> Dict[str, Any]:
        """Return it as a flat dict for JSON."""
        data = {key: getattr(self, key) for key in self.__dataclass_fields__}
        del data["statistics"]
        return {**data, **self.statistics.to_dict()}

    def __str__(self) -> str:
        block = f" in block {self.block!r}" if self.block else ""
        where = f"{self.node!r} ({self.operator}{block})"
        backward = "the backward pass of " if self.phase == "backward" else ""
        detail = f"; {self.detail}" if self.detail else ""
        return (
            f"step {self.step}: {backward}{where} {_KINDS[self.kind]}: "
            f"{self.tensor} is {self.statistics}{detail}"
        )


class NumericsError(AmpError, ArithmeticError):
    """A check of numerics has found something; `finding` says what and where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding: Optional[Finding] = finding
