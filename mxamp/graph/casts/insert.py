"""Rewrite a graph for a policy: insert `amp_cast` where an operator must read another dtype.

The rewrite walks the nodes once, inputs first. It maps each output of the old graph to its dtype
without mxamp ("plain") and to an entry of the new graph. Nodes are identified by index, because a
block that is called twice gives two nodes the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, AbstractSet, Any, Iterator, NamedTuple, Sequence

from mxnet.symbol import Symbol

from ...backends import backend_of
from ...errors import AmpError
from ...policy import regions
from ...policy.active import record_lowered
from ...policy.decision import CASTABLE, Decision, decide
from ...policy.policy import Policy
from ...policy.regions import CAST, REGION
from ...policy.values import is_true
from .. import ir
from ..ir import CASTS, HALVES, ROLE, Graph, Node, Output, Usage
from .builder import Builder, NewOutput

if TYPE_CHECKING:
    from ...backends.choices import Chosen


@dataclass
class Rewrite:
    """A graph rewritten with casts, and the cast decision for each operator by node index."""

    graph: Graph
    decisions: dict[int, Decision] = field(default_factory=dict)
    #: The rewritten bodies of loops, by index of the loop.
    bodies: dict[int, list[Rewrite]] = field(default_factory=dict)

    def decided(self) -> Iterator[tuple[Graph, Node, Decision]]:
        """Yield (graph, node, cast decision) for each operator, those in loop bodies included."""
        for i, decision in self.decisions.items():
            yield self.graph, self.graph.nodes[i], decision
            for body in self.bodies.get(i, ()):
                yield from body.decided()


def rewrite(graph: Graph, policy: Policy, usage: Usage, choices: Chosen | None = None) -> Rewrite:
    """Return a copy of a graph with a policy's casts, and with faster equivalents of operators.

    `choices` are those of the policy's backend for the graph; None to choose them here.
    """
    backend = backend_of(policy.device)
    choices = backend.choose(graph, policy, usage) if choices is None else choices
    return _with_casts(backend.with_choices(graph, choices, usage.training), policy, usage)


def _with_casts(graph: Graph, policy: Policy, usage: Usage) -> Rewrite:
    """Return a copy of a graph with the casts that a policy requires, operators unchanged."""
    to_widen: AbstractSet[str] = frozenset()
    # The dtypes of a promote_function's arguments are known only after a walk. Where they differ,
    # the next walk widens them.
    while True:
        rewriter = _Rewriter(graph, policy, usage)
        result = rewriter.run(to_widen)
        mixed = {cast for cast, dtypes in rewriter.promoted.items() if len(dtypes) > 1}
        if mixed <= to_widen:
            return result
        to_widen = mixed | to_widen


class _Value(NamedTuple):
    """A rewritten output (`entry`), and the dtype that it has without mxamp (`plain`)."""

    entry: NewOutput
    plain: str


class _CastPlan(NamedTuple):
    """The casts to insert around one operator, with the policy and precision class behind them."""

    policy: Policy
    op_class: str
    to_lower: frozenset[int]  #: inputs that speed alone kept in float32, lowered before `decision`
    decision: Decision
    key: tuple[Any, ...]  #: equal for operators with equal plans and dtypes


class _Rewriter:
    """A single pass over a graph's nodes that copies them to a new graph and inserts casts."""

    def __init__(self, graph: Graph, policy: Policy, usage: Usage) -> None:
        self.graph, self.policy, self.usage = graph, policy, usage
        self.promoted: dict[str, set[str]] = {}  #: the dtypes of each promote_function's arguments
        self.backend = backend_of(policy.device)
        self.builder = Builder(graph, usage.accumulated, self.backend.casts_empty_arrays)
        self.values: dict[Output, _Value] = {}
        # Graphs call the same operators over and over.
        self.decided: dict[tuple[Any, ...], Decision] = {}
        self.inferred: dict[tuple[Any, ...], tuple[Sequence[str], Sequence[str]]] = {}
        self.result = Rewrite(Graph(self.builder.nodes, [], dict(graph.attrs)))

    def run(self, to_widen: AbstractSet[str]) -> Rewrite:
        """Copy the graph with casts, and return the copy with the cast decisions.

        The `promote_function` calls in `to_widen`, named by their marks, compute in float32.
        """
        self.to_widen = to_widen
        for i, node in enumerate(self.graph.nodes):
            for k, value in enumerate(self._add_node(node)):
                self.values[i, k] = value
        heads = [self.values[output] for output in self.graph.heads]
        self.result.graph.heads = [
            (self._restore(value) if self.usage.restore else value.entry).output for value in heads
        ]
        return self.result

    def _add_node(self, node: Node) -> Sequence[_Value]:
        """Copy a node of the original graph, with casts, to the new one; return its outputs."""
        if node.is_variable:
            plain = ir.variable_dtype(node, self.usage)
            held = self.policy.target_dtype if node.name in self.usage.stored else plain
            return [_Value(NewOutput((self.builder.add(node), 0), held), plain)]
        inputs: Sequence[_Value] = [self.values[output] for output in node.inputs]
        if node.op == "amp_cast" and node.stands_for is not None:
            # A cast for an equivalent changes no dtype that the graph has without mxamp.
            [source] = inputs
            return [source._replace(entry=self.builder.cast(source.entry, node.attrs["dtype"]))]
        cast = self._add_cast(node, inputs[0]) if node.op in CASTS else None
        if cast is not None:
            return [cast]
        if node.op == "amp_multicast" and _are_castable(inputs):
            # On CPUs amp_multicast has no kernel for float16 next to float32.
            narrow = is_true(node.attrs.get("cast_narrow", "False"))
            dtype = _multicast_dtype([value.plain for value in inputs], narrow)
            return [_Value(self.builder.cast(value.entry, dtype), dtype) for value in inputs]
        if CAST in node.attrs:
            inputs = self._cast_argument(node, inputs)
        return self._add_operator(node, inputs)

    def _add_cast(self, node: Node, source: _Value) -> _Value | None:
        """Return the output that replaces an existing cast; None to copy the cast as an operator.

        Inserted casts are left out. But one that widens half precision other than the target dtype
        stays: operators would compute in float32 on it, since they read no two half dtypes.
        """
        dtype, read = node.attrs["dtype"], source.entry.dtype
        stays = read in HALVES - {self.policy.target_dtype} and dtype == "float32"
        if node.is_inserted_cast and not stays:
            if source.plain in CASTABLE or (node.op == "Cast" and source.plain == "float64"):
                return _Value(source.entry, dtype)
            if node.op == "amp_cast":
                return source  # MXNet's own conversion casts integers too, which is a no-op
        if node.op == "amp_cast" and {read, dtype} <= CASTABLE:
            return _Value(self.builder.cast(source.entry, dtype, node), dtype)
        return None

    def _cast_argument(self, node: Node, inputs: Sequence[_Value]) -> Sequence[_Value]:
        """Cast a traced function's arguments as its decorator (`half_function` or similar) asks.

        Tracing the function has marked them in the graph.
        """
        dtype = regions.argument_dtype(self.policy, node.attrs, self.usage.regions_only)
        cast = node.attrs[CAST]
        if cast.startswith(regions.WIDEST_INSIDE):
            dtypes = self.promoted.setdefault(cast, set())
            dtypes.update({value.entry.dtype for value in inputs} & CASTABLE)
            dtype = dtype if cast in self.to_widen else None
        if dtype is None or not _are_castable(inputs):
            return inputs
        return [value._replace(entry=self.builder.cast(value.entry, dtype)) for value in inputs]

    # ------------------------------------------------------------------ operators

    def _add_operator(self, node: Node, inputs: Sequence[_Value]) -> list[_Value]:
        """Copy an operator, with casts around it, to the new graph; return its outputs."""
        bodies = self._rewrite_bodies(node, inputs)
        plan = self._plan(node, inputs)
        reads = self._cast_inputs(node, plan, inputs)
        copied = node.with_inputs([entry.output for entry in reads])
        copied.subgraphs = [body.graph for body in bodies]
        added = self.builder.add(copied)
        self.result.decisions[added] = plan.decision
        if bodies:
            self.result.bodies[added] = list(bodies)
        if plan.key not in self.inferred:
            given, read = [value.plain for value in inputs], [entry.dtype for entry in reads]
            without = ir.infer_outputs(node, given)
            made = without if read == given else ir.infer_outputs(node, read)
            self.inferred[plan.key] = without, made
        plain, dtypes = self.inferred[plan.key]
        for_speed = (node.kept_float32 is not None and not node.kept_float32.changes_results) or (
            plan.op_class in ("neutral", "widest") and any(entry.for_speed for entry in reads)
        )
        outputs = [
            NewOutput((added, k), dtype, for_speed=for_speed and dtype == "float32")
            for k, dtype in enumerate(dtypes)
        ]
        rounded = self._round_outputs(node, plan, reads, outputs)
        return [_Value(*pair) for pair in zip(rounded, plain)]

    def _plan(self, node: Node, inputs: Sequence[_Value]) -> _CastPlan:
        """Return the casts to insert around an operator, from its policy and inputs' dtypes."""
        policy = regions.policy_for_node(self.policy, node.attrs, self.usage.regions_only)
        op_class, target = policy.rule(node.operator).op_class, policy.target_dtype
        reads_plain = op_class == "untouched"
        entries = [self._restore(value) if reads_plain else value.entry for value in inputs]
        to_lower = _kept_for_speed(entries, target) if op_class == "widest" else frozenset()
        dtypes = [target if k in to_lower else entry.dtype for k, entry in enumerate(entries)]
        key = _call_key(policy, node, inputs, dtypes)
        if key not in self.decided:
            self.decided[key] = self._decide(policy, node, dtypes)
        return _CastPlan(policy, op_class, to_lower, self.decided[key], key)

    def _decide(self, policy: Policy, node: Node, dtypes: Sequence[str]) -> Decision:
        """Return the cast decision for an operator, with a reason for `explain` to show."""
        original = node.stands_for
        layer = (original or node).name if policy.fp32_layers else None
        decision = decide(node.operator, node.attrs, dtypes, policy, layer, node.kept_float32)
        decision = regions.with_region_reason(decision, node.attrs)
        if original is None:
            return decision
        reason = self.backend.said(f"stands in for {original.op}: {decision.reason}")
        return replace(decision, reason=reason)

    def _cast_inputs(
        self, node: Node, plan: _CastPlan, inputs: Sequence[_Value]
    ) -> list[NewOutput]:
        """Cast an operator's inputs as `plan` requires; return the outputs to read instead."""
        if plan.op_class == "untouched":
            reads = [self._restore(value) for value in inputs]
        else:
            entries = [value.entry for value in inputs]
            for k in sorted(plan.to_lower):
                entries[k] = self.builder.cast(entries[k], plan.policy.target_dtype)
            reads = [self._cast_input(entry, plan.decision, k) for k, entry in enumerate(entries)]
        emulated = node.kept_float32 is not None and node.kept_float32.is_missing_kernel
        if emulated and plan.decision.rounded_to is None and not self.usage.converting:
            # Casts can't read a view of a blocked float32 output either.
            reads[0] = self.builder.add_plain_layout(reads[0])
        return reads

    def _cast_input(self, entry: NewOutput, decision: Decision, position: int) -> NewOutput:
        """Cast one input of an operator as `decision` requires; return the output to read."""
        dtype = decision.reads[position]
        if dtype is None:
            return entry
        if position in decision.copied:
            entry = NewOutput(self.builder.add_copy(entry.output), entry.dtype)
        if decision.rounded_to is not None:
            entry = self.builder.cast(entry, decision.rounded_to)
        return self.builder.cast(entry, dtype)

    def _round_outputs(
        self, node: Node, plan: _CastPlan, reads: Sequence[NewOutput], made: list[NewOutput]
    ) -> list[NewOutput]:
        """Return an operator's outputs for its consumers, rounded or cast where `plan` requires."""
        cast, decision, through = self.builder.cast, plan.decision, plan.decision.rounded_to
        if through is not None:
            return [
                cast(entry, through) if decision.rounds(k, entry.dtype) else entry
                for k, entry in enumerate(made)
            ]
        if node.operator == "Cast" and reads[0].dtype in HALVES and made[0].dtype == "float32":
            return [made[0]._replace(source=reads[0])]
        if plan.op_class != "untouched" or plan.policy.target_dtype == "float32":
            return made
        # A model fused for bfloat16 computes in it under a float16 policy too, whose lists don't
        # say which operators can read bfloat16.
        others = HALVES - {plan.policy.target_dtype}
        return [cast(entry, "float32") if entry.dtype in others else entry for entry in made]

    def _restore(self, value: _Value) -> NewOutput:
        """Return an output of the new graph, cast back to the dtype that it has without mxamp."""
        entry, plain = value
        if entry.dtype == plain or not {entry.dtype, plain} <= CASTABLE:
            return entry
        return self.builder.cast(entry, plain)

    def _rewrite_bodies(self, node: Node, inputs: Sequence[_Value]) -> Sequence[Rewrite]:
        """Return the subgraphs of a loop or branch with casts, or unchanged if casts are unsafe."""
        if not ir.rewrites_bodies(node, self.usage.training):
            return [Rewrite(body) for body in node.subgraphs]
        dtypes = [value.plain for value in inputs]
        return [
            _with_casts(body, self.policy, ir.body_usage(self.usage, node, k, dtypes))
            for k, body in enumerate(node.subgraphs)
        ]


def _call_key(
    policy: Policy, node: Node, inputs: Sequence[_Value], dtypes: Sequence[str]
) -> tuple[Any, ...]:
    """Return a cache key that is equal for operators with equal casts and dtypes."""
    original = node.stands_for
    return (
        id(node) if node.subgraphs else node.call,
        node.num_outputs,
        node.attrs.get(REGION),
        node.attrs.get(CAST),
        (original or node).name if policy.fp32_layers else None,
        node.kept_float32,
        original and original.op,
        *[value.plain for value in inputs],
        *dtypes,
    )


def _kept_for_speed(entries: Sequence[NewOutput], target: str) -> frozenset[int]:
    """Return the positions of inputs kept in float32 only for speed, if all others are in `target`.

    Those are the inputs that a rule about speed alone keeps in float32.
    """
    others = {e.dtype for e in entries if e.dtype in CASTABLE and not e.for_speed}
    return frozenset(k for k, e in enumerate(entries) if e.for_speed and others == {target})


def _are_castable(values: Sequence[_Value]) -> bool:
    """Return whether all outputs would be float16, bfloat16 or float32 without mxamp."""
    return {value.plain for value in values} <= CASTABLE


def _multicast_dtype(dtypes: Sequence[str], cast_narrow: bool) -> str:
    """Return the dtype to which `amp_multicast` casts inputs of these dtypes."""
    halves = sorted(set(dtypes) & HALVES)
    if len(set(dtypes)) == 1 or (cast_narrow and len(halves) == 1):
        return halves[0] if halves else "float32"
    return "float32"


# ---------------------------------------------------------------------- symbols

OTHER_ORDER = (
    "the rewritten graph has its inputs in another order; please report this graph: "
    "{before} became {after}"
)


def region_marks(symbol: Symbol) -> frozenset[str]:
    """Return the distinct values of the attribute that records `autocast` regions in a symbol.

    A converted symbol has none: its casts are part of it.
    """
    if REGION not in Symbol.tojson(symbol, remove_amp_cast=False):
        return frozenset()
    graph = Graph.from_symbol(symbol)
    return frozenset() if graph.is_converted else graph.marks


@ir.collector_paused()
def rewritten_graph(graph: Graph, policy: Policy, usage: Usage, choices: Chosen) -> Graph:
    """Return a graph ready to run with a policy's casts; `graph` itself if nothing changes."""
    result = rewrite(graph, policy, usage, choices)
    for _, node, decision in result.decided():
        record_lowered(node.operator, decision.precision)
    if result.graph == graph:
        return graph
    for _, node, decision in result.decided():
        if decision.rounded_to is not None:
            node.attrs = {**node.attrs, ROLE: decision.precision}
    return result.graph


def runnable_symbol(graph: Graph, symbol_class: type[Symbol], inputs: Sequence[str]) -> Symbol:
    """Return a rewritten graph as a symbol; raise if the order of its inputs has changed."""
    symbol = graph.to_symbol(symbol_class)
    after = symbol.list_inputs()
    if after != list(inputs):
        raise AmpError(OTHER_ORDER.format(before=inputs, after=after))
    return symbol
