"""The view of a graph that a pass gets, and the edit that it records.

A pass never counts consumers, copies nodes or makes names by itself. The view has the consumers of
every output, the graph's outputs among them, and the edit is applied in one walk: an output that is
no longer read disappears with everything that only it has read.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from mxnet.ndarray.ndarray import NDArray

from ..framework.machine import dtype_name
from .ir import Graph, Node, Output

__all__ = ["Edit", "Names", "Params", "View", "without_shape"]

Params = Dict[str, NDArray]

#: The consumer that stands for the caller, who gets the graph's outputs.
_CALLER = -1


class Names:
    """Names that are taken, and new ones."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: Dict[str, int] = {}  #: the number that was last put behind a name

    def take(self, name: str) -> None:
        """Reserve a name."""
        self._taken.add(name)

    def new(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if it is taken, and reserve the result."""
        name, count = wanted, self._counts.get(wanted, 0)
        while name in self._taken:
            count += 1
            name = f"{wanted}{count}"
        self._taken.add(name)
        self._counts[wanted] = count
        return name


@dataclass(frozen=True)
class View:
    """A graph with its consumers and, where they are known, the values of its parameters."""

    graph: Graph
    params: Mapping[str, NDArray]

    @cached_property
    def consumers(self) -> Mapping[Output, List[Tuple[int, int]]]:
        """Return the readers of each output: (node, position), or (-1, place) for the caller."""
        found: Dict[Output, List[Tuple[int, int]]] = {}
        for i, node in enumerate(self.graph.nodes):
            for k, output in enumerate(node.inputs):
                found.setdefault(output, []).append((i, k))
        for place, output in enumerate(self.graph.heads):
            found.setdefault(output, []).append((_CALLER, place))
        return found

    @cached_property
    def _reads(self) -> Mapping[int, int]:
        """Return how often each node is read, by any of its outputs."""
        return Counter(i for (i, _), readers in self.consumers.items() for _ in readers)

    @cached_property
    def _reads_by_name(self) -> Mapping[str, int]:
        """Return how often each name is read: two variables of one name are one parameter."""
        counts: Dict[str, int] = Counter()
        for i, count in self._reads.items():
            counts[self.graph.nodes[i].name] += count
        return counts

    @cached_property
    def outputs(self) -> Set[int]:
        """Return the nodes that give an output of the graph."""
        return {i for i, _ in self.graph.heads}

    @cached_property
    def several_read(self) -> Set[int]:
        """Return the nodes of which another output than the first is read."""
        return {i for i, k in self.consumers if k}

    def is_read_once(self, i: int) -> bool:
        """Return whether one input in all reads node i, and it gives no output of the graph."""
        return self._reads.get(i, 0) == 1 and i not in self.outputs

    def reads(self, i: int) -> int:
        """Return how often node i is read, outputs of the graph included."""
        return self._reads.get(i, 0)

    def own_parameter(self, node: Node, position: int) -> Optional[str]:
        """Return the name of an input that is a float32 parameter with no other consumer."""
        if position >= len(node.inputs):
            return None
        variable = self.graph.nodes[node.inputs[position][0]]
        array = self.params.get(variable.name) if variable.is_variable else None
        if array is None or dtype_name(array.dtype) != "float32":
            return None
        return variable.name if self._reads_by_name[variable.name] == 1 else None

    def own_parameters(self, node: Node) -> Optional[List[str]]:
        """Return the names of all inputs but the first, if each is an own parameter; else None."""
        names = [self.own_parameter(node, k) for k in range(1, len(node.inputs))]
        return None if None in names else [name for name in names if name is not None]


class Edit:
    """Changes of a graph, by index of node, in the making.

    Outputs are those of the source, or of nodes that `add` has made. `params` are the parameters'
    values; new and changed ones are put there.
    """

    def __init__(self, graph: Graph, params: Mapping[str, NDArray]) -> None:
        self.params: Params = dict(params)
        self._graph = graph
        self._changed: Dict[int, Node] = {}
        self._added: List[Node] = []
        self._aliases: Dict[Output, Output] = {}
        self._heads: Dict[int, Output] = {}

    @cached_property
    def _names(self) -> Names:
        return Names([*(node.name for node in self._graph.nodes), *self.params])

    def new_name(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if a node or a parameter has that name."""
        return self._names.new(wanted)

    def add(self, op: str, name: str, inputs: Iterable[Output] = (), **attrs: str) -> Output:
        """Add a node with a new name made of `name`; return its output."""
        return self.add_node(Node(op, self.new_name(name), attrs, list(inputs)))

    def add_node(self, node: Node) -> Output:
        """Add a node that has its name already; return its first output.

        It reads its inputs as they are by now: a later `alias` may put it behind one of them.
        """
        self._added.append(replace(node, inputs=[self._behind(output) for output in node.inputs]))
        return len(self._graph.nodes) + len(self._added) - 1, 0

    def add_parameter(self, name: str, value: NDArray) -> Output:
        """Add a parameter with a new name made of `name`; return the variable."""
        name = self.new_name(name)
        self.params[name] = value
        return self.add_node(Node("null", name))

    def change(self, i: int, **fields: Any) -> None:
        """Change fields of node i; what reads it reads the changed node."""
        self._changed[i] = replace(self.node(i), **fields)

    def node(self, i: int) -> Node:
        """Return node i as it is by now."""
        return self._changed.get(i, self._graph.nodes[i])

    def read(self, i: int, position: int, output: Output) -> None:
        """Let input `position` of node i read another output."""
        inputs = list(self.node(i).inputs)
        inputs[position] = output
        self.change(i, inputs=inputs)

    def alias(self, output: Output, other: Output) -> None:
        """Let all that reads `output`, outputs of the graph included, read `other`."""
        self._aliases[output] = other

    def give(self, place: int, output: Output) -> None:
        """Let the graph's output number `place` be another one."""
        self._heads[place] = output

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self._changed or self._aliases or self._heads)

    def applied(self) -> Graph:
        """Return the changed graph, without what nothing reads."""
        source = self._graph
        if self.is_empty:
            return source
        nodes = [self.node(i) for i in range(len(source.nodes))] + self._added
        heads = [
            self._behind(self._heads.get(place, head)) for place, head in enumerate(source.heads)
        ]
        inputs = [
            [self._behind(output) for output in node.inputs] for node in nodes[: len(source.nodes)]
        ]
        inputs += [node.inputs for node in self._added]
        order = _in_order(inputs, [i for i, _ in heads], len(source.nodes))
        places = {old: new for new, old in enumerate(order)}
        made = [replace(nodes[i], inputs=[(places[j], k) for j, k in inputs[i]]) for i in order]
        return Graph(made, [(places[i], k) for i, k in heads], source.attrs)

    def _behind(self, output: Output) -> Output:
        """Follow aliases to the output that is read in the end."""
        while output in self._aliases:
            output = self._aliases[output]
        return output


def _in_order(inputs: List[List[Output]], heads: List[int], of_source: int) -> List[int]:
    """Return the nodes that heads are computed from, inputs first, in the source's order."""
    needed: Set[int] = set()
    open_ones = list(heads)
    while open_ones:
        i = open_ones.pop()
        if i not in needed:
            needed.add(i)
            open_ones += [j for j, _ in inputs[i]]
    order: List[int] = []
    placed: Set[int] = set()
    for root in [i for i in range(of_source) if i in needed] + heads:
        stack = [root]
        while stack:
            i = stack[-1]
            waiting = [j for j, _ in inputs[i] if j not in placed]
            if waiting and i not in placed:
                stack += waiting[::-1]
                continue
            stack.pop()
            if i not in placed:
                placed.add(i)
                order.append(i)
    return order


def without_shape(variable: Node) -> Dict[str, str]:
    """Return a variable's attributes without the shape that Gluon records."""
    return {name: text for name, text in variable.attrs.items() if name != "__shape__"}
