"""A graph run node by node, as eager calls, by code that wants to see every value."""

import re
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Sequence

from mxnet import autograd
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol
from mxnet.symbol.numpy import _Symbol

from ..framework.arrays import dtypes_of, invoke
from ..framework.nested import as_list
from ..framework.operators import resolve
from ..framework.zero_gradients import kept_safe, zero_gradients
from .census import tensors_of
from .graph import Graph, Node, Output, alone
from .usage import Shape

__all__ = ["interpret", "run_node"]

#: A dimension that MXNet is to find out.
_UNKNOWN = re.compile(r"(?<!\d)(0|-1)(?!\d)")

#: Runs a node on its inputs, and returns its outputs.
Runner = Callable[[Node, Sequence[NDArray]], Sequence[NDArray]]


def interpret(graph: Graph, inputs: Mapping[str, NDArray], run: Runner) -> List[NDArray]:
    """Return the outputs of a graph for inputs by name, each node having been run by `run`.

    Autograd records the nodes, not the graph, and the results are those of the graph: the same
    kernels run on the same values. Bodies of loops are run by MXNet as one.
    """
    values: Dict[Output, NDArray] = {}
    shapes = _inferred_shapes(graph, inputs)
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            values[i, 0] = inputs[node.name]
            continue
        if i in shapes:
            node = replace(node, attrs={**node.attrs, "shape": str(shapes[i])})  # noqa: PLW2901
        outputs = run(node, [values[entry] for entry in node.inputs])
        values.update({(i, k): array for k, array in enumerate(outputs)})
    return [values[head] for head in graph.heads]


def run_node(
    node: Node, inputs: Sequence[NDArray], context: Any, is_np: bool = False
) -> Sequence[NDArray]:
    """Run one node on these arrays, in this context where there are none."""
    if node.subgraphs:
        return as_list(_alone(node, len(inputs), is_np)(*inputs))
    operator = resolve(node.op)
    attrs = {key: value for key, value in node.attrs.items() if not key.startswith("__")}
    if not inputs and "ctx" in operator.defaults:
        attrs["ctx"] = str(context)
    zero = zero_gradients()
    if operator.handle in zero and autograd.is_recording():
        inputs = kept_safe(inputs, zero[operator.handle], is_np)
    outputs = invoke(
        operator.handle, list(inputs), list(attrs), list(attrs.values()), None, is_np, True
    )
    return as_list(outputs)


def _inferred_shapes(graph: Graph, inputs: Mapping[str, NDArray]) -> Dict[int, Shape]:
    """Return the shapes of nodes that make arrays of a shape that others know: first states."""
    open_ones = [
        i
        for i, node in enumerate(graph.nodes)
        if not node.inputs and _UNKNOWN.search(node.attrs.get("shape", ""))
    ]
    if not open_ones:
        return {}
    dtypes = dict(zip(inputs, dtypes_of(list(inputs.values()))))
    found = tensors_of(graph, dtypes, {name: array.shape for name, array in inputs.items()})
    shapes = {i: found[i, 0].shape for i in open_ones}
    return {i: shape for i, shape in shapes.items() if shape is not None}


def _alone(node: Node, count: int, is_np: bool) -> CachedOp:
    """Return a loop, or operators that were fused, as a graph of its own."""
    symbol_class = _Symbol if is_np else Symbol
    return CachedOp(alone(node, [{}] * count, node.num_outputs, symbol_class))
