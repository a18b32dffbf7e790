"""Tables of results: as text for terminals and pipes, and as HTML for notebooks."""

import html
from io import StringIO
from typing import Any, Sequence

__all__ = ["cell_text", "html_table", "text_table"]

#: Lines are never cut or folded: names of nodes are made to be copied.
_WIDTH = 10_000


def text_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows under headings, numbers on the right, lines as long as they need to be."""
    # rich is a third of what `import mxamp` would take, and is needed by few programs.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for i, heading in enumerate(headings):
        right = _holds_numbers(rows, i)
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell_text(cell) for cell in row))
    stream = StringIO()
    Console(file=stream, width=_WIDTH, color_system=None, markup=False, highlight=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def html_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return the same as HTML."""
    right = [" align=right" if _holds_numbers(rows, i) else "" for i in range(len(headings))]
    head = "".join(
        f"<th scope=col{side}>{html.escape(heading)}</th>" for heading, side in zip(headings, right)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{side}>{html.escape(cell_text(cell))}</td>" for cell, side in zip(row, right)
        )
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _holds_numbers(rows: Sequence[Sequence[Any]], column: int) -> bool:
    return bool(rows) and all(isinstance(row[column], (int, float)) for row in rows)


def cell_text(cell: Any) -> str:
    """Return a value as tables show it: numbers with four digits, nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"
