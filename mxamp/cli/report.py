"""`mxamp report`: a page of one trace, or of several to compare."""

import os
from pathlib import Path
from typing import Sequence

import click

from ..framework.files import check_file_path, write_file
from ..framework.wording import counted
from ..tools.debugging.report import report_page
from ..tools.debugging.trace_reading import read_trace
from .output import IS_THERE, examples, usage_error

__all__ = ["report"]


@click.command(epilog=examples("mxamp report trace.jsonl --out report.html"))
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option(
    "--out", default="report.html", show_default=True, metavar="FILE", help="The page to write."
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def report(traces: Sequence[str], out: str, force: bool) -> None:
    """Make a page of charts from traces: loss, loss scale, skipped steps, records and versions.

    `amp.debugging.trace` writes traces. Several traces share the same charts.
    """
    target = Path(out)
    check_file_path(target)
    if target.exists() and any(map(target.samefile, filter(os.path.exists, traces))):
        raise usage_error(f"--out would replace the trace {out!r}: give another file")
    if os.path.lexists(target) and not force:
        raise usage_error(IS_THERE.format(path=out))
    found = [read_trace(trace) for trace in traces]
    # JSON can hold names with lone surrogates, which UTF-8 can't.
    write_file(target, report_page(found).encode("utf-8", "replace"))
    for trace in found:
        for warning in trace.warnings:
            click.echo(f"warning: {trace.path}: {warning}", err=True)
    steps = sum(len(trace.steps) for trace in found)
    skipped = sum(len(trace.skipped) for trace in found)
    click.echo(f"{out}: {counted(steps, 'step')}, {skipped:,} skipped")
