"""What a policy does to a graph, node by node, and why: for people to read."""

import fnmatch
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

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
from ..graph.insert_casts import rewrite
from ..graph.shape_rules import choose
from ..policy.active import suspended
from ..policy.policy import Policy
from ..scaling.hook import shortened

__all__ = ["Cast", "NodePlan", "Plan", "explain"]

MODES = ("converted", "inference", "training")
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class NodePlan:
    """One operator of the graph: the dtype it computes in ("as is": untouched), and why."""

    name: str
    operator: str
    precision: str
    reason: str
    inputs: Tuple[Tuple[str, Optional[str]], ...] = ()  #: (name, the dtype it is cast to or None)


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


@dataclass(frozen=True)
class Plan:
    """What is decided for a graph. `str(plan)` is a table, `len(plan)` counts its operators.

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

    def __getitem__(self, name: str) -> NodePlan:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def filter(
        self,
        name: str = "*",
        operator: Optional[str] = None,
        precision: Optional[str] = None,
    ) -> "Plan":
        """Return the plan with some of its operators; `name` may hold * and ?."""
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
        found: Dict[str, int] = {}
        for node in self.nodes:
            found[node.precision] = found.get(node.precision, 0) + 1
        return found

    def to_json(self) -> str:
        """Return it all as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [("name", "operator", "precision", "reason")]
        rows += [(n.name, n.operator, n.precision, n.reason) for n in self.nodes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]))
            for row in rows
        ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """Return one line: operators a precision, casts, parameter bytes."""
        counts = ", ".join(f"{n} in {precision}" for precision, n in self.counts().items())
        size = ""
        if self.bytes_before:
            size = (
                f"; parameters {self.bytes_before:,} bytes, {self.bytes_after:,} with casts offline"
            )
        if self.lossy:
            names = shortened([cast.name for cast in self.lossy])
            size += f"; casts offline would lose values of {len(self.lossy)} parameters: {names}"
        return f"{len(self)} operators: {counts}; {len(self.casts)} casts{size}"


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
    symbol, held = _graph_of(model, params, example_inputs)
    chosen = Policy.from_lists(target_dtype, policy=policy)
    graph = Graph.from_symbol(symbol)
    chosen = checked_policy(chosen, excluded_sym_names, graph)
    dtypes = {name: array.dtype for name, array in held.items()}
    known_names(list(input_shapes or {}), symbol.list_inputs(), "input")
    shapes = {name: array.shape for name, array in held.items()}
    running = mode != "converted"
    if running:
        shapes.update({name: tuple(shape) for name, shape in (input_shapes or {}).items()})
    choices = choose(symbol, chosen, shapes, mode == "training", converting=not running)
    result = rewrite(
        graph, chosen, known_dtypes(symbol, dtypes, input_dtypes),
        training=mode == "training", choices=choices,
    )  # fmt: skip
    edges = dict(_edges(result.graph))
    nodes = tuple(
        NodePlan(name, operator, decision.precision, decision.reason, edges.get(name, ()))
        for name, (operator, decision) in result.decisions.items()
    )
    data = tuple(name for name in symbol.list_inputs() if name not in held)
    _, offline = cast_offline(result.graph, frozenset(data), chosen.target_dtype)
    casts = tuple(_offline_cast(name, held[name], dtype) for name, dtype in offline.items())
    before = sum(array.size * _width(array.dtype) for array in held.values())
    saved = sum(c.size * (_width(held[c.name].dtype) - _width(c.dtype)) for c in casts)
    return Plan(
        chosen.target_dtype, chosen.device, nodes, tuple(_casts(result.graph)), data,
        before, before - saved, casts,
    )  # fmt: skip


def _width(dtype: Any) -> int:
    return _BYTES.get(dtype_name(dtype), 1)


def _offline_cast(name: str, array: NDArray, dtype: str) -> OfflineCast:
    with suspended():
        return OfflineCast(name, dtype, array.size, *count_losses(array, cast(array, dtype)))


def _graph_of(
    model: Any, params: Optional[Mapping[str, NDArray]], example_inputs: Examples
) -> Tuple[Symbol, Dict[str, NDArray]]:
    if isinstance(model, Symbol):
        used = set(model.list_inputs())
        return model, {name: array for name, array in (params or {}).items() if name in used}
    if not isinstance(model, HybridBlock):
        raise ArgumentError(f"explain takes a Symbol or a HybridBlock, not {type(model).__name__}")
    traced = trace(model, example_inputs)
    return traced.symbol, traced.values()


def _edges(graph: Graph) -> Iterable[Tuple[str, Tuple[Tuple[str, Optional[str]], ...]]]:
    """Yield each node with what it reads, behind the casts that were inserted."""
    for node in graph.nodes:
        yield node.name, tuple(_source(graph, i) for i, _ in node.inputs)
        for body in node.subgraphs:
            yield from _edges(body)


def _source(graph: Graph, position: int) -> Tuple[str, Optional[str]]:
    node, dtype = graph.nodes[position], None
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
