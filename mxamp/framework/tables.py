"""Tables of results: as text for terminals and pipes, and as HTML for notebooks."""

import html
from io import StringIO
from typing import Any, Mapping, Sequence

__all__ = ["PRECISION_COLORS", "cell_text", "html_lines", "html_table", "text_table"]

#: The background of each precision, under black text.
PRECISION_COLORS: Mapping[str, str] = {
    "float16": "#8fd18f",
    "bfloat16": "#8fd18f",
    "float32": "#f5d76e",
}

#: Wide enough that rich never wraps or cuts a line: users copy names of nodes from tables.
_WIDTH = 10_000


def text_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as plain text, with columns of numbers right-aligned and no line wrapped."""
    # Importing rich takes a third of the time of `import mxamp`, and few programs print tables.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for i, heading in enumerate(headings):
        right = _is_numeric_column(rows, i)
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell_text(cell) for cell in row))
    stream = StringIO()
    Console(file=stream, width=_WIDTH, color_system=None, markup=False, highlight=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def html_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """Return a table as an HTML `<table>`: numbers right-aligned, text left, precisions colored."""
    sides = ["right" if _is_numeric_column(rows, i) else "left" for i in range(len(headings))]
    head = "".join(
        f'<th scope=col style="text-align:{side}">{html.escape(heading)}</th>'
        for heading, side in zip(headings, sides)
    )
    body = "".join(f"<tr>{''.join(map(_html_cell, row, sides))}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_lines(*lines: str) -> str:
    """Return lines of text as HTML paragraphs."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _html_cell(cell: Any, side: str) -> str:
    """Return a cell as an HTML `<td>`; a precision on its color."""
    text = cell_text(cell)
    content = html.escape(text)
    if text in PRECISION_COLORS:
        # Not the cell, which is as wide as its column.
        style = f"background:{PRECISION_COLORS[text]};color:#000;padding:0 .3em"
        content = f'<span style="{style}">{content}</span>'
    # In a style of its own: notebooks align all cells to the right.
    return f'<td style="text-align:{side}">{content}</td>'


def _is_numeric_column(rows: Sequence[Sequence[Any]], column: int) -> bool:
    return bool(rows) and all(isinstance(row[column], (int, float)) for row in rows)


def cell_text(cell: Any) -> str:
    """Return a cell's text: floats to 4 digits, integers with thousands commas, "" for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"
