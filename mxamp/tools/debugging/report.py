"""The page that `mxamp report` makes of traces: one file, which loads nothing."""

import json
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from string import Template
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from ...framework.tables import html_table
from ...framework.wording import counted, shortened
from .charts import PAGE, charts_of, escaped, histogram_chart, hover_data, runs_of, style_element
from .trace_lines import TraceRecord
from .trace_reading import CULPRIT_HEADINGS, TraceFile

__all__ = ["report_page"]

#: The most rows of a table, steps, pictures and records of unknown kinds that a page shows.
_ROWS, _SKIPS, _PICTURES, _OTHERS = 1000, 300, 6, 20

_FINDING = (
    "step", "phase", "block", "node", "operator", "dtype", "nan", "inf", "zero", "subnormal",
    "size", "min", "max", "mean",
)  # fmt: skip
_OPERATOR = ("operator", "dtype", "calls")
_CAST = ("source", "target", "casts", "bytes")
_PLAN = ("name", "operator", "precision", "reason")

Records = Sequence[TraceRecord]


def report_page(traces: Sequence[TraceFile]) -> str:
    """Return the HTML page of one trace, or of several with their runs in the same charts."""
    counts = Counter(Path(trace.path).name for trace in traces)
    names = [Path(trace.path).name for trace in traces]
    names = [name if counts[name] == 1 else one.path for name, one in zip(names, traces)]
    runs = [run for name, one in zip(names, traces) for run in runs_of(name, one.steps)]
    sections = [
        f"<section><h2>{escaped(name)}</h2>{_trace_section(one)}</section>"
        for name, one in zip(names, traces)
    ]
    return Template((PAGE / "report.html").read_text(encoding="utf-8")).substitute(
        title=escaped("mxamp report: " + ", ".join(names)),
        style=style_element(),
        summary="".join(map(_summary, names if names[1:] else [""], traces)),
        charts=charts_of(runs),
        sections="".join(sections),
        # "<" in a name must not end the script element.
        data=hover_data(runs).replace("<", "\\u003c"),
        script=(PAGE / "report.js").read_text(encoding="utf-8"),
    )


def _trace_section(trace: TraceFile) -> str:
    """Return as HTML the tables of one trace, which stand below the charts."""
    parts = [_warnings(trace), _skips(trace)]
    parts += [draw(trace.of_kind(kind)) for kind, draw in _KINDS.items() if trace.of_kind(kind)]
    parts.append(_other_records([record for record in trace.records if record.kind not in _KINDS]))
    rows = [row for header in trace.headers for row in _header_rows(header)]
    machine = _table("Of each start of the run", ("", ""), rows)
    return "".join([*parts, "<h3>Machine and versions</h3>", machine])


def _table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table in a box that scrolls, cut after `_ROWS` rows."""
    cut = ""
    if len(rows) > _ROWS:
        shown = f"{_ROWS:,} of {counted(len(rows), 'row')} are shown; the trace has them all."
        cut = f'<p class="soft">{shown}</p>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(caption)}">'
        f"{html_table(headings, rows[:_ROWS], caption)}</div>{cut}"
    )


def _collapsed(title: str, content: str) -> str:
    """Return HTML content that is shown when its title is clicked."""
    return f"<details><summary>{title}</summary>{content}</details>"


def _warnings(trace: TraceFile) -> str:
    """Return as HTML the notes on a trace's unreadable lines and resumes."""
    found = list(trace.warnings)
    for header in trace.headers[1:]:
        after = header.get("resumed_after")
        found.append(f"the run was resumed{f' after step {after}' if after else ''}")
    return "".join(f'<p class="warning">Note: {escaped(warning)}.</p>' for warning in found)


def _summary(name: str, trace: TraceFile) -> str:
    """Return as HTML the cards that a page opens with: a trace's summary and its machine.

    `name` is "" if the page is of one trace, which the title names.
    """
    cards = "".join(
        f"<div><dt>{escaped(title)}</dt><dd>{escaped(value)}</dd></div>"
        for title, value in (*trace.summary(), ("machine", _machine_text(trace.header)))
    )
    label = f'<p class="soft">{escaped(name)}</p>' if name else ""
    return f'{label}<dl class="cards">{cards}</dl>'


def _skips(trace: TraceFile) -> str:
    """Return HTML tables of skipped steps, by parameter and by step; "" if none was skipped."""
    skipped = trace.skipped
    if not skipped:
        return ""
    without = sum(not step.nonfinite for step in skipped)
    more = f"<p>{without:,} skipped steps name no gradient.</p>" if without else ""
    caption = "Parameters whose gradients held Inf or NaN, the most frequent first"
    gradients = _table(caption, ("parameter", *CULPRIT_HEADINGS[1:]), trace.culprits())
    rows = []
    for step in skipped[-_SKIPS:]:
        loss = "" if step.loss is None else f"{step.loss:.6g}"
        loss = loss if step.loss_finite else f"{loss} (not finite)".strip()
        scales = f"{step.loss_scale:g} to {step.next_loss_scale:g}"
        rows.append((step.step, loss, scales, shortened(step.nonfinite)))
    which = f"The last {len(rows):,} of {len(skipped):,}" if len(skipped) > _SKIPS else "All"
    headings = ("step", "loss", "loss scale", "not finite")
    steps = _table(f"{which} skipped steps", headings, rows)
    folded = _collapsed(f"Skipped steps ({len(skipped):,})", steps)
    return f"<h3>Gradients that were not finite</h3>{more}{gradients}{folded}"


# ---------------------------------------------------------------------- records


def _rows_of(entries: Any, columns: Sequence[str]) -> List[List[Any]]:
    """Return one row for each dict in a list; [] if `entries`, the program's own, is no list."""
    if not isinstance(entries, list):
        return []
    return [
        [_cell_value(entry.get(column, "")) for column in columns]
        for entry in entries
        if isinstance(entry, dict)
    ]


def _cell_value(value: Any) -> Any:
    """Return a value of a record as a table shows it."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    # JSON has no such numbers: a trace holds them as text.
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _findings(records: Records) -> str:
    """Return an HTML table of the "culprit" records: findings of `check_numerics`."""
    rows = _rows_of([record.data for record in records], _FINDING)
    used = [i for i in range(len(_FINDING)) if any(row[i] not in ("", None) for row in rows)]
    headings = [_FINDING[i] for i in used]
    table = _table("Where they came from", headings, [[row[i] for i in used] for row in rows])
    return f"<h3>Values that were not finite</h3>{table}"


def _histograms(records: Records) -> str:
    """Return HTML charts of the last "histogram" records."""
    pictures = ""
    for step, data in ((record.step, record.data) for record in records[-_PICTURES:]):
        title = f"Gradients after step {step:,}"
        details = [str(data["dtype"])] if data.get("dtype") else []
        details += [f"loss scale {_cell_value(data['scale'])}"] if data.get("scale") else []
        picture = histogram_chart(data, ", ".join([title, *details]))
        pictures += picture or f'<p class="warning">Note: {title}: no histogram.</p>'
    earlier = _earlier_note(len(records) - _PICTURES, "histograms")
    return f'<h3>Sizes of gradients</h3>{earlier}<div class="charts">{pictures}</div>'


def _earlier_note(count: int, what: str) -> str:
    """Return an HTML note that so many earlier records are not shown; "" for none."""
    return f'<p class="soft">{count:,} earlier {what} are in the trace.</p>' if count > 0 else ""


def _operators(records: Records) -> str:
    """Return HTML tables of the last "operators" record: calls and casts."""
    record = records[-1]
    parts = [f"<h3>What ran, up to step {record.step:,}</h3>"]
    for name, columns, caption in (
        ("operators", _OPERATOR, "Calls by operator and dtype"),
        ("casts", _CAST, "Casts, and the bytes that they read and wrote"),
    ):
        rows = _rows_of(record.data.get(name), columns)
        parts.append(_table(caption, columns, rows) if rows else f'<p class="soft">No {name}.</p>')
    return "".join(parts)


def _plans(records: Records) -> str:
    """Return an HTML table of the last "plan" record: the precision of each operator."""
    data = records[-1].data
    rows, casts = _rows_of(data.get("nodes"), _PLAN), data.get("casts")
    counts = Counter(str(row[2]) for row in rows).most_common()
    summary = ", ".join(f"{count:,} in {precision}" for precision, count in counts)
    summary += f"; {counted(len(casts), 'cast')}" if isinstance(casts, list) else ""
    head = (
        f"<h3>The plan</h3><p>{counted(len(rows), 'operator')}: {escaped(summary or 'none')}.</p>"
    )
    return head + _collapsed(
        "Every operator, and why", _table("Precision by operator", _PLAN, rows)
    )


def _other_records(records: Records) -> str:
    """Return an HTML table of the last records of unknown kinds, as JSON."""
    if not records:
        return ""
    rows = [(one.kind, one.step, json.dumps(one.data)[:2000]) for one in records[-_OTHERS:]]
    table = _table("As they are", ("kind", "step", "data"), rows)
    return f"<h3>Other records</h3>{_earlier_note(len(records) - _OTHERS, 'records')}{table}"


#: The function that shows all records of a kind.
_KINDS: Dict[str, Callable[[Records], str]] = {
    "culprit": _findings,
    "histogram": _histograms,
    "operators": _operators,
    "plan": _plans,
}

# ---------------------------------------------------------------------- headers


def _machine_text(header: Mapping[str, Any]) -> str:
    """Return a run's processor and number of cores."""
    machine = header.get("machine", {})
    return f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores"


def _header_rows(header: Mapping[str, Any]) -> Iterator[Tuple[str, str]]:
    """Yield (name, value) of what a header says about its run."""
    machine, policy = header.get("machine", {}), header.get("policy")
    started = datetime.fromtimestamp(header.get("time", 0), timezone.utc)
    yield "started", f"{started:%Y-%m-%d %H:%M:%S} UTC"
    versions = [f"{name} {header[name]}" for name in ("mxamp", "mxnet", "numpy") if name in header]
    yield "versions", ", ".join([*versions, f"Python {header.get('python', 'unknown')}"])
    yield "CPU", _machine_text(header)
    if machine.get("features"):
        yield "CPU features", ", ".join(machine["features"])
    precision = f"{header.get('dtype')}; mixed precision was not on when the trace was opened"
    if policy is not None:
        kept = policy.get("fp32_layers")
        layers = f"; float32 layers: {shortened(kept)}" if kept else ""
        precision = f"{header.get('dtype')} on the {policy.get('device', 'unknown')}{layers}"
    yield "precision", precision
    if header.get("rank") is not None:
        yield "rank", str(header["rank"])
    for trainer in header.get("trainers", ()):
        yield "trainer", ", ".join(_trainer_parts(trainer))


def _trainer_parts(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the properties of a header's trainer as text."""
    yield trainer.get("optimizer", "unknown optimizer")
    if trainer.get("learning_rate") is not None:
        yield f"learning rate {trainer['learning_rate']:g}"
    elements = trainer.get("elements")
    size = f" of {counted(elements, 'element')}" if elements is not None else ""
    yield f"{trainer.get('parameters', '?')} parameters{size}"
    yield f"scaled by {trainer['scaled_by']}" if trainer.get("scaled_by") else "not scaled"
