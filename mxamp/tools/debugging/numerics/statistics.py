"""What the values of a tensor are like: how many are not finite, zero, or too small to be exact."""

from dataclasses import asdict, dataclass
from typing import Any, Dict, Optional, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray

from ....framework.machine import BFLOAT16, dtype_name
from ....framework.patching import original
from ....policy.values import RANGES

__all__ = ["Statistics", "values_of"]

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
