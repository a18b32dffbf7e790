"""Charts of training runs, as HTML and SVG that need nothing else."""

import html
import itertools
import json
import math
import sys
from pathlib import Path
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from .trace_lines import TraceStep, duration

__all__ = [
    "Axis",
    "Curve",
    "Lane",
    "Run",
    "buckets",
    "chart",
    "charts_of",
    "histogram_chart",
    "hover_data",
    "labels",
    "runs_of",
    "style",
    "text",
    "ticks",
]

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


#: So many styles of lines there are.
STYLES = 6
#: The ends of what floats hold, and the least range of an axis: its ticks are floats too.
_SMALLEST, _LARGEST, _LEAST_RANGE = 5e-324, sys.float_info.max, 1e-300
_PAGE = Path(__file__).parent / "page"

Value = Callable[[TraceStep], Optional[float]]


class Run(NamedTuple):
    """One trainer's steps, under the name that the legend gives them."""

    label: str
    steps: Sequence[TraceStep]


def runs_of(label: str, steps: Sequence[TraceStep]) -> List[Run]:
    """Return the steps of each trainer."""
    trainers = sorted({step.trainer for step in steps})
    if len(trainers) == 1:
        return [Run(label, steps)]
    return [
        Run(f"{label}, trainer {trainer}", [step for step in steps if step.trainer == trainer])
        for trainer in trainers
    ]


def style() -> str:
    """Return the style sheet, for notebooks and for the page."""
    return f"<style>{(_PAGE / 'report.css').read_text(encoding='utf-8')}</style>"


def charts_of(runs: Sequence[Run]) -> str:
    """Return the charts of runs, over each other, with a legend where there are several."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return "<p>No step was traced.</p>"
    across = _across(runs)
    skips = _lanes(runs, "skipped", lambda step: not step.stepped)
    broken = _lanes(runs, "loss not finite", lambda step: not step.loss_finite)
    parts = [
        _legend(runs),
        _chart("loss", "Loss", runs, across, lambda step: step.loss, "{:.4g}", [*skips, *broken]),
        _scale_chart(runs, across, skips),
        _chart("seconds", "Step time", runs, across, lambda step: step.seconds, "s", []),
        _chart("memory", "Memory of the process", runs, across, _mebibytes, "{:,.6g} MiB", []),
        _chart("gpu", "GPU memory", runs, across, _gpu_mebibytes, "{:,.6g} MiB", []),
    ]
    return f'<div class="charts">{"".join(parts)}</div>'


def hover_data(runs: Sequence[Run]) -> str:
    """Return what the page's script shows under the pointer, as JSON."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return "{}"
    across = _across(runs)
    rows = [
        [_hover_row(group) for group in buckets(run.steps, across, lambda step: step.step)]
        for run in runs
    ]
    found = {
        "across": across,
        "names": ["loss", "scale", "seconds", "MiB"],
        "runs": [{"label": run.label, "rows": r} for run, r in zip(runs, rows)],
    }
    return json.dumps(found, separators=(",", ":"))


def _hover_row(group: Sequence[TraceStep]) -> List[Any]:
    """Return [first step, last, [least, greatest] of each value or 0, skipped steps]."""
    row: List[Any] = [group[0].step, group[-1].step]
    for value in (
        _finite(lambda s: s.loss),
        _finite(lambda s: s.loss_scale),
        _finite(lambda s: s.seconds),
        _mebibytes,
    ):
        known = [v for v in map(value, group) if v is not None]
        ends = [float(f"{end(known):.5g}") for end in (min, max)] if known else []
        row.append(0 if not ends else ends[:1] if ends[0] == ends[1] else ends)
    row.append(sum(not step.stepped for step in group))
    return row


def _across(runs: Sequence[Run]) -> Across:
    steps = [step.step for run in runs for step in run.steps]
    return min(steps), max(steps)


def _mebibytes(step: TraceStep) -> Optional[float]:
    return None if step.memory is None else step.memory / 2**20


def _gpu_mebibytes(step: TraceStep) -> Optional[float]:
    return None if step.gpu_memory is None else step.gpu_memory / 2**20


def _finite(value: Value) -> Value:
    def finite(step: TraceStep) -> Optional[float]:
        found = value(step)
        return found if found is not None and math.isfinite(found) else None

    return finite


def _legend(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return ""
    entries = "".join(
        '<li><svg viewBox="0 0 40 10" aria-hidden="true"><path class="line '
        f's{i % STYLES}" d="M0 5H40"/></svg>{text(run.label)}</li>'
        for i, run in enumerate(runs)
    )
    return f'<ul class="legend">{entries}</ul>'


def _lanes(runs: Sequence[Run], label: str, marked: Callable[[TraceStep], bool]) -> List[Lane]:
    lanes = []
    for i, run in enumerate(runs):
        places = [step.step for step in run.steps if marked(step)]
        if places:
            name = label if len(runs) == 1 else f"{run.label}: {label}"
            lanes.append(Lane(name, i % STYLES, places))
    return lanes


def _curves(runs: Sequence[Run], value: Value) -> List[Curve]:
    return [
        Curve(i % STYLES, [(step.step, value(step)) for step in run.steps])
        for i, run in enumerate(runs)
    ]


def _chart(
    name: str,
    title: str,
    runs: Sequence[Run],
    across: Across,
    value: Value,
    unit: str,
    lanes: Sequence[Lane],
) -> str:
    """Return a chart of one value of each step; nothing where no step has it."""
    finite = _finite(value)
    known = [(run, [v for v in map(finite, run.steps) if v is not None]) for run in runs]
    values = [v for _, of_run in known for v in of_run]
    if not values:
        return ""
    shown = duration if unit == "s" else unit.format
    log = min(values) > 0 and max(values) > 100 * min(values)
    axis = _log_axis(values, shown, 10.0) if log else _linear_axis(values, shown)
    described = "; ".join(
        f"{run.label}: first {shown(v[0])}, last {shown(v[-1])}, "
        f"from {shown(min(v))} to {shown(max(v))}"
        for run, v in known
        if v
    )
    curves = _curves(runs, finite)
    full = f"{title}, logarithmic" if log else title
    return chart(name, full, f"{title} by step. {described}", curves, axis, across, lanes)


def _scale_chart(runs: Sequence[Run], across: Across, lanes: Sequence[Lane]) -> str:
    known = [_positive_scale(step) for run in runs for step in run.steps]
    scales = [scale for scale in known if scale is not None]
    if not scales:
        return ""
    axis = _log_axis(scales, _power_of_two, 2.0)
    described = "; ".join(
        f"{run.label}: from {run.steps[0].loss_scale:g} to {run.steps[-1].loss_scale:g}"
        for run in runs
    )
    return chart(
        "scale",
        "Loss scale, logarithmic",
        f"Loss scale by step. {described}",
        _curves(runs, _positive_scale),
        axis,
        across,
        lanes,
        steps=True,
    )


def _positive_scale(step: TraceStep) -> Optional[float]:
    return step.loss_scale if 0 < step.loss_scale < math.inf else None


def _power_of_two(value: float) -> str:
    power = math.log2(value)
    if 0 <= power < 10:  # noqa: PLR2004
        return f"{value:g}"
    return f"2^{power:.0f}" if power.is_integer() else f"{value:.3g}"


def _linear_axis(values: Sequence[float], shown: Callable[[float], str]) -> Axis:
    low, high = min(values), max(values)
    margins = high * 0.05 - low * 0.05, abs(high) * 0.1, 1.0
    margin = next(one for one in margins if one >= _LEAST_RANGE)
    low = 0.0 if 0 <= low < high / 2 else max(low - margin, -_LARGEST)
    high = min(high + margin, _LARGEST)
    return Axis(low, high, [(at, shown(at)) for at in ticks(low, high)])


def _log_axis(values: Sequence[float], shown: Callable[[float], str], base: float) -> Axis:
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    low, high = (low - 1, high + 1) if low == high else (low, high)
    powers = ticks(low, high, whole=True)
    marks = [(at, shown(at)) for at in (_power(base, power) for power in powers)]
    # A margin, so that lines at either end are not cut.
    edge = (high - low) * 0.05
    return Axis(_power(base, low - edge), _power(base, high + edge), marks, log=True)


def _power(base: float, exponent: float) -> float:
    """Return a power, or the closest to it that is a float greater than zero."""
    try:
        return max(math.pow(base, exponent), _SMALLEST)
    except OverflowError:
        return _LARGEST
