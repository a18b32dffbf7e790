"""The graph rewrite: puts `amp_cast` where the policy's decisions ask for other dtypes.

One walk over the nodes, inputs first. Each output of the old graph is known by its dtype without
mxamp ("plain") and by the entry of the new graph that stands for it. One cast a tensor and dtype;
a cast up is undone by reading what was cast, never by casting down again.
"""

from dataclasses import dataclass, field, replace
from typing import (
    AbstractSet,
    Dict,
    FrozenSet,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from mxnet.symbol import Symbol

from ..errors import AmpError
from ..policy.active import note_precision
from ..policy.decision import CASTABLE, Decision, decide
from ..policy.policy import Policy
from . import substitutions
from .graph import Graph, Node, Output, infer_outputs
from .shape_rules import NONE, Choices

__all__ = ["UNSAFE_LOOPS", "Rewrite", "rewrite", "rewrite_symbol"]

HALVES = CASTABLE - {"float32"}

#: Control flow whose gradients in graphs read memory that MXNet has never written: garbage or
#: right by luck, in plain float32 too. Any change to their bodies changes the luck.
UNSAFE_LOOPS = frozenset({"_while_loop", "_cond"})

LOOPS = UNSAFE_LOOPS | {"_foreach"}


class Entry(NamedTuple):
    """An output in the new graph, its dtype, and what it is a mere widening of.

    One that is `by_choice` is float32 only because a choice by shape has kept it so: next to the
    target dtype it is cast down, where others would widen.
    """

    output: Output
    dtype: str
    source: Optional["Entry"] = None
    by_choice: bool = False


@dataclass
class Rewrite:
    """The new graph, and what was decided for each operator node: by name, with its operator."""

    graph: Graph
    decisions: Dict[str, Tuple[str, Decision]] = field(default_factory=dict)

    @property
    def casts(self) -> int:
        """How many casts the graph holds, bodies of loops included."""
        return _count_casts(self.graph)


def _count_casts(graph: Graph) -> int:
    inner = sum(_count_casts(body) for node in graph.nodes for body in node.subgraphs)
    return inner + sum(node.op == "amp_cast" for node in graph.nodes)


def rewrite_symbol(
    symbol: Symbol,
    policy: Policy,
    dtypes: Mapping[str, str],
    guarded: AbstractSet[str] = frozenset(),
    training: bool = False,
    choices: Choices = NONE,
    stored: AbstractSet[str] = frozenset(),
) -> Symbol:
    """Return `symbol` rewritten; the symbol itself where there is nothing to cast.

    Its inputs and outputs keep names, order and dtypes.
    """
    graph = Graph.from_symbol(symbol)
    result = rewrite(graph, policy, dtypes, guarded, training, choices=choices, stored=stored)
    for operator, decision in result.decisions.values():
        note_precision(operator, decision.precision)
    if result.graph == graph:
        return symbol
    rewritten = result.graph.to_symbol(type(symbol))
    if rewritten.list_inputs() != symbol.list_inputs():
        raise AmpError(
            "the rewritten graph takes its inputs in another order; please report this graph: "
            f"{symbol.list_inputs()} became {rewritten.list_inputs()}"
        )
    return rewritten


def rewrite(
    graph: Graph,
    policy: Policy,
    dtypes: Mapping[str, str],
    guarded: AbstractSet[str] = frozenset(),
    training: bool = False,
    restore: bool = True,
    choices: Choices = NONE,
    stored: AbstractSet[str] = frozenset(),
) -> Rewrite:
    """Insert the casts that `policy` decides on.

    Parameters
    ----------
    graph : Graph
        Left as it is.
    dtypes : mapping of str to str
        The dtype of each variable by name, or "sparse"; float32 where unnamed.
    guarded : set of str
        Variables whose gradients may be accumulated (`grad_req="add"`): see `_guarded`.
    training : bool
        Gradients will be computed. Then the bodies of `UNSAFE_LOOPS` stay as they are.
    restore : bool
        Give the graph's outputs the dtypes that they had; otherwise they stay as computed.
    choices : Choices
        What shapes and neighbours have decided: `choices.choose`.
    stored : set of str
        Variables that were cast to the target dtype before they are passed in.
    """
    return _Rewriter(
        graph, policy, dtypes, frozenset(guarded), training, restore, choices, stored
    ).run()


class _Rewriter:
    def __init__(
        self,
        graph: Graph,
        policy: Policy,
        dtypes: Mapping[str, str],
        guarded: FrozenSet[str],
        training: bool,
        restore: bool,
        choices: Choices,
        stored: AbstractSet[str],
    ) -> None:
        self.graph, self.policy = graph, policy
        self.dtypes, self.guarded, self.training = dtypes, guarded, training
        self.restore, self.choices, self.stored = restore, choices, stored
        self.kept, self.substituted = dict(choices.kept), dict(choices.substituted)
        self.stand_ins: Dict[str, Node] = {}
        self.number = len(graph.nodes)
        self.nodes: List[Node] = []
        # Names of casts are made anew, so that rewriting a rewritten graph changes nothing.
        self.names: Set[str] = {node.name for node in graph.nodes if node.op != "amp_cast"}
        self.plain: Dict[Output, str] = {}
        self.entries: Dict[Output, Entry] = {}
        self.cast_entries: Dict[Tuple[Output, str], Entry] = {}
        self.copies: Dict[Output, Output] = {}
        self.roots: Dict[int, str] = {}
        self.result = Rewrite(Graph([], [], dict(graph.attrs)))

    def run(self) -> Rewrite:
        for i, node in enumerate(self.graph.nodes):
            if node.is_variable:
                dtype = self.dtypes.get(node.name, "float32")
                held = self.policy.target_dtype if node.name in self.stored else dtype
                self._record(i, [dtype], [Entry((self._add(node), 0), held)])
            elif node.name in self.substituted and self._castable(node):
                self._substitute(i, node)
            else:
                self._visit(i, node)
        heads = [self._head(head).output for head in self.graph.heads]
        self.result.graph.nodes, self.result.graph.heads = self.nodes, heads
        return self.result

    def _visit(self, i: int, node: Node) -> None:
        entries = [self.entries[output] for output in node.inputs]
        plain = [self.plain[output] for output in node.inputs]
        if node.op == "amp_cast" and {entries[0].dtype, node.attrs["dtype"]} <= CASTABLE:
            # A cast that is there already is one that is asked for again.
            dtype = node.attrs["dtype"]
            self._record(i, [dtype], [self._cast(entries[0], dtype)])
            return
        if node.op == "amp_multicast" and set(plain) <= CASTABLE:
            # On CPUs it has no kernel for float16 next to float32; casts of ours say the same.
            dtype = _common(plain, node.attrs.get("cast_narrow") in ("True", "1"))
            self._record(i, [dtype] * len(plain), [self._cast(e, dtype) for e in entries])
            return
        kind = self.policy.rule(node.operator).op_class
        if kind == "widest":
            entries = self._lowered(entries)
        stand_in = self.stand_ins.get(node.name)
        decision = decide(
            node.operator, node.attrs, [e.dtype for e in entries], self.policy,
            (stand_in or node).name, self.kept.get(node.name),
        )  # fmt: skip
        if stand_in is not None:
            reason = f"stands in for {stand_in.op}: {decision.reason}"
            decision = replace(decision, reason=reason)
        self.result.decisions[node.name] = (node.operator, decision)
        if kind == "untouched":
            reads = [self._restored(output) for output in node.inputs]
        else:
            reads = [self._read(entry, decision, k) for k, entry in enumerate(entries)]
        new = Node(
            node.op, node.name, node.attrs, [entry.output for entry in reads],
            [self._subgraph(graph, node, k) for k, graph in enumerate(node.subgraphs)],
            node.num_outputs,
        )  # fmt: skip
        added = self._add(new)
        before = infer_outputs(node, plain)
        after = before
        if [entry.dtype for entry in reads] != plain:
            after = infer_outputs(node, [entry.dtype for entry in reads])
        chosen = node.name in self.kept or (
            kind in ("neutral", "widest") and any(entry.by_choice for entry in reads)
        )
        outputs = [
            Entry((added, k), dtype, by_choice=chosen and dtype == "float32")
            for k, dtype in enumerate(after)
        ]
        if decision.through is not None:
            outputs = [
                self._cast(entry, decision.through) if decision.rounds(k, entry.dtype) else entry
                for k, entry in enumerate(outputs)
            ]
        elif node.operator == "Cast" and reads[0].dtype in HALVES and after[0] == "float32":
            outputs = [outputs[0]._replace(source=reads[0])]
        self._record(i, before, outputs)

    def _castable(self, node: Node) -> bool:
        return all(self.plain[output] in CASTABLE for output in node.inputs)

    def _substitute(self, i: int, node: Node) -> None:
        """Visit what stands in for a node; its last parts are the node's outputs."""
        name, detail = self.substituted[node.name]
        substitution = substitutions.ALL[name]
        parts = substitution.build(node.attrs, detail)
        when_training, always = substitution.float32
        outputs = list(node.inputs)
        hidden = {k: v for k, v in node.attrs.items() if k.startswith("__")}
        for part in parts:
            name = self._name(f"{node.name}_{part.suffix}") if part.suffix else node.name
            self.stand_ins[name] = node
            if always or (when_training and self.training):
                self.kept[name] = "float32 sums" if always else "its gradient is faster in float32"
            inputs = [outputs[k] for k in part.inputs]
            attrs = {**hidden, **part.attrs}
            count = 1 if part.suffix else node.num_outputs
            self._visit(self.number, Node(part.op, name, attrs, inputs, num_outputs=count))
            outputs.append((self.number, 0))
            self.number += 1
        if not parts[-1].suffix:
            outputs = [(self.number - 1, k) for k in range(node.num_outputs)]
        # Else parts that all have names of their own are each an output.
        for k, output in enumerate(outputs[-node.num_outputs :]):
            self._record_one((i, k), self.plain[output], self.entries[output])

    def _record(self, i: int, plain: "Tuple[str, ...] | List[str]", entries: List[Entry]) -> None:
        for k, (dtype, entry) in enumerate(zip(plain, entries)):
            self._record_one((i, k), dtype, entry)

    def _record_one(self, output: Output, plain: str, entry: Entry) -> None:
        self.plain[output], self.entries[output] = plain, entry

    def _lowered(self, entries: List[Entry]) -> List[Entry]:
        """Cast what is float32 by choice to the target dtype, where all others have that."""
        target = self.policy.target_dtype
        floats = [entry for entry in entries if entry.dtype in CASTABLE]
        if not any(e.dtype == target for e in floats):
            return entries
        if not all(e.dtype == target or e.by_choice for e in floats):
            return entries
        return [self._cast(e, target) if e.by_choice else e for e in entries]

    def _read(self, entry: Entry, decision: Decision, position: int) -> Entry:
        """Return the entry that the operator reads as input `position`."""
        dtype = decision.reads[position]
        if dtype is None:
            return entry
        if position in decision.guards:
            entry = Entry(self._copied(entry.output), entry.dtype)
        if decision.through is not None:
            entry = self._cast(entry, decision.through)
        return self._cast(entry, dtype)

    def _restored(self, output: Output) -> Entry:
        """Return an old output in the dtype that it had without mxamp."""
        entry, plain = self.entries[output], self.plain[output]
        if entry.dtype == plain or not {entry.dtype, plain} <= CASTABLE:
            return entry
        return self._cast(entry, plain)

    def _head(self, output: Output) -> Entry:
        return self._restored(output) if self.restore else self.entries[output]

    def _cast(self, entry: Entry, dtype: str) -> Entry:
        if entry.dtype == dtype:
            return entry
        if entry.source is not None and entry.source.dtype == dtype:
            return entry.source
        if "float32" not in (entry.dtype, dtype):
            # amp_cast knows no float64, and between the two halves gives garbage in graphs.
            return self._cast(self._cast(entry, "float32"), dtype)
        key = (entry.output, dtype)
        found = self.cast_entries.get(key)
        if found is None:
            source = entry if entry.dtype in HALVES and dtype == "float32" else None
            read = self._guarded(entry, dtype)
            op = "Cast" if "float64" in (entry.dtype, dtype) else "amp_cast"
            added = self._insert(op, read, f"amp_cast_{dtype}", {"dtype": dtype})
            found = self.cast_entries[key] = Entry((added, 0), dtype, source)
        return found

    def _guarded(self, entry: Entry, dtype: str) -> Output:
        """Return what a cast reads: a copy, where autograd may accumulate into a variable.

        On CPUs the gradient of a cast to or from bfloat16 is lost under grad_req="add": its
        kernel never commits what it adds to. A copy in between takes the sum instead.
        """
        node = self.nodes[entry.output[0]]
        if "bfloat16" in (entry.dtype, dtype) and node.is_variable and node.name in self.guarded:
            return self._copied(entry.output)
        return entry.output

    def _copied(self, output: Output) -> Output:
        if output not in self.copies:
            self.copies[output] = (self._insert("_copy", output, "amp_copy", {}), 0)
        return self.copies[output]

    def _subgraph(self, graph: Graph, node: Node, position: int) -> Graph:
        """Rewrite the body of a loop or a branch; its inputs and outputs keep their dtypes."""
        if node.operator not in LOOPS or (self.training and node.operator in UNSAFE_LOOPS):
            return graph  # oneDNN's fused operators hold graphs too
        inputs = _subgraph_inputs(node, position)
        names = [variable.name for variable in graph.variables]
        dtypes = {names[k]: self.plain[node.inputs[outer]] for k, outer in inputs.items()}
        result = rewrite(graph, self.policy, dtypes, frozenset(names), self.training,
                         choices=self.choices)  # fmt: skip
        self.result.decisions.update(result.decisions)
        return result.graph

    # ------------------------------------------------------------------ new nodes

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _insert(self, op: str, output: Output, suffix: str, attrs: Dict[str, str]) -> int:
        producer = self.nodes[output[0]]
        group = {k: v for k, v in producer.attrs.items() if k in ("__ctx_group__", "ctx_group")}
        position = str(output[1]) if producer.num_outputs > 1 else ""
        # Casts of casts are named after what was cast first.
        root = self.roots.get(output[0], f"{producer.name}{position}")
        added = self._add(Node(op, self._name(f"{root}_{suffix}"), {**group, **attrs}, [output]))
        self.roots[added] = root
        return added

    def _name(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self.names:
            count += 1
            name = f"{wanted}{count}"
        self.names.add(name)
        return name


def _common(dtypes: Sequence[str], narrow: bool) -> str:
    """Return the dtype that `amp_multicast` brings its inputs to."""
    halves = sorted(set(dtypes) & HALVES)
    if len(set(dtypes)) == 1 or (narrow and len(halves) == 1):
        return halves[0] if halves else "float32"
    return "float32"


def _subgraph_inputs(node: Node, position: int) -> Dict[int, int]:
    """Map the inputs of a control-flow body to the node's own inputs, by position."""

    def listed(name: str) -> List[int]:
        return [
            int(part)
            for part in node.attrs.get(name, "[]").strip("[]()").split(",")
            if part.strip()
        ]

    if node.operator == "_foreach":
        # The body's positions of what the node takes, in the node's order.
        places = listed("in_data_locs") + listed("in_state_locs") + listed("remain_locs")
        return {place: outer for outer, place in enumerate(places)}
    bodies = {"_while_loop": ("cond", "func"), "_cond": ("cond", "then", "else")}
    if node.operator not in bodies:
        return {}
    # The node's positions of what the body takes, in the body's order.
    return dict(enumerate(listed(f"{bodies[node.operator][position]}_input_locs")))
