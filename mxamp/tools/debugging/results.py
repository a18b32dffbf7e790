"""Results of the debugging tools, which print as tables and a summary."""

from __future__ import annotations

from typing import Any, Iterable, Sequence, Tuple

from ...framework.tables import text_table

#: Headings and rows.
Table = Tuple[Sequence[str], Sequence[Sequence[Any]]]


class Result:
    """A result that prints as tables and a summary in one line."""

    def summary(self) -> str:
        """Return one line that sums the result up."""
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        """Yield the tables that the result prints as."""
        raise NotImplementedError

    def __str__(self) -> str:
        tables = (text_table(*table) for table in self._tables())
        return "\n\n".join([*tables, self.summary()])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"
