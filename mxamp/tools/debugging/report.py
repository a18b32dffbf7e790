"""The page that `mxamp report` makes of traces: one file, which loads nothing."""

import json
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ...framework.tables import html_table
from ...framework.wording import counted, shortened
from .charts import Run, charts_of, histogram_chart, hover_data, runs_of, style, text
from .trace_lines import TraceRecord
from .trace_reading import TraceFile

__all__ = [
    "report_page",
    "sections_of",
    "table",
]

#: More rows than this make a page slow, and nobody reads them.
ROWS = 1000
_SKIPS = 300
_PICTURES = 6
_OTHERS = 20

CULPRIT_COLUMNS = (
    "step", "phase", "block", "node", "operator", "dtype", "nan", "inf", "zero", "subnormal",
    "size", "min", "max", "mean",
)  # fmt: skip
OPERATOR_COLUMNS = ("operator", "dtype", "calls")
CAST_COLUMNS = ("source", "target", "casts", "bytes")
PLAN_COLUMNS = ("name", "operator", "precision", "reason")

Rows = Sequence[Sequence[Any]]


def sections_of(trace: TraceFile) -> str:
    """Return what is to be said of a trace, without its charts."""
    kinds: Dict[str, Callable[[Sequence[TraceRecord]], str]] = {
        "culprit": _numerics,
        "histogram": _histograms,
        "operators": _operators,
        "plan": _plans,
    }
    parts = [_warnings(trace), _cards(trace), _gradients(trace), _skips(trace)]
    parts += [draw(trace.of_kind(kind)) for kind, draw in kinds.items() if trace.of_kind(kind)]
    parts.append(_others([record for record in trace.records if record.kind not in kinds]))
    parts.append(_machine(trace))
    return "".join(parts)


def table(caption: str, headings: Sequence[str], rows: Rows) -> str:
    """Return a table that scrolls in a box of its own, cut where it is long."""
    cut = ""
    if len(rows) > ROWS:
        shown = f"{ROWS:,} of {counted(len(rows), 'row')} are shown; the trace has them all."
        cut = f'<p class="soft">{shown}</p>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"{html_table(headings, rows[:ROWS], caption)}</div>{cut}"
    )


def _warnings(trace: TraceFile) -> str:
    found = list(trace.warnings)
    for header in trace.headers[1:]:
        after = header.get("resumed_after")
        found.append(f"the run was resumed{f' after step {after}' if after else ''}")
    return "".join(f'<p class="warning">Note: {text(warning)}.</p>' for warning in found)


def _cards(trace: TraceFile) -> str:
    cards = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in trace.summary()
    )
    return f'<dl class="cards">{cards}</dl>'


def _gradients(trace: TraceFile) -> str:
    if not trace.skipped:
        return ""
    rows = trace.culprits()
    without = sum(not step.nonfinite for step in trace.skipped)
    more = f"<p>{without:,} skipped steps name no gradient.</p>" if without else ""
    headings = ("parameter", "skipped steps", "first", "last")
    caption = "Parameters whose gradients held Inf or NaN, those of most skipped steps first"
    return f"<h3>Gradients that were not finite</h3>{more}" + table(caption, headings, rows)


def _skips(trace: TraceFile) -> str:
    skipped = trace.skipped
    if not skipped:
        return ""
    rows = [
        (
            step.step,
            _loss_of(step.loss, step.loss_finite),
            f"{step.loss_scale:g} to {step.next_loss_scale:g}",
            shortened(step.nonfinite),
        )
        for step in skipped[-_SKIPS:]
    ]
    caption = f"The last {len(rows):,} of {len(skipped):,}" if len(skipped) > _SKIPS else "All"
    headings = ("step", "loss", "loss scale", "not finite")
    content = table(f"{caption} skipped steps", headings, rows)
    return f"<details><summary>Skipped steps ({len(skipped):,})</summary>{content}</details>"


def _loss_of(loss: Optional[float], finite: bool) -> str:
    known = "" if loss is None else f"{loss:.6g}"
    return known if finite else f"{known} (not finite)".strip()


def _numerics(records: Sequence[TraceRecord]) -> str:
    rows = [[record.data.get(name, "") for name in CULPRIT_COLUMNS] for record in records]
    used = [i for i in range(len(CULPRIT_COLUMNS)) if any(row[i] not in ("", None) for row in rows)]
    headings = [CULPRIT_COLUMNS[i] for i in used]
    rows = [[_cell(row[i]) for i in used] for row in rows]
    return "<h3>Values that were not finite</h3>" + table("Where they came from", headings, rows)


def _histograms(records: Sequence[TraceRecord]) -> str:
    pictures = []
    for record in records[-_PICTURES:]:
        parts = [f"Gradients after step {record.step:,}"]
        parts += [str(record.data["dtype"])] if record.data.get("dtype") else []
        parts += [f"loss scale {_cell(record.data['scale'])}"] if record.data.get("scale") else []
        picture = histogram_chart(record.data, ", ".join(parts))
        pictures.append(picture or f'<p class="warning">Note: {text(parts[0])}: no histogram.</p>')
    left = len(records) - len(pictures)
    more = f'<p class="soft">{left:,} earlier histograms are in the trace.</p>' if left else ""
    return f'<h3>Sizes of gradients</h3>{more}<div class="charts">{"".join(pictures)}</div>'


def _operators(records: Sequence[TraceRecord]) -> str:
    record = records[-1]
    parts = [f"<h3>What ran, up to step {record.step:,}</h3>"]
    kinds = (
        ("operators", OPERATOR_COLUMNS, "Calls by operator and dtype"),
        ("casts", CAST_COLUMNS, "Casts, and the bytes that they read and wrote"),
    )
    for name, columns, caption in kinds:
        rows = _rows(record.data.get(name), columns)
        if rows:
            parts.append(table(caption, columns, rows))
        else:
            parts.append(f'<p class="soft">No {text(name)}.</p>')
    return "".join(parts)


def _plans(records: Sequence[TraceRecord]) -> str:
    data = records[-1].data
    rows = _rows(data.get("nodes"), PLAN_COLUMNS)
    counts = Counter(str(row[2]) for row in rows).most_common()
    summary = ", ".join(f"{count:,} in {precision}" for precision, count in counts)
    casts = data.get("casts")
    casts_text = f"; {counted(len(casts), 'cast')}" if isinstance(casts, list) else ""
    operators = counted(len(rows), "operator")
    head = f"<h3>The plan</h3><p>{operators}: {text(summary or 'none')}{casts_text}.</p>"
    content = table("Precision by operator", PLAN_COLUMNS, rows)
    return f"{head}<details><summary>Every operator, and why</summary>{content}</details>"


def _rows(entries: Any, columns: Sequence[str]) -> List[List[Any]]:
    if not isinstance(entries, list):
        return []
    return [
        [_cell(entry.get(column, "")) for column in columns]
        for entry in entries
        if isinstance(entry, dict)
    ]


def _cell(value: Any) -> Any:
    """Return a value as a table shows it."""
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    # As the trace has them.
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _others(records: Sequence[TraceRecord]) -> str:
    if not records:
        return ""
    rows = [(r.kind, r.step, json.dumps(r.data)[:2000]) for r in records[-_OTHERS:]]
    left = len(records) - len(rows)
    more = f'<p class="soft">{left:,} earlier records are in the trace.</p>' if left else ""
    return f"<h3>Other records</h3>{more}" + table("As they are", ("kind", "step", "data"), rows)


def _machine(trace: TraceFile) -> str:
    rows = [row for header in trace.headers for row in _header_rows(header)]
    return "<h3>Machine and versions</h3>" + table("Of each start of the run", ("", ""), rows)


def _header_rows(header: Mapping[str, Any]) -> Iterator[Tuple[str, str]]:
    machine = header.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    policy = header.get("policy")
    trainers = header.get("trainers")
    yield "started", _time_of(header.get("time"))
    versions = [f"{name} {header[name]}" for name in ("mxamp", "mxnet", "numpy") if name in header]
    yield "versions", ", ".join([*versions, f"Python {header.get('python', 'unknown')}"])
    yield "CPU", f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores"
    features = machine.get("features")
    if features and isinstance(features, list):
        yield "CPU features", ", ".join(map(str, features))
    yield "precision", _precision_of(header.get("dtype"), policy)
    if header.get("rank") is not None:
        yield "rank", str(header["rank"])
    for one in trainers if isinstance(trainers, list) else []:
        if isinstance(one, dict):
            yield "trainer", _trainer_of(one)


def _precision_of(dtype: Any, policy: Any) -> str:
    if not isinstance(policy, dict):
        return f"{dtype}; mixed precision was not on when the trace was opened"
    kept = policy.get("fp32_layers")
    layers = f"; float32 layers: {shortened([str(k) for k in kept])}" if kept else ""
    return f"{dtype} on the {policy.get('device', 'unknown')}{layers}"


def _trainer_of(trainer: Mapping[str, Any]) -> str:
    parts = [str(trainer.get("optimizer", "unknown optimizer"))]
    if isinstance(trainer.get("learning_rate"), (int, float)):
        parts.append(f"learning rate {trainer['learning_rate']:g}")
    elements = trainer.get("elements")
    size = f" of {counted(elements, 'element')}" if isinstance(elements, int) else ""
    parts.append(f"{trainer.get('parameters', '?')} parameters{size}")
    parts.append(f"scaled by {trainer['scaled_by']}" if trainer.get("scaled_by") else "not scaled")
    return ", ".join(parts)


def _time_of(stamp: Any) -> str:
    try:
        return datetime.fromtimestamp(float(stamp), timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return "unknown"


_SCRIPT = Path(__file__).parent / "page" / "report.js"
#: Whatever is in a trace, the page loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def report_page(traces: Sequence[TraceFile]) -> str:
    """Return the page of one trace, or of several, whose charts lie over each other."""
    named = _named(traces)
    title = "mxamp report: " + ", ".join(name for name, _ in named)
    runs: List[Run] = [run for name, trace in named for run in runs_of(name, trace.steps)]
    sections = "".join(
        f"<section><h2>{text(name)}</h2>{sections_of(trace)}</section>" for name, trace in named
    )
    # "<" would end the script, wherever it stands.
    data = hover_data(runs).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title>{style()}</head>\n"
        f'<body class="mxamp"><main><h1>{text(title)}</h1>\n{charts_of(runs)}\n{sections}</main>\n'
        f'<script type="application/json" id="mxamp-data">{data}</script>\n'
        f"<script>{_SCRIPT.read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _named(traces: Sequence[TraceFile]) -> List[Tuple[str, TraceFile]]:
    """Return the traces with names that tell them apart: of the file, or with its path."""
    counts: Dict[str, int] = {}
    for trace in traces:
        name = Path(trace.path).name
        counts[name] = counts.get(name, 0) + 1
    return [
        (name if counts[name] == 1 else trace.path, trace)
        for name, trace in ((Path(trace.path).name, trace) for trace in traces)
    ]
