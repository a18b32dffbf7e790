"""Where operators are called: their block, their node, and what their inputs are called."""

from typing import Dict, Mapping, Optional, Sequence

from mxnet.gluon.block import Block

from ...framework.operators import Operator, resolve
from ...graph.graph import CASTS, Graph, Node
from ...graph.insert_casts import PRECISION
from .inspection import Site

__all__ = ["input_names", "prefixes_of", "site_of"]


def prefixes_of(block: Optional[Block]) -> Mapping[str, str]:
    """Return the names of a block and those in it by the prefix of their nodes, longest first."""
    found: Dict[str, str] = {}

    def visit(one: Block) -> None:
        found.setdefault(one.prefix, one.name)
        for child in one._children.values():
            visit(child)

    if block is not None:
        visit(block)
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def site_of(graph: Graph, node: Node, prefixes: Mapping[str, str]) -> Site:
    """Return where a node is; a cast that rounds a result is named after what has computed it."""
    block = next((name for prefix, name in prefixes.items() if node.name.startswith(prefix)), "")
    operator, sources = resolve(node.op), [graph.nodes[i] for i, _ in node.inputs]
    names = [
        source.name if source.is_variable else name
        for source, name in zip(sources, input_names(operator, len(sources)))
    ]
    if node.op not in CASTS:
        return Site(block, node.name, operator, node.attrs, names)
    source, dtype = sources[0], node.attrs.get("dtype", "")
    what = source.name if source.is_variable else f"output of {source.name!r}"
    name = source.name if PRECISION in source.attrs else node.name
    return Site(block, name, operator, node.attrs, names, f"{what} cast to {dtype}")


def input_names(operator: Operator, count: int) -> Sequence[str]:
    """Return what an operator calls its inputs, of which there are so many."""
    names = operator.inputs
    if len(names) < count:
        return [f"input {i}" for i in range(count)]
    return names[:count]
