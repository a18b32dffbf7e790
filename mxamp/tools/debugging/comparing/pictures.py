"""Pictures of measurements, drawn by matplotlib: without pyplot, so that they need no display."""

import base64
import io
import math
from pathlib import Path
from typing import Any, Callable, Mapping, Union

from ....errors import ArgumentError, InstallError
from ....framework.files import checked_folder, write_file
from .exponents import NORMAL, TOP, VANISHES

__all__ = ["comparison_figure", "histogram_figure", "png_html", "written"]

NO_MATPLOTLIB = 'pictures need matplotlib: pip install "matplotlib>=3.7,<4", or mxamp[plots]'

#: Colour and marker of each precision; the colours differ in brightness too.
_STYLES = {"float16": ("#1b6ca8", "o"), "bfloat16": ("#1b6ca8", "o"), "float32": ("#e8a838", "s")}
_OTHER = ("#777777", "^")
#: Up to so many layers have their names below the axis.
_NAMED = 24


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
        checked_folder(target)
        known = figure.canvas.get_supported_filetypes()
        if target.suffix[1:].lower() not in known:
            raise ArgumentError(
                f"a picture must be a file of one of {', '.join(sorted(known))}, not {str(path)!r}"
            )
        stream = io.BytesIO()
        figure.savefig(stream, format=target.suffix[1:].lower(), dpi=120)
        write_file(target, stream.getvalue())
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


def comparison_figure(result: Mapping[str, Any]) -> Any:
    """Draw the errors of layers in the order in which they run; `result` is a comparison's dict.

    An error of 0 lies at the lower edge. Layers that have lost elements get a cross at the upper
    edge; those that have lost them all have no error to draw.
    """
    figure = new_figure(height=5.0)
    axes = figure.subplots()
    errors = result["outputs"]
    drawn = [
        i for i, error in enumerate(errors) if error["lost"] < max(math.prod(error["shape"]), 1)
    ]
    relative = [error["relative"] for error in errors]
    least = min((relative[i] for i in drawn if relative[i]), default=1e-8) / 2
    values = {i: max(relative[i], least) for i in drawn}
    axes.plot(drawn, list(values.values()), color="#bbbbbb", linewidth=1, zorder=1)
    for precision in dict.fromkeys(errors[i]["precision"] for i in drawn):
        colour, marker = _STYLES.get(precision, _OTHER)
        places = [i for i in drawn if errors[i]["precision"] == precision]
        axes.scatter(
            places,
            [values[i] for i in places],
            color=colour,
            marker=marker,
            edgecolors="black",
            linewidths=0.5,
            label=f"computed in {precision}",
            zorder=2,
        )
    lost = [i for i, error in enumerate(errors) if error["lost"]]
    if lost:
        axes.scatter(
            lost,
            [0.97] * len(lost),
            color="black",
            marker="x",
            s=60,
            zorder=3,
            label="elements not finite in mixed precision",
            transform=axes.get_xaxis_transform(),
        )
    _mark_jump(axes, result)
    axes.set_yscale("log")
    axes.set_xlim(-0.7, len(errors) - 0.3)
    if lost and values:
        axes.set_ylim(top=max(values.values()) * 4)  # room for the crosses
    axes.set_xlabel("layer, in the order of execution")
    if len(errors) <= _NAMED:
        axes.set_xticks(range(len(errors)), [e["name"] for e in errors], rotation=60, ha="right")
        axes.tick_params(axis="x", labelsize="small")
    axes.set_ylabel("relative error of the output (L2)")
    axes.set_title(f"{result['dtype']} against float32")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def _mark_jump(axes: Any, result: Mapping[str, Any]) -> None:
    """Draw a line at the first layer at which the error jumps."""
    if result["first_jump"] is None:
        return
    place = result["outputs"].index(result["first_jump"])
    label = f"the error jumps first: {result['first_jump']['name']}"
    axes.axvline(place, color="#b03030", linestyle="--", linewidth=1, label=label, zorder=0)


def histogram_figure(histogram: Mapping[str, Any]) -> Any:
    """Draw the share of gradients by exponent over float16's range; from a histogram's dict."""
    figure = new_figure(height=4.6)
    axes = figure.subplots()
    shares, exponents = histogram["share"], histogram["exponents"]
    axes.bar(
        exponents,
        shares,
        width=1.0,
        align="edge",
        color="#1b6ca8",
        edgecolor="black",
        linewidth=0.4,
        zorder=2,
    )
    shift = math.log2(histogram["scale"])
    normal, least, top = (edge - shift for edge in (NORMAL, VANISHES, TOP + 1))
    axes.axvspan(normal, top, color="#cfe8cf", zorder=0, label="float16, all bits")
    axes.axvspan(
        least,
        normal,
        facecolor="#eef5e0",
        edgecolor="#9aa58a",
        hatch="///",
        linewidth=0,
        zorder=0,
        label="float16, fewer bits (subnormal)",
    )
    axes.axvline(least, color="black", linewidth=1, linestyle=":", label="zero below")
    if histogram["recommended_scale"] is not None:
        recommended = math.log2(histogram["recommended_scale"])
        axes.axvline(
            VANISHES - recommended,
            color="#b03030",
            linewidth=1,
            linestyle="--",
            label=f"zero below, at the recommended scale, $2^{{{recommended:.0f}}}$",
        )
    lowest, highest = min((*exponents, least)), max((*exponents, top))
    axes.set_xlim(lowest - 2, highest + 2)
    axes.set_xlabel("exponent of the gradient: floor of log2(|gradient|), without loss scale")
    axes.set_ylabel("share of all gradients")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.3g}")
    scale, zero = histogram["scale"], histogram["zero"]
    axes.set_title(f"Gradients and float16 at loss scale {scale:g}; {zero:.1%} are zero")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure
