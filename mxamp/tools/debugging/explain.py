"""How a plan is made: what a policy does to a graph, node by node, and why."""

import fnmatch
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...convert.arguments import checked_policy, known_dtypes, known_names, known_shapes
from ...convert.blocks import Examples, trace
from ...errors import ArgumentError, UnknownNameError, located, unknown
from ...framework.arrays import cast, copy
from ...framework.machine import dtype_name
from ...framework.operators import resolve
from ...framework.tables import html_table, text_table
from ...framework.wording import counted, one_of, shortened, shown
from ...graph.casts.insert import Rewrite, rewrite
from ...graph.casts.offline import cast_offline, count_losses
from ...graph.ir import CASTS, Graph, Node, Usage
from ...graph.recognise import layer_costs, recognised
from ...graph.speed.shape_rules import choose
from ...policy.active import current_policy, suspended
from ...policy.evidence import LayerCost
from ...policy.layers import Layers
from ...policy.policy import Policy
from ...policy.targets import DEFAULT_TARGET, TARGETS

__all__ = [
    "Cast",
    "NodePlan",
    "OfflineCast",
    "PRECISIONS",
    "Plan",
    "explain",
]

#: What an operator of a plan may compute in; "as is" where its inputs are not touched.
PRECISIONS = (*TARGETS, "float32", "as is")

_GLUON = "_fwd"  # what Gluon adds to a layer's name for its operator


@dataclass(frozen=True)
class NodePlan:
    """One operator of the graph: the dtype it computes in ("as is": untouched), and why."""

    name: str
    operator: str
    precision: str
    reason: str
    inputs: Tuple[Tuple[str, Optional[str]], ...] = ()  #: (name, the dtype it is cast to or None)
    error: Optional[float] = None  #: what low precision costs here, as `tune` has measured it
    gain: Optional[float] = None  #: and the milliseconds that it saves


@dataclass(frozen=True)
class Cast:
    """One cast that is inserted: after which node, to which dtype."""

    name: str
    source: str
    dtype: str


@dataclass(frozen=True)
class OfflineCast:
    """A parameter that `cast_optional_params` casts, and what that does to its values."""

    name: str
    dtype: str
    size: int
    overflown: int  #: finite values that become infinite
    vanished: int  #: values that become zero


@dataclass(frozen=True, repr=False)
class Plan:
    """What mixed precision does to a graph, operator by operator; `explain` makes one.

    ::

        plan = amp.explain(net, "bfloat16")
        print(plan)  # a table, and a summary
        plan["dense0_fwd"].reason  # Gluon adds _fwd to the name of a layer
        plan.filter(precision="float32")

    Plans count and iterate over their operators. Under a policy that `tune` has found for this
    model, operators have an `error` and a `gain`, and the table has columns for them.

    `inputs` are the model's inputs without the parameters that were given.
    `bytes_before` and `bytes_after` are those of the parameters, the latter with
    `cast_optional_params`, and `offline` are the parameters that it casts; nothing where no
    parameters were given.
    """

    target_dtype: str
    device: str
    nodes: Tuple[NodePlan, ...]
    casts: Tuple[Cast, ...]
    inputs: Tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    offline: Tuple[OfflineCast, ...] = ()

    @property
    def lossy(self) -> Tuple[OfflineCast, ...]:
        """The parameters that lose values when they are cast offline."""
        return tuple(cast for cast in self.offline if cast.overflown or cast.vanished)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodePlan]:
        return iter(self.nodes)

    def __contains__(self, name: object) -> bool:
        return any(node.name == name for node in self.nodes)

    def __getitem__(self, name: str) -> NodePlan:
        """Return the first operator of that name: a block called twice gives two of one name.

        Raises `UnknownNameError`, which is a `LookupError`, with the closest names.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise self.unknown(name)

    def unknown(self, name: object) -> UnknownNameError:
        """Return the error for a name, or a pattern, that no operator of the plan has."""
        hint = f"The plan has {counted(len(self), 'operator')}"
        if f"{name}{_GLUON}" in self:
            hint += f". Gluon adds {_GLUON} to the name of a layer"
        return unknown("operator name", name, [node.name for node in self.nodes], hint)

    def filter(
        self,
        name: str = "*",
        operator: Optional[str] = None,
        precision: Optional[str] = None,
    ) -> "Plan":
        """Return the plan with some of its operators; `name` may hold * and ?.

        `operator` is any name of an MXNet operator, `precision` one of "float16", "bfloat16",
        "float32" and "as is".
        """
        if operator is not None:
            operator = resolve(operator).name
        if precision is not None and precision not in PRECISIONS:
            raise ArgumentError(f"precision must be {one_of(PRECISIONS)}, not {shown(precision)}")
        kept = tuple(
            node
            for node in self.nodes
            if fnmatch.fnmatchcase(node.name, name)
            and operator in (None, node.operator)
            and precision in (None, node.precision)
        )
        return replace(self, nodes=kept)

    def compare(self, other: "Plan") -> List[Tuple[str, Optional[str], Optional[str]]]:
        """Return (name, precision here, precision there) of operators that differ.

        None stands for an operator that the other graph does not have.
        """
        here = {node.name: node.precision for node in self.nodes}
        there = {node.name: node.precision for node in other.nodes}
        names = dict.fromkeys((*here, *there))
        return [(n, here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)]

    def counts(self) -> Dict[str, int]:
        """Return how many operators compute in each precision."""
        return dict(Counter(node.precision for node in self.nodes))

    def to_dict(self) -> Dict[str, Any]:
        """Return it all as a dict; errors and gains only where the plan has some."""
        data = asdict(self)
        for node in data["nodes"]:
            costs = {key: node.pop(key) for key in ("error", "gain")}
            if self.is_tuned:
                # JSON has no infinity.
                finite = {k: "inf" if v == math.inf else v for k, v in costs.items()}
                node.update(finite)
        return data

    def to_json(self) -> str:
        """Return it all as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join([text_table(*self.rows()), self.summary()])

    def _repr_html_(self) -> str:
        return html_table(*self.rows(), caption=self.summary())

    @property
    def is_tuned(self) -> bool:
        """Whether there are errors and gains that `tune` has measured."""
        return any(node.error is not None or node.gain is not None for node in self.nodes)

    def rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return headings and rows of the table."""
        costs = ("error", "gain ms") if self.is_tuned else ()
        measured = [(n.error, n.gain)[: len(costs)] for n in self.nodes]
        rows = [
            (n.name, n.operator, n.precision, *some, n.reason)
            for n, some in zip(self.nodes, measured)
        ]
        return ("name", "operator", "precision", *costs, "reason"), rows

    def __repr__(self) -> str:
        numbers = f"{self._counted()}; {counted(len(self.casts), 'cast')}"
        return f"<Plan {self.target_dtype} on {self.device}: {numbers}>"

    def _counted(self) -> str:
        counts = ", ".join(f"{n} in {precision}" for precision, n in self.counts().items())
        return counted(len(self), "operator") + (f": {counts}" if counts else "")

    def summary(self) -> str:
        """Return one line: operators a precision, casts, parameter bytes."""
        size = ""
        if self.bytes_before:
            sizes = f"{counted(self.bytes_before, 'byte')}, {self.bytes_after:,}"
            size = f"; parameters {sizes} with cast_optional_params"
        if self.lossy:
            names = shortened([cast.name for cast in self.lossy])
            lossy = counted(len(self.lossy), "parameter")
            size += f"; which would lose values of {lossy}: {names}"
        casts = counted(len(self.casts), "cast")
        return f"{self._counted()}; {casts}{size}"


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
    costs = layer_costs(policy, graph)
    policy = checked_policy(recognised(policy, graph), excluded_sym_names, graph)
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
    return _with_costs(_plan_of(result, policy, graph.input_names, held), costs)


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


def _with_costs(plan: Plan, costs: Mapping[str, LayerCost]) -> Plan:
    """Return a plan with what was measured of its operators."""

    def with_cost(node: NodePlan) -> NodePlan:
        cost = costs.get(node.name)
        if cost is None:
            return node
        # What the search did not reach is NaN.
        error = None if math.isnan(cost.error) else cost.error
        gain = None if cost.gain is None or math.isnan(cost.gain) else cost.gain
        return replace(node, error=error, gain=gain)

    return replace(plan, nodes=tuple(map(with_cost, plan.nodes))) if costs else plan


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
