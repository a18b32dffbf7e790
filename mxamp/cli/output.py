"""Tables on standard output: fitted to a terminal, and whole in a pipe or a file."""

import sys
from typing import Iterable, Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["console", "table_of"]

#: Columns where there is no terminal: no table of ours is as wide.
_UNLIMITED = 100_000


def console() -> Console:
    """Return the console; without a terminal it cuts nothing and has no colour."""
    return Console() if sys.stdout.isatty() else Console(width=_UNLIMITED, no_color=True)


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose cells go over several lines where a terminal is narrow."""
    table = Table(show_header=bool(headings), box=Table().box if headings else None)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
