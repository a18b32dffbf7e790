"""Barriers before what MXNet's fusion for oneDNN would fuse wrongly.

MXNet fuses a product with what reads it, in executors for inference and in `get_backend_symbol`. It
takes one that reads an output for the only one, wrongly where that is an output of the graph too,
or where a sum reads both a convolution and what is computed from it. An operator that is the
identity, and that nothing is fused across, keeps the two apart. It costs nothing: MXNet runs it in
place.
"""

from typing import AbstractSet, Set, Tuple

from ..edit import Edit, View
from ..ir import Graph, Node

__all__ = ["with_barriers", "without_barriers"]

_BARRIER = "BlockGrad"


def with_barriers(graph: Graph, before_norms: bool = False) -> Tuple[Graph, AbstractSet[str]]:
    """Return a graph for inference with barriers, and their names.

    They stand behind each output that is read more than once, and `before_norms`, which MXNet would
    fold into weights in the dtype that these have.
    """
    view, edit = View(graph, {}), Edit(graph, {})
    made: Set[str] = set()
    for i, node in enumerate(graph.nodes):
        for position, output in enumerate(node.inputs):
            source = graph.nodes[output[0]]
            shared = _is_fusible(source) and view.reads(output[0]) > 1
            if shared or (before_norms and node.op == "BatchNorm" and position == 0):
                name = edit.new_name(f"{node.name}_{position}_amp_apart")
                made.add(name)
                edit.read(i, position, edit.add_node(Node(_BARRIER, name, {}, [output])))
    return edit.applied(), made


def without_barriers(graph: Graph, made: AbstractSet[str]) -> Graph:
    """Return a graph without the barriers of these names."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.name in made:
            edit.alias((i, 0), node.inputs[0])
    return edit.applied()


def _is_fusible(node: Node) -> bool:
    return not node.is_variable and node.num_outputs == 1
