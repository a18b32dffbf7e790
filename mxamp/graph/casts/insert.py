"""The graph rewrite: puts `amp_cast` where the policy's decisions ask for other dtypes.

One walk over the nodes, inputs first. Each output of the old graph is known by its dtype without
mxamp ("plain") and by the entry of the new graph that stands for it. Nodes are known by index: a
block that is called twice gives two nodes the same name.
"""

from dataclasses import dataclass, field, replace
from typing import (
    AbstractSet,
    Any,
    Dict,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
)

from mxnet.symbol import Symbol

from ...errors import AmpError
from ...policy.active import note_precision
from ...policy.decision import CASTABLE, Decision, decide
from ...policy.policy import Policy
from ...policy.regions import CAST, REGION, WIDEST_INSIDE, dtype_asked, policy_in, with_words
from ...policy.values import is_true
from ..ir import (
    TAKES_EMPTY,
    Graph,
    Node,
    Output,
    Usage,
    body_usage,
    collector_paused,
    infer_outputs,
    rewrites_bodies,
)
from ..speed import substitutions
from ..speed.shape_rules import NONE, Choices
from .builder import HALVES, Builder, Entry, is_converted, is_inserted, reads_as_inserted

__all__ = [
    "PRECISION",
    "Rewrite",
    "own_marks",
    "rewrite",
    "rewritten_symbol",
    "with_reversed_inputs",
]


@dataclass
class Rewrite:
    """The new graph, and what was decided for each operator in it: by index of the new node."""

    graph: Graph
    decisions: Dict[int, Decision] = field(default_factory=dict)
    bodies: Dict[int, List["Rewrite"]] = field(default_factory=dict)  #: of loops, by their index

    @property
    def casts(self) -> int:
        """How many casts the graph holds, bodies of loops included."""
        return _count_casts(self.graph)

    def decided(self) -> Iterator[Tuple[Graph, Node, Decision]]:
        """Yield each operator with the graph that holds it; bodies follow their loops."""
        for i, decision in self.decisions.items():
            yield self.graph, self.graph.nodes[i], decision
            for body in self.bodies.get(i, ()):
                yield from body.decided()


def _count_casts(graph: Graph) -> int:
    inner = sum(_count_casts(body) for node in graph.nodes for body in node.subgraphs)
    return inner + sum(node.op == "amp_cast" or TAKES_EMPTY in node.attrs for node in graph.nodes)


#: What a graph that runs calls the precision of nodes whose own dtype does not say it: those that
#: compute in float32 on rounded values. MXNet takes no notice of attributes of this form.
PRECISION = "__mxamp_precision__"

# The attribute of variables declared with a storage type, and its value for dense ones.
_STORAGE, _DENSE = "__storage_type__", "0"

#: Why a part of what stands in for an operator computes in float32.
FLOAT32_PART = "gates and cells are summed in float32"


def rewrite(graph: Graph, policy: Policy, usage: Usage, choices: Choices = NONE) -> Rewrite:
    """Insert the casts that `policy` decides on into a graph that is used like this.

    The graph stays as it is. `choices` are what `shape_rules.choose` returns for it.
    """
    widened: AbstractSet[str] = frozenset()
    while True:
        rewriter = _Rewriter(graph, policy, usage, choices)
        result = rewriter.run(widened)
        mixed = {cast for cast, dtypes in rewriter.given.items() if len(dtypes) > 1}
        if mixed <= widened:
            return result
        widened = mixed | widened


class _Value(NamedTuple):
    """What stands for an output of the old graph, and the dtype it would have without mxamp."""

    entry: Entry
    plain: str


class _Rewriter:
    def __init__(self, graph: Graph, policy: Policy, usage: Usage, choices: Choices) -> None:
        self.graph, self.policy, self.usage = graph, policy, usage
        self.given: Dict[str, Set[str]] = {}  #: the dtypes of each promote_function's arguments
        self.kept, self.substituted = dict(choices.kept), dict(choices.substituted)
        self.body_choices = dict(choices.bodies)
        self.builder = Builder(graph, usage.accumulated, policy.device)
        self.values: Dict[Output, _Value] = {}
        # Graphs call the same operators over and over.
        self.decided: Dict[Tuple[Any, ...], Decision] = {}
        self.result = Rewrite(Graph(self.builder.nodes, [], dict(graph.attrs)))

    def run(self, widened: AbstractSet[str]) -> Rewrite:
        self.widened = widened
        for i, node in enumerate(self.graph.nodes):
            inputs = [self.values[output] for output in node.inputs]
            outputs = self._visit(i, node, inputs)
            for k, value in enumerate(outputs):
                self.values[i, k] = value
        heads = [self.values[head] for head in self.graph.heads]
        self.result.graph.heads = [
            (self._restored(value) if self.usage.restore else value.entry).output for value in heads
        ]
        return self.result

    def _visit(self, i: int, node: Node, inputs: Sequence[_Value]) -> Sequence[_Value]:
        """Add what stands for node i of the old graph; return what stands for its outputs."""
        if node.is_variable:
            return [self._variable(node)]
        if i in self.substituted and _can_substitute(self.substituted[i][0], inputs):
            return self._substitute(i, node, inputs)
        behind = _behind_inserted(node, inputs)
        if behind is not None:
            return [behind]
        if is_inserted(node):
            # Written by hand after all.
            self.builder.reserve(node.name)
        if node.op == "amp_cast" and {inputs[0].entry.dtype, node.attrs["dtype"]} <= CASTABLE:
            # A cast that is written by hand is asked for; by its name a later conversion knows it.
            entry = self.builder.cast(inputs[0].entry, node.attrs["dtype"], node.name)
            return [_Value(entry, node.attrs["dtype"])]
        if node.op == "amp_multicast" and _castable(inputs):
            # On CPUs it has no kernel for float16 next to float32; casts of ours say the same.
            narrow = is_true(node.attrs.get("cast_narrow", "False"))
            return self._cast_all(inputs, _common([value.plain for value in inputs], narrow))
        if CAST in node.attrs:
            inputs = self._as_asked(node, inputs)
        bodies = self._rewrite_bodies(i, node, inputs)
        return self._operator(node, inputs, self.kept.get(i), bodies=bodies)

    def _variable(self, node: Node) -> _Value:
        plain = self.usage.dtypes.get(node.name, "float32")
        if node.attrs.get(_STORAGE, _DENSE) != _DENSE:
            plain = "sparse"
        held = self.policy.target_dtype if node.name in self.usage.stored else plain
        return _Value(Entry((self.builder.add(node), 0), held), plain)

    def _as_asked(self, node: Node, inputs: Sequence[_Value]) -> Sequence[_Value]:
        """Return an argument in the dtype that a function of the user's own asks for."""
        dtype, cast = dtype_asked(self.policy, node.attrs, self.usage.off), node.attrs[CAST]
        if dtype is not None and cast.startswith(WIDEST_INSIDE):
            given = self.given.setdefault(cast, set())
            given.update({value.entry.dtype for value in inputs} & CASTABLE)
            dtype = dtype if cast in self.widened else None
        if dtype is None or not _castable(inputs):
            return inputs
        return [value._replace(entry=self.builder.cast(value.entry, dtype)) for value in inputs]

    def _cast_all(self, values: Sequence[_Value], dtype: str) -> List[_Value]:
        return [_Value(self.builder.cast(value.entry, dtype), dtype) for value in values]

    # ------------------------------------------------------------------ operators

    def _operator(
        self,
        node: Node,
        inputs: Sequence[_Value],
        kept: Optional[str],
        original: Optional[Node] = None,
        bodies: Sequence[Rewrite] = (),
    ) -> List[_Value]:
        """Add an operator with the casts around it.

        `kept` is why a choice keeps it in float32, `original` the node that it stands in for.
        """
        policy = policy_in(self.policy, node.attrs, self.usage.off)
        rule = policy.rule(node.operator)
        op_class = rule.op_class
        entries = [value.entry for value in inputs]
        if op_class == "widest":
            entries = self.builder.lowered(entries, policy.target_dtype)
        decision = self._decide(policy, node, entries, kept, original)
        if op_class == "untouched":
            reads = [self._restored(value) for value in inputs]
        else:
            reads = [self._read(entry, decision, k) for k, entry in enumerate(entries)]
        if rule.is_detour(kept) and decision.through is None and not self.usage.converting:
            # A view of a float32 one is read by casts no better.
            reads[0] = self.builder.in_plain_layout(reads[0])
        read, graphs = [entry.output for entry in reads], [body.graph for body in bodies]
        copied = Node(node.op, node.name, node.attrs, read, graphs, node.num_outputs)
        added = self.builder.add(copied)
        self.result.decisions[added] = decision
        if bodies:
            self.result.bodies[added] = list(bodies)
        by_choice = (kept is not None and not rule.is_exact(kept)) or (
            op_class in ("neutral", "widest") and any(entry.by_choice for entry in reads)
        )
        plain, after = _output_dtypes(node, [value.plain for value in inputs], reads)
        made = [
            Entry((added, k), dtype, by_choice=by_choice and dtype == "float32")
            for k, dtype in enumerate(after)
        ]
        rounded = self._rounded(node, decision, reads, made)
        if op_class == "untouched":
            target = policy.target_dtype
            rounded = [self.builder.without_other_half(entry, target) for entry in rounded]
        return [_Value(*pair) for pair in zip(rounded, plain)]

    def _decide(
        self,
        policy: Policy,
        node: Node,
        entries: Sequence[Entry],
        kept: Optional[str],
        original: Optional[Node],
    ) -> Decision:
        """Return what is decided for a call, once for all calls that are alike."""
        layer = (original or node).name if policy.fp32_layers else None
        dtypes = [entry.dtype for entry in entries]
        key = (node.call, *dtypes, layer, kept, policy)
        decision = self.decided.get(key)
        if decision is None:
            decision = decide(node.operator, node.attrs, dtypes, policy, layer, kept)
            self.decided[key] = decision
        decision = with_words(decision, node.attrs, self.policy)
        if original is None:
            return decision
        return replace(decision, reason=f"stands in for {original.op}: {decision.reason}")

    def _rounded(
        self, node: Node, decision: Decision, reads: Sequence[Entry], made: List[Entry]
    ) -> List[Entry]:
        """Return an operator's outputs in the dtype that its decision rounds them to."""
        if decision.through is not None:
            return [
                self.builder.cast(entry, decision.through)
                if decision.rounds(k, entry.dtype)
                else entry
                for k, entry in enumerate(made)
            ]
        if node.operator == "Cast" and reads[0].dtype in HALVES and made[0].dtype == "float32":
            return [made[0]._replace(source=reads[0])]
        return made

    def _read(self, entry: Entry, decision: Decision, position: int) -> Entry:
        """Return the entry that the operator reads as input `position`."""
        dtype = decision.reads[position]
        if dtype is None:
            return entry
        if position in decision.guards:
            entry = Entry(self.builder.copied(entry.output), entry.dtype)
        if decision.through is not None:
            entry = self.builder.cast(entry, decision.through)
        return self.builder.cast(entry, dtype)

    def _restored(self, value: _Value) -> Entry:
        """Return an old output in the dtype that it had without mxamp."""
        entry, plain = value
        if entry.dtype == plain or not {entry.dtype, plain} <= CASTABLE:
            return entry
        return self.builder.cast(entry, plain)

    # ------------------------------------------------------------------ several nodes for one

    def _substitute(self, i: int, node: Node, inputs: Sequence[_Value]) -> Sequence[_Value]:
        """Add what stands in for a node; its last parts are the node's outputs."""
        name, detail = self.substituted[i]
        substitution = substitutions.ALL[name]
        float32 = substitution.why_float32(self.usage.training)
        hidden = {k: v for k, v in node.attrs.items() if k.startswith("__")}
        parts = substitution.build(node.attrs, detail)
        values, outputs = list(inputs), list(inputs)
        for part in parts:
            # The last part has the node's name and outputs, and stays in float32 for its reasons.
            kept = float32 or (FLOAT32_PART if part.float32 else None)
            if kept is None and not part.suffix:
                kept = self.kept.get(i)
            name = self.builder.new_name(f"{node.name}_{part.suffix}") if part.suffix else node.name
            count = 1 if part.suffix else node.num_outputs
            stand_in = Node(part.op, name, {**hidden, **part.attrs}, num_outputs=count)
            outputs = self._operator(stand_in, [values[k] for k in part.inputs], kept, node)
            values.append(outputs[0])
        # Parts that all have names of their own are each an output.
        return values[-node.num_outputs :] if parts[-1].suffix else outputs

    def _rewrite_bodies(self, i: int, node: Node, inputs: Sequence[_Value]) -> Sequence[Rewrite]:
        """Rewrite the bodies of a loop or a branch, where that is safe."""
        if not node.subgraphs:
            return ()
        if not rewrites_bodies(node, self.usage.training):
            return [Rewrite(body) for body in node.subgraphs]
        dtypes = [value.plain for value in inputs]
        return [
            rewrite(
                body,
                self.policy,
                body_usage(self.usage, node, k, dtypes),
                self.body_choices.get((i, k), NONE),
            )
            for k, body in enumerate(node.subgraphs)
        ]


def _behind_inserted(node: Node, inputs: Sequence[_Value]) -> Optional[_Value]:
    """Return what stands for a cast that a conversion has put in; None for other nodes."""
    if not is_inserted(node):
        return None
    if reads_as_inserted(node, inputs[0].plain):
        # The policy decides anew.
        return _Value(inputs[0].entry, node.attrs["dtype"])
    # MXNet's own conversion casts integers too, which does nothing to them.
    return inputs[0] if node.op == "amp_cast" else None


def _can_substitute(name: str, values: Sequence[_Value]) -> bool:
    dtypes = {"float32"} if substitutions.ALL[name].constants else CASTABLE
    return {value.plain for value in values} <= dtypes


def _castable(values: Sequence[_Value]) -> bool:
    return {value.plain for value in values} <= CASTABLE


def _output_dtypes(
    node: Node, plain: Sequence[str], reads: Sequence[Entry]
) -> Tuple[Sequence[str], Sequence[str]]:
    """Return the dtypes of a node's outputs without mxamp, and with these inputs."""
    before, dtypes = infer_outputs(node, plain), [entry.dtype for entry in reads]
    return before, before if dtypes == list(plain) else infer_outputs(node, dtypes)


def _common(dtypes: Sequence[str], narrow: bool) -> str:
    """Return the dtype that `amp_multicast` brings its inputs to."""
    halves = sorted(set(dtypes) & HALVES)
    if len(set(dtypes)) == 1 or (narrow and len(halves) == 1):
        return halves[0] if halves else "float32"
    return "float32"


def with_reversed_inputs(graph: Graph) -> Graph:
    """Return a graph that computes the same, whose symbol lists its inputs in reverse.

    `graph` has its inputs in the order of its symbol's `list_inputs`, which follows from a
    depth-first walk. The first comes last once all others are among its dependencies, which the
    walk visits and nothing reads.
    """
    inputs = [i for i, node in enumerate(graph.nodes) if node.is_variable]
    operators = [i for i, node in enumerate(graph.nodes) if not node.is_variable]
    places = {old: new for new, old in enumerate([*reversed(inputs), *operators])}
    nodes = [
        graph.nodes[old].reading([(places[i], k) for i, k in graph.nodes[old].inputs])
        for old in places
    ]
    if len(inputs) > 1:
        last = len(inputs) - 1
        nodes[last].control_deps = list(range(last))
    return Graph(nodes, [(places[i], k) for i, k in graph.heads], graph.attrs)


OTHER_ORDER = (
    "the rewritten graph takes its inputs in another order; please report this graph: "
    "{before} became {after}"
)


def own_marks(symbol: Symbol) -> FrozenSet[str]:
    """Return the regions that hold in a graph where mixed precision is off around it.

    A converted graph has its casts, for whoever runs it.
    """
    if REGION not in Symbol.tojson(symbol, remove_amp_cast=False):
        return frozenset()
    graph = Graph.from_symbol(symbol)
    return frozenset() if is_converted(graph) else graph.marks


@collector_paused()
def rewritten_symbol(
    graph: Graph,
    symbol_class: Type[Symbol],
    policy: Policy,
    usage: Usage,
    choices: Choices = NONE,
    reverse: bool = False,
) -> Optional[Symbol]:
    """Return a symbol's graph rewritten, as a symbol of that class that is about to run.

    None where there is nothing to cast. Inputs and outputs keep names, order and dtypes; inputs
    that are to `reverse` come in the reverse order.
    """
    result = rewrite(graph, policy, usage, choices)
    for _, node, decision in result.decided():
        note_precision(node.operator, decision.precision)
    if result.graph == graph:
        return None
    for _, node, decision in result.decided():
        if decision.through is not None:
            node.attrs = {**node.attrs, PRECISION: decision.precision}
    rewritten = with_reversed_inputs(result.graph) if reverse else result.graph
    symbol = rewritten.to_symbol(symbol_class)
    before, after = graph.input_names, symbol.list_inputs()
    if reverse:
        before = before[::-1]
    if after != before:
        raise AmpError(OTHER_ORDER.format(before=before, after=after))
    return symbol
