"""What each layer of a net computes: a node of its graph, or a child block."""

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Sequence,
    Tuple,
)

from mxnet.context import Context
from mxnet.gluon import Block, HybridBlock
from mxnet.ndarray.ndarray import NDArray

from ....errors import ArgumentError
from ....framework.arrays import dtypes_of
from ....graph.casts.builder import HALVES
from ....graph.casts.insert import PRECISION
from ....graph.inspect import FLOATS, Tensor, precision_at
from ....graph.ir import CASTS, Graph, Output
from .isolated import IsolatedRun, arrays_in, dense_values, descendants
from .randomness import Seeds

__all__ = ["Key", "Layer", "LayerRun"]

NOT_FLOAT32 = (
    "layer {name!r} computes in {precision} with mixed precision off: compare takes a float32 net, "
    "not one that was converted or cast"
)

#: Which output of which layer: its name, how many of that name came before it, and the output.
Key = Tuple[str, int, int]


@dataclass(frozen=True)
class Layer:
    """One output of a layer, and what it was computed from."""

    key: Key
    block: str
    operator: str
    precision: str
    values: Any  #: float32, of NumPy's
    sources: FrozenSet[Key]

    @property
    def name(self) -> str:
        """The layer's name, with the number of the output where it is not the first."""
        name, _, output = self.key
        return f"{name}[{output}]" if output else name


class LayerRun(IsolatedRun):
    """Notes what each layer of `net` computes, while `watching` it.

    In a `plain` run, a layer that computes in half precision is an `ArgumentError`.
    """

    def __init__(self, net: Block, seeds: Seeds, plain: bool) -> None:
        super().__init__(seeds)
        self._plain = plain
        self._watching = False
        self._layers: Dict[Key, Layer] = {}
        self._seen: "Counter[str]" = Counter()
        #: What has computed an array, by its `id`; the arrays are kept, so that ids stay theirs.
        self._producers: Dict[int, FrozenSet[Key]] = {}
        self._kept: List[NDArray] = []
        #: The layer that reads a parameter first, by the parameter's name.
        self.readers: Dict[str, Key] = {}
        names = [(block.prefix, block.name) for block in descendants(net)]
        self._prefixes = sorted(names, key=lambda pair: -len(pair[0]))

    @property
    def layers(self) -> Mapping[Key, Layer]:
        """What was noted, in the order of execution."""
        return self._layers

    @contextlib.contextmanager
    def watching(self, block: Block, inputs: Sequence[Any]) -> Iterator[None]:
        """Note the layers of a block that is called with these inputs."""
        self._made(arrays_in(inputs), frozenset())
        hooks = [
            one.register_forward_hook(self._note_block)
            for one in descendants(block)
            if not (isinstance(one, HybridBlock) and one._active)
        ]
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            for hook in hooks:
                hook.detach()

    # ------------------------------------------------------------------ graphs

    def run_graph(
        self,
        graph: Graph,
        symbol_class: Any,
        tensors: Mapping[Output, Tensor],
        values: Dict[str, NDArray],
        context: Context,
    ) -> List[NDArray]:
        """Run a graph; note what each of its nodes computes that another one reads."""
        heads = list(graph.heads)
        if self._watching:
            # Before it runs: on CPUs much of it would not.
            for i, node in enumerate(graph.nodes):
                if not node.is_variable:
                    self._check(node.name, precision_at(graph, i, tensors))
            graph = replace(graph, heads=[*heads, *_entries_read(graph)])
        outputs = super().run_graph(graph, symbol_class, tensors, values, context)
        if self._watching:
            arrays = dict(zip(graph.heads, outputs))
            keys = self._note_nodes(graph, tensors, values, arrays)
            for head, array in zip(heads, outputs):
                self._made([array], keys.get(head, frozenset()))
        return outputs[: len(heads)]

    def _note_nodes(
        self,
        graph: Graph,
        tensors: Mapping[Output, Tensor],
        values: Mapping[str, NDArray],
        arrays: Mapping[Output, NDArray],
    ) -> Dict[Output, FrozenSet[Key]]:
        """Note the nodes of a graph; return what each of its entries comes from."""
        rounded = _rounded(graph)
        keys: Dict[Output, FrozenSet[Key]] = {}
        for i, node in enumerate(graph.nodes):
            if node.is_variable:
                array = values.get(node.name)
                keys[i, 0] = self._producers.get(id(array), frozenset())
                continue
            sources = frozenset().union(*(keys.get(entry, frozenset()) for entry in node.inputs))
            number = self._number(node.name)
            for k in range(node.num_outputs):
                keys[i, k] = sources
                if (i, k) not in arrays or tensors[i, k].dtype not in FLOATS:
                    continue
                key = (node.name, number, k)
                array = arrays[rounded.get((i, k), (i, k))]
                precision = precision_at(graph, i, tensors)
                block = self._block_of(node.name)
                self._note(
                    Layer(key, block, node.operator, precision, dense_values(array), sources)
                )
                keys[i, k] = frozenset({key})
                for entry in node.inputs:
                    if graph.nodes[entry[0]].is_variable:
                        self.readers.setdefault(graph.nodes[entry[0]].name, key)
        return keys

    def _block_of(self, name: str) -> str:
        return next((block for prefix, block in self._prefixes if name.startswith(prefix)), "")

    # ------------------------------------------------------------------ blocks

    def _note_block(self, block: Block, inputs: Sequence[Any], outputs: Any) -> None:
        """Note what a block has returned that no block in it has."""
        if not self._watching:
            return
        given = arrays_in(inputs)
        known = [self._producers[id(array)] for array in given if id(array) in self._producers]
        if len(known) < len(given) and self._layers:
            # Computed between blocks: from what came before, for all that is known.
            known.append(frozenset({next(reversed(list(self._layers)))}))
        sources = frozenset().union(*known)
        made = [array for array in arrays_in(outputs) if id(array) not in self._producers]
        number = self._number(block.name) if made else 0
        for k, array in enumerate(made):
            key = (block.name, number, k)
            dtype = dtypes_of([array])[0]
            self._made([array], frozenset({key}) if dtype in FLOATS else sources)
            if dtype in FLOATS:
                self._check(block.name, dtype)
                kind = type(block).__name__
                self._note(Layer(key, block.name, kind, dtype, dense_values(array), sources))
                for param in block._reg_params.values():
                    self.readers.setdefault(param.name, key)

    # ------------------------------------------------------------------ both

    def _note(self, layer: Layer) -> None:
        self._layers[layer.key] = layer

    def _check(self, name: str, precision: str) -> None:
        if self._plain and precision in HALVES:
            raise ArgumentError(NOT_FLOAT32.format(name=name, precision=precision))

    def _number(self, name: str) -> int:
        self._seen[name] += 1
        return self._seen[name] - 1

    def _made(self, arrays: Sequence[NDArray], keys: FrozenSet[Key]) -> None:
        for array in arrays:
            self._producers[id(array)] = keys
            self._kept.append(array)


def _entries_read(graph: Graph) -> List[Output]:
    """Return the outputs of nodes that others read, which are no hidden ones."""
    heads = set(graph.heads)
    read = dict.fromkeys(entry for node in graph.nodes for entry in node.inputs)
    return [e for e in read if e not in heads and not graph.nodes[e[0]].is_variable]


def _rounded(graph: Graph) -> Dict[Output, Output]:
    """Return the casts that round what operators without a kernel have computed in float32."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op in CASTS:
            source = node.inputs[0]
            precision = graph.nodes[source[0]].attrs.get(PRECISION)
            if precision is not None and precision == node.attrs["dtype"]:
                found[source] = (i, 0)
    return found
