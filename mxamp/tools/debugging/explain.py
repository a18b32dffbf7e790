"""How a plan is made: what a policy does to a graph, node by node, and why."""

import math
from typing import Any, Dict, Iterable, Mapping, Optional, Sequence, Tuple, Union

from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert.blocks import Examples, trace
from ...convert.options import checked_policy, known_dtypes, known_names, known_shapes
from ...errors import ArgumentError, located
from ...framework.arrays import cast, copy
from ...framework.machine import dtype_name
from ...framework.wording import one_of, shown
from ...graph.casts.insert import Rewrite, rewrite
from ...graph.casts.offline import cast_offline, count_losses
from ...graph.ir import CASTS, Graph, Node, Usage
from ...graph.speed.shape_rules import choose
from ...policy.active import current_policy, suspended
from ...policy.overrides import Layers
from ...policy.policy import Policy
from ...policy.targets import DEFAULT_TARGET
from .plan import Cast, NodePlan, OfflineCast, Plan

__all__ = ["explain"]

MODES = ("converted", "inference", "training")
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


def explain(
    model: Union[Symbol, HybridBlock],
    target_dtype: Any = None,
    *,
    policy: Optional[Policy] = None,
    excluded_sym_names: Layers = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    params: Optional[Mapping[str, NDArray]] = None,
    example_inputs: Examples = None,
    mode: str = "converted",
    input_shapes: Optional[Mapping[str, Sequence[int]]] = None,
) -> Plan:
    """Show which precision each operator of a model computes in, and why.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.sym.softmax(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"))
    >>> amp.explain(net, policy=amp.Policy.default("float16", "gpu"))["fc"].precision
    'float16'

    The model is not run and not changed. Printing the plan gives a table.

    Parameters
    ----------
    model : Symbol or HybridBlock
        The model.
    target_dtype : str or dtype, optional
        "float16" or "bfloat16". With `policy`, what that is for.
    policy : Policy, optional
        By default mxamp's own for `target_dtype` and this machine's kind of device. Where neither
        is given, the one that is on (`init`, `autocast`) for "inference" and "training"; else that
        for float16, as `convert_*` take it.
    excluded_sym_names : list of str or Block, optional
        Layers to keep in float32: Gluon blocks, or names that the plan shows, where * and ? stand
        for any characters.
    input_dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32 and can't be inferred.
    params : dict of str to NDArray, optional
        The parameters of a symbol: `{**arg_params, **aux_params}`. Give them to see what
        `convert_model` does: some precisions depend on the shapes of weights, and without
        `params` the plan leaves those rules out. With them it also has the parameters' size, and
        the values that a cast would lose. A block has its own: leave `params` out.
    example_inputs : NDArray or sequence, optional
        The arguments of one call, for a block that was not hybridized and run before.
    mode : str, default "converted"
        What to explain: "converted" is the model that `convert_*` makes; "inference" and
        "training" are the graphs that run while mixed precision is on (`init`, `autocast`), with
        faster equivalents in place of some operators.
    input_shapes : dict of str to tuple, optional
        Shapes of inputs, for "inference" and "training", where the precision of some operators
        depends on them (a dense layer of few rows).

    Returns
    -------
    Plan
        All decisions, to print, filter and compare.

    Raises
    ------
    UnknownNameError
        A layer or an input that the model does not have, with the closest names.
    ArgumentError
        No model, an unknown mode or dtype, or a policy for another dtype.
    StateError
        A block that has not run yet, without `example_inputs`.
    """
    if mode not in MODES:
        raise ArgumentError(f"mode must be {one_of(MODES)}, not {shown(mode)}")
    input_shapes = known_shapes("input_shapes", input_shapes)
    symbol, held = _model_of(model, params, example_inputs)
    if policy is None and target_dtype is None:
        policy = current_policy() if mode != "converted" else None
    policy = Policy.from_lists(target_dtype or DEFAULT_TARGET, policy=policy)
    graph = Graph.from_symbol(symbol)
    policy = checked_policy(policy, excluded_sym_names, graph)
    with located("input_shapes"):
        known_names(list(input_shapes), graph.input_names, "input")
    shapes = {name: array.shape for name, array in held.items()}
    if mode != "converted":
        shapes.update(input_shapes)
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
    before = sum(_size(array) * _width(array.dtype) for array in held.values())
    saved = sum(c.size * (_width(held[c.name].dtype) - _width(c.dtype)) for c in offline)
    casts = tuple(_casts(result.graph))
    return Plan(
        policy.target_dtype, policy.device, nodes, casts, data, before, before - saved, offline
    )


def _size(array: NDArray) -> int:
    return int(math.prod(array.shape))  # sparse arrays have no size


def _width(dtype: Any) -> int:
    return _BYTES.get(dtype_name(dtype), 1)


def _offline_cast(name: str, array: NDArray, dtype: str) -> OfflineCast:
    with suspended():
        found = cast(copy(array), dtype)  # as a conversion casts it, from the plain layout
        return OfflineCast(name, dtype, _size(array), *count_losses(array, found))


def _model_of(
    model: Any, params: Optional[Mapping[str, NDArray]], example_inputs: Examples
) -> Tuple[Symbol, Dict[str, NDArray]]:
    """Return a model's symbol and the values of its parameters, as far as they are known."""
    if isinstance(model, HybridBlock) and params is not None:
        raise ArgumentError("params are for a Symbol, and a block has its own: leave params out")
    if isinstance(model, Symbol):
        if not isinstance(params, (Mapping, type(None))):
            raise ArgumentError(f"params must map names to NDArrays, not be {shown(params)}")
        used = set(model.list_inputs())
        return model, {name: array for name, array in (params or {}).items() if name in used}
    if not isinstance(model, HybridBlock):
        raise ArgumentError(f"explain takes a Symbol or a HybridBlock, not {shown(model)}")
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
