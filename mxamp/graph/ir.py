"""How a graph is going to be used: the one value that passes over graphs are told."""

import ctypes
import gc
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

from mxnet import __version__
from mxnet.base import _LIB, MXNetError, SymbolHandle, c_str, check_call, mx_uint
from mxnet.symbol import Symbol

from ..framework.machine import DTYPE_CODES, DTYPE_NAMES, dtype_name
from ..framework.operators import resolve
from ..framework.versions import release
from ..policy.regions import marks_of
from ..policy.values import integers

__all__ = [
    "CASTS",
    "Graph",
    "LOOPS",
    "Node",
    "Output",
    "Shape",
    "TAKES_EMPTY",
    "UNSAFE_LOOPS",
    "Usage",
    "VERSION",
    "alone",
    "argument_dtypes",
    "body_inputs",
    "body_usage",
    "collector_paused",
    "infer_outputs",
    "infer_types",
    "rewrites_bodies",
    "step_shapes",
]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, if it is on.

    A graph is made of a hundred thousand small objects that live. Whenever their number has grown
    by a quarter, Python would look through all objects of the process, of which MXNet alone has as
    many (50 ms each time).
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
    """What a graph's variables hold, by name, and whether gradients will be computed.

    Parameters
    ----------
    dtypes : mapping of str to str
        The dtype of each variable, or "sparse"; float32 where unnamed.
    shapes : mapping of str to tuple
        The shapes that are known.
    accumulated : frozenset of str
        Variables whose gradients may be accumulated (`grad_req="add"`).
    stored : frozenset of str
        Variables that were cast to the target dtype before they are passed in.
    offline : frozenset of str
        Variables that a conversion casts to the target dtype, where all that reads them does.
    training : bool
        Gradients will be computed.
    restore : bool
        The graph's outputs get the dtypes that they had; otherwise they stay as computed.
    converting : bool
        The graph is saved, for data of any shape: it keeps its operators, and nothing is chosen
        by the shapes of data.
    off : bool
        Mixed precision is off around the graph: what its own regions ask for alone is cast.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    accumulated: FrozenSet[str] = frozenset()
    stored: FrozenSet[str] = frozenset()
    offline: FrozenSet[str] = frozenset()
    training: bool = False
    restore: bool = True
    converting: bool = False
    off: bool = False


Output = Tuple[int, int]  #: (node, output of it)
CASTS = frozenset({"amp_cast", "Cast"})
#: An attribute of a `Cast` that stands where `amp_cast` fails for arrays without elements. MXNet
#: takes no notice of attributes of this form.
TAKES_EMPTY = "__mxamp_takes_empty__"


@dataclass
class Node:
    """One node: a variable (`op` "null") or an operator called by any of its names."""

    op: str
    name: str
    attrs: Dict[str, str] = field(default_factory=dict)
    inputs: List[Output] = field(default_factory=list)
    subgraphs: List["Graph"] = field(default_factory=list)
    num_outputs: int = 1
    control_deps: List[int] = field(default_factory=list)  #: nodes that come before it, unread
    #: Whether it is an input of the graph; every pass asks several times.
    is_variable: bool = field(init=False, repr=False, compare=False)
    #: The operator's canonical name.
    operator: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.is_variable = self.op == "null"
        self.operator = self.op if self.is_variable else resolve(self.op).name

    @property
    def call(self) -> Tuple[Any, ...]:
        """The operator and the attributes that it sees, as a key: equal where the calls are."""
        return (self.op, *[item for item in self.attrs.items() if item[0][:2] != "__"])

    def reading(self, inputs: List[Output]) -> "Node":
        """Return a copy that reads other inputs."""
        return Node(self.op, self.name, self.attrs, inputs, self.subgraphs, self.num_outputs)

    def to_json(self) -> Dict[str, Any]:
        """Return it as MXNet writes it."""
        data: Dict[str, Any] = {"op": self.op, "name": self.name}
        if self.attrs:
            data["attrs"] = self.attrs
        data["inputs"] = [(node, output, 0) for node, output in self.inputs]
        if self.subgraphs:
            data["subgraphs"] = [graph.to_json() for graph in self.subgraphs]
        if self.control_deps:
            data["control_deps"] = self.control_deps
        return data


@dataclass
class Graph:
    """Nodes in an order in which inputs come first, and the outputs that make the result."""

    nodes: List[Node]
    heads: List[Output]
    attrs: Dict[str, Any] = field(default_factory=dict)
    #: What it was read from, which MXNet need not load again to be asked about shapes.
    symbol: Optional[Symbol] = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    @collector_paused()
    def from_symbol(cls, symbol: Symbol) -> "Graph":
        """Read a symbol, casts included."""
        text = Symbol.tojson(symbol, remove_amp_cast=False)
        graph = cls.from_json(json.loads(text, strict=False))  # control characters are as they are
        graph.symbol = symbol
        return graph

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Graph":
        """Read MXNet's JSON, loaded."""
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

    def to_json(self) -> Dict[str, Any]:
        """Return it as MXNet reads it."""
        ends = [0]
        for node in self.nodes:
            ends.append(ends[-1] + node.num_outputs)
        return {
            "nodes": [node.to_json() for node in self.nodes],
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node.is_variable],
            "node_row_ptr": ends,
            "heads": [[node, output, 0] for node, output in self.heads],
            **({"attrs": self.attrs} if self.attrs else {}),
        }

    @collector_paused()
    def to_symbol(self, symbol_class: Type[Symbol] = Symbol) -> Symbol:
        """Return it as a symbol of a class: `mx.sym.Symbol`, or the one of `mx.sym.np`."""
        return symbol_class(_load(self.to_json()))

    @property
    def variables(self) -> List[Node]:
        """Its inputs: of a graph that was read from a symbol, in the order of `list_inputs`."""
        return [node for node in self.nodes if node.is_variable]

    @property
    def input_names(self) -> List[str]:
        """The names of its inputs, in the same order."""
        return [node.name for node in self.variables]

    @property
    def all_nodes(self) -> List[Node]:
        """Its nodes, and after them those in the bodies of its loops, in order."""
        inner = [one for node in self.nodes for body in node.subgraphs for one in body.all_nodes]
        return [*self.nodes, *inner]

    @cached_property
    def marks(self) -> FrozenSet[str]:
        """The regions that its nodes were made in, and those in the bodies of its loops."""
        return marks_of(node.attrs for node in self.all_nodes if not node.is_variable)

    @property
    def operators(self) -> FrozenSet[str]:
        """The operators in it, and in the bodies of its loops."""
        inner = (body.operators for node in self.nodes for body in node.subgraphs)
        return frozenset(node.op for node in self.nodes if not node.is_variable).union(*inner)


# ---------------------------------------------------------------------- dtypes

#: Answers of MXNet on single nodes, which never change.
_inferred: Dict[Any, Tuple[str, ...]] = {}

#: Attributes that say shapes, and dtypes of no operator: a model has dozens of convolutions.
_OF_SHAPES = frozenset(
    {"kernel", "stride", "pad", "dilate", "num_filter", "num_group", "num_hidden"}
)

#: Escapes in JSON, and those that MXNet does not know: of control characters.
_ESCAPE = re.compile(r"\\(?:u[0-9a-f]{4}|.)")
_UNREAD = re.compile(r"\\(?:u[0-9a-f]{4}|[bf])")

_major, _minor, _patch = release(__version__)
#: Without it MXNet takes a graph for one of version 0.8 and "upgrades" it.
VERSION = {"mxnet_version": ["int", 10000 * _major + 100 * _minor + _patch]}


def infer_outputs(node: Node, dtypes: Sequence[str]) -> Tuple[str, ...]:
    """Return the dtype of each output of `node`, hidden ones included, for these inputs.

    MXNet is asked, on a graph of that one node (0.1 ms); answers are remembered. Where it can't
    tell, outputs are taken to be float32.
    """
    if node.subgraphs:
        return _ask(node, dtypes)
    if node.operator == "cast_storage" and node.attrs.get("stype") != "default":
        return ("sparse",)
    op, *attrs = node.call
    asked = [(name, text) for name, text in attrs if name not in _OF_SHAPES]
    key = (op, *asked, tuple(dtypes), node.num_outputs)
    outputs = _inferred.get(key)
    if outputs is None:
        outputs = _inferred[key] = _ask(node, dtypes)
    return outputs


def _ask(node: Node, dtypes: Sequence[str]) -> Tuple[str, ...]:
    attrs = [{"__dtype__": str(DTYPE_CODES.get(dtype, 0))} for dtype in dtypes]
    inferred = infer_types(alone(node, attrs, node.num_outputs))
    return inferred[1] if inferred is not None else ("float32",) * node.num_outputs


def alone(
    node: Node,
    inputs: Sequence[Mapping[str, str]],
    outputs: int = 1,
    symbol_class: Type[Symbol] = Symbol,
) -> Symbol:
    """Return the symbol of one operator, and so many outputs of it.

    It reads variables, one an input, which have these attributes.
    """
    count = len(inputs)
    variables = [Node("null", f"input{i}", dict(attrs)) for i, attrs in enumerate(inputs)]
    single = replace(node, name="node", inputs=[(i, 0) for i in range(count)])
    heads = [(count, i) for i in range(outputs)]
    return Graph([*variables, single], heads, VERSION).to_symbol(symbol_class)


def infer_types(
    symbol: Symbol, known: Optional[Mapping[str, str]] = None
) -> Optional[Tuple[Tuple[str, ...], ...]]:
    """Return the dtypes of a symbol's arguments, outputs and auxiliary states, by name.

    `known` maps names of arguments to dtypes. None where MXNet can't infer them all.
    """
    known = known or {}
    keys = (ctypes.c_char_p * len(known))(*(name.encode() for name in known))
    codes = (ctypes.c_int * len(known))(*(DTYPE_CODES[dtype] for dtype in known.values()))
    sizes = [mx_uint() for _ in range(3)]
    types = [ctypes.POINTER(ctypes.c_int)() for _ in range(3)]
    complete = ctypes.c_int()
    pairs = [ctypes.byref(value) for pair in zip(sizes, types) for value in pair]
    try:
        check_call(
            _LIB.MXSymbolInferType(
                symbol.handle, mx_uint(len(known)), keys, codes, *pairs, ctypes.byref(complete)
            )
        )
    except MXNetError:
        return None
    if not complete.value:
        return None
    return tuple(
        tuple(DTYPE_NAMES.get(listed[i], "other") for i in range(size.value))
        for size, listed in zip(sizes, types)
    )


def argument_dtypes(symbol: Symbol, type_dict: Optional[Mapping[str, Any]]) -> Dict[str, str]:
    """Return the dtype of every argument, float32 where neither given nor inferred."""
    known = {name: dtype_name(dtype) for name, dtype in (type_dict or {}).items()}
    names, inferred = symbol.list_arguments(), infer_types(symbol, known)
    dtypes = dict(zip(names, inferred[0])) if inferred is not None else {}
    return {name: known.get(name, dtypes.get(name, "float32")) for name in names}


def _load(data: Mapping[str, Any]) -> SymbolHandle:
    handle = SymbolHandle()
    # MXNet reads it character by character, and knows few escapes.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    if _UNREAD.search(text):
        text = _ESCAPE.sub(_unescaped, text)
    check_call(_LIB.MXSymbolCreateFromJSON(c_str(text), ctypes.byref(handle)))
    return handle


def _unescaped(escape: "re.Match[str]") -> str:
    """Return a character for an escape that MXNet does not know."""
    text = escape.group()
    return str(json.loads(f'"{text}"')) if _UNREAD.fullmatch(text) else text


#: Control flow whose gradients in graphs read memory that MXNet has never written: garbage or
#: right by luck, in plain float32 too. Any change to their bodies changes the luck.
UNSAFE_LOOPS = frozenset({"_while_loop", "_cond"})

LOOPS = UNSAFE_LOOPS | {"_foreach"}

#: The bodies of a node, in order, as its attributes call them.
_BODIES = {"_while_loop": ("cond", "func"), "_cond": ("cond", "then", "else")}


def rewrites_bodies(node: Node, training: bool) -> bool:
    """Tell whether the graphs that `node` holds are rewritten.

    oneDNN's fused operators hold graphs too, which stay as they are.
    """
    return node.operator in LOOPS and not (training and node.operator in UNSAFE_LOOPS)


def body_usage(usage: Usage, node: Node, position: int, dtypes: Sequence[str]) -> Usage:
    """Return how one body of `node` is used, where the node's own inputs have these `dtypes`.

    A body's inputs and outputs keep their dtypes. All gradients may be accumulated over the steps
    of a loop.
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


def step_shapes(node: Node, shapes: Sequence[Optional[Shape]]) -> Dict[str, Shape]:
    """Return the shapes of what one step of a `foreach` reads, by the names of its body's inputs.

    `shapes` are those of the node's inputs, data first: a step takes one slice of each. Those that
    are None are left out.
    """
    names, data = node.subgraphs[0].input_names, len(_places(node, "in_data_locs"))
    return {
        names[inner]: shape[1:] if outer < data else shape
        for inner, outer in body_inputs(node, 0).items()
        for shape in [shapes[outer]]
        if shape is not None
    }


def body_inputs(node: Node, position: int) -> Dict[int, int]:
    """Map the inputs of a body to the node's own inputs, by position."""
    if node.operator == "_foreach":
        # The body's positions of what the node takes, in the node's order.
        locations = ("in_data_locs", "in_state_locs", "remain_locs")
        places = [place for name in locations for place in _places(node, name)]
        return {place: outer for outer, place in enumerate(places)}
    if node.operator not in _BODIES:
        return {}
    # The node's positions of what the body takes, in the body's order.
    name = _BODIES[node.operator][position]
    return dict(enumerate(_places(node, f"{name}_input_locs")))


def _places(node: Node, attribute: str) -> List[int]:
    return integers(node.attrs.get(attribute, "[]"))
