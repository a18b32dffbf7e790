"""Builder of a rewritten graph: unique names, and one cast per tensor and dtype."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import AbstractSet, NamedTuple

from mxnet.util import is_np_shape

from ...policy.decision import CASTABLE
from ..edit import Names
from ..ir import CASTS, TAKES_EMPTY, Graph, Node, Output

HALVES = CASTABLE - {"float32"}

# MXNet's own conversion uses these names too. A cast written by hand is called amp_cast0.
_INSERTED = re.compile(r"_amp_cast_(float16|bfloat16|float32|float64)\d*$")


def is_inserted_cast(node: Node) -> bool:
    """Return whether a node is, by its name, a cast that a conversion may have inserted.

    If the dtype of the input is known, check `casts_like_conversions` too.
    """
    return node.op in CASTS and _INSERTED.search(node.name) is not None


def casts_like_conversions(node: Node, input_dtype: str) -> bool:
    """Return whether conversions insert a cast like `node` for an input of `input_dtype`.

    Conversions never cast integers. They use `Cast` for float64 and, with the attribute
    `TAKES_EMPTY`, for arrays that may be empty. The user has written any other cast.
    """
    if node.op == "Cast" and TAKES_EMPTY not in node.attrs:
        other = {input_dtype, node.attrs["dtype"]} - {"float64"}
        return len(other) == 1 and other <= CASTABLE
    return input_dtype in CASTABLE


def is_converted(graph: Graph) -> bool:
    """Return whether a conversion has inserted casts into a graph."""
    return any(is_inserted_cast(node) for node in graph.nodes)


class Entry(NamedTuple):
    """An output in the new graph, its dtype, and its `source`: the entry that it casts up, if any.

    An entry is float32 `by_choice` where only a shape rule keeps it in float32. Next to inputs in
    the target dtype it is cast down, instead of widening the other inputs.
    """

    output: Output
    dtype: str
    source: Entry | None = None
    by_choice: bool = False


class Builder:
    """Nodes added to a new graph, with unique names and one cast for each output and dtype.

    To undo a cast up, consumers read its source: values are never cast down again.
    """

    def __init__(
        self, graph: Graph, accumulated: AbstractSet[str], casts_empty: bool = True
    ) -> None:
        self.nodes: list[Node] = []
        self._accumulated = accumulated
        # Where amp_cast takes no empty arrays, `Cast` does. Only NumPy semantics allow them.
        self._may_be_empty = not casts_empty and is_np_shape()
        # Casts get new names, so that rewriting a rewritten graph changes nothing.
        self._names = Names(
            node.name
            for node in graph.nodes
            if node.op != "amp_cast" and not is_inserted_cast(node)
        )
        self._casts: dict[tuple[Output, str], Entry] = {}
        self._copies: dict[Output, Output] = {}
        self._roots: dict[int, str] = {}

    def add(self, node: Node) -> int:
        """Append a node with its final name; return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def reserve(self, name: str) -> None:
        """Reserve the name of a cast written by hand; rename an inserted cast that has it."""
        taken = [i for i in self._roots if self.nodes[i].name == name]
        for i in taken:
            self.nodes[i] = replace(self.nodes[i], name=self._names.make_unique(name))
        self._names.reserve(name)

    def cast(self, entry: Entry, dtype: str, name: str | None = None) -> Entry:
        """Return `entry` in `dtype`, adding a cast unless one exists.

        With `name`, the cast takes that name.
        """
        if entry.dtype == dtype:
            return entry
        if entry.source is not None and entry.source.dtype == dtype:
            return entry.source
        if "float32" not in (entry.dtype, dtype):
            # amp_cast has no float64, and gives garbage between float16 and bfloat16 in graphs.
            return self.cast(self.cast(entry, "float32"), dtype)
        key = (entry.output, dtype)
        if key not in self._casts:
            source = entry if entry.dtype in HALVES and dtype == "float32" else None
            op = "Cast" if self._may_be_empty or "float64" in (entry.dtype, dtype) else "amp_cast"
            attrs = {TAKES_EMPTY: "1"} if self._may_be_empty else {}
            source_output = self._input_of_cast(entry, dtype)
            added = self._insert(op, source_output, f"amp_cast_{dtype}", {"dtype": dtype, **attrs})
            self._casts[key] = Entry((added, 0), dtype, source)
        made = self._casts[key]
        if name is not None:
            i = made.output[0]
            self.nodes[i] = replace(self.nodes[i], name=name)
        return made

    def cast_down_choices(self, entries: list[Entry], target: str) -> list[Entry]:
        """Cast the entries that are float32 by choice to `target`, if all other floats have it."""
        floats = [entry for entry in entries if entry.dtype in CASTABLE]
        if not any(e.dtype == target for e in floats):
            return entries
        if not all(e.dtype == target or e.by_choice for e in floats):
            return entries
        return [self.cast(e, target) if e.by_choice else e for e in entries]

    def widen_other_half(self, entry: Entry, target: str) -> Entry:
        """Return an entry in float32 if it has the half-precision dtype that is not `target`.

        A model fused for bfloat16 computes in it under a float16 policy too, whose lists don't say
        which operators can read bfloat16.
        """
        is_other = entry.dtype in HALVES and entry.dtype != target
        return self.cast(entry, "float32") if is_other else entry

    def add_copy(self, output: Output) -> Output:
        """Return a copy of an output, adding a `_copy` node unless one exists."""
        if output not in self._copies:
            self._copies[output] = (self._insert("_copy", output, "amp_copy", {}), 0)
        return self._copies[output]

    def add_plain_layout(self, entry: Entry) -> Entry:
        """Return a float32 entry copied to MXNet's plain layout by a slice; others unchanged."""
        if entry.dtype != "float32":
            return entry
        whole = {"axis": "0", "begin": "0", "end": "None"}
        return entry._replace(
            output=(self._insert("slice_axis", entry.output, "amp_plain", whole), 0)
        )

    def _input_of_cast(self, entry: Entry, dtype: str) -> Output:
        """Return the output for a cast of `entry` to read: a copy if its gradient may be added up.

        On CPUs the gradient of a cast to or from bfloat16 is lost under grad_req="add", because the
        kernel never commits the sum. A copy before the cast accumulates the gradient instead.
        """
        node = self.nodes[entry.output[0]]
        accumulated = node.is_variable and node.name in self._accumulated
        if accumulated and "bfloat16" in (entry.dtype, dtype):
            return self.add_copy(entry.output)
        return entry.output

    def _insert(self, op: str, output: Output, suffix: str, attrs: dict[str, str]) -> int:
        """Add an operator that reads `output`, named after its producer; return its index."""
        producer = self.nodes[output[0]]
        position = str(output[1]) if producer.num_outputs > 1 else ""
        # Casts of casts are named after the first source.
        root = self._roots.get(output[0], f"{producer.name}{position}")
        name = self._names.make_unique(f"{root}_{suffix}")
        added = self.add(Node(op, name, {**producer.device_group, **attrs}, [output]))
        self._roots[added] = root
        return added
