"""Graph passes' tools: `View` finds the consumers of nodes, and `Edit` records changes.

The view counts the consumers of every output, the caller among them. The edit is applied in one
walk, which drops nodes without consumers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, Dict, Iterable, Mapping

from mxnet.ndarray.ndarray import NDArray

from ..framework.machine import dtype_name
from .ir import Graph, Node, Output

Params = Dict[str, NDArray]

#: The consumer that stands for the caller, who gets the graph's outputs.
_CALLER = -1


class UniqueNames:
    """The set of node names in use; a taken name gets a number to make it unique."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}  #: the number last appended to a name

    def reserve(self, name: str) -> None:
        """Add a name to the names in use."""
        self._taken.add(name)

    def make_unique(self, name: str) -> str:
        """Return `name`, with a number if it is in use already, and add it to the names in use."""
        unique, count = name, self._counts.get(name, 0)
        while unique in self._taken:
            count += 1
            unique = f"{name}{count}"
        self._taken.add(unique)
        self._counts[name] = count
        return unique


@dataclass(frozen=True)
class View:
    """Read-only view of a graph for passes: consumers of each output, values of parameters."""

    graph: Graph
    params: Mapping[str, NDArray]

    @cached_property
    def consumers(self) -> Mapping[Output, list[tuple[int, int]]]:
        """The consumers of each output as (node, input position); node -1 is a graph output.

        For a graph output, the second number is its position among the outputs.
        """
        found: dict[Output, list[tuple[int, int]]] = {}
        live = set(self.head_nodes)
        for i in range(len(self.graph.nodes) - 1, -1, -1):
            if i in live:
                live.update(source for source, _ in self.graph.nodes[i].inputs)
        for i in sorted(live):
            for k, output in enumerate(self.graph.nodes[i].inputs):
                found.setdefault(output, []).append((i, k))
        for place, output in enumerate(self.graph.heads):
            found.setdefault(output, []).append((_CALLER, place))
        return found

    @cached_property
    def _reads(self) -> Mapping[int, int]:
        """The number of consumers of each node, over all its outputs, graph outputs included."""
        return Counter(i for (i, _), readers in self.consumers.items() for _ in readers)

    @cached_property
    def _reads_by_name(self) -> Mapping[str, int]:
        """The number of consumers of each node name, summed over nodes that share the name."""
        counts: dict[str, int] = Counter()
        for i, count in self._reads.items():
            counts[self.graph.nodes[i].name] += count
        return counts

    @cached_property
    def head_nodes(self) -> set[int]:
        """The indexes of nodes that produce a graph output."""
        return {i for i, _ in self.graph.heads}

    @cached_property
    def multi_output_nodes(self) -> set[int]:
        """The indexes of nodes whose outputs beyond the first have consumers."""
        return {i for i, k in self.consumers if k}

    def is_read_once(self, i: int) -> bool:
        """Return whether node i has exactly one consumer, and it is not a graph output."""
        return self._reads.get(i, 0) == 1 and i not in self.head_nodes

    def reads(self, i: int) -> int:
        """Return the number of consumers of node i, graph outputs included."""
        return self._reads.get(i, 0)

    def own_parameter(self, node: Node, position: int) -> str | None:
        """Return an input's name if it is a float32 parameter with no other reader, else None."""
        if position >= len(node.inputs):
            return None
        variable = self.graph.nodes[node.inputs[position][0]]
        array = self.params.get(variable.name) if variable.is_variable else None
        if array is None or dtype_name(array.dtype) != "float32":
            return None
        return variable.name if self._reads_by_name[variable.name] == 1 else None

    def own_parameters(self, node: Node) -> list[str] | None:
        """Return the names of a layer's parameters if no other node reads them, else None."""
        names = [self.own_parameter(node, k) for k in range(1, len(node.inputs))]
        return None if None in names else [name for name in names if name is not None]


class Edit:
    """The changes that a pass makes to a graph and its parameters, applied by `applied`.

    Arguments may name outputs of the source graph and of added nodes. `params` holds the values of
    all parameters, with those that the edit adds or changes.
    """

    def __init__(self, graph: Graph, params: Mapping[str, NDArray]) -> None:
        self.params: Params = dict(params)
        self._graph = graph
        self._changed: dict[int, Node] = {}
        self._added: list[Node] = []
        self._targets: dict[Output, Output] = {}
        self._heads: dict[int, Output] = {}

    @cached_property
    def _used_names(self) -> UniqueNames:
        return UniqueNames([*(node.name for node in self._graph.nodes), *self.params])

    def unique_name(self, name: str) -> str:
        """Return `name`, with a number if a node or a parameter has it already."""
        return self._used_names.make_unique(name)

    def add(self, op: str, name: str, inputs: Iterable[Output] = (), **attrs: str) -> Output:
        """Add an operator node and return its output; a taken `name` gets a number."""
        return self.add_node(Node(op, self.unique_name(name), attrs, list(inputs)))

    def add_node(self, node: Node) -> Output:
        """Add a node, whose name must be unique already; return its first output.

        Its inputs are resolved now, so that a later `redirect` can put the node behind one of them.
        It runs on the device of its first input: MXNet's fusion for GPUs ends the process at nodes
        without a device in a graph on several devices.
        """
        inputs = [self.resolve(output) for output in node.inputs]
        group = self.node(inputs[0][0]).device_group if inputs else {}
        self._added.append(replace(node, inputs=inputs, attrs={**group, **node.attrs}))
        return len(self._graph.nodes) + len(self._added) - 1, 0

    def add_parameter(self, name: str, value: NDArray) -> Output:
        """Add a parameter with its value and return its output; a taken `name` gets a number.

        Its shape is recorded, because MXNet infers no shape from an addition or a product.
        """
        name = self.unique_name(name)
        self.params[name] = value
        return self.add_node(Node("null", name, {"__shape__": str(value.shape)}))

    def change(self, i: int, **fields: Any) -> None:
        """Replace fields of node i, such as `op`, `attrs` or `inputs`."""
        self._changed[i] = replace(self.node(i), **fields)

    def node(self, i: int) -> Node:
        """Return node i of the changed graph; indexes of added nodes follow the original ones."""
        count = len(self._graph.nodes)
        return self._added[i - count] if i >= count else self._changed.get(i, self._graph.nodes[i])

    def set_input(self, i: int, position: int, output: Output) -> None:
        """Connect input `position` of node i to another output."""
        inputs = list(self.node(i).inputs)
        inputs[position] = output
        self.change(i, inputs=inputs)

    def redirect(self, output: Output, target: Output) -> None:
        """Make all consumers of a node's output, graph outputs included, read `target` instead."""
        self._targets[output] = target

    def set_head(self, place: int, output: Output) -> None:
        """Replace the graph output number `place` with another node's output."""
        self._heads[place] = output

    def applied(self) -> Graph:
        """Return the graph with all changes and without unused nodes."""
        source = self._graph
        if not (self._changed or self._targets or self._heads):
            return source
        nodes = [self.node(i) for i in range(len(source.nodes))] + self._added
        heads = [
            self.resolve(self._heads.get(place, head)) for place, head in enumerate(source.heads)
        ]
        inputs = [
            [self.resolve(output) for output in node.inputs] for node in nodes[: len(source.nodes)]
        ]
        inputs += [node.inputs for node in self._added]
        order = _sort_nodes(inputs, [i for i, _ in heads], len(source.nodes))
        places = {old: new for new, old in enumerate(order)}
        made = [replace(nodes[i], inputs=[(places[j], k) for j, k in inputs[i]]) for i in order]
        return Graph(made, [(places[i], k) for i, k in heads], source.attrs)

    def resolve(self, output: Output) -> Output:
        """Return the output that consumers of `output` read after all calls of `redirect`."""
        while output in self._targets:
            output = self._targets[output]
        return output


def _sort_nodes(inputs: list[list[Output]], heads: list[int], source_count: int) -> list[int]:
    """Return the indexes of the nodes that graph outputs depend on, in topological order.

    The first `source_count` nodes keep their order.
    """
    needed: set[int] = set()
    pending = list(heads)
    while pending:
        i = pending.pop()
        if i not in needed:
            needed.add(i)
            pending += [j for j, _ in inputs[i]]
    order: list[int] = []
    placed: set[int] = set()
    for root in [i for i in range(source_count) if i in needed] + heads:
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


def without_shape(variable: Node) -> dict[str, str]:
    """Return a variable's attributes without `__shape__`, so that its shape may change."""
    return {name: text for name, text in variable.attrs.items() if name != "__shape__"}


def without_fused_operators(
    graph: Graph, where: Callable[[Node], bool] = lambda _node: True
) -> Graph:
    """Replace nodes fused by oneDNN with the operators inside, where `where(node)` is true."""
    edit = Edit(graph, {})
    for i, node in enumerate(graph.nodes):
        if node.is_fused and where(node):
            [body] = node.subgraphs
            outside = iter(node.inputs)
            made: dict[Output, Output] = {}
            for k, inner in enumerate(body.nodes):
                read = inner.with_inputs([made[output] for output in inner.inputs])
                made[k, 0] = next(outside) if inner.is_variable else edit.add_node(read)
            edit.redirect((i, 0), made[body.heads[0]])
    return edit.applied()
