"""Drawings of plans by Graphviz: operators colored by precision, error or gain, casts on edges."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import List, NamedTuple, Optional, Union

from ...errors import ArgumentError, StateError
from ...framework.files import check_file_path, checked_path, write_file
from ...framework.keywords import checked_call
from ...framework.tables import PRECISION_COLORS, cell_text
from ...framework.wording import one_of, shown
from .explain import NodePlan, Plan

__all__ = ["BY", "colors_of", "draw", "to_dot"]

#: What the colors may stand for.
BY = ("precision", "error", "gain")

NO_GRAPHVIZ = (
    "Graphviz is not installed: there is no program `dot` on the PATH. Install it (on Debian and "
    "Ubuntu: apt-get install graphviz), or write {dot!r}, which needs nothing"
)
NO_COSTS = (
    "the plan holds no {what} of layers to color by: tune the model, and explain it with the "
    "policy that comes back, explain(net, policy=tune(net, data))"
)

#: The border of layers that `tune` measured in low precision and keeps in float32.
_THICK = "penwidth=4"


def to_dot(plan: Plan, color: str = "precision") -> str:
    """Return the plan in Graphviz's language.

    Operators are boxes colored by precision, error or gain, inputs are ellipses, and an edge with
    a label is a cast. Known parameters are left out.
    """
    colors = colors_of(plan, color)
    in_float32 = sum(map(_stays_float32, plan))
    lines = [
        "digraph plan {",
        '  node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10]',
        '  edge [fontname="Helvetica" fontsize=8]',
    ]
    for one, count in sorted(Counter(colors).items()):
        lines.append(_legend_line(f"{one.label}: {count}", _color_attrs(one)))
    if in_float32:
        lines.append(_legend_line(f"stays in float32: {in_float32}", f'fillcolor="white" {_THICK}'))
    lines += map(_operator_line, plan, colors)
    lines += [f'  {_quote(name)} [shape=ellipse fillcolor="white"]' for name in plan.inputs]
    drawn = {*plan.inputs, *(node.name for node in plan.nodes)}
    lines += [
        _edge_line(source, node.name, dtype)
        for node in plan.nodes
        for source, dtype in node.inputs
        if source in drawn
    ]
    return "\n".join([*lines, "}", ""])


@checked_call()
def draw(plan: Plan, path: Union[str, Path], color: str = "precision") -> None:
    """Write a plan as a picture: a .svg, .png, .pdf or .dot file.

    ::

        plan = amp.explain(net, "bfloat16")
        amp.draw(plan, "net.svg")

    Boxes are operators, colored by their precision; labels on edges are casts. In a plan of
    `Tuning.annotated`, layers that stay in float32 have a thick border. All formats but .dot need
    Graphviz's program `dot`.

    Parameters
    ----------
    plan : Plan
        A plan made by `explain`.
    path : str or Path
        The file to write, in the format of its suffix. An existing file is replaced.
    color : str, default "precision"
        What the colors stand for: "precision"; for a plan of `Tuning.annotated` also "error", the
        error of low precision on a log scale, or "gain", the milliseconds that it saves. Darker is
        more; the picture has a legend.

    Raises
    ------
    ArgumentError
        Not a plan, another color or suffix, a plan without errors or gains, or a missing folder.
    StateError
        Graphviz is not installed.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"draw takes a Plan, which mxamp.explain makes, not {shown(plan)}")
    target = checked_path(path)
    file_format = target.suffix[1:].lower()
    if file_format not in ("svg", "png", "pdf", "dot"):
        raise ArgumentError(f"a drawing must be a .svg, .png, .pdf or .dot file, not {str(path)!r}")
    check_file_path(target)
    source = to_dot(plan, color)
    if file_format == "dot":
        write_file(target, source.encode())
        return
    import graphviz

    try:
        picture = graphviz.Source(source).pipe(format=file_format)
    except graphviz.ExecutableNotFound:
        raise StateError(NO_GRAPHVIZ.format(dot=str(target.with_suffix(".dot")))) from None
    write_file(target, picture)


# ---------------------------------------------------------------------- colors


class Color(NamedTuple):
    """The color of a box and of its text, and the values that it stands for."""

    place: int  #: in the legend
    fill: str
    text: str
    label: str


#: From light to dark: readable without color vision.
_PALETTES = {
    "error": ("#ffffb2", "#fed976", "#feb24c", "#fd8d3c", "#f03b20", "#a50026"),
    "gain": ("#ffffd9", "#c7e9b4", "#7fcdbb", "#41b6c4", "#2c7fb8", "#253494"),
}
_DARK = 4  #: from this color of a palette on, text is white
_OTHER, _BLACK, _WHITE = "#e8e8e8", "#000000", "#ffffff"


def colors_of(plan: Plan, color: str) -> List[Color]:
    """Return each operator's color, which stands for its "precision", "error" or "gain"."""
    if color not in BY:
        raise ArgumentError(f"color must be {one_of(BY)}, not {shown(color)}")
    if color == "precision":
        kinds = [node.precision for node in plan]
        return [
            Color(0, PRECISION_COLORS.get(kind, _OTHER), _BLACK, f"in {kind}") for kind in kinds
        ]
    values = [getattr(node, color) for node in plan]
    measured = [value for value in values if value is not None]
    if not measured:
        raise ArgumentError(NO_COSTS.format(what=f"{color}s"))
    palette, is_log = _PALETTES[color], color == "error"
    drawn = [value for value in measured if not is_log or 0 < value < math.inf] or [1.0]
    low, high = (math.log10(end(drawn)) if is_log else end(drawn) for end in (min, max))
    width = (high - low) / len(palette)

    def color_of(value: Optional[float]) -> Color:
        if value is None:
            return Color(len(palette) + 1, _OTHER, _BLACK, "not measured")
        if is_log and value == 0:
            return Color(-1, _WHITE, _BLACK, "error 0")
        if is_log and value == math.inf:
            return Color(len(palette), _BLACK, _WHITE, "error infinite")
        place = (math.log10(value) if is_log else value) - low
        number = min(int(place / width), len(palette) - 1) if width else 0
        ends = [low + width * k for k in (number, number + 1)]
        first, last = (f"{10**end if is_log else end:.3g}" for end in ends)
        text = _WHITE if number >= _DARK else _BLACK
        return Color(
            number, palette[number], text, f"{color} {first} to {last}{'' if is_log else ' ms'}"
        )

    return [color_of(value) for value in values]


# ---------------------------------------------------------------------- Graphviz's language


def _quote(text: str) -> str:
    """Return text as a string of Graphviz's language."""
    return json.dumps(text, ensure_ascii=False)


def _legend_line(label: str, attrs: str) -> str:
    """Return the node of the legend with this label and these attributes."""
    return f"  {_quote('legend ' + label)} [label={_quote(label)} shape=note {attrs}]"


def _color_attrs(color: Color) -> str:
    """Return the attributes of a node of this color."""
    return f'fillcolor="{color.fill}" fontcolor="{color.text}"'


def _operator_line(node: NodePlan, color: Color) -> str:
    """Return the box of an operator, with its reason and costs as tooltip."""
    costs = [
        f"{name} {cell_text(value)}{unit}"
        for name, value, unit in (("error", node.error, ""), ("gain", node.gain, " ms"))
        if value is not None
    ]
    tip = _quote("; ".join([f"{node.precision}: {node.reason}", *costs]))
    label = _quote(f"{node.name}\n{node.operator}")
    border = f" {_THICK}" if _stays_float32(node) else ""
    return f"  {_quote(node.name)} [label={label} {_color_attrs(color)} tooltip={tip}{border}]"


def _stays_float32(node: NodePlan) -> bool:
    """Return whether `tune` measured a layer in low precision and keeps it in float32."""
    return node.error is not None and node.precision == "float32"


def _edge_line(source: str, target: str, dtype: Optional[str]) -> str:
    """Return the edge between two nodes, labeled with the dtype if it is a cast."""
    label = f' [label="{dtype}" color="#c0392b" fontcolor="#c0392b"]' if dtype else ""
    return f"  {_quote(source)} -> {_quote(target)}{label}"
