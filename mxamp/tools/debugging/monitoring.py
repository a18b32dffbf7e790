"""MXNet's monitor on a graph: the outputs of its operators, forward and backward."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Callable, Mapping, Optional, Sequence

from mxnet.base import NDArrayHandle
from mxnet.gluon import Block
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...graph.ir import Graph
from .blocks import BlockNames
from .faults import Site, Tensor, site_of

#: An output as the monitor names it: node, whether in the backward pass, and the output's number.
#: Operators name hidden outputs in other ways, whose values may be anything.
_OUTPUT = re.compile(r"(.+?)(_backward)?_(?:output)?(\d*)")
#: Operators that read the shape of their input alone.
_SHAPES = frozenset({"ones_like", "shape_array", "size_array", "zeros_like"})

#: Called with the site, the inputs if they are known, None in the backward pass, and an output.
OnOutput = Callable[[Site, Optional[Sequence[Tensor]], Tensor], None]


class GraphMonitor:
    """Hands each output that MXNet computes in a graph to `on_output`."""

    def __init__(self, symbol: Symbol, block: Block | None, on_output: OnOutput) -> None:
        self._graph, self._block_names = Graph.from_symbol(symbol), BlockNames(block)
        self._on_output = on_output
        #: The nodes of each name: Gluon gives those of a block that is called twice one name.
        self._places: dict[str, list[int]] = {}
        consumers: dict[int, set[str]] = {}
        for i, node in enumerate(self._graph.nodes):
            if not node.is_variable:
                self._places.setdefault(node.name, []).append(i)
            for source, _ in node.inputs:
                consumers.setdefault(source, set()).add(node.op)
        # MXNet does not compute what nobody reads: its memory may hold anything.
        self._unread = {i for i, ops in consumers.items() if ops <= _SHAPES}
        self.begin({})

    def begin(self, inputs: Mapping[str, NDArray]) -> None:
        """Begin a forward pass on these inputs, or end one."""
        self._variables = {name: Tensor(name, array) for name, array in inputs.items()}
        for name, tensor in self._variables.items():
            tensor.variable = name
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._calls: Counter[str] = Counter()

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        """Take an output: its name, in cached ops its operator's name, and the array's handle."""
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)
        found = _OUTPUT.fullmatch(name.decode() if isinstance(name, bytes) else name)
        if found is None:
            return
        node, number = found[1], int(found[3] or 0)
        places = self._places.get(node, [])
        if found[2] or not places:
            site = self._site(places[0]) if places else Site("", node, "add_n")
            of = site.names[number] if number < len(site.names) else f"input {number}"
            self._on_output(site, None, Tensor(f"gradient of {of}", array))
            return
        self._calls[node] += number == 0
        i = places[min(self._calls[node], len(places)) - 1]
        if i in self._unread:
            return
        site = self._site(i)
        # At once, as another operator may write over it.
        output = self._seen[i, number] = Tensor(site.output, array, now=True)
        inputs = map(self._input, self._graph.nodes[i].inputs, site.names)
        self._on_output(site, [tensor for tensor in inputs if tensor is not None], output)

    def _input(self, entry: tuple[int, int], name: str) -> Tensor | None:
        """Return an input of a node, as it is called there; None if the monitor did not name it."""
        source = self._graph.nodes[entry[0]]
        found = self._variables.get(source.name) if source.is_variable else self._seen.get(entry)
        return found if found is None else found.called(name)

    def _site(self, i: int) -> Site:
        return site_of(self._graph, self._graph.nodes[i], self._block_names)


def monitored_op(symbol: Symbol, monitor: GraphMonitor) -> CachedOp:
    """Return a cached op of a symbol that calls `monitor`, which static graphs do not."""
    op = CachedOp(symbol, [("inline_limit", "0")])  # nodes of inlined graphs aren't monitored
    op._register_op_hook(monitor)
    return op
