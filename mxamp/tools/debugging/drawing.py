"""Drawings of plans by Graphviz: operators colored by precision, error or gain, casts on edges."""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from ...errors import ArgumentError, StateError
from ...framework.files import checked_folder, checked_path, write_file
from ...framework.wording import one_of, shown
from ..tables import cell_text
from .explain import NodePlan, Plan

__all__ = ["BY", "draw", "scale_of", "to_dot"]

#: What the colors may stand for.
BY = ("precision", "error", "gain")

KEPT = "stays in float32: {count}"
NO_GRAPHVIZ = (
    "Graphviz is not installed: there is no program `dot` on the PATH. Install it (on Debian and "
    "Ubuntu: apt-get install graphviz), or write {dot!r}, which needs nothing"
)
NO_COSTS = (
    "the plan holds no {what} of layers to colour by: tune the model, and explain it with the "
    "policy that comes back, explain(net, policy=tune(net, data))"
)

#: The border of layers that were measured in low precision and stay in float32.
_THICK = "penwidth=4"


def to_dot(plan: Plan, colour: str = "precision") -> str:
    """Return the plan in Graphviz's language.

    Operators are boxes colored by precision, error or gain, inputs are ellipses, and an edge with
    a label is a cast. Known parameters are left out.
    """
    scale = scale_of(plan, colour)
    lines = [
        "digraph plan {",
        '  node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10]',
        '  edge [fontname="Helvetica" fontsize=8]',
    ]
    lines += _legend(scale, sum(map(_stays, plan)))
    lines += [_box(node, scale.of(node)) for node in plan.nodes]
    lines += [f'  {_quoted(name)} [shape=ellipse fillcolor="white"]' for name in plan.inputs]
    drawn = {*plan.inputs, *(node.name for node in plan.nodes)}
    edges = [
        _edge(source, node.name, dtype)
        for node in plan.nodes
        for source, dtype in node.inputs
        if source in drawn
    ]
    return "\n".join([*lines, *edges, "}", ""])


def draw(plan: Plan, path: Union[str, Path], colour: str = "precision") -> None:
    """Write a plan as a picture: a .svg, .png, .pdf or .dot file.

    ::

        amp.draw(amp.explain(net, "bfloat16"), "net.svg")

    Boxes are operators, colored by their precision; labels on edges are casts. In a plan of
    `Tuning.annotated`, layers that stay in float32 have a thick border. All formats but .dot need
    Graphviz's program `dot`.

    Parameters
    ----------
    plan : Plan
        A plan made by `explain`.
    path : str or Path
        The file to write, in the format of its suffix. An existing file is replaced.
    colour : str, default "precision"
        What the colors stand for: "precision"; for a plan of `Tuning.annotated` also "error", the
        error of low precision on a log scale, or "gain", the milliseconds that it saves. Darker is
        more; the picture has a legend.

    Raises
    ------
    ArgumentError
        Not a plan, another colour or suffix, a plan without errors or gains, or a missing folder.
    StateError
        Graphviz is not installed.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"draw takes a Plan, which mxamp.explain makes, not {shown(plan)}")
    target = checked_path(path)
    file_format = target.suffix[1:].lower()
    if file_format not in ("svg", "png", "pdf", "dot"):
        raise ArgumentError(f"a drawing must be a .svg, .png, .pdf or .dot file, not {str(path)!r}")
    checked_folder(target)
    source = to_dot(plan, colour)
    if file_format == "dot":
        write_file(target, source.encode())
        return
    import graphviz

    try:
        picture = graphviz.Source(source).pipe(format=file_format)
    except graphviz.ExecutableNotFound:
        raise StateError(NO_GRAPHVIZ.format(dot=str(target.with_suffix(".dot")))) from None
    write_file(target, picture)


# ---------------------------------------------------------------------- color scales


class _Color(NamedTuple):
    """The color of a box, and of its text."""

    fill: str
    text: str = "#000000"


class Scale(NamedTuple):
    """The colors of operators, and the legend: a label for each color in use."""

    of: Callable[[NodePlan], _Color]
    legend: Sequence[Tuple[str, _Color]]


class _Range(NamedTuple):
    """The values of one color, from `start` up to the next range."""

    start: float
    name: str
    color: _Color


#: From light to dark: readable without color vision.
_ERRORS = ("#ffffb2", "#fed976", "#feb24c", "#fd8d3c", "#f03b20", "#a50026")
_GAINS = ("#ffffd9", "#c7e9b4", "#7fcdbb", "#41b6c4", "#2c7fb8", "#253494")
_DARK = 4  #: colors of a palette from here on have white text
_PRECISIONS = {
    "float16": _Color("#8fd18f"),
    "bfloat16": _Color("#8fd18f"),
    "float32": _Color("#f5d76e"),
}
_OTHER, _NOTHING, _LOST = _Color("#e8e8e8"), _Color("#ffffff"), _Color("#000000", "#ffffff")

_SHORTEST = 1e-6  #: ms: smaller differences of gains get one color
_LEAST = sys.float_info.min * sys.float_info.epsilon  #: the smallest number above zero
_STEPS = (1, 2, 5, 10)  #: lengths of a range of gains, times a power of ten


def scale_of(plan: Plan, colour: str) -> Scale:
    """Return the color scale of a plan by "precision", "error" or "gain"."""
    if colour not in BY:
        raise ArgumentError(f"colour must be {one_of(BY)}, not {shown(colour)}")
    if colour == "precision":
        counts = plan.counts().items()
        legend = [(f"{n} in {name}", _PRECISIONS.get(name, _OTHER)) for name, n in counts]
        return Scale(lambda node: _PRECISIONS.get(node.precision, _OTHER), legend)
    values = [value for node in plan if (value := getattr(node, colour)) is not None]
    if not values:
        raise ArgumentError(NO_COSTS.format(what=f"{colour}s"))
    ranges = _decades(values) if colour == "error" else _steps(values)

    def of(node: NodePlan) -> _Color:
        value = getattr(node, colour)
        return _OTHER if value is None else _range_of(value, ranges).color

    used = Counter(_range_of(value, ranges) for value in values)
    legend = [(f"{colour} {one.name}: {used[one]}", one.color) for one in ranges if used[one]]
    left = len(plan) - len(values)
    return Scale(of, [*legend, (f"not measured: {left}", _OTHER)] if left else legend)


def _range_of(value: float, ranges: Sequence[_Range]) -> _Range:
    return max(one for one in ranges if value >= one.start)


def _decades(errors: Sequence[float]) -> List[_Range]:
    """Return ranges of whole powers of ten, one for zero and one for infinity."""
    logs = [math.log10(error) for error in errors if 0 < error < math.inf] or [0.0]
    first, last = math.floor(min(logs)), math.floor(max(logs))
    width = math.ceil((last - first + 1) / len(_ERRORS))
    powers = range(first, last + 1, width)
    names = [f"1e{power} to 1e{power + width}" for power in powers]
    starts = [float(f"1e{power}") for power in powers]
    starts[0] = _LEAST  # powers of ten are rounded
    ranges = _colored(starts, names, _ERRORS)
    return [_Range(-math.inf, "0", _NOTHING), *ranges, _Range(math.inf, "infinite", _LOST)]


def _steps(gains: Sequence[float]) -> List[_Range]:
    """Return ranges of one round length, one of which begins at zero."""
    low, high = min(gains), max(gains)
    least = max(high - low, abs(low), abs(high), _SHORTEST) / (len(_GAINS) - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next((one * power for one in _STEPS if one * power >= least), 10 * power)
    numbers = range(math.floor(low / step), math.floor(high / step) + 1)
    names = [f"{n * step:.4g} to {(n + 1) * step:.4g} ms" for n in numbers]
    return _colored([-math.inf, *(n * step for n in numbers[1:])], names, _GAINS)


def _colored(starts: Sequence[float], names: Sequence[str], palette: Sequence[str]) -> List[_Range]:
    """Return ranges colored from the palette's first color to its last."""
    spread = (len(palette) - 1) / max(len(starts) - 1, 1)
    places = [round(i * spread) for i in range(len(starts))]
    colors = [_Color(palette[p], "#ffffff" if p >= _DARK else "#000000") for p in places]
    return [_Range(*one) for one in zip(starts, names, colors)]


# ---------------------------------------------------------------------- Graphviz's language


def _legend(scale: Scale, kept: int) -> Iterable[str]:
    for label, color in scale.legend:
        yield _note(label, _filled(color))
    if kept:
        yield _note(KEPT.format(count=kept), f'fillcolor="white" {_THICK}')


def _note(label: str, look: str) -> str:
    return f"  {_quoted('legend ' + label)} [label={_quoted(label)} shape=note {look}]"


def _filled(color: _Color) -> str:
    ink = "" if color.text == _NOTHING.text else f' fontcolor="{color.text}"'
    return f'fillcolor="{color.fill}"{ink}'


def _box(node: NodePlan, color: _Color) -> str:
    label = f'"{_escaped(node.name)}\\n{_escaped(node.operator)}"'
    costs = [
        f"{name} {cell_text(value)}{unit}"
        for name, value, unit in (("error", node.error, ""), ("gain", node.gain, " ms"))
        if value is not None
    ]
    tip = _quoted("; ".join([f"{node.precision}: {node.reason}", *costs]))
    border = f" {_THICK}" if _stays(node) else ""
    return f"  {_quoted(node.name)} [label={label} {_filled(color)} tooltip={tip}{border}]"


def _stays(node: NodePlan) -> bool:
    """Return whether a layer that was measured in low precision stays in float32."""
    return node.error is not None and node.precision == "float32"


def _edge(source: str, target: str, dtype: Optional[str]) -> str:
    label = f' [label="{dtype}" color="#c0392b" fontcolor="#c0392b"]' if dtype else ""
    return f"  {_quoted(source)} -> {_quoted(target)}{label}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
