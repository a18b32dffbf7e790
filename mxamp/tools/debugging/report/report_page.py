"""The page that `mxamp report` makes of traces: one file, which needs no network to be read."""

from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from ..tracing.reading import TraceFile
from .charts import text
from .report_sections import sections_of
from .run_charts import Run, charts_of, hover_data, runs_of, style

__all__ = ["report_page"]

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
