"""Results of the debugging tools: as tables, as JSON, as HTML for notebooks, and as figures."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Dict, Iterable, Sequence, Tuple, Union

from ...errors import ArgumentError, InstallError
from ...framework.files import check_file_path, write_file
from ...framework.tables import html_lines, html_table, text_table

__all__ = ["BLUE", "INK", "ORANGE", "RED", "Drawn", "Result", "Table", "add_legend", "new_figure"]

NO_MATPLOTLIB = 'pictures need matplotlib: pip install "matplotlib>=3.7,<4", or mxamp[plots]'

#: Colors of figures, which are transparent: readable on white and on black.
INK, BLUE, ORANGE, RED = "#768390", "#2f81f7", "#e8a838", "#e5534b"

#: A caption (which may be empty), headings, and rows.
Table = Tuple[str, Sequence[str], Sequence[Sequence[Any]]]


class Result:
    """A result that prints as tables and a summary in one line."""

    def summary(self) -> str:
        """Return one line that sums the result up."""
        raise NotImplementedError

    def to_dict(self) -> Dict[str, Any]:
        """Return the result as plain values."""
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        """Yield the tables that the result prints as."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return `to_dict()` as JSON.

        ::

            Path("plan.json").write_text(amp.explain(net, "bfloat16").to_json())
        """
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        parts = []
        for caption, headings, rows in self._tables():
            parts += [*([caption] if caption else []), text_table(headings, rows), ""]
        return "\n".join([*parts, self.summary()])

    def _repr_html_(self) -> str:
        tables = "".join(html_table(head, rows, caption) for caption, head, rows in self._tables())
        return html_lines(self.summary()) + tables

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"


class Drawn(Result):
    """A result that matplotlib draws."""

    def _figure(self) -> Any:
        """Return a matplotlib figure of the result."""
        raise NotImplementedError

    def plot(self, path: Union[None, str, Path] = None) -> Any:
        """Draw the result with matplotlib; write it to `path`, in the format of its suffix.

        Returns the figure. Raises `InstallError` without matplotlib.
        """
        figure = self._figure()
        if path is not None:
            target = Path(path)
            check_file_path(target)
            suffix, known = target.suffix[1:].lower(), figure.canvas.get_supported_filetypes()
            if suffix not in known:
                allowed = ", ".join(sorted(known))
                raise ArgumentError(
                    f"a picture must be a file of one of {allowed}, not {str(path)!r}"
                )
            write_file(target, _image_bytes(figure, suffix, 120))
        return figure

    def _repr_html_(self) -> str:
        try:
            image = base64.b64encode(_image_bytes(self._figure(), "png", 90)).decode()
        except InstallError:
            return super()._repr_html_()
        return f'<img src="data:image/png;base64,{image}">{super()._repr_html_()}'


def new_figure(height: float) -> Tuple[Any, Any]:
    """Return a transparent matplotlib figure and its empty axes, made without pyplot."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InstallError(NO_MATPLOTLIB) from None
    figure = Figure(figsize=(8.0, height), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.tick_params(which="both", colors=INK)
    for spine in axes.spines.values():
        spine.set_color(INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(INK)
    return figure, axes


def add_legend(figure: Any) -> None:
    """Add the legend below the axes of a figure."""
    outside = {"loc": "outside lower center", "ncols": 2, "fontsize": "small"}
    figure.legend(**outside, labelcolor=INK, facecolor="none", edgecolor=INK)


def _image_bytes(figure: Any, file_format: str, dpi: int) -> bytes:
    """Return a matplotlib figure as the bytes of an image file."""
    stream = io.BytesIO()
    figure.savefig(stream, format=file_format, dpi=dpi)
    return stream.getvalue()
