"""Charts as HTML and SVG that need nothing else: lines that stretch, labels that do not.

The drawing fills its box whatever its width (`preserveAspectRatio="none"`, strokes of one width);
labels are HTML beside it, so that they are as large on a phone as on a desk.
"""

import html
import math
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

__all__ = ["Axis", "Curve", "Lane", "buckets", "chart", "envelope", "labels", "text", "ticks"]

WIDTH, HEIGHT = 1000.0, 260.0
#: So many columns are told apart; more points than that are drawn by the extremes of each.
BUCKETS = 600

Point = Tuple[float, Optional[float]]
Entry = TypeVar("Entry")


class Curve(NamedTuple):
    """A line: points in order, None where the value is not known or not finite."""

    style: int
    points: Sequence[Point]


class Lane(NamedTuple):
    """A row of marks under a chart."""

    label: str
    style: int
    places: Sequence[float]


class Axis(NamedTuple):
    """A vertical axis: its range, ticks with their labels, and whether it is logarithmic."""

    low: float
    high: float
    ticks: Sequence[Tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """Return how far down a value lies: 0 at the top, 1 at the bottom."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max(1 - (value - low) / (high - low), 0.0), 1.0)


def text(value: object) -> str:
    """Return text as HTML has it."""
    return html.escape(str(value))


def chart(
    name: str,
    title: str,
    description: str,
    curves: Sequence[Curve],
    axis: Axis,
    across: Tuple[float, float],
    lanes: Sequence[Lane] = (),
    steps: bool = False,
) -> str:
    """Return a chart of curves over one range, with lanes of marks below it.

    `steps`: values hold until the next one. `description` is what those hear who see no picture.
    """
    grid = "".join(f"M0 {axis.share(at) * HEIGHT:.1f}H{WIDTH:.0f}" for at, _ in axis.ticks)
    lines = "".join(
        f'<path class="line s{curve.style}" d="{_path(curve.points, axis, across, steps)}"/>'
        for curve in curves
    )
    marks = "".join(_lane(lane, across) for lane in lanes)
    across_ticks = [(at, f"{at:,.0f}") for at in ticks(*across, count=5, whole=True)]
    return (
        f'<figure class="chart" data-chart="{text(name)}"><figcaption>{text(title)}</figcaption>'
        f'<div class="plot"><div class="ys" aria-hidden="true">{labels(axis)}</div>'
        f'<div class="area"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'preserveAspectRatio="none" aria-label="{text(description)}">'
        f'<path class="grid" d="{grid}"/>{lines}</svg></div>{marks}'
        f'<div class="xs" aria-hidden="true">{_below(across_ticks, across)}</div></div></figure>'
    )


def labels(axis: Axis) -> str:
    """Return an axis's labels."""
    return "".join(
        f'<span style="top:{axis.share(at):.2%}">{text(label)}</span>' for at, label in axis.ticks
    )


def _below(ticks_: Sequence[Tuple[float, str]], across: Tuple[float, float]) -> str:
    return "".join(
        f'<span style="left:{_left(at, across):.2%}">{text(label)}</span>' for at, label in ticks_
    )


def _lane(lane: Lane, across: Tuple[float, float]) -> str:
    """Return a row of marks: all of them, those in one place as one."""
    places = sorted({round(_left(at, across) * WIDTH, 1) for at in lane.places})
    path = "".join(f"M{at:g} 0V10" for at in places)
    count = len(lane.places)
    return (
        f'<div class="lane-label">{text(lane.label)} <b>{count:,}</b></div>'
        f'<div class="lane"><svg viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" '
        f'aria-hidden="true"><path class="mark s{lane.style}" d="{path}"/></svg></div>'
    )


def _left(at: float, across: Tuple[float, float]) -> float:
    low, high = across
    return (at - low) / (high - low) if high > low else 0.5


def _path(points: Sequence[Point], axis: Axis, across: Tuple[float, float], steps: bool) -> str:
    parts: List[str] = []
    pen_down = False
    for at, value in envelope(points, across):
        if value is None:
            pen_down = False
            continue
        x, y = f"{_left(at, across) * WIDTH:.1f}", f"{axis.share(value) * HEIGHT:.1f}"
        # "h0" is a dot where no line follows.
        parts.append((f"H{x}V{y}" if steps else f"L{x} {y}") if pen_down else f"M{x} {y}h0")
        pen_down = True
    return "".join(parts)


def envelope(points: Sequence[Point], across: Tuple[float, float]) -> Iterable[Point]:
    """Return the points; of many, the least and the greatest of each bucket, in their order."""
    if len(points) <= 2 * BUCKETS:
        return points
    kept: List[Point] = []
    for bucket in buckets(points, across, lambda point: point[0]):
        finite = [(value, place) for place, (_, value) in enumerate(bucket) if value is not None]
        if not finite:
            kept.append(bucket[0])
            continue
        extremes = {min(finite)[1], max(finite)[1]}
        kept.extend(bucket[place] for place in sorted(extremes))
    return kept


def buckets(
    entries: Sequence[Entry], across: Tuple[float, float], place: Callable[[Entry], float]
) -> Iterable[List[Entry]]:
    """Yield the entries in groups, a group for each column that can be told apart."""
    group: List[Entry] = []
    column = None
    for entry in entries:
        at = int(_left(place(entry), across) * BUCKETS)
        if group and at != column:
            yield group
            group = []
        column = at
        group.append(entry)
    if group:
        yield group


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> List[float]:
    """Return round numbers from low to high, about `count` of them."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
