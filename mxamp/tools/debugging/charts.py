"""Charts of training runs as HTML and SVG, for report pages and notebooks.

The drawing stretches with its box (`preserveAspectRatio="none"`). Labels are HTML beside it, so
that they are as large on a phone as on a desktop.
"""

import html
import itertools
import json
import math
from pathlib import Path
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .trace_lines import TraceStep, duration_text

__all__ = [
    "PAGE",
    "Run",
    "charts_of",
    "escaped",
    "histogram_chart",
    "hover_data",
    "runs_of",
    "style_element",
]

#: The folder of the page's template, style sheet and script.
PAGE = Path(__file__).parent / "page"
WIDTH, HEIGHT = 1000.0, 260.0
#: Columns of a chart. Steps that share one are drawn as their median and a band around it.
COLUMNS = 1200
#: Line styles in the style sheet.
STYLES = 6
BANDS = " <small>bands: the least to the greatest of steps side by side</small>"

#: A label that begins beyond this share of the width is aligned with its end.
_EDGE = 0.95
#: Sizes that are drawn: axes a little longer than these have ends and ticks that are floats.
_SMALLEST, _LARGEST = 1e-250, 1e250
#: From this power of two on, a tick shows the power.
_POWERS_FROM = 10
#: float16's exponents: the first subnormal one, the first normal one, and the first beyond.
_SUBNORMAL, _NORMAL, _BEYOND = -24, -14, 16
_FARTHEST_EXPONENT = 2**12

XRange = Tuple[float, float]  #: the first and the last value of the horizontal axis
Spread = Tuple[float, float, float]  #: least, median and greatest value in a column


class Run(NamedTuple):
    """One trainer's steps, and their label in the legend."""

    label: str
    steps: Sequence[TraceStep]


class Axis(NamedTuple):
    """A vertical axis: its range, ticks with labels, and whether it is logarithmic."""

    low: float
    high: float
    ticks: Sequence[Tuple[float, str]]
    log: bool = False

    def y(self, value: float) -> float:
        """Return the vertical coordinate of a value, clipped to the chart."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max(1 - (value - low) / (high - low), 0.0), 1.0) * HEIGHT


class Measure(NamedTuple):
    """A value of each step that has a chart: where it is read, and how it is shown."""

    name: str
    title: str
    hover: str  #: its name under the pointer
    read: Callable[[TraceStep], Optional[float]]
    shown: Callable[[float], str]
    stairs: bool = False  #: powers of two that hold until the next step

    def value(self, step: TraceStep) -> Optional[float]:
        """Return a step's value, clipped to drawn sizes; None if it is unknown or not finite."""
        found = self.read(step)
        if found is None or not math.isfinite(found) or (self.stairs and found <= 0):
            return None
        if abs(found) < _SMALLEST:
            return _SMALLEST if self.stairs else 0.0
        return min(max(found, -_LARGEST), _LARGEST)

    def spread(self, steps: Sequence[TraceStep]) -> Optional[Spread]:
        """Return the least, median and greatest value of steps; None where all are unknown."""
        values = sorted(value for step in steps if (value := self.value(step)) is not None)
        return (values[0], values[len(values) // 2], values[-1]) if values else None


def _mebibytes(size: Optional[int]) -> Optional[float]:
    """Return bytes in MiB, and None for None."""
    return None if size is None else size / 2**20


def _power_of_two(value: float) -> str:
    """Return a value as text: small numbers as they are, large powers of two as 2^n."""
    power = math.log2(value)
    if 0 <= power < _POWERS_FROM:
        return f"{value:g}"
    return f"2^{power:.0f}" if power.is_integer() else f"{value:.3g}"


MEASURES = (
    Measure("loss", "Loss", "loss", lambda step: step.loss, "{:.4g}".format),
    Measure("scale", "Loss scale", "scale", lambda step: step.loss_scale, _power_of_two, True),
    Measure("seconds", "Step time", "seconds", lambda step: step.seconds, duration_text),
    Measure(
        "memory", "Memory of the process", "MiB",
        lambda step: _mebibytes(step.memory), "{:,.6g} MiB".format,
    ),
    Measure(
        "gpu", "GPU memory", "GPU MiB",
        lambda step: _mebibytes(step.gpu_memory), "{:,.6g} MiB".format,
    ),
)  # fmt: skip


def escaped(value: object) -> str:
    """Return `str(value)`, escaped for HTML."""
    return html.escape(str(value))


def style_element() -> str:
    """Return the HTML <style> element with the style sheet of charts and report pages."""
    return f"<style>{(PAGE / 'report.css').read_text(encoding='utf-8')}</style>"


def runs_of(label: str, steps: Sequence[TraceStep]) -> List[Run]:
    """Return a run for each trainer of a trace."""
    trainers = sorted({step.trainer for step in steps})
    if len(trainers) == 1:
        return [Run(label, steps)]
    return [
        Run(f"{label}, trainer {trainer}", [step for step in steps if step.trainer == trainer])
        for trainer in trainers
    ]


def charts_of(runs: Sequence[Run]) -> str:
    """Return as HTML a chart of each measure, all runs in one, and a legend for several runs."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return "<p>No step was traced.</p>"
    x_range = _step_range(runs)
    skipped = _mark_rows(runs, x_range, "skipped", lambda step: not step.stepped)
    broken = _mark_rows(runs, x_range, "loss not finite", lambda step: not step.loss_finite)
    mark_rows = {"loss": skipped + broken, "scale": skipped}
    charts = [_measure_chart(one, runs, x_range, mark_rows.get(one.name, "")) for one in MEASURES]
    return f'<div class="charts">{_legend(runs)}{"".join(charts)}</div>'


def hover_data(runs: Sequence[Run]) -> str:
    """Return the JSON from which the page's script shows values under the pointer."""
    runs = [run for run in runs if run.steps]
    if not runs:
        return "{}"
    x_range = _step_range(runs)
    found = {
        "across": x_range,
        "names": [measure.hover for measure in MEASURES],
        "runs": [
            {"label": run.label, "rows": [_hover_row(steps) for steps in _by_column(run, x_range)]}
            for run in runs
        ],
    }
    return json.dumps(found, separators=(",", ":"))


def _hover_row(steps: Sequence[TraceStep]) -> List[Any]:
    """Return [first step, last, [least, greatest] of each measure or 0, skipped steps] as JSON."""
    row: List[Any] = [steps[0].step, steps[-1].step]
    for measure in MEASURES:
        spread = measure.spread(steps) or ()
        row.append(sorted({float(f"{end:.5g}") for end in spread[::2]}) or 0)
    return [*row, sum(not step.stepped for step in steps)]


def _step_range(runs: Sequence[Run]) -> XRange:
    """Return the numbers of the first and of the last step of all runs."""
    steps = [step.step for run in runs for step in run.steps]
    return min(steps), max(steps)


def _position(at: float, x_range: XRange) -> float:
    """Return the position of a value on the horizontal axis, from 0 to 1."""
    low, high = x_range
    return (at - low) / (high - low) if high > low else 0.5


def _by_column(run: Run, x_range: XRange) -> List[List[TraceStep]]:
    """Return a run's steps, grouped by the column that they are drawn in."""
    columns = itertools.groupby(
        run.steps, lambda step: int(_position(step.step, x_range) * COLUMNS)
    )
    return [list(steps) for _, steps in columns]


def _legend(runs: Sequence[Run]) -> str:
    """Return the legend of the runs' line styles as HTML; "" for one run."""
    if len(runs) == 1:
        return ""
    entries = "".join(
        '<li><svg viewBox="0 0 40 10" aria-hidden="true"><path class="line '
        f's{i % STYLES}" d="M0 5H40"/></svg>{escaped(run.label)}</li>'
        for i, run in enumerate(runs)
    )
    return f'<ul class="legend">{entries}</ul>'


def _mark_rows(
    runs: Sequence[Run], x_range: XRange, label: str, marked: Callable[[TraceStep], bool]
) -> str:
    """Return as HTML, for each run with marked steps, a row of marks under the chart."""
    mark_rows = ""
    for i, run in enumerate(runs):
        places = [_position(step.step, x_range) for step in run.steps if marked(step)]
        if not places:
            continue
        name = label if len(runs) == 1 else f"{run.label}: {label}"
        path = "".join(f"M{x:g} 0V10" for x in sorted({round(x * WIDTH, 1) for x in places}))
        mark_rows += (
            f'<div class="lane-label">{escaped(name)} <b>{len(places):,}</b></div>'
            f'<div class="lane"><svg viewBox="0 0 {WIDTH:.0f} 10" preserveAspectRatio="none" '
            f'aria-hidden="true"><path class="mark s{i % STYLES}" d="{path}"/></svg></div>'
        )
    return mark_rows


def _measure_chart(measure: Measure, runs: Sequence[Run], x_range: XRange, mark_rows: str) -> str:
    """Return the HTML chart of a measure by step, over rows of marks; "" if no step has it."""
    known = [[v for step in run.steps if (v := measure.value(step)) is not None] for run in runs]
    values = [value for of_run in known for value in of_run]
    if not values:
        return ""
    low, high, shown = min(values), max(values), measure.shown
    log = measure.stairs or (low > 0 and high > 100 * low)
    base = 2.0 if measure.stairs else 10.0
    axis = _log_axis(low, high, shown, base) if log else _linear_axis(low, high, shown)
    described = "; ".join(
        f"{run.label}: first {shown(v[0])}, last {shown(v[-1])}, "
        f"from {shown(min(v))} to {shown(max(v))}"
        for run, v in zip(runs, known)
        if v
    )
    lines = "".join(
        _line_and_band(i % STYLES, measure, _by_column(run, x_range), axis, x_range)
        for i, run in enumerate(runs)
    )
    grid = "".join(f"M0 {axis.y(at):.1f}H{WIDTH:.0f}" for at, _ in axis.ticks)
    caption = f"{escaped(measure.title)}{', logarithmic' if log else ''}"
    return _chart_figure(
        f'class="chart" data-chart="{measure.name}"',
        caption + (BANDS if 'class="band' in lines else ""),
        f"{measure.title} by step. {described}",
        f'<path class="grid" d="{grid}"/>{lines}',
        axis,
        [(_position(at, x_range), f"{at:,.0f}") for at in ticks(*x_range, whole=True)],
        mark_rows,
    )


def _line_and_band(
    number: int, measure: Measure, columns: Sequence[List[TraceStep]], axis: Axis, x_range: XRange
) -> str:
    """Return the SVG line through the medians of columns, over the band of their ranges.

    Unknown values are gaps.
    """
    spots = [
        (_position(steps[0].step, x_range) * WIDTH, measure.spread(steps)) for steps in columns
    ]
    line = band = ""
    for known, group in itertools.groupby(spots, lambda spot: spot[1] is not None):
        if not known:
            continue
        piece = [(x, [axis.y(value) for value in spread]) for x, spread in group if spread]
        (x, (_, y, _)), *rest = piece
        step = "H{:.1f}V{:.1f}" if measure.stairs else "L{:.1f} {:.1f}"
        # "h0" draws a dot where no line follows.
        line += f"M{x:.1f} {y:.1f}h0" + "".join(step.format(x, ys[1]) for x, ys in rest)
        edge = [(x, ys[2]) for x, ys in piece] + [(x, ys[0]) for x, ys in reversed(piece)]
        band += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in edge) + "Z"
    drawn = f'<path class="line s{number}" d="{line}"/>'
    has_band = any(len(steps) > 1 for steps in columns)
    return f'<path class="band f{number}" d="{band}"/>{drawn}' if has_band else drawn


def _chart_figure(
    attributes: str,
    caption: str,
    description: str,
    drawing: str,
    axis: Axis,
    below: Sequence[Tuple[float, str]],
    rows: str = "",
    after: str = "",
) -> str:
    """Return an HTML figure: SVG drawing, labels of both axes, rows of marks, then `after`."""
    beside = "".join(
        f'<span style="top:{axis.y(at) / HEIGHT:.2%}">{escaped(label)}</span>'
        for at, label in axis.ticks
    )
    under = "".join(_axis_label(left, label) for left, label in below)
    return (
        f"<figure {attributes}><figcaption>{caption}</figcaption>"
        f'<div class="plot"><div class="ys" aria-hidden="true">{beside}</div>'
        f'<div class="area"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'preserveAspectRatio="none" aria-label="{escaped(description)}">{drawing}</svg></div>'
        f'{rows}<div class="xs" aria-hidden="true">{under}</div></div>{after}</figure>'
    )


def _axis_label(left: float, label: str) -> str:
    """Return a label under the chart as HTML; `left` is its position, from 0 to 1."""
    # A label centered at the page's edge would stick out of the page.
    side = "end" if left > _EDGE else "start" if left < 1 - _EDGE else ""
    return f'<span class="{side}" style="left:{left:.2%}">{escaped(label)}</span>'


def _linear_axis(low: float, high: float, shown: Callable[[float], str]) -> Axis:
    """Return a linear axis for values from low to high, which starts at 0 where that is near."""
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    low, high = 0.0 if 0 <= low < high / 2 else low - margin, high + margin
    return Axis(low, high, [(at, shown(at)) for at in ticks(low, high)])


def _log_axis(low: float, high: float, shown: Callable[[float], str], base: float) -> Axis:
    """Return a logarithmic axis for values from low to high, with ticks at powers of `base`."""
    first = math.floor(math.log(low, base) + 1e-9)
    last = math.ceil(math.log(high, base) - 1e-9)
    first, last = (first - 1, last + 1) if first == last else (first, last)
    # A margin, so that lines at either end are not cut.
    edge = (last - first) * 0.05
    marks = [(base**power, shown(base**power)) for power in ticks(first, last, whole=True)]
    return Axis(base ** (first - edge), base ** (last + edge), marks, log=True)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> List[float]:
    """Return about `count` round numbers from low to high, evenly spaced; integers if `whole`."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    step = max(step, 1.0) if whole else step
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


# ---------------------------------------------------------------------- histograms


def histogram_chart(data: Mapping[str, Any], title: str) -> Optional[str]:
    """Return the HTML chart of a "histogram" record's data; None if the data is malformed."""
    try:
        exponents = [int(exponent) for exponent in data["exponents"]]
        shares = [float(share) for share in data["share"]]
        zero = float(data.get("zero") or 0)
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    if not 0 < len(exponents) == len(shares) or not all(0 <= s <= 1 for s in [*shares, zero]):
        return None
    if max(map(abs, exponents)) > _FARTHEST_EXPONENT:
        return None
    x_range = min(_SUBNORMAL, *exponents) - 1, max(_BEYOND, *exponents) + 2
    top = max(shares) * 1.05 or 1.0
    axis = Axis(0.0, top, [(at, f"{at:.3g}") for at in ticks(0.0, top, count=4)])
    ranges = _float16_ranges(exponents, shares, zero)

    def rectangle(name: str, first: float, last: float, share: float = top) -> str:
        left, right, y = _position(first, x_range), _position(last, x_range), axis.y(share)
        return (
            f'<rect class="{name}" x="{left * WIDTH:.1f}" y="{y:.1f}" '
            f'width="{(right - left) * WIDTH:.1f}" height="{HEIGHT - y:.1f}"/>'
        )

    bars = [
        rectangle("bar", e + 0.1, e + 0.9, share)
        for e, share in zip(exponents, shares)
        if share > 0
    ]
    edges = [_position(exponent, x_range) * WIDTH for exponent in (_SUBNORMAL, _NORMAL, _BEYOND)]
    edge = "".join(f"M{x:.1f} 0V{HEIGHT:.0f}" for x in edges)
    shaded = rectangle("subnormal", _SUBNORMAL, _NORMAL) + rectangle("normal", _NORMAL, _BEYOND)
    entries = "".join(
        f'<li>{f"<i class={name!r}></i>" if name else ""}{label}</li>' for name, label in ranges
    )
    return _chart_figure(
        'class="chart bars"',
        escaped(title),
        "Share of values by exponent. " + "; ".join(label for _, label in ranges),
        f'{shaded}{"".join(bars)}<path class="edge" d="{edge}"/>',
        axis,
        [(_position(at, x_range), f"2^{at:.0f}") for at in ticks(*x_range, count=6, whole=True)],
        after=f'<ul class="zones">{entries}</ul>',
    )


def _float16_ranges(
    exponents: Sequence[int], shares: Sequence[float], zero: float
) -> List[Tuple[str, str]]:
    """Return (style class, label) of each range of float16, with its share of the values."""

    def share_between(low: float, high: float) -> float:
        return sum(share for e, share in zip(exponents, shares) if low <= e < high)

    ranges = [
        ("", "zero", zero),
        ("", "vanishes in float16", share_between(-math.inf, _SUBNORMAL)),
        ("subnormal", "subnormal in float16", share_between(_SUBNORMAL, _NORMAL)),
        ("normal", "normal in float16", share_between(_NORMAL, _BEYOND)),
        ("", "overflows in float16", share_between(_BEYOND, math.inf)),
    ]
    return [(name, f"{label} {share:.2%}") for name, label, share in ranges]
