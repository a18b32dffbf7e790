"""The graph that a rewrite makes: its nodes and their names, one cast a tensor and dtype."""

import re
from dataclasses import replace
from typing import AbstractSet, Dict, List, NamedTuple, Optional, Tuple

from mxnet.util import is_np_shape

from ...policy.decision import CASTABLE
from ..edit import Names
from ..ir import CASTS, TAKES_EMPTY, Graph, Node, Output

__all__ = ["HALVES", "Builder", "Entry", "is_converted", "is_inserted", "reads_as_inserted"]

HALVES = CASTABLE - {"float32"}

# MXNet's own conversion calls its casts so too. One that is written by hand is called amp_cast0.
_INSERTED = re.compile(r"_amp_cast_(float16|bfloat16|float32|float64)\d*$")


def is_inserted(node: Node) -> bool:
    """Tell whether a node may be a cast that a conversion has put into its graph, by its name.

    Where the dtype that it reads is known, `reads_as_inserted` tells for sure of more.
    """
    return node.op in CASTS and _INSERTED.search(node.name) is not None


def reads_as_inserted(node: Node, dtype: str) -> bool:
    """Tell whether conversions insert a cast of this operator from this dtype.

    They never cast integers, and take `Cast` for float64 and, with an attribute, for arrays that
    may be empty: others are written by hand, whatever their names.
    """
    if node.op == "Cast" and TAKES_EMPTY not in node.attrs:
        other = {dtype, node.attrs["dtype"]} - {"float64"}
        return len(other) == 1 and other <= CASTABLE
    return dtype in CASTABLE


def is_converted(graph: Graph) -> bool:
    """Tell whether a conversion has put casts into a graph."""
    return any(is_inserted(node) for node in graph.nodes)


class Entry(NamedTuple):
    """An output in the new graph, its dtype, and what it is a mere widening of.

    One that is `by_choice` is float32 only because a choice by shape has kept it so: next to the
    target dtype it is cast down, where others would widen.
    """

    output: Output
    dtype: str
    source: Optional["Entry"] = None
    by_choice: bool = False


class Builder:
    """The new graph in the making.

    A cast up is undone by reading what was cast, never by casting down again. `device` is the kind
    of device that the graph is for.
    """

    def __init__(self, graph: Graph, accumulated: AbstractSet[str], device: str = "cpu") -> None:
        self.nodes: List[Node] = []
        self._accumulated = accumulated
        # GPUs launch an empty grid for amp_cast of an empty array, which is an error; `Cast` looks
        # at the size. Only NumPy's shapes have arrays without elements.
        self._may_be_empty = device == "gpu" and is_np_shape()
        # Names of casts are made anew, so that rewriting a rewritten graph changes nothing.
        self._names = Names(
            node.name for node in graph.nodes if node.op != "amp_cast" and not is_inserted(node)
        )
        self._casts: Dict[Tuple[Output, str], Entry] = {}
        self._copies: Dict[Output, Output] = {}
        self._roots: Dict[int, str] = {}

    def add(self, node: Node) -> int:
        """Append a node that has its name already; return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def new_name(self, wanted: str) -> str:
        """Return `wanted`, with a number behind it if a node has that name."""
        return self._names.new(wanted)

    def reserve(self, name: str) -> None:
        """Leave a name to a cast that is written by hand: one of ours that has it gets another."""
        taken = [i for i in self._roots if self.nodes[i].name == name]
        for i in taken:
            self.nodes[i] = replace(self.nodes[i], name=self.new_name(name))
        self._names.take(name)

    def cast(self, entry: Entry, dtype: str, name: Optional[str] = None) -> Entry:
        """Return `entry` in `dtype`, cast once for all that read it so.

        The cast takes a `name` that is given, whoever else reads it.
        """
        if entry.dtype == dtype:
            return entry
        if entry.source is not None and entry.source.dtype == dtype:
            return entry.source
        if "float32" not in (entry.dtype, dtype):
            # amp_cast knows no float64, and between the two halves gives garbage in graphs.
            return self.cast(self.cast(entry, "float32"), dtype)
        key = (entry.output, dtype)
        if key not in self._casts:
            source = entry if entry.dtype in HALVES and dtype == "float32" else None
            op = "Cast" if self._may_be_empty or "float64" in (entry.dtype, dtype) else "amp_cast"
            attrs = {TAKES_EMPTY: "1"} if self._may_be_empty else {}
            read = self._read_by_cast(entry, dtype)
            added = self._insert(op, read, f"amp_cast_{dtype}", {"dtype": dtype, **attrs})
            self._casts[key] = Entry((added, 0), dtype, source)
        made = self._casts[key]
        if name is not None:
            i = made.output[0]
            self.nodes[i] = replace(self.nodes[i], name=name)
        return made

    def lowered(self, entries: List[Entry], target: str) -> List[Entry]:
        """Cast what is float32 by choice to the target dtype, where all others have that."""
        floats = [entry for entry in entries if entry.dtype in CASTABLE]
        if not any(e.dtype == target for e in floats):
            return entries
        if not all(e.dtype == target or e.by_choice for e in floats):
            return entries
        return [self.cast(e, target) if e.by_choice else e for e in entries]

    def without_other_half(self, entry: Entry, target: str) -> Entry:
        """Widen what an operator gives in the half precision that its policy is not for.

        A model that was fused for bfloat16 computes in it under float16 too. The policy does not
        know which operators behind can't.
        """
        is_other = entry.dtype in HALVES and entry.dtype != target
        return self.cast(entry, "float32") if is_other else entry

    def copied(self, output: Output) -> Output:
        """Return a copy of an output, made once for all that read one."""
        if output not in self._copies:
            self._copies[output] = (self._insert("_copy", output, "amp_copy", {}), 0)
        return self._copies[output]

    def in_plain_layout(self, entry: Entry) -> Entry:
        """Return a float32 output in MXNet's own layout: slices are written in it."""
        if entry.dtype != "float32":
            return entry
        whole = {"axis": "0", "begin": "0", "end": "None"}
        return entry._replace(
            output=(self._insert("slice_axis", entry.output, "amp_plain", whole), 0)
        )

    def _read_by_cast(self, entry: Entry, dtype: str) -> Output:
        """Return what a cast reads: a copy, where autograd may accumulate into a variable.

        On CPUs the gradient of a cast to or from bfloat16 is lost under grad_req="add": its
        kernel never commits what it adds to. A copy in between takes the sum instead.
        """
        node = self.nodes[entry.output[0]]
        accumulated = node.is_variable and node.name in self._accumulated
        if accumulated and "bfloat16" in (entry.dtype, dtype):
            return self.copied(entry.output)
        return entry.output

    def _insert(self, op: str, output: Output, suffix: str, attrs: Dict[str, str]) -> int:
        producer = self.nodes[output[0]]
        group = {k: v for k, v in producer.attrs.items() if k in ("__ctx_group__", "ctx_group")}
        position = str(output[1]) if producer.num_outputs > 1 else ""
        # Casts of casts are named after what was cast first.
        root = self._roots.get(output[0], f"{producer.name}{position}")
        name = self.new_name(f"{root}_{suffix}")
        added = self.add(Node(op, name, {**group, **attrs}, [output]))
        self._roots[added] = root
        return added
