"""Values counted by exponent: exactly as float16 would round them at any power of two."""

import math
from typing import Any, Dict, Sequence, Tuple

import numpy as np

__all__ = ["NORMAL", "SUBNORMAL", "TOP", "VANISHES", "ExponentCounts"]

#: float16: values up to 2**-25 round to zero, those below 2**-14 are subnormal, and the largest
#: finite one, 65504, has the exponent 15.
VANISHES, SUBNORMAL, NORMAL, TOP = -25, -24, -14, 15
#: From 65520 on, so many times 2**15, float16 rounds to infinity.
_OVERFLOWS = 65520 / 2**TOP
#: So many values are looked at in one go: they fit into a core's cache.
_CHUNK = 2**16


class ExponentCounts:
    """How many values have each exponent (floor of log2 of the magnitude).

    Exact powers of two, and values at the top of their power of two, are counted once more: they
    round differently at the ends of float16's range.
    """

    def __init__(self) -> None:
        #: exponent: values, powers of two among them, and values of 1.9995 times it and more
        self.by_exponent: Dict[int, Tuple[int, int, int]] = {}
        self.zero = self.nonfinite = 0
        self.largest = 0.0

    def count(self, values: Any, scale: float = 1.0) -> None:
        """Take in a flat array of floats that carries a scale; bfloat16 ones as uint16."""
        for start in range(0, values.size, _CHUNK):
            chunk = values[start : start + _CHUNK]
            if chunk.dtype == np.uint16:
                chunk = (chunk.astype(np.uint32) << 16).view(np.float32)
            elif chunk.dtype == np.float16:
                chunk = chunk.astype(np.float32)
            # A power of two changes exponents alone; float64 has room for them all.
            if scale != 1:
                chunk = chunk.astype("float64") / scale
            self._count(chunk)

    def _count(self, values: Any) -> None:
        finite = values[np.isfinite(values)] if not np.isfinite(values).all() else values
        self.nonfinite += values.size - finite.size
        # The mantissa of a finite number lies from 0.5 up to 1, that of zero is 0.
        mantissas, exponents = np.frexp(np.abs(finite))
        used = mantissas != 0
        if not used.all():
            self.zero += int(finite.size - used.sum())
            mantissas, exponents = mantissas[used], exponents[used]
        if not mantissas.size:
            return
        self.largest = max(self.largest, float(np.abs(finite).max()))
        lowest = int(exponents.min())
        offsets = exponents - lowest
        power, top = mantissas == 0.5, mantissas >= _OVERFLOWS / 2  # noqa: PLR2004
        size = int(offsets.max()) + 1
        counts = (np.bincount(offsets[which], minlength=size) for which in (..., power, top))
        for i, row in enumerate(zip(*counts)):
            if row[0]:
                self._add(lowest + i - 1, row)

    def _add(self, exponent: int, row: Sequence[int]) -> None:
        known = self.by_exponent.get(exponent, (0, 0, 0))
        self.by_exponent[exponent] = (
            known[0] + int(row[0]),
            known[1] + int(row[1]),
            known[2] + int(row[2]),
        )

    def add(self, other: "ExponentCounts") -> None:
        """Take in what another one has counted."""
        for exponent, row in other.by_exponent.items():
            self._add(exponent, row)
        self.zero += other.zero
        self.nonfinite += other.nonfinite
        self.largest = max(self.largest, other.largest)

    @property
    def nonzero(self) -> int:
        """How many values are neither zero nor Inf nor NaN."""
        return sum(row[0] for row in self.by_exponent.values())

    def below(self, exponent: float, inclusive: bool) -> float:
        """Count the values below 2**exponent; `inclusive` adds those that are equal to it.

        Exact for whole exponents; else values of one power of two are taken to be spread evenly
        over its logarithm.
        """
        whole = math.floor(exponent)
        total = float(sum(row[0] for e, row in self.by_exponent.items() if e < whole))
        row = self.by_exponent.get(whole, (0, 0, 0))
        if exponent == whole:
            return total + (row[1] if inclusive else 0)
        return total + row[1] + (row[0] - row[1]) * (exponent - whole)

    def overflowing(self, shift: float) -> float:
        """Count the values that float16 rounds to infinity when 2**shift multiplies them."""
        limit = TOP - shift
        whole = math.floor(limit)
        above = float(sum(row[0] for e, row in self.by_exponent.items() if e > whole))
        if limit == whole:
            return above + self.by_exponent.get(whole, (0, 0, 0))[2]
        # The limit is just below the next power of two.
        upper = self.by_exponent.get(whole + 1, (0, 0, 0))[0]
        return above - upper * (limit - whole)
