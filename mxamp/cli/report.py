"""`mxamp report`: a page of one trace, or of several to compare."""

from pathlib import Path
from typing import Sequence

import click

from ..debugging.reading import read_trace
from ..debugging.report_page import report_page
from ..framework.files import replaced_file
from .group import usage_error

__all__ = ["report"]


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="The page.")
def report(traces: Sequence[str], out: str) -> None:
    """Make a page of traces: loss, loss scale, skipped steps, and what else they hold.

    Traces are written by `amp.debugging.trace`. The charts of several lie over each other.
    """
    target = Path(out)
    if not target.parent.is_dir() or target.is_dir():
        raise usage_error(f"--out is a file in a folder that is there, not {out!r}")
    if target.exists() and any(_same(target, trace) for trace in traces):
        raise usage_error(f"--out would replace the trace {out!r}: give another file")
    found = [read_trace(trace) for trace in traces]
    with replaced_file(target) as temporary:
        # Names that are no proper text, which JSON can hold, are no reason to fail.
        page = report_page(found).encode("utf-8", "replace")
        temporary.write_bytes(page)
    for trace in found:
        for warning in trace.warnings:
            click.echo(f"warning: {trace.path}: {warning}", err=True)
    steps = sum(len(trace.steps) for trace in found)
    click.echo(f"{out}: {steps:,} steps, {sum(len(trace.skipped) for trace in found):,} skipped")


def _same(target: Path, trace: str) -> bool:
    return Path(trace).exists() and target.samefile(trace)
