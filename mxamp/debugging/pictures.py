"""Pictures of measurements, drawn by matplotlib: without pyplot, so that they need no display."""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Union

from ..errors import ArgumentError, InstallError

if TYPE_CHECKING:
    from .comparison import Comparison

__all__ = ["comparison_figure", "png_html", "written"]

NO_MATPLOTLIB = 'pictures need matplotlib: pip install "matplotlib>=3.7,<4", or mxamp[plots]'

#: Colour and marker of each precision; the colours differ in brightness too.
_STYLES = {"float16": ("#1b6ca8", "o"), "bfloat16": ("#1b6ca8", "o"), "float32": ("#e8a838", "s")}
_OTHER = ("#777777", "^")


def new_figure(width: float = 8.0, height: float = 4.0) -> Any:
    """Return an empty figure of matplotlib's; raise `InstallError` where that is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InstallError(NO_MATPLOTLIB) from None
    return Figure(figsize=(width, height), layout="constrained")


def written(figure: Any, path: Union[None, str, Path]) -> Any:
    """Write a figure to a file, if one is given; return the figure."""
    if path is not None:
        target = Path(path)
        if not target.parent.is_dir():
            raise ArgumentError(f"there is no folder {str(target.parent)!r} to write to")
        known = figure.canvas.get_supported_filetypes()
        if target.suffix[1:].lower() not in known:
            raise ArgumentError(
                f"a picture is written as one of {', '.join(sorted(known))}, by the suffix of the "
                f"file; {str(path)!r} has none of them"
            )
        figure.savefig(target, dpi=120)
    return figure


def png_html(draw: Callable[[], Any]) -> str:
    """Return a figure as HTML for notebooks; nothing without matplotlib."""
    try:
        figure = draw()
    except InstallError:
        return ""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=90)
    return f'<img src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}">'


def comparison_figure(result: "Comparison") -> Any:
    """Draw the errors of layers in the order in which they run."""
    figure = new_figure()
    axes = figure.subplots()
    errors = result.outputs
    smallest = min((e.relative for e in errors if e.relative), default=1e-8) / 2
    axes.plot(
        range(len(errors)),
        [max(e.relative, smallest) for e in errors],
        color="#bbbbbb",
        linewidth=1,
        zorder=1,
    )
    for precision in dict.fromkeys(error.precision for error in errors):
        colour, marker = _STYLES.get(precision, _OTHER)
        places = [i for i, error in enumerate(errors) if error.precision == precision]
        values = [max(errors[i].relative, smallest) for i in places]
        axes.scatter(
            places, values, color=colour, marker=marker, edgecolors="black", linewidths=0.5,
            label=f"computed in {precision}", zorder=2,
        )  # fmt: skip
    lost = [i for i, error in enumerate(errors) if error.lost]
    if lost:
        values = [max(errors[i].relative, smallest) for i in lost]
        axes.scatter(
            lost, values, color="black", marker="x", s=70, label="elements not finite", zorder=3
        )
    _mark_jump(axes, result)
    axes.set_yscale("log")
    axes.set_xlabel("layer, in the order of execution")
    axes.set_ylabel("relative error of the output (L2)")
    axes.set_title(f"{result.dtype} against float32")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(fontsize="small")
    return figure


def _mark_jump(axes: Any, result: "Comparison") -> None:
    """Draw a line at the first layer at which the error jumps."""
    if result.first_jump is None:
        return
    place = result.outputs.index(result.first_jump)
    label = f"the error jumps first: {result.first_jump.name}"
    axes.axvline(place, color="#b03030", linestyle="--", linewidth=1, label=label, zorder=0)
