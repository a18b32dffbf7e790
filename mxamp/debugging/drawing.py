"""A plan as a picture: operators coloured by precision, casts on the edges. Drawn by Graphviz."""

from pathlib import Path
from typing import Iterable, Optional, Union

from ..errors import ArgumentError, StateError
from ..framework.files import checked_folder, checked_path, write_file
from ..framework.wording import shown
from .plan import NodePlan, Plan

__all__ = ["draw", "to_dot"]

#: Colours that also differ in brightness, for those who see no difference between hues.
COLOURS = {"float16": "#8fd18f", "bfloat16": "#8fd18f", "float32": "#f5d76e"}
OTHER = "#e8e8e8"

NO_GRAPHVIZ = (
    "Graphviz is not installed: there is no program `dot` on the PATH. Install it (on Debian and "
    "Ubuntu: apt-get install graphviz), or write {dot!r}, which needs nothing"
)


def to_dot(plan: Plan) -> str:
    """Return the plan in Graphviz's language.

    Operators are boxes in the colour of their precision, inputs are ellipses, and an edge with a
    label is a cast. Parameters are left out where the plan knows them.
    """
    lines = [
        "digraph plan {",
        '  node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10]',
        '  edge [fontname="Helvetica" fontsize=8]',
    ]
    lines += _legend(plan)
    lines += [_box(node) for node in plan.nodes]
    lines += [f'  {_quoted(name)} [shape=ellipse fillcolor="white"]' for name in plan.inputs]
    drawn = {*plan.inputs, *(node.name for node in plan.nodes)}
    edges = [
        _edge(source, node.name, dtype)
        for node in plan.nodes
        for source, dtype in node.inputs
        if source in drawn
    ]
    return "\n".join([*lines, *edges, "}", ""])


def draw(plan: Plan, path: Union[str, Path]) -> None:
    """Write a plan as a picture: a .svg, .png, .pdf or .dot file.

    ::

        amp.draw(amp.explain(net, "bfloat16"), "net.svg")

    Boxes are operators, coloured by their precision; labels on edges are casts. All kinds but .dot
    need Graphviz's program `dot`.

    Parameters
    ----------
    plan : Plan
        What `explain` returns.
    path : str or Path
        The file to write; its suffix says which kind. A file that is there is replaced.

    Raises
    ------
    ArgumentError
        Another suffix, a folder that is not there, or no plan.
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
    source = to_dot(plan)
    if file_format == "dot":
        write_file(target, source.encode())
        return
    import graphviz

    try:
        picture = graphviz.Source(source).pipe(format=file_format)
    except graphviz.ExecutableNotFound:
        raise StateError(NO_GRAPHVIZ.format(dot=str(target.with_suffix(".dot")))) from None
    write_file(target, picture)


def _legend(plan: Plan) -> Iterable[str]:
    for precision, count in plan.counts().items():
        colour = COLOURS.get(precision, OTHER)
        label = _quoted(f"{count} in {precision}")
        yield f'  {_quoted("legend " + precision)} [label={label} shape=note fillcolor="{colour}"]'


def _box(node: NodePlan) -> str:
    label = f'"{_escaped(node.name)}\\n{_escaped(node.operator)}"'
    colour = COLOURS.get(node.precision, OTHER)
    tip = _quoted(f"{node.precision}: {node.reason}")
    return f'  {_quoted(node.name)} [label={label} fillcolor="{colour}" tooltip={tip}]'


def _edge(source: str, target: str, dtype: Optional[str]) -> str:
    label = f' [label="{dtype}" color="#c0392b" fontcolor="#c0392b"]' if dtype else ""
    return f"  {_quoted(source)} -> {_quoted(target)}{label}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'
