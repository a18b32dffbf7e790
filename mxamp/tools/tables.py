"""Text tables for the results of tools."""

from typing import Any, Dict, List, Sequence

#: By a cell's type: floats have 4 digits, integers commas between thousands; None is empty.
_FORMATS: Dict[type, str] = {float: "{:.4g}", int: "{:,}", type(None): ""}


def text_table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as a text table, with numbers aligned right and without empty columns."""
    columns = [_column(*one) for one in zip(headings, *rows) if one.count(None) < max(1, len(rows))]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


def _column(heading: str, *cells: Any) -> List[str]:
    """Return the heading and cells of a table's column as lines of equal width."""
    texts = [heading, *(_FORMATS.get(type(cell), "{}").format(cell) for cell in cells)]
    width = max(map(len, texts))
    align = str.rjust if any(isinstance(cell, (int, float)) for cell in cells) else str.ljust
    return [align(text, width) for text in texts]
