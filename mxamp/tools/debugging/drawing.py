"""A plan as a picture: operators coloured by precision, casts on the edges. Drawn by Graphviz."""

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from ...errors import ArgumentError, StateError
from ...framework.files import checked_folder, checked_path, write_file
from ...framework.tables import cell_text
from ...framework.wording import one_of, shown
from .explain import NodePlan, Plan

__all__ = [
    "BY",
    "Colour",
    "Scale",
    "draw",
    "scale_of",
    "to_dot",
]

#: What boxes may be coloured by.
BY = ("precision", "error", "gain")

NO_COSTS = (
    "the plan holds no {what} of layers to colour by: tune the model, and explain it with the "
    "policy that comes back, explain(net, policy=tune(net, data))"
)


class Colour(NamedTuple):
    """The colour of a box, and of the text in it."""

    fill: str
    text: str = "#000000"


#: From light to dark, so that those who see no difference between hues see which is more.
_ERRORS = ("#ffffb2", "#fed976", "#feb24c", "#fd8d3c", "#f03b20", "#a50026")
_GAINS = ("#ffffd9", "#c7e9b4", "#7fcdbb", "#41b6c4", "#2c7fb8", "#253494")
_DARK = 4  #: from here on the text is white
#: Gains in milliseconds that are smaller are all the same.
_SHORTEST = 1e-6
_LEAST = sys.float_info.min * sys.float_info.epsilon  #: the smallest number above zero
_PRECISIONS = {"float16": "#8fd18f", "bfloat16": "#8fd18f", "float32": "#f5d76e"}
_OTHER = Colour("#e8e8e8")
_LOST = Colour("#000000", "#ffffff")
_NOTHING = Colour("#ffffff")

#: Lengths of a range of gains, times a power of ten.
_STEPS = (1, 2, 5, 10)


class _Range(NamedTuple):
    """Values of one colour: from here to where the next range begins."""

    start: float
    name: str
    colour: Colour


class Scale(NamedTuple):
    """The colours of operators, and the legend: a label for each colour that there is."""

    of: Callable[[NodePlan], Colour]
    legend: Sequence[Tuple[str, Colour]]


def scale_of(plan: Plan, colour: str) -> Scale:
    """Return the scale for a plan: by "precision", "error" or "gain"."""
    if colour not in BY:
        raise ArgumentError(f"colour must be {one_of(BY)}, not {shown(colour)}")
    if colour == "precision":
        legend = [(f"{n} in {name}", _of_precision(name)) for name, n in plan.counts().items()]
        return Scale(lambda node: _of_precision(node.precision), legend)
    values = [value for node in plan if (value := getattr(node, colour)) is not None]
    if not values:
        raise ArgumentError(NO_COSTS.format(what=f"{colour}s"))
    ranges = _decades(values) if colour == "error" else _steps(values)

    def of(node: NodePlan) -> Colour:
        value = getattr(node, colour)
        return _OTHER if value is None else _range_of(value, ranges).colour

    counts = Counter(_range_of(value, ranges) for value in values)
    legend = [(f"{colour} {one.name}: {counts[one]}", one.colour) for one in ranges if counts[one]]
    left = len(plan) - len(values)
    return Scale(of, [*legend, (f"not measured: {left}", _OTHER)] if left else legend)


def _of_precision(precision: str) -> Colour:
    fill = _PRECISIONS.get(precision)
    return _OTHER if fill is None else Colour(fill)


def _range_of(value: float, ranges: Sequence[_Range]) -> _Range:
    return max(one for one in ranges if value >= one.start)


def _decades(errors: Sequence[float]) -> List[_Range]:
    """Return ranges of whole powers of ten, and those for zero and for infinity."""
    logs = [math.log10(error) for error in errors if 0 < error < math.inf] or [0.0]
    first, last = math.floor(min(logs)), math.floor(max(logs))
    width = math.ceil((last - first + 1) / len(_ERRORS))
    starts = [float(f"1e{power}") for power in range(first, last + 1, width)]
    names = [f"1e{power} to 1e{power + width}" for power in range(first, last + 1, width)]
    # All that is above zero: powers of ten are rounded.
    starts[0] = _LEAST
    ranges = _coloured(starts, names, _ERRORS)
    return [_Range(-math.inf, "0", _NOTHING), *ranges, _Range(math.inf, "infinite", _LOST)]


def _steps(gains: Sequence[float]) -> List[_Range]:
    """Return ranges of one round length, of which one begins at zero."""
    low, high = min(gains), max(gains)
    least = max(high - low, abs(low), abs(high), _SHORTEST) / (len(_GAINS) - 1)
    power = 10.0 ** math.floor(math.log10(least))
    step = next((one * power for one in _STEPS if one * power >= least), 10 * power)
    numbers = range(math.floor(low / step), math.floor(high / step) + 1)
    names = [f"{n * step:.4g} to {(n + 1) * step:.4g} ms" for n in numbers]
    return _coloured([-math.inf, *(n * step for n in numbers[1:])], names, _GAINS)


def _coloured(
    starts: Sequence[float], names: Sequence[str], palette: Sequence[str]
) -> List[_Range]:
    """Return ranges in the colours of a palette, from its first to its last."""
    spread = (len(palette) - 1) / max(len(starts) - 1, 1)
    places = [round(i * spread) for i in range(len(starts))]
    text = ["#ffffff" if place >= _DARK else "#000000" for place in places]
    colours = [Colour(palette[place], ink) for place, ink in zip(places, text)]
    return [_Range(*one) for one in zip(starts, names, colours)]


#: The border of layers that were measured in low precision and stay in float32.
_THICK = "penwidth=4"
KEPT = "stays in float32: {count}"

NO_GRAPHVIZ = (
    "Graphviz is not installed: there is no program `dot` on the PATH. Install it (on Debian and "
    "Ubuntu: apt-get install graphviz), or write {dot!r}, which needs nothing"
)


def to_dot(plan: Plan, colour: str = "precision") -> str:
    """Return the plan in Graphviz's language.

    Operators are boxes in the colour of their precision, their error or their gain, inputs are
    ellipses, and an edge with a label is a cast. Parameters are left out where the plan knows them.
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

    Boxes are operators, coloured by their precision; labels on edges are casts. Under a policy
    that `tune` has found for the model, layers that stay in float32 have a thick border. All kinds
    but .dot need Graphviz's program `dot`.

    Parameters
    ----------
    plan : Plan
        What `explain` returns.
    path : str or Path
        The file to write; its suffix says which kind. A file that is there is replaced.
    colour : str, default "precision"
        What colours stand for: "precision"; for tuned policies also "error", what low precision
        costs in accuracy, on a log scale, or "gain", the milliseconds that it saves. Darker is
        more; the picture has a legend.

    Raises
    ------
    ArgumentError
        Another colour or suffix, errors or gains that the plan does not have, a folder that is not
        there, or no plan.
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


def _legend(scale: Scale, kept: int) -> Iterable[str]:
    for label, colour in scale.legend:
        yield _note(label, _filled(colour))
    if kept:
        yield _note(KEPT.format(count=kept), f'fillcolor="white" {_THICK}')


def _note(label: str, look: str) -> str:
    return f"  {_quoted('legend ' + label)} [label={_quoted(label)} shape=note {look}]"


def _filled(colour: Colour) -> str:
    ink = "" if colour.text == Colour("").text else f' fontcolor="{colour.text}"'
    return f'fillcolor="{colour.fill}"{ink}'


def _box(node: NodePlan, colour: Colour) -> str:
    label = f'"{_escaped(node.name)}\\n{_escaped(node.operator)}"'
    costs = [
        f"{name} {cell_text(value)}{unit}"
        for name, value, unit in (("error", node.error, ""), ("gain", node.gain, " ms"))
        if value is not None
    ]
    tip = _quoted("; ".join([f"{node.precision}: {node.reason}", *costs]))
    border = f" {_THICK}" if _stays(node) else ""
    return f"  {_quoted(node.name)} [label={label} {_filled(colour)} tooltip={tip}{border}]"


def _stays(node: NodePlan) -> bool:
    """Tell whether a layer that was measured in low precision stays in float32."""
    return node.error is not None and node.precision == "float32"


def _edge(source: str, target: str, dtype: Optional[str]) -> str:
    label = f' [label="{dtype}" color="#c0392b" fontcolor="#c0392b"]' if dtype else ""
    return f"  {_quoted(source)} -> {_quoted(target)}{label}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
