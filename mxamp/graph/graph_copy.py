"""Graphs copied with changes, and names for what is put into them."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Dict, Iterable, List, Optional

from .graph import Graph, Node, Output

__all__ = ["GraphCopy", "Names"]


class Names:
    """Names that are taken, and new ones."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: Dict[str, int] = {}  #: the number that was last put behind a name

    def take(self, name: str) -> None:
        """Give a name out no more."""
        self._taken.add(name)

    def new(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if it is taken; it is from now on."""
        name, count = wanted, self._counts.get(wanted, 0)
        while name in self._taken:
            count += 1
            name = f"{wanted}{count}"
        self._taken.add(name)
        self._counts[wanted] = count
        return name


class GraphCopy:
    """A copy of a graph in the making: node by node, with changes on the way.

    Every node of the source is added once, or another is read in its place.
    """

    def __init__(self, source: Graph, taken: Iterable[str] = ()) -> None:
        self.nodes: List[Node] = []
        self._source, self._taken = source, taken
        self._places: Dict[int, int] = {}

    @cached_property
    def _names(self) -> Names:
        return Names([*(node.name for node in self._source.nodes), *self._taken])

    def new_name(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if that is a node's name, or `taken`."""
        return self._names.new(wanted)

    def inputs(self, node: Node) -> List[Output]:
        """Return what a node of the source reads, by the copy's indices."""
        return [(self._places[i], k) for i, k in node.inputs]

    def add(self, node: Node) -> Output:
        """Append a node that the source does not have; return its first output."""
        self.nodes.append(node)
        return len(self.nodes) - 1, 0

    def add_copy(self, i: int, inputs: Optional[List[Output]] = None, **changes: Any) -> None:
        """Append node i of the source, with some of its fields changed."""
        node = self._source.nodes[i]
        copied = node.reading(self.inputs(node) if inputs is None else inputs)
        self._places[i], _ = self.add(replace(copied, **changes) if changes else copied)

    def stand_in(self, i: int, node: Node) -> None:
        """Append a node that is read in place of node i of the source."""
        self._places[i], _ = self.add(node)

    def read_instead(self, i: int, other: int) -> None:
        """Leave node i of the source out; what read it reads `other`, an earlier one."""
        self._places[i] = self._places[other]

    def read_through(self, i: int, added: Output) -> None:
        """Let what is going to read node i of the source read the first output of an added node."""
        self._places[i], _ = added

    def finished(self) -> Graph:
        """Return the copy."""
        heads = [(self._places[i], k) for i, k in self._source.heads]
        return Graph(self.nodes, heads, self._source.attrs)
