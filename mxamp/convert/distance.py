"""How far arrays are from the ones they should be: the worst of as many as there are."""

import math
from typing import Any

import numpy as np

from ..errors import ArgumentError

__all__ = ["Distance"]


class Distance:
    """The errors of arrays against others of the same shapes.

    `relative` is the L2 norm of the difference over that of the first array, of the pair where that
    is largest: pooled, large arrays would hide that smaller ones are all wrong. It is 1 where all
    should be zero and is not. `maximum` is the largest absolute difference; both leave out elements
    that are not finite in one of the two. `lost` counts elements that are finite in the first and
    not in the second, of all pairs.
    """

    def __init__(self) -> None:
        self.relative = self.maximum = 0.0
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
        self.relative = max(self.relative, _relative(base, difference))
        if difference.size:
            self.maximum = max(self.maximum, float(abs(difference).max()))


def _relative(base: Any, difference: Any) -> float:
    whole, error = (math.sqrt(float((one**2).sum())) for one in (base, difference))
    return error / whole if whole else float(error > 0)
