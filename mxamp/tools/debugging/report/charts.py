"""Charts as HTML and SVG that need nothing else: lines that stretch, labels that do not.

The drawing fills its box whatever its width (`preserveAspectRatio="none"`, strokes of one width);
labels are HTML beside it, so that they are as large on a phone as on a desk.
"""

import html
import itertools
import math
from typing import (
    Callable,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

__all__ = ["Axis", "Curve", "Lane", "buckets", "chart", "labels", "text", "ticks"]

WIDTH, HEIGHT = 1000.0, 260.0
#: So many columns are told apart; of more points, the least and the most of each are drawn.
BUCKETS = 600

#: Said where not every point is drawn.
BANDS = "bands: the least to the greatest of steps side by side"
# From here on a label ends where its mark is.
_EDGE = 0.95

Across = Tuple[float, float]  #: the first step and the last
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
        # Halves: the range of the largest floats is no float.
        low, high, value = low / 2, high / 2, value / 2
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
    across: Across,
    lanes: Sequence[Lane] = (),
    steps: bool = False,
) -> str:
    """Return a chart of curves over one range, with lanes of marks below it.

    `steps`: values hold until the next one. `description` is what those hear who see no picture.
    """
    grid = "".join(f"M0 {axis.share(at) * HEIGHT:.1f}H{WIDTH:.0f}" for at, _ in axis.ticks)
    lines = "".join(_drawn(curve, axis, across, steps) for curve in curves)
    marks = "".join(_lane(lane, across) for lane in lanes)
    across_ticks = [(at, f"{at:,.0f}") for at in ticks(*across, count=5, whole=True)]
    many = any(len(curve.points) > 2 * BUCKETS for curve in curves)
    note = f" <small>{BANDS}</small>" if many else ""
    return (
        f'<figure class="chart" data-chart="{text(name)}">'
        f"<figcaption>{text(title)}{note}</figcaption>"
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


def _below(marks: Sequence[Tuple[float, str]], across: Across) -> str:
    return "".join(_place(_left(at, across), label) for at, label in marks)


def _place(left: float, label: str) -> str:
    # Near an edge a label ends there, or it would stand out of the page.
    side = "end" if left > _EDGE else "start" if left < 1 - _EDGE else ""
    return f'<span class="{side}" style="left:{left:.2%}">{text(label)}</span>'


def _lane(lane: Lane, across: Across) -> str:
    """Return a row of marks: all of them, those in one place as one."""
    places = sorted({round(_left(at, across) * WIDTH, 1) for at in lane.places})
    path = "".join(f"M{at:g} 0V10" for at in places)
    count = len(lane.places)
    return (
        f'<div class="lane-label">{text(lane.label)} <b>{count:,}</b></div>'
        f'<div class="lane"><svg viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" '
        f'aria-hidden="true"><path class="mark s{lane.style}" d="{path}"/></svg></div>'
    )


def _left(at: float, across: Across) -> float:
    low, high = across
    return (at - low) / (high - low) if high > low else 0.5


def _drawn(curve: Curve, axis: Axis, across: Across, steps: bool) -> str:
    """Return a line; through many points one of medians, in a band from the least to the most."""
    if len(curve.points) <= 2 * BUCKETS:
        return _line(curve.style, curve.points, axis, across, steps)
    columns = list(_columns(curve.points, across, steps))
    middle = [(at, column and column[1]) for at, column in columns]
    band: List[str] = []
    for known, group in itertools.groupby(columns, lambda entry: entry[1] is not None):
        if known:
            ends = [(at, column) for at, column in group if column is not None]
            corners = [(at, high) for at, (_, _, high) in ends]
            corners += [(at, low) for at, (low, _, _) in reversed(ends)]
            band.append("M" + "L".join(_spot(*corner, axis, across) for corner in corners) + "Z")
    line = _line(curve.style, middle, axis, across, steps)
    return f'<path class="band f{curve.style}" d="{"".join(band)}"/>{line}'


def _line(style: int, points: Sequence[Point], axis: Axis, across: Across, steps: bool) -> str:
    parts: List[str] = []
    pen_down = False
    for at, value in points:
        if value is None:
            pen_down = False
            continue
        spot = _spot(at, value, axis, across)
        # "h0" is a dot where no line follows.
        parts.append(
            f"M{spot}h0"
            if not pen_down
            else "H{}V{}".format(*spot.split())
            if steps
            else f"L{spot}"
        )
        pen_down = True
    return f'<path class="line s{style}" d="{"".join(parts)}"/>'


def _spot(at: float, value: float, axis: Axis, across: Across) -> str:
    return f"{_left(at, across) * WIDTH:.1f} {axis.share(value) * HEIGHT:.1f}"


def _columns(
    points: Sequence[Point], across: Across, last: bool
) -> Iterator[Tuple[float, Optional[Tuple[float, float, float]]]]:
    """Yield (place, (least, median or last, most)) of each column; None where nothing is known."""
    for group in buckets(points, across, lambda point: point[0]):
        values = [value for _, value in group if value is not None]
        if not values:
            yield group[0][0], None
            continue
        ordered = sorted(values)
        middle = values[-1] if last else ordered[len(ordered) // 2]
        yield group[0][0], (ordered[0], middle, ordered[-1])


def buckets(
    entries: Sequence[Entry], across: Across, place: Callable[[Entry], float]
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
    if high <= low:
        return [low]
    # The range of the largest floats is no float.
    rough = (high - low) / count if math.isfinite(high - low) else high / count - low / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    step = max(step, 1.0) if whole else step
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
