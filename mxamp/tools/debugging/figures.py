"""Figures of matplotlib: made without pyplot, written to files, embedded in notebooks."""

import base64
import io
from pathlib import Path
from typing import Any, Callable, Union

from ...errors import ArgumentError, InstallError
from ...framework.files import checked_folder, write_file

__all__ = ["new_figure", "png_html", "save_figure"]

NO_MATPLOTLIB = 'pictures need matplotlib: pip install "matplotlib>=3.7,<4", or mxamp[plots]'


def new_figure(width: float = 8.0, height: float = 4.0) -> Any:
    """Return an empty matplotlib figure; raise `InstallError` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InstallError(NO_MATPLOTLIB) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Union[None, str, Path]) -> Any:
    """Write the figure to `path` in the format of its suffix, unless it is None; return it."""
    if path is None:
        return figure
    target = Path(path)
    checked_folder(target)
    suffix, known = target.suffix[1:].lower(), figure.canvas.get_supported_filetypes()
    if suffix not in known:
        raise ArgumentError(
            f"a picture must be a file of one of {', '.join(sorted(known))}, not {str(path)!r}"
        )
    write_file(target, _image(figure, suffix, 120))
    return figure


def png_html(draw: Callable[[], Any]) -> str:
    """Return the figure that `draw` makes as an <img> tag, or "" without matplotlib."""
    try:
        image = _image(draw(), "png", 90)
    except InstallError:
        return ""
    return f'<img src="data:image/png;base64,{base64.b64encode(image).decode()}">'


def _image(figure: Any, file_format: str, dpi: int) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format=file_format, dpi=dpi)
    return stream.getvalue()
