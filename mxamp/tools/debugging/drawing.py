"""A plan as a picture: operators coloured by precision, casts on the edges. Drawn by Graphviz."""

from pathlib import Path
from typing import Iterable, Optional, Union

from ...errors import ArgumentError, StateError
from ...framework.files import checked_folder, checked_path, write_file
from ...framework.wording import shown
from ..tables import cell_text
from .colours import Colour, Scale, scale_of
from .plan import NodePlan, Plan

__all__ = ["draw", "to_dot"]

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

    Boxes are operators, coloured by their precision; labels on edges are casts. In a plan
    of `Tuning.annotated`, layers that stay in float32 have a thick border. All kinds but .dot need
    Graphviz's program `dot`.

    Parameters
    ----------
    plan : Plan
        What `explain` returns.
    path : str or Path
        The file to write; its suffix says which kind. A file that is there is replaced.
    colour : str, default "precision"
        What colours stand for: "precision"; for a plan of `Tuning.annotated` also "error", what
        low precision costs in accuracy, on a log scale, or "gain", the milliseconds that it saves.
        Darker is more; the picture has a legend.

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
