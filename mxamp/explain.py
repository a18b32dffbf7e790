"""What a policy does to a graph, node by node, and why: for people to read."""

import fnmatch
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Union

from mxnet.gluon import HybridBlock
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from .arguments import checked_policy, known_dtypes
from .autocast import make_policy
from .errors import ArgumentError, StateError
from .graph import CASTS, Graph
from .machine import dtype_name
from .offline import cast_offline
from .policy import Policy
from .rewrite import rewrite

__all__ = ["Cast", "NodePlan", "Plan", "explain"]

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class NodePlan:
    """One operator of the graph: the dtype it computes in ("as is": untouched), and why."""

    name: str
    operator: str
    precision: str
    reason: str


@dataclass(frozen=True)
class Cast:
    """One cast that is inserted: after which node, to which dtype."""

    name: str
    source: str
    dtype: str


@dataclass(frozen=True)
class Plan:
    """What is decided for a graph. `str(plan)` is a table, `len(plan)` counts its operators.

    `bytes_before` and `bytes_after` are those of the parameters, the latter with
    `cast_optional_params`; 0 where no parameters were given.
    """

    target_dtype: str
    device: str
    nodes: Tuple[NodePlan, ...]
    casts: Tuple[Cast, ...]
    bytes_before: int = 0
    bytes_after: int = 0

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
        return f"{len(self)} operators: {counts}; {len(self.casts)} casts{size}"


def explain(
    model: Union[Symbol, HybridBlock],
    target_dtype: Any = "float16",
    *,
    policy: Optional[Policy] = None,
    excluded_sym_names: Optional[Iterable[str]] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    params: Optional[Mapping[str, NDArray]] = None,
) -> Plan:
    """Return what mixed precision does to a symbol, or to a block that was hybridized and run.

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
        A symbol's parameters, for their size; a block brings its own.
    """
    symbol, held = _graph_of(model, params)
    chosen = make_policy(target_dtype, policy=policy)
    graph = Graph.from_symbol(symbol)
    chosen = checked_policy(chosen, excluded_sym_names, graph)
    dtypes = {name: array.dtype for name, array in held.items()}
    result = rewrite(graph, chosen, known_dtypes(symbol, {**dtypes, **(input_dtypes or {})}))
    nodes = tuple(
        NodePlan(name, operator, decision.precision, decision.reason)
        for name, (operator, decision) in result.decisions.items()
    )
    keep = frozenset(name for name in symbol.list_inputs() if name not in held)
    _, offline = cast_offline(result.graph, keep, chosen.target_dtype)
    sizes = {
        name: (array.size, dtype_name(array.dtype), offline.get(name, dtype_name(array.dtype)))
        for name, array in held.items()
    }
    return Plan(
        chosen.target_dtype,
        chosen.device,
        nodes,
        tuple(_casts(result.graph)),
        sum(size * _BYTES.get(before, 1) for size, before, _ in sizes.values()),
        sum(size * _BYTES.get(after, 1) for size, _, after in sizes.values()),
    )


def _graph_of(
    model: Any, params: Optional[Mapping[str, NDArray]]
) -> Tuple[Symbol, Dict[str, NDArray]]:
    if isinstance(model, Symbol):
        used = set(model.list_inputs())
        return model, {name: array for name, array in (params or {}).items() if name in used}
    if not isinstance(model, HybridBlock):
        raise ArgumentError(f"explain takes a Symbol or a HybridBlock, not {type(model).__name__}")
    if not model._cached_graph:
        raise StateError(
            f"block {model.name!r} has no graph yet: hybridize it and run it once before explain"
        )
    symbol = model._cached_graph[1]
    used = set(symbol.list_inputs())
    found = {name: param for name, param in model.collect_params().items() if name in used}
    return symbol, {name: param.data(param.list_ctx()[0]) for name, param in found.items()}


def _casts(graph: Graph) -> Iterable[Cast]:
    for node in graph.nodes:
        if node.op in CASTS and node.name.split("_")[-1] == node.attrs.get("dtype"):
            yield Cast(node.name, graph.nodes[node.inputs[0][0]].name, node.attrs["dtype"])
        for body in node.subgraphs:
            yield from _casts(body)
