"""Choices for a graph before it gets its casts: operators kept in float32, and equivalents.

A backend says what it chooses for the operators of one graph; the rest is here: the shapes that
rules and passes read, bodies of loops, and the graph with what was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

from ..graph.edit import Edit
from ..graph.ir import (
    Graph,
    Node,
    Output,
    Shape,
    Usage,
    body_usage,
    infer_dtypes,
    infer_shapes,
    rewrites_bodies,
)
from ..policy.policy import Policy
from ..policy.regions import REGION, policy_for_node
from ..policy.rules import Reason, Rule, ShapeRule
from . import NONE, shape_checks
from .passes import INFERENCE, TRAINING, Call, Detail, Parts, Pass, Shapes

Match = Tuple[str, Detail]  #: the name of a substitution, and the detail of the call


class Choices(NamedTuple):
    """The choices for a graph, by node index: reasons to keep nodes in float32, and substitutions.

    `bodies` hold the choices for bodies of loops, by (index of the loop, position of the body).
    """

    kept: frozenset[tuple[int, Reason]] = frozenset()
    substituted: frozenset[tuple[int, Match]] = frozenset()
    bodies: frozenset[tuple[tuple[int, int], Choices]] = frozenset()


@dataclass
class Site:
    """An operator and its surroundings in the graph. Unknown shapes are None."""

    node: Node
    shapes: Shapes  #: of its inputs
    training: bool
    uses: int = 1  #: how often the graph reads its second input; 0 if that input needs no cast
    casts_weight: bool = False  #: gradients may be computed, and its second input would be cast
    feeds_norm: bool = False  #: a BatchNorm reads its output, without a change of layout between
    blocked: bool = False  #: its first input is in oneDNN's blocked layout
    reads_volume: bool = False  #: an input may be a 3-D convolution's output, in that layout
    has_blocks: bool = False  #: it will be replaced by a convolution with a blocked kernel
    in_call: bool = False  #: an eager call, whose casts take several times as long as a node's

    @property
    def sizes(self) -> tuple[Shape, Shape] | None:
        """The shapes of its data and its weight; None unless both are known."""
        data, weight = (*self.shapes, None, None)[:2]
        return None if data is None or weight is None else (data, weight)


class Passes:
    """The passes of a backend for graphs that run; of those that fit, the first applies."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.by_name: Mapping[str, Pass] = {str(one.name): one for one in passes}
        self.by_operator: dict[str, list[Pass]] = {}
        for one in passes:
            for operator in sorted(one.ops):
                self.by_operator.setdefault(operator, []).append(one)

    def match(self, call: Call) -> Match | None:
        """Return the match of a call's substitution; None without one that its policy allows.

        A user who sets the class of an operator turns its substitutions off.
        """
        if call.operator not in self.by_operator or call.policy.rule(call.operator).given:
            return None
        phase = TRAINING if call.training else INFERENCE
        for one in self.by_operator[call.operator]:
            if one.name in call.policy.substitutions and phase in one.phases:
                detail = one.match(call)
                if detail is not None:
                    return str(one.name), detail
        return None

    def inputs(self, graph: Graph, node: Node) -> Sequence[Output]:
        """Return the tensors that a pass reads in place of a node's inputs."""
        passes = self.by_operator.get(node.operator)
        return passes[0].inputs(graph, node) if passes else node.inputs


#: Returns what stays in float32 and what is substituted, for a graph, the policies of its nodes,
#: the graph's policy, its usage, and the known shapes of inputs by node index.
Chooser = Callable[
    [Graph, Sequence[Policy], Policy, Usage, Mapping[int, Shapes]],
    Tuple[Mapping[int, Reason], Mapping[int, Match]],
]


def choose(graph: Graph, policy: Policy, usage: Usage, passes: Passes, chooser: Chooser) -> Any:
    """Return the choices for a graph and the bodies of its loops; `NONE` for none."""
    inside = (policy_for_node(policy, {REGION: mark}) for mark in graph.marks)
    if not any(one.depends_on_shapes for one in (policy, *inside)):
        return NONE
    return _choose(graph, policy, usage, _input_shapes(graph, policy, usage, passes), chooser)


def _choose(
    graph: Graph, policy: Policy, usage: Usage, known: Mapping[int, Shapes], chooser: Chooser
) -> Any:
    """Return the choices for a graph whose operators have the input shapes `known`, by index."""
    policies = [policy_for_node(policy, node.attrs, usage.off) for node in graph.nodes]
    kept, substituted = chooser(graph, policies, policy, usage, known)
    bodies = {}
    for i, node in enumerate(graph.nodes):
        if rewrites_bodies(node, usage.training):
            dtypes = infer_dtypes(graph, usage)
            for k, body in enumerate(node.subgraphs):
                inner = body_usage(usage, node, k, [dtypes[output] for output in node.inputs])
                inner = replace(inner, offline=frozenset())
                bodies[i, k] = _choose(body, policy, inner, {}, chooser)
    chosen = frozenset((key, body) for key, body in bodies.items() if body != NONE)
    choices = Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)
    return choices if any(choices) else NONE


def _input_shapes(
    graph: Graph, policy: Policy, usage: Usage, passes: Passes
) -> Mapping[int, Shapes]:
    """Return, by node index, the input shapes that rules by shape and passes read.

    A conversion knows no shapes of data: it reads those of weights.
    """
    shapes: dict[Output, Shape | None] = {
        (i, 0): usage.shapes[node.name]
        for i, node in enumerate(graph.nodes)
        if node.is_variable and usage.shapes.get(node.name) is not None
    }
    wanted: dict[int, Sequence[Output | None]] = {}
    for i, node in enumerate(graph.nodes):
        rule = policy_for_node(policy, node.attrs, usage.off).rules.get(node.operator)
        by_shape = rule.by_shape if rule is not None else ()
        if usage.converting and by_shape:
            wanted[i] = [None, *node.inputs[1:2]]
        elif not usage.converting and (by_shape or node.operator in passes.by_operator):
            wanted[i] = passes.inputs(graph, node)
    asked = {o for few in wanted.values() for o in few if o is not None and o not in shapes}
    if asked and shapes:
        shapes.update(infer_shapes(graph, usage.shapes))
    return {
        i: tuple([None if output is None else shapes.get(output) for output in outputs])
        for i, outputs in wanted.items()
    }


def reason_to_keep(site: Site, rules: Sequence[ShapeRule]) -> Reason | None:
    """Return the reason of the last rule that keeps an operator in float32; None without one."""
    checks = shape_checks()
    kept = (one.reason for one in reversed(rules) if checks[one.name].holds(site, one.limit))
    return next(kept, None)


def reason_to_keep_call(
    rule: Rule, attrs: dict[str, str], shapes: Shapes, training: bool, casts_weight: bool
) -> Reason | None:
    """Return why an eager call stays in float32 by the shapes of its inputs; None without a reason.

    `casts_weight`: the call records, and its second input would be cast.
    """
    checks = shape_checks()
    site = Site(Node(rule.operator, "", attrs), shapes, training, 1, casts_weight, in_call=True)
    return reason_to_keep(site, [one for one in rule.by_shape if checks[one.name].in_calls])


def reads_unset_flag(node: Node) -> bool:
    """Return whether an RNN runs wrong under static_shape, which leaves its training flag unset.

    Where the uninitialized flag says training, an LSTM with a projection fails in inference with
    "No training support", and an LSTM with dropout drops elements. Where it changes between a
    forward and a backward pass, one of several `RNN` nodes fails with "_M_range_check".
    """
    attrs = node.attrs
    return node.op == "RNN" and (
        attrs.get("projection_size", "None") != "None" or float(attrs.get("p", "0")) > 0
    )


def with_choices(graph: Graph, choices: Choices, training: bool, passes: Passes) -> Graph:
    """Return the graph with the chosen equivalents and with the reasons of kept nodes."""
    edit = Edit(graph, {})
    for i, reason in choices.kept:
        edit.change(i, kept=reason)
    for (i, k), body in choices.bodies:
        bodies = list(edit.node(i).subgraphs)
        bodies[k] = with_choices(bodies[k], body, training, passes)
        edit.change(i, subgraphs=bodies)
    for i, (name, detail) in sorted(choices.substituted):
        one = passes.by_name[name]
        parts = Parts(edit, i, one, one.inputs(graph, graph.nodes[i]), training)
        for k, output in enumerate(one.apply(parts, detail) or ()):
            if output != (i, k):
                edit.redirect((i, k), output)
    return edit.applied()
