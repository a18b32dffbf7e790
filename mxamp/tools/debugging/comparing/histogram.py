"""Gradients counted by exponent: what `gradient_histogram` returns."""

import json
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from ....errors import ArgumentError, StateError
from ....framework.wording import counted, shown
from ....scaling.scaler import positive_number
from ...tables import html_table, text_table
from .exponents import NORMAL, VANISHES, ExponentCounts
from .pictures import histogram_figure, png_html, written

__all__ = ["GradientHistogram"]

#: So many times the largest gradient is left free below float16's largest number.
MARGIN = 8.0
NOTHING = "all gradients that were counted are zero: no scale keeps more of them"
KEEP = "keep must be a share above 0 and at most 1, not {keep}"
_HEADINGS = ("name", "values", "zero", "vanishing", "subnormal", "overflowing", "not finite")
_SHOWN = 10


class GradientHistogram:
    """Gradients counted by the power of two that they lie at: `str(histogram)` is a table.

    Gradients are counted as they are without a loss scale; `scale` is the one in use, which the
    table and the picture are for. Shares are of the values that are neither zero nor Inf nor NaN.
    They are exact for scales that are powers of two, as float16 rounds; for others, values of one
    power of two are taken to be spread evenly over its logarithm. Histograms of several batches
    add up: `histogram += another`.
    """

    def __init__(
        self,
        parameters: Mapping[str, ExponentCounts],
        activations: Optional[Mapping[str, ExponentCounts]] = None,
        scale: float = 1.0,
        batches: int = 1,
    ) -> None:
        self._parameters, self._activations = dict(parameters), dict(activations or {})
        self.scale = scale
        self.batches = batches
        self._counts = ExponentCounts()
        for counts in (*self._parameters.values(), *self._activations.values()):
            self._counts.add(counts)

    @property
    def exponents(self) -> Tuple[int, ...]:
        """The exponents that occur, from the smallest to the largest, without gaps."""
        found = self._counts.by_exponent
        return tuple(range(min(found), max(found) + 1)) if found else ()

    @property
    def counts(self) -> Tuple[int, ...]:
        """How many values lie from 2**exponent up to 2**(exponent + 1), for each exponent."""
        found = self._counts.by_exponent
        return tuple(found.get(exponent, (0,))[0] for exponent in self.exponents)

    @property
    def size(self) -> int:
        """How many values were counted."""
        return self._counts.nonzero + self._counts.zero + self._counts.nonfinite

    @property
    def zero(self) -> int:
        """How many of them are zero."""
        return self._counts.zero

    @property
    def nonfinite(self) -> int:
        """How many are Inf or NaN."""
        return self._counts.nonfinite

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return self._counts.largest

    @property
    def by_parameter(self) -> Dict[str, "GradientHistogram"]:
        """A histogram for each parameter, by name."""
        return {n: GradientHistogram({n: c}, {}, self.scale) for n, c in self._parameters.items()}

    @property
    def by_activation(self) -> Dict[str, "GradientHistogram"]:
        """A histogram for the gradient of each layer's output, by the layer's name."""
        return {n: GradientHistogram({}, {n: c}, self.scale) for n, c in self._activations.items()}

    def share_vanishing(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 rounds to zero at a scale: up to 2**-25."""
        return self._share(self._counts.below(VANISHES - self._shift(scale), inclusive=True))

    def share_subnormal(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 keeps with fewer bits: below 2**-14, and not vanishing.

        Values that round up to 2**-14 count as subnormal.
        """
        shift = self._shift(scale)
        below = self._counts.below(NORMAL - shift, inclusive=False)
        return self._share(below - self._counts.below(VANISHES - shift, inclusive=True))

    def share_overflowing(self, scale: Optional[float] = None) -> float:
        """Return the share that float16 rounds to infinity at a scale: from 65520 on."""
        return self._share(self._counts.overflowing(self._shift(scale)))

    def recommended_scale(self, keep: float = 0.999) -> float:
        """Return the smallest power of two at which float16 keeps this share of the gradients.

        Kept is what rounds neither to zero nor to infinity. The scale is never so large that the
        largest gradient comes above an eighth of float16's largest number, 65504, even if less is
        kept then: the rest is for batches with larger gradients. Raises `StateError` where all
        gradients are zero.
        """
        if not (isinstance(keep, (int, float)) and 0 < keep <= 1):
            raise ArgumentError(KEEP.format(keep=shown(keep)))
        if not self._counts.nonzero:
            raise StateError(NOTHING)
        most = math.floor(math.log2(65504 / MARGIN) - math.log2(self.largest))
        for power in range(min(most, 0), most):
            if self.share_vanishing(2.0**power) <= 1 - keep:
                return 2.0**power
        return 2.0**most

    # ------------------------------------------------------------------ several

    def __add__(self, other: "GradientHistogram") -> "GradientHistogram":
        return GradientHistogram(
            _merged(self._parameters, other._parameters),
            _merged(self._activations, other._activations),
            other.scale,
            self.batches + other.batches,
        )

    # ------------------------------------------------------------------ shown

    def to_dict(self) -> Dict[str, Any]:
        """Return exponents, the share of all values at each of them, that of zeros, and more."""
        size = max(self.size, 1)
        return {
            "exponents": list(self.exponents),
            "share": [count / size for count in self.counts],
            "zero": self.zero / size,
            "scale": self.scale,
            "dtype": "float16",
            "values": self.size,
            "nonfinite": self.nonfinite,
            "vanishing": self.share_vanishing(),
            "subnormal": self.share_subnormal(),
            "overflowing": self.share_overflowing(),
            "recommended_scale": self._recommended(),
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, path: Union[None, str, Path] = None) -> Any:
        """Draw the share of gradients by exponent, and float16's range; needs matplotlib.

        Returns matplotlib's figure, and writes it to `path`, in the format of its suffix.
        Raises `InstallError` without matplotlib.
        """
        return written(histogram_figure(self.to_dict()), path)

    def summary(self) -> str:
        """Return one line: what float16 would lose at the scale in use, and a better one."""
        recommended = self._recommended()
        better = f"; recommended scale {recommended:g}" if recommended is not None else ""
        zero = self.zero / max(self.size, 1)
        return (
            f"{counted(self.size, 'gradient')} of {counted(self.batches, 'batch', 'batches')}, "
            f"{zero:.2%} zero, "
            f"{self.nonfinite:,} not finite. float16 at scale {self.scale:g}: "
            f"{self.share_vanishing():.2%} vanish, {self.share_subnormal():.2%} are subnormal, "
            f"{self.share_overflowing():.2%} overflow{better}"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary(), "", text_table(_HEADINGS, self._rows())])

    def _repr_html_(self) -> str:
        picture = png_html(lambda: histogram_figure(self.to_dict()))
        return f"<p>{self.summary()}</p>{picture}{html_table(_HEADINGS, self._rows())}"

    def __repr__(self) -> str:
        return f"<GradientHistogram: {self.summary()}>"

    def _rows(self) -> List[Tuple[Any, ...]]:
        """Return lines of the table: what loses most first."""
        rows = []
        for name, one in {**self.by_parameter, **self.by_activation}.items():
            shares = one.share_vanishing(), one.share_subnormal(), one.share_overflowing()
            zero = one.zero / max(one.size, 1)
            rows.append((shares, (name, one.size, zero, *shares, one.nonfinite)))
        rows.sort(key=lambda pair: (-pair[0][2], -pair[0][0], -pair[0][1]))
        return [row for _, row in rows[:_SHOWN]]

    def _recommended(self) -> Optional[float]:
        return self.recommended_scale() if self._counts.nonzero else None

    def _shift(self, scale: Optional[float]) -> float:
        return math.log2(self.scale if scale is None else positive_number("scale", scale))

    def _share(self, count: float) -> float:
        return count / self._counts.nonzero if self._counts.nonzero else 0.0


def _merged(
    one: Mapping[str, ExponentCounts], other: Mapping[str, ExponentCounts]
) -> Dict[str, ExponentCounts]:
    merged: Dict[str, ExponentCounts] = {}
    for name in dict.fromkeys((*one, *other)):
        merged[name] = ExponentCounts()
        for counts in (one, other):
            if name in counts:
                merged[name].add(counts[name])
    return merged
