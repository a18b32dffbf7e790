"""A graph with casts put in, and what was decided for each of its operators."""

from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Tuple

from ..policy.decision import Decision
from .graph import TAKES_EMPTY, Graph, Node

__all__ = ["Rewrite"]


@dataclass
class Rewrite:
    """The new graph, and what was decided for each operator in it: by index of the new node."""

    graph: Graph
    decisions: Dict[int, Decision] = field(default_factory=dict)
    bodies: Dict[int, List["Rewrite"]] = field(default_factory=dict)  #: of loops, by their index

    @property
    def casts(self) -> int:
        """How many casts the graph holds, bodies of loops included."""
        return _count_casts(self.graph)

    def decided(self) -> Iterator[Tuple[Graph, Node, Decision]]:
        """Yield each operator with the graph that holds it; bodies follow their loops."""
        for i, decision in self.decisions.items():
            yield self.graph, self.graph.nodes[i], decision
            for body in self.bodies.get(i, ()):
                yield from body.decided()


def _count_casts(graph: Graph) -> int:
    inner = sum(_count_casts(body) for node in graph.nodes for body in node.subgraphs)
    return inner + sum(node.op == "amp_cast" or TAKES_EMPTY in node.attrs for node in graph.nodes)
