"""A run's charts: loss, loss scale, step time and memory over its steps; runs over each other."""

import json
import math
import sys
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from ..tracing.trace_steps import TraceStep, duration
from .charts import Axis, Curve, Lane, buckets, chart, text, ticks

__all__ = ["Run", "charts_of", "hover_data", "runs_of", "style"]

#: So many styles of lines there are.
STYLES = 6
#: The ends of what floats hold, and the least range of an axis: its ticks are floats too.
_SMALLEST, _LARGEST, _LEAST_RANGE = 5e-324, sys.float_info.max, 1e-300
_PAGE = Path(__file__).parent / "page"

Value = Callable[[TraceStep], Optional[float]]
Across = Tuple[float, float]


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
