"""How far arrays are from the ones they should be, summed over as many as there are."""

import math
from typing import Any

import numpy as np

from ..errors import ArgumentError

__all__ = ["Distance"]


class Distance:
    """The errors of arrays against others of the same shapes.

    `relative` is the L2 norm of the difference over that of the first array, `maximum` the
    largest absolute difference; both leave out elements that are not finite in one of the two.
    `lost` counts elements that are finite in the first and not in the second.
    """

    def __init__(self) -> None:
        self._squares = self._differences = self.maximum = 0.0
        self.lost = 0

    def add(self, name: str, ours: Any, theirs: Any) -> None:
        """Take in one more pair of float32 arrays of NumPy's."""
        if ours.shape != theirs.shape:
            raise ArgumentError(f"output {name!r} has shape {ours.shape} and {theirs.shape}")
        finite = np.isfinite(ours)
        both = finite & np.isfinite(theirs)
        self.lost += int(finite.sum() - both.sum())
        base = ours[both].astype("float64")
        difference = theirs[both].astype("float64") - base
        self._squares += float((base**2).sum())
        self._differences += float((difference**2).sum())
        if difference.size:
            self.maximum = max(self.maximum, float(abs(difference).max()))

    @property
    def relative(self) -> float:
        """The relative error in the L2 norm; 1 where all should be zero and is not."""
        if not self._squares:
            return float(self._differences > 0)
        return math.sqrt(self._differences) / math.sqrt(self._squares)
