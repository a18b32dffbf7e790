"""Tables of results as text."""

from io import StringIO
from typing import Any, Mapping, Sequence

#: The colors of precisions in `Plan.to_dot`.
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


def _is_numeric_column(rows: Sequence[Sequence[Any]], column: int) -> bool:
    return bool(rows) and all(isinstance(row[column], (int, float)) for row in rows)


def cell_text(cell: Any) -> str:
    """Return a cell's text: floats to 4 digits, integers with thousands commas, "" for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"
