"""Builder of a rewritten graph, with unique node names and each cast inserted only once."""

from __future__ import annotations

from typing import AbstractSet, NamedTuple

from mxnet.util import is_np_shape

from ..edit import UniqueNames
from ..ir import HALVES, ROLE, Graph, Node, Output


class NewOutput(NamedTuple):
    """A node's output in the rewritten graph, with its dtype.

    If it is a cast to float32, `source` is the output that the cast reads. An entry is in float32
    `for_speed` if a rule about speed alone has kept it there. Where the other inputs of an operator
    are in the target dtype, it is cast down, and does not widen them.
    """

    output: Output
    dtype: str
    source: NewOutput | None = None
    for_speed: bool = False


class Builder:
    """Builder of a rewritten graph: unique node names, one cast per node output and dtype.

    To undo a cast up, consumers read its source: values are never cast down again.
    """

    def __init__(
        self, graph: Graph, accumulated: AbstractSet[str], casts_empty: bool = True
    ) -> None:
        self.nodes: list[Node] = []
        self._accumulated = accumulated
        # Where amp_cast takes no empty arrays, `Cast` does. Only NumPy semantics allow them.
        self._may_be_empty = not casts_empty and is_np_shape()
        # Inserted casts are inserted anew, so that rewriting a rewritten graph changes nothing.
        self._names = UniqueNames(node.name for node in graph.nodes if not node.is_inserted_cast)
        self._casts: dict[tuple[Output, str], NewOutput] = {}
        self._copies: dict[Output, Output] = {}
        self._roots: dict[int, str] = {}

    def add(self, node: Node) -> int:
        """Append a node to the rewritten graph under the node's own name; return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def cast(self, entry: NewOutput, dtype: str, old: Node | None = None) -> NewOutput:
        """Return a node's output cast to `dtype`; insert a cast node unless one exists.

        The cast takes the name and the role of `old`, a cast of the old graph that it stands for.
        """
        if old is not None:
            self._names.reserve(old.name)
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
            attrs = {"dtype": dtype, ROLE: "cast"}
            source_output = self._input_of_cast(entry, dtype)
            added = self._insert(op, source_output, f"amp_cast_{dtype}", attrs)
            self._casts[key] = NewOutput((added, 0), dtype, source)
        made = self._casts[key]
        if old is not None:
            node = self.nodes[made.output[0]]
            node.name = old.name
            if not old.is_inserted_cast:
                node.attrs.pop(ROLE, None)
        return made

    def add_copy(self, output: Output) -> Output:
        """Return a copy of a node's output; insert a `_copy` node unless one exists."""
        if output not in self._copies:
            self._copies[output] = (self._insert("_copy", output, "amp_copy", {ROLE: "copy"}), 0)
        return self._copies[output]

    def add_plain_layout(self, entry: NewOutput) -> NewOutput:
        """Insert a slice after a float32 output to restore MXNet's default memory layout."""
        if entry.dtype != "float32":
            return entry
        whole = {"axis": "0", "begin": "0", "end": "None", ROLE: "layout"}
        return entry._replace(
            output=(self._insert("slice_axis", entry.output, "amp_plain", whole), 0)
        )

    def _input_of_cast(self, entry: NewOutput, dtype: str) -> Output:
        """Return the output for a cast to read: a copy where a bfloat16 cast would lose gradients.

        On CPUs the gradient of a cast to or from bfloat16 is lost under grad_req="add", because the
        kernel never commits the sum. A copy before the cast accumulates the gradient instead.
        """
        node = self.nodes[entry.output[0]]
        accumulated = node.is_variable and node.name in self._accumulated
        if accumulated and "bfloat16" in (entry.dtype, dtype):
            return self.add_copy(entry.output)
        return entry.output

    def _insert(self, op: str, output: Output, suffix: str, attrs: dict[str, str]) -> int:
        """Add a node that reads `output`, named after its source and `suffix`; return its index."""
        producer = self.nodes[output[0]]
        position = str(output[1]) if producer.num_outputs > 1 else ""
        # Casts of casts are named after the first source.
        root = self._roots.get(output[0], f"{producer.name}{position}")
        name = self._names.make_unique(f"{root}_{suffix}")
        added = self.add(Node(op, name, {**producer.device_group, **attrs}, [output]))
        self._roots[added] = root
        return added
