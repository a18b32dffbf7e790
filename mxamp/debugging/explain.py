"""How a plan is made: what a policy does to a graph, node by node, and why."""

from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..convert.arguments import checked_policy, known_dtypes, known_names
from ..convert.blocks import Examples, trace
from ..errors import ArgumentError
from ..framework.arrays import cast
from ..framework.machine import dtype_name
from ..graph.cast_params import cast_offline, count_losses
from ..graph.graph import CASTS, Graph, Node
from ..graph.insert_casts import Rewrite, rewrite
from ..graph.shape_rules import choose
from ..graph.usage import Usage
from ..policy.active import suspended
from ..policy.policy import Policy
from .plan import Cast, NodePlan, OfflineCast, Plan

__all__ = ["explain"]

MODES = ("converted", "inference", "training")
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


def explain(
    model: Union[Symbol, HybridBlock],
    target_dtype: Any = "float16",
    *,
    policy: Optional[Policy] = None,
    excluded_sym_names: Optional[Iterable[str]] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    params: Optional[Mapping[str, NDArray]] = None,
    example_inputs: Examples = None,
    mode: str = "converted",
    input_shapes: Optional[Mapping[str, Sequence[int]]] = None,
) -> Plan:
    """Return what mixed precision does to a symbol or a block.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"))
    >>> amp.explain(net, policy=amp.Policy.default("float16", "gpu"))["fc"].precision
    'float16'

    Parameters
    ----------
    model : Symbol or HybridBlock
        Left as it is.
    target_dtype, policy, excluded_sym_names, input_dtypes
        As of `convert_symbol`.
    params : dict of str to NDArray, optional
        A symbol's parameters, for their size and what a cast does to their values; a block
        brings its own.
    example_inputs : NDArray or sequence, optional
        The arguments of one call, for a block that was not hybridized and run before.
    mode : str, default "converted"
        What to explain: the converted model; or, with "inference" or "training", the graph that
        runs while mixed precision is on: some operators have others standing in for them.
    input_shapes : dict of str to tuple, optional
        Shapes of inputs, for precisions of graphs that run, where they depend on them (dense
        layers of few rows). What is converted depends on its parameters' shapes alone.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    symbol, held = _model_of(model, params, example_inputs)
    policy = Policy.from_lists(target_dtype, policy=policy)
    graph = Graph.from_symbol(symbol)
    policy = checked_policy(policy, excluded_sym_names, graph)
    known_names(list(input_shapes or {}), graph.input_names, "input")
    shapes = {name: array.shape for name, array in held.items()}
    if mode != "converted":
        shapes.update({name: tuple(shape) for name, shape in (input_shapes or {}).items()})
    usage = Usage(
        known_dtypes(symbol, {name: array.dtype for name, array in held.items()}, input_dtypes),
        shapes,
        training=mode == "training",
        converting=mode == "converted",
    )
    result = rewrite(graph, policy, usage, choose(graph, policy, usage))
    return _plan_of(result, policy, graph.input_names, held)


def _plan_of(
    result: Rewrite, policy: Policy, inputs: Sequence[str], held: Mapping[str, NDArray]
) -> Plan:
    """Return the plan of a rewritten graph with these inputs, of which some are `held` values."""
    nodes = tuple(
        NodePlan(
            node.name,
            node.operator,
            decision.precision,
            decision.reason,
            tuple(_source(graph, i) for i, _ in node.inputs),
        )
        for graph, node, decision in result.decided()
    )
    data = tuple(name for name in inputs if name not in held)
    _, dtypes = cast_offline(result.graph, frozenset(data), policy.target_dtype)
    offline = tuple(_offline_cast(name, held[name], dtype) for name, dtype in dtypes.items())
    before = sum(array.size * _width(array.dtype) for array in held.values())
    saved = sum(c.size * (_width(held[c.name].dtype) - _width(c.dtype)) for c in offline)
    casts = tuple(_casts(result.graph))
    return Plan(
        policy.target_dtype, policy.device, nodes, casts, data, before, before - saved, offline
    )


def _width(dtype: Any) -> int:
    return _BYTES.get(dtype_name(dtype), 1)


def _offline_cast(name: str, array: NDArray, dtype: str) -> OfflineCast:
    with suspended():
        return OfflineCast(name, dtype, array.size, *count_losses(array, cast(array, dtype)))


def _model_of(
    model: Any, params: Optional[Mapping[str, NDArray]], example_inputs: Examples
) -> Tuple[Symbol, Dict[str, NDArray]]:
    """Return a model's symbol and the values of its parameters, as far as they are known."""
    if isinstance(model, Symbol):
        used = set(model.list_inputs())
        return model, {name: array for name, array in (params or {}).items() if name in used}
    if not isinstance(model, HybridBlock):
        raise ArgumentError(f"explain takes a Symbol or a HybridBlock, not {type(model).__name__}")
    traced = trace(model, example_inputs)
    return traced.symbol, traced.values()


def _source(graph: Graph, i: int) -> Tuple[str, Optional[str]]:
    """Return the name of what a reader of node i reads behind inserted casts, and their dtype."""
    node, dtype = graph.nodes[i], None
    while _inserted(node) or (node.op == "_copy" and "_amp_copy" in node.name):
        dtype = dtype or node.attrs.get("dtype")
        node = graph.nodes[node.inputs[0][0]]
    return node.name, dtype


def _inserted(node: Node) -> bool:
    return node.op in CASTS and f"_amp_cast_{node.attrs['dtype']}" in node.name


def _casts(graph: Graph) -> Iterable[Cast]:
    for node in graph.nodes:
        if _inserted(node):
            yield Cast(node.name, graph.nodes[node.inputs[0][0]].name, node.attrs["dtype"])
        for body in node.subgraphs:
            yield from _casts(body)
