"""Statistics of a graph for tools: types of tensors, and counts of operators and casts."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from math import prod
from typing import Collection, Mapping, NamedTuple, Sequence

from mxnet.base import MXNetError

from . import ir
from .ir import CASTS, Graph, Node, Output, Shape, Usage, emulated_dtype

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: str
    shape: Shape | None  #: None where it depends on values, as after `boolean_mask` or a loop

    @property
    def size(self) -> int:
        """The number of elements in the tensor; 0 if its shape is unknown."""
        return 0 if self.shape is None else prod(self.shape)


class Census(NamedTuple):
    """Counts of operators by (name, dtype), and of casts and their bytes by (source, target)."""

    operators: Counter[tuple[str, str]]
    casts: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]

    @classmethod
    def empty(cls) -> Census:
        """Return a census (counts of operators and casts) with all counts at zero."""
        return cls(Counter(), Counter(), Counter())

    def add(self, other: Census, times: int = 1) -> None:
        """Add the counts of another census, each multiplied by `times`, to these counts."""
        for mine, theirs in zip(self, other):
            for key, number in theirs.items():
                mine[key] += number * times

    def add_cast(self, source: str, target: str, size: int) -> None:
        """Count one cast of `size` elements from dtype `source` to `target`, and its bytes."""
        self.casts[source, target] += 1
        self.bytes[source, target] += size * (_BYTES.get(source, 4) + _BYTES.get(target, 4))


def take_census(graph: Graph, dtypes: Mapping[str, str], shapes: Mapping[str, Shape]) -> Census:
    """Count operators and casts in one run of a graph, for inputs of these dtypes and shapes.

    Bodies of `foreach` count once per step. Bodies of `while_loop` and `cond` don't count, since
    only MXNet knows how often they run. Where a shape depends on values, casts count without
    bytes, and bodies of `foreach` don't count.
    """
    census = Census.empty()
    values = tensors_of(graph, dtypes, shapes)
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            continue
        inputs, output = [values[entry] for entry in node.inputs], values[i, 0]
        if node.op in CASTS and is_cast(inputs[0].dtype, output.dtype):
            census.add_cast(inputs[0].dtype, output.dtype, inputs[0].size)
            continue
        if node.is_inserted_copy:
            continue  # a part of a cast
        census.operators[node.operator, precision_of_node(graph, i, values)] += 1
        if node.operator == "_foreach" and inputs[0].shape is not None:
            census.add(_census_of_step(node, inputs), times=inputs[0].shape[0])
    return census


def is_cast(source: str, target: str) -> bool:
    """Return whether a cast from `source` to `target` is between two different float dtypes."""
    return source != target and {source, target} <= FLOATS


def precision_of_node(graph: Graph, i: int, values: Mapping[Output, TensorType]) -> str:
    """Return the dtype in which node i computes, given the types of all tensors.

    It is the recorded one, or that of the node's first floating-point tensor.
    """
    node = graph.nodes[i]
    dtypes = [values[entry].dtype for entry in (*node.inputs, (i, 0))]
    first = next((dtype for dtype in dtypes if dtype in FLOATS), dtypes[0])
    return emulated_dtype(node.attrs) or first


def _census_of_step(node: Node, inputs: Sequence[TensorType]) -> Census:
    """Count operators and casts in one step of a `foreach` loop, for inputs of these types."""
    body = node.subgraphs[0]
    usage = ir.body_usage(Usage(), node, 0, [tensor.dtype for tensor in inputs])
    return take_census(
        body, usage.dtypes, ir.step_shapes(node, [tensor.shape for tensor in inputs])
    )


def tensors_of(
    graph: Graph, dtypes: Mapping[str, str], shapes: Mapping[str, Shape]
) -> dict[Output, TensorType]:
    """Return the dtype and the shape of each node's outputs; the shape is None if unknown."""
    entries, symbol = graph.all_outputs
    arguments = set(symbol.list_arguments())
    inferred = ir.infer_types(symbol, {n: dtype for n, dtype in dtypes.items() if n in arguments})
    types = inferred[1] if inferred is not None else ("float32",) * len(entries)
    known = ir.infer_shapes(graph, shapes)
    return {entry: TensorType(dtype, known[entry]) for entry, dtype in zip(entries, types)}


def shapes_for_any_data(graph: Graph, params: Collection[str]) -> dict[str, Shape]:
    """Return the shapes that parameters must have, whatever the sizes and rank of the data.

    In a shape 0 stands for any size. MXNet's own inference of unknown sizes is of no use: it takes
    them for -1, and multiplies them. So it runs on several sizes, and shapes that differ between
    those depend on the data.
    """
    later = {graph.nodes[i].name for node in graph.nodes for i, _ in node.inputs[1:]}
    data = set(graph.input_names) - later - set(params)  # operators read labels second
    symbol, found = graph.to_symbol(), None
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    for rank in range(1, 6):
        with suppress(MXNetError):
            known = [dict.fromkeys(data, (size,) * rank) for size in (960, 1920)]
            for arguments, _, states in [symbol.infer_shape_partial(**one) for one in known]:
                new = [tuple(shape or ()) for shape in (*arguments, *states)]
                found = list(map(_common_sizes, found or new, new))
    return {name: shape for name, shape in zip(names, found or ()) if shape and name in params}


def _common_sizes(first: Shape, second: Shape) -> Shape:
    same_rank = len(first) == len(second)
    return tuple(a if a == b > 0 else 0 for a, b in zip(first, second)) if same_rank else ()
