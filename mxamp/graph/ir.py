"""Intermediate representation of a symbol's graph: nodes, their dtypes and shapes."""

from __future__ import annotations

import ctypes
import gc
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import AbstractSet, Any, Iterator, Mapping, Sequence, Tuple

from mxnet.base import _LIB, MXNetError, SymbolHandle, c_str, check_call, mx_uint
from mxnet.symbol import Symbol
from mxnet.util import is_np_shape

from ..framework.machine import DTYPE_CODES, DTYPE_NAMES, dtype_name
from ..framework.operators import resolve, with_trait
from ..policy.decision import CASTABLE
from ..policy.regions import REGION
from ..policy.rules import Reason
from ..policy.values import parse_integers


@contextmanager
def collector_paused() -> Iterator[None]:
    """Return a context that pauses Python's garbage collector, for faster work on graphs.

    A graph consists of many small long-lived objects. Whenever their number grew by a quarter, the
    collector would scan all objects of the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


Shape = Tuple[int, ...]


@dataclass(frozen=True)
class Usage:
    """How a graph will run: dtypes and shapes of its variables, in training or inference.

    Parameters
    ----------
    dtypes : mapping of str to str
        The dtype of each variable, or "sparse"; float32 for other variables.
    shapes : mapping of str to tuple
        The known shapes.
    accumulated : frozenset of str
        Variables whose gradients may be accumulated (`grad_req="add"`).
    stored : frozenset of str
        Variables that are passed in already cast to the target dtype.
    offline : frozenset of str
        Variables that a conversion casts to the target dtype if all their consumers do.
    training : bool
        Gradients will be computed.
    restore : bool
        The graph's outputs get their original dtypes; otherwise they stay as computed.
    converting : bool
        The graph is saved for data of any shape: it keeps its operators, and no choice depends on
        the shapes of data.
    regions_only : bool
        Mixed precision is off around the graph: only its own regions are cast.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    accumulated: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    offline: frozenset[str] = frozenset()
    training: bool = False
    restore: bool = True
    converting: bool = False
    regions_only: bool = False


Output = Tuple[int, int]  #: (index of the node, index among its outputs)
CASTS = with_trait("casts")
HALVES = CASTABLE - {"float32"}
#: The attribute of a node that a rewrite has inserted or changed: "cast", "copy" (before a cast),
#: "layout" (a copy to MXNet's plain layout), or the dtype that an operator emulates in a wider one.
#: MXNet saves attributes of this form, and ignores them.
ROLE = "__mxamp__"


@dataclass
class Node:
    """A node of a graph: a variable (`op` is "null"), or a call of an operator."""

    op: str
    name: str
    attrs: dict[str, str] = field(default_factory=dict)
    inputs: list[Output] = field(default_factory=list)
    subgraphs: list[Graph] = field(default_factory=list)
    num_outputs: int = 1
    control_deps: list[int] = field(default_factory=list)  #: nodes that come first, unread
    kept_float32: Reason | None = None  #: why the node stays in float32 beyond its operator's class
    stands_for: Node | None = None  #: the node that an equivalent has replaced
    #: Whether the node is an input of the graph.
    is_variable: bool = field(init=False, repr=False, compare=False)
    #: The operator's canonical name.
    operator: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.is_variable = self.op == "null"
        self.operator = self.op if self.is_variable else resolve(self.op).name

    @property
    def call(self) -> tuple[Any, ...]:
        """The operator and its attributes as a cache key, without attributes named __*."""
        return (self.op, *[item for item in self.attrs.items() if item[0][:2] != "__"])

    @property
    def is_fused(self) -> bool:
        """Whether the node is an operator that an MXNet backend such as oneDNN has fused."""
        return bool(self.subgraphs) and self.operator not in LOOPS

    @property
    def is_inserted_cast(self) -> bool:
        """Whether the node is a cast that mxamp or a conversion inserted, not the model's own."""
        return self.attrs.get(ROLE) == "cast"

    @property
    def is_inserted_copy(self) -> bool:
        """Whether the node is a copy that mxamp or a conversion inserted before a cast."""
        return self.attrs.get(ROLE) == "copy"

    @property
    def hidden_attrs(self) -> dict[str, str]:
        """The node's attributes named __*, such as its `autocast` region: operators ignore them."""
        return {name: text for name, text in self.attrs.items() if name.startswith("__")}

    @property
    def device_group(self) -> dict[str, str]:
        """The node's attribute `ctx_group`, by which `group2ctx` places it on a device, or {}."""
        names = ("__ctx_group__", "ctx_group")
        return {name: self.attrs[name] for name in names if name in self.attrs}

    def with_inputs(self, inputs: list[Output]) -> Node:
        """Return a copy of the node with other inputs."""
        return Node(self.op, self.name, self.attrs, inputs, self.subgraphs, self.num_outputs)

    def to_json(self) -> dict[str, Any]:
        """Return the node as a dict in MXNet's symbol JSON format."""
        data: dict[str, Any] = {"op": self.op, "name": self.name}
        if self.attrs:
            data["attrs"] = self.attrs
        data["inputs"] = self.inputs
        if self.subgraphs:
            data["subgraphs"] = [graph.to_json() for graph in self.subgraphs]
        if self.control_deps:
            data["control_deps"] = self.control_deps
        return data


@dataclass
class Graph:
    """A symbol's graph as nodes in topological order, and its outputs."""

    nodes: list[Node]
    heads: list[Output]
    attrs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    @collector_paused()
    def from_symbol(cls, symbol: Symbol) -> Graph:
        """Return a symbol as a graph, with its `amp_cast` nodes."""
        text = Symbol.tojson(symbol, remove_amp_cast=False)
        graph = cls.from_json(json.loads(text, strict=False))
        _recognize_by_name(graph)
        return graph

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Return the graph that a symbol's JSON, already parsed to a dict, describes."""
        ends = data["node_row_ptr"]
        nodes = [
            Node(
                op=node["op"],
                name=node["name"],
                attrs=node.get("attrs", {}),
                inputs=[(entry[0], entry[1]) for entry in node["inputs"]],
                subgraphs=[cls.from_json(graph) for graph in node.get("subgraphs", ())],
                num_outputs=ends[i + 1] - ends[i],
            )
            for i, node in enumerate(data["nodes"])
        ]
        heads = [(head[0], head[1]) for head in data["heads"]]
        return cls(nodes, heads, dict(data.get("attrs", {})))

    def to_json(self) -> dict[str, Any]:
        """Return the graph as a dict in MXNet's symbol JSON format."""
        return {
            "nodes": [node.to_json() for node in self.nodes],
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node.is_variable],
            "heads": self.heads,
            **({"attrs": self.attrs} if self.attrs else {}),
        }

    @collector_paused()
    def to_symbol(self, symbol_class: type[Symbol] = Symbol) -> Symbol:
        """Return the graph as a symbol of a class: `mx.sym.Symbol`, or that of `mx.sym.np`."""
        return symbol_class(_load_symbol(self.to_json()))

    @cached_property
    def all_outputs(self) -> tuple[list[Output], Symbol]:
        """Every output of every node, and a symbol whose outputs they are."""
        outputs = [(i, k) for i, node in enumerate(self.nodes) for k in range(node.num_outputs)]
        return outputs, replace(self, heads=outputs).to_symbol()

    @property
    def variables(self) -> list[Node]:
        """The variable nodes of the graph, in the order of `Symbol.list_inputs`."""
        return [node for node in self.nodes if node.is_variable]

    @property
    def input_names(self) -> list[str]:
        """The names of the graph's variables, in the order of `variables`."""
        return [node.name for node in self.variables]

    @property
    def recorded_dtypes(self) -> dict[str, str]:
        """The dtypes that variables record in their `__dtype__` attribute, by variable name."""
        codes = {node.name: int(node.attrs.get("__dtype__", "-1")) for node in self.variables}
        return {name: DTYPE_NAMES[code] for name, code in codes.items() if code in DTYPE_NAMES}

    @property
    def all_nodes(self) -> list[Node]:
        """The graph's nodes, followed by all nodes in the subgraphs of its loops and branches."""
        inner = [one for node in self.nodes for body in node.subgraphs for one in body.all_nodes]
        return [*self.nodes, *inner]

    @cached_property
    def marks(self) -> frozenset[str]:
        """The distinct values of the attribute that records an operator's `autocast` region."""
        operators = (node.attrs for node in self.all_nodes if not node.is_variable)
        return frozenset(attrs[REGION] for attrs in operators if REGION in attrs)

    @property
    def is_converted(self) -> bool:
        """Whether a conversion to mixed precision, or a rewrite, inserted casts in the graph."""
        return any(node.is_inserted_cast for node in self.nodes)

    @property
    def has_fused_operators(self) -> bool:
        """Whether the graph, or the body of a loop in it, contains operators fused by oneDNN."""
        return any(node.is_fused for node in self.all_nodes)

    @property
    def operators(self) -> frozenset[str]:
        """The names of all operators that the graph calls, loop bodies included.

        Aliases are not resolved.
        """
        return frozenset(node.op for node in self.all_nodes if not node.is_variable)

    @property
    def layer_names(self) -> list[str]:
        """The distinct names of the graph's operator nodes, those in loop bodies included."""
        return list(dict.fromkeys(node.name for node in self.all_nodes if not node.is_variable))


def emulated_dtype(attrs: Mapping[str, str]) -> str | None:
    """Return the dtype whose rounding an operator emulates while it computes in a wider dtype."""
    role = attrs.get(ROLE)
    return role if role in DTYPE_CODES else None


# ---------------------------------------------------------------------- casts known by name

#: The end of the names of casts and copies that earlier versions and MXNet's own conversion insert.
_INSERTED = re.compile(r"_amp_(?:copy|cast_(float16|bfloat16|float32|float64))\d*$")
#: The attribute by which earlier versions mark a `Cast` in place of `amp_cast`.
_TAKES_EMPTY = "__mxamp_takes_empty__"


def _recognize_by_name(graph: Graph) -> None:
    """Find, by name, casts that MXNet's or an older mxamp's conversion inserted, and mark them.

    Such casts are known only by name. A model's own cast may have such a name too, but a model that
    was not converted records other dtypes.
    """
    nodes = graph.all_nodes
    named = any(_INSERTED.search(node.name) for node in nodes if not node.is_variable)
    if not named or any(ROLE in node.attrs for node in nodes):
        return
    inserted = _inserted_by_name(graph, Usage(graph.recorded_dtypes))
    if _records_dtypes_as_converted(graph, {i for i, _ in inserted}):
        for _, node in inserted:
            node.attrs.pop(_TAKES_EMPTY, None)
            node.attrs[ROLE] = "copy" if node.op == "_copy" else "cast"


def _records_dtypes_as_converted(graph: Graph, casts: AbstractSet[int]) -> bool:
    """Return whether the dtypes recorded on variables look like those that a conversion records.

    An earlier version recorded those of all variables that a cast depends on. MXNet's own
    conversion does for the parameters, which it casts in the graph or has cast offline.
    """
    recorded = graph.recorded_dtypes
    before, read = set(casts), {source for i in casts for source, _ in graph.nodes[i].inputs}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in before:
            before.update(source for source, _ in graph.nodes[i].inputs)
    variables = {graph.nodes[i].name for i in before if graph.nodes[i].is_variable}
    return (
        variables <= recorded.keys()
        or any(graph.nodes[i].name in recorded for i in read)
        or not HALVES.isdisjoint(recorded.values())
    )


def _inserted_by_name(graph: Graph, usage: Usage) -> list[tuple[int, Node]]:
    """Find inserted casts and copies by the names that conversions give them.

    Loop bodies are searched too. With each comes its index, or the index of the loop that holds it.
    """
    found: list[tuple[int, Node]] = []
    dtypes, (outputs, symbol) = infer_dtypes(graph, usage), graph.all_outputs
    # mxamp names a cast after its source and the output's number. MXNet's own conversion takes
    # MXNet's name of the output, or an underscore and the number.
    names: dict[Output, set[str]] = {}
    for (i, k), output_name in zip(outputs, symbol.list_outputs()):
        name, number = graph.nodes[i].name, str(k) if graph.nodes[i].num_outputs > 1 else ""
        names[i, k] = {f"{name}{number}", f"{name}_{k}", output_name}
    for i, node in enumerate(graph.nodes):
        match = _INSERTED.search(node.name)
        if match and _may_be_inserted(node, match[1], dtypes):
            sources = names[node.inputs[0]]
            if node.name[: match.start()] in sources:
                found.append((i, node))
                names[i, 0] |= sources
        for k, body in enumerate(node.subgraphs if node.operator in LOOPS else ()):
            inner = body_usage(usage, node, k, [dtypes[output] for output in node.inputs])
            found += [(i, one) for _, one in _inserted_by_name(body, inner)]
    return found


def _may_be_inserted(node: Node, dtype: str | None, dtypes: Mapping[Output, str]) -> bool:
    """Return whether a conversion may have inserted a node, as a cast to `dtype` or a copy.

    Conversions take `Cast` for float64, and for arrays that may be empty.
    """
    if dtype is None:
        return node.op == "_copy"
    if node.op not in CASTS or node.attrs["dtype"] != dtype:
        return False
    source = dtypes[node.inputs[0]]
    if node.op == "Cast" and _TAKES_EMPTY not in node.attrs:
        return len({source, dtype} & CASTABLE) == 1 and "float64" in (source, dtype)
    return node.op == "amp_cast" or source in CASTABLE


# ---------------------------------------------------------------------- shapes and dtypes


def infer_shapes(graph: Graph, shapes: Mapping[str, Shape]) -> dict[Output, Shape | None]:
    """Return the shapes of all nodes' outputs, None where unknown, from shapes of variables."""
    outputs, symbol = graph.all_outputs
    try:
        given = {name: shapes[name] for name in graph.input_names if name in shapes}
        _, found, _ = symbol.infer_shape_partial(**given)
    except MXNetError:
        found = None  # the graph can't run on these shapes; MXNet says why when it runs
    # NumPy semantics write -1 for an unknown dimension. Classic semantics write 0, and () for an
    # unknown shape.
    least = 0 if is_np_shape() else 1
    return {
        output: tuple(shape) if shape is not None and min(shape, default=0) >= least else None
        for output, shape in zip(outputs, found or [None] * len(outputs))
    }


#: The most entries of the cache of inferred dtypes.
_MOST_INFERRED = 2**14
#: The inferred output dtypes of single nodes: a cache.
_inferred: dict[Any, tuple[str, ...]] = {}

#: Attributes that no dtype depends on: left out, so that a model's convolutions share a cache key.
_OF_SHAPES = frozenset(
    {"kernel", "stride", "pad", "dilate", "num_filter", "num_group", "num_hidden"}
)

#: Escapes in JSON, and the escapes of control characters, which MXNet can't read.
_ESCAPE = re.compile(r"\\(?:u[0-9a-f]{4}|.)")
_UNREAD = re.compile(r"\\(?:u[0-9a-f]{4}|[bf])")

#: MXNet 1.9.1. Without a version MXNet "upgrades" a graph as one of version 0.8.
VERSION = {"mxnet_version": ["int", 10901]}


def infer_outputs(node: Node, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return the dtypes of a node's outputs for inputs of these dtypes, from a cache.

    MXNet infers them on a graph of that node alone (0.1 ms, cached).
    """
    if node.subgraphs:
        return _infer_uncached(node, dtypes)
    if node.operator == "cast_storage" and node.attrs.get("stype") != "default":
        return ("sparse",)
    if node.operator in with_trait("keeps_sparse") and set(dtypes) == {"sparse"}:
        return ("sparse",)
    op, *attrs = node.call
    asked = [(name, text) for name, text in attrs if name not in _OF_SHAPES]
    key = (op, *asked, tuple(dtypes), node.num_outputs)
    outputs = _inferred.get(key)
    if outputs is None:
        if len(_inferred) >= _MOST_INFERRED:  # each number among the attributes makes an entry
            _inferred.clear()
        outputs = _inferred[key] = _infer_uncached(node, dtypes)
    return outputs


def _infer_uncached(node: Node, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Infer the dtypes of a node's outputs with MXNet; float32 where it can't."""
    nodes = [
        Node("null", f"input{i}", {"__dtype__": str(DTYPE_CODES.get(dtype, 0))})
        for i, dtype in enumerate(dtypes)
    ]
    read = [(i, 0) for i in range(len(nodes))]
    heads = [(len(nodes), k) for k in range(node.num_outputs)]
    graph = Graph([*nodes, replace(node, name="node", inputs=read)], heads, VERSION)
    inferred = infer_types(graph.to_symbol())
    return inferred[1] if inferred is not None else ("float32",) * node.num_outputs


def infer_dtypes(graph: Graph, usage: Usage) -> dict[Output, str]:
    """Return the dtypes of all nodes' outputs without mxamp's casts, as MXNet infers them."""
    found: dict[Output, str] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            found[i, 0] = variable_dtype(node, usage)
            continue
        dtypes = infer_outputs(node, [found[output] for output in node.inputs])
        found.update({(i, k): dtype for k, dtype in enumerate(dtypes)})
    return found


def variable_dtype(node: Node, usage: Usage) -> str:
    """Return the dtype of a variable node, or "sparse" if its storage is sparse."""
    dense = node.attrs.get("__storage_type__", "0") == "0"
    return usage.dtypes.get(node.name, "float32") if dense else "sparse"


def infer_types(
    symbol: Symbol, known: Mapping[str, str] | None = None, partial: bool = False
) -> tuple[tuple[str, ...], ...] | None:
    """Infer the dtypes of a symbol's arguments, outputs and auxiliary states; None on failure.

    `known` maps names of arguments to dtypes. With `partial`, unknown dtypes are "other"; otherwise
    returns None where MXNet can't infer all dtypes.
    """
    known = known or {}
    keys = (ctypes.c_char_p * len(known))(*(name.encode() for name in known))
    codes = (ctypes.c_int * len(known))(*(DTYPE_CODES[dtype] for dtype in known.values()))
    sizes = [mx_uint() for _ in range(3)]
    types = [ctypes.POINTER(ctypes.c_int)() for _ in range(3)]
    complete = ctypes.c_int()
    infer = _LIB.MXSymbolInferTypePartial if partial else _LIB.MXSymbolInferType
    pairs = [ctypes.byref(value) for pair in zip(sizes, types) for value in pair]
    try:
        check_call(
            infer(symbol.handle, mx_uint(len(known)), keys, codes, *pairs, ctypes.byref(complete))
        )
    except MXNetError:
        return None
    if not complete.value and not partial:
        return None
    return tuple(
        tuple(DTYPE_NAMES.get(listed[i], "other") for i in range(size.value))
        for size, listed in zip(sizes, types)
    )


def argument_dtypes(symbol: Symbol, type_dict: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the dtypes of a symbol's arguments by name; float32 if MXNet can't infer one."""
    known = {name: dtype_name(dtype) for name, dtype in (type_dict or {}).items()}
    names = symbol.list_arguments()
    inferred = infer_types(symbol, known)
    is_complete = inferred is not None
    inferred = inferred or infer_types(symbol, known, partial=True)
    found = zip(names, inferred[0] if inferred is not None else ())
    # What partial inference leaves open is "other" too.
    dtypes = {name: dtype for name, dtype in found if is_complete or dtype != "other"}
    return {name: known.get(name, dtypes.get(name, "float32")) for name in names}


def _load_symbol(data: Mapping[str, Any]) -> SymbolHandle:
    """Create a symbol in MXNet from a graph's JSON data; return its C API handle."""
    handle = SymbolHandle()
    # MXNet's JSON reader is slow and knows few escapes.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    if _UNREAD.search(text):
        text = _ESCAPE.sub(_unescape, text)
    check_call(_LIB.MXSymbolCreateFromJSON(c_str(text), ctypes.byref(handle)))
    return handle


def _unescape(escape: re.Match[str]) -> str:
    """Return the character for a JSON escape that MXNet can't read; other escapes unchanged."""
    text = escape.group()
    return str(json.loads(f'"{text}"')) if _UNREAD.fullmatch(text) else text


#: Control flow whose gradients in graphs read uninitialized memory, in plain float32 too. A change
#: to the bodies can change results that were right by luck.
UNSAFE_LOOPS = with_trait("unsafe_loops")
LOOPS = with_trait("loops")

#: The bodies of a node, in order, by their names in its attributes.
_BODIES = {"_while_loop": ("cond", "func"), "_cond": ("cond", "then", "else")}


def rewrites_bodies(node: Node, training: bool) -> bool:
    """Return whether a node is a loop or branch whose subgraphs can be rewritten safely.

    The subgraphs of oneDNN's fused operators stay as they are.
    """
    return node.operator in LOOPS and not (training and node.operator in UNSAFE_LOOPS)


def body_usage(usage: Usage, node: Node, position: int, dtypes: Sequence[str]) -> Usage:
    """Return how a loop's body will run (its `Usage`), given the dtypes of the loop's inputs.

    `position` is the number of the subgraph. A body's inputs and outputs keep their dtypes. A loop
    may accumulate all gradients over its steps.
    """
    names = node.subgraphs[position].input_names
    inputs = body_inputs(node, position)
    return replace(
        usage,
        dtypes={names[inner]: dtypes[outer] for inner, outer in inputs.items()},
        shapes={},
        accumulated=frozenset(names),
        stored=frozenset(),
        restore=True,
    )


def step_shapes(node: Node, shapes: Sequence[Shape | None]) -> dict[str, Shape]:
    """Return the shapes of the inputs of a `foreach` loop's body, by name, where known.

    `shapes` are the shapes of the node's inputs, data first: a step reads one slice of each.
    """
    names, data = node.subgraphs[0].input_names, len(_positions(node, "in_data_locs"))
    return {
        names[inner]: shape[1:] if outer < data else shape
        for inner, outer in body_inputs(node, 0).items()
        for shape in [shapes[outer]]
        if shape is not None
    }


def body_inputs(node: Node, position: int) -> dict[int, int]:
    """Return a map from the positions of a loop body's inputs to those of the loop's inputs."""
    if node.operator == "_foreach":
        # Positions in the body, in the order of the node's inputs.
        locations = ("in_data_locs", "in_state_locs", "remain_locs")
        places = [place for name in locations for place in _positions(node, name)]
        return {place: outer for outer, place in enumerate(places)}
    if node.operator not in _BODIES:
        return {}
    # Positions in the node, in the order of the body's inputs.
    name = _BODIES[node.operator][position]
    return dict(enumerate(_positions(node, f"{name}_input_locs")))


def _positions(node: Node, attribute: str) -> list[int]:
    """Return the input positions listed in a loop's attribute; [] if the loop lacks it."""
    return parse_integers(node.attrs.get(attribute, "[]"))
