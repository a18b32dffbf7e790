"""A histogram of exponents, with float16's range shaded: what is below it vanishes."""

import math
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .charts import HEIGHT, WIDTH, Axis, labels, text, ticks

__all__ = ["histogram_chart"]

#: float16's exponents: of its subnormal numbers, of its normal ones, and the first beyond.
SUBNORMAL, NORMAL, BEYOND = -24, -14, 16
#: Beyond the exponents of all floats, scaled ones too.
_FARTHEST = 2**12


class _Histogram(NamedTuple):
    exponents: Sequence[int]
    shares: Sequence[float]
    zero: float

    def between(self, low: float, high: float) -> float:
        """Return the share of values whose exponents are in a range."""
        return sum(s for e, s in zip(self.exponents, self.shares) if low <= e < high)


def histogram_chart(data: Mapping[str, Any], title: str) -> Optional[str]:
    """Return the chart of a record of the kind "histogram"; None where it is none."""
    found = _parsed(data)
    if found is None:
        return None
    low = min(SUBNORMAL, *found.exponents) - 1
    high = max(BEYOND, *found.exponents) + 2
    top = max(found.shares) * 1.05 or 1.0
    axis = Axis(0.0, top, [(at, f"{at:.3g}") for at in ticks(0.0, top, count=4)])

    def x(exponent: float) -> float:
        return (exponent - low) / (high - low) * WIDTH

    def box(style: str, first: float, last: float, height: float = HEIGHT) -> str:
        return (
            f'<rect class="{style}" x="{x(first):.1f}" y="{HEIGHT - height:.1f}" '
            f'width="{x(last) - x(first):.1f}" height="{height:.1f}"/>'
        )

    bars = "".join(
        box("bar", e + 0.1, e + 0.9, s / top * HEIGHT)
        for e, s in zip(found.exponents, found.shares)
        if s > 0
    )
    edges = "".join(f"M{x(at):.1f} 0V{HEIGHT:.0f}" for at in (SUBNORMAL, NORMAL, BEYOND))
    zones = _zones(found)
    described = "; ".join(f"{name}: {share:.2%}" for _, name, share in zones)
    below = "".join(
        f'<span style="left:{x(at) / WIDTH:.2%}">2^{at:.0f}</span>'
        for at in ticks(low, high, count=6, whole=True)
    )
    return (
        f'<figure class="chart bars"><figcaption>{text(title)}</figcaption>'
        f'<div class="plot"><div class="ys" aria-hidden="true">{labels(axis)}</div>'
        f'<div class="area"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'preserveAspectRatio="none" aria-label="Share of values by exponent. {text(described)}">'
        f"{box('subnormal', SUBNORMAL, NORMAL)}{box('normal', NORMAL, BEYOND)}{bars}"
        f'<path class="edge" d="{edges}"/></svg></div>'
        f'<div class="xs" aria-hidden="true">{below}</div></div>{_list(zones)}</figure>'
    )


def _zones(found: _Histogram) -> List[Tuple[str, str, float]]:
    """Return (style, name, share of the values) of the ranges."""
    return [
        ("", "zero", found.zero),
        ("", "vanishes in float16", found.between(-math.inf, SUBNORMAL)),
        ("subnormal", "subnormal in float16", found.between(SUBNORMAL, NORMAL)),
        ("normal", "normal in float16", found.between(NORMAL, BEYOND)),
        ("", "overflows in float16", found.between(BEYOND, math.inf)),
    ]


def _list(zones: Sequence[Tuple[str, str, float]]) -> str:
    entries = "".join(
        f'<li>{f"<i class={style!r}></i>" if style else ""}{text(name)} {share:.2%}</li>'
        for style, name, share in zones
    )
    return f'<ul class="zones">{entries}</ul>'


def _parsed(data: Mapping[str, Any]) -> Optional[_Histogram]:
    try:
        exponents = [int(e) for e in data["exponents"]]
        shares = [float(s) for s in data["share"]]
        zero = float(data.get("zero") or 0)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    sound = all(0 <= s <= 1 for s in [*shares, zero])
    sound = sound and max(map(abs, exponents), default=0) <= _FARTHEST
    whole = sound and len(exponents) == len(shares) > 0
    return _Histogram(exponents, shares, zero) if whole else None
