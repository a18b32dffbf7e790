"""Tables of results as text."""

from typing import Any, Sequence


def text_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as plain text, with numbers right-aligned and no line wrapped."""
    cells = [list(headings), *([_cell_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    sides = [
        str.rjust if any(isinstance(cell, (int, float)) for cell in column) else str.ljust
        for column in zip(headings, *rows)
    ]
    lines = (
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _cell_text(cell: object) -> str:
    """Return a cell's text: floats to 4 digits, integers with thousands commas, "" for None."""
    if cell is None:
        return ""
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"
