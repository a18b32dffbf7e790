"""Choices for a graph before casts: which nodes stay in float32, and which are replaced.

A backend says what it chooses for the operators of one graph; the rest is here: the shapes that
rules and passes read, bodies of loops, and the graph with what was chosen.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Mapping, NamedTuple, Sequence, Tuple, Union

from ..graph.edit import Edit
from ..graph.ir import (
    HALVES,
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
from . import NONE, Backend, Site, shape_checks
from .passes import INFERENCE, TRAINING, Call, Detail, Parts, Pass, Shapes

Match = Tuple[str, Detail]  #: the name of a substitution, and the detail of the call


class Choices(NamedTuple):
    """A backend's choices for a graph: nodes to keep in float32, and nodes to replace.

    `bodies` hold the choices for bodies of loops, by (index of the loop, position of the body).
    """

    kept_float32: frozenset[tuple[int, Reason]] = frozenset()
    substituted: frozenset[tuple[int, Match]] = frozenset()
    bodies: frozenset[tuple[tuple[int, int], Choices]] = frozenset()


#: `NONE`, an empty tuple, where there is nothing to do.
Chosen = Union[Choices, Tuple[()]]


@dataclass(frozen=True)
class Setting:
    """The input of a backend's choices: a graph with its policies, dtypes and input shapes."""

    graph: Graph
    policies: Sequence[Policy]  #: of each node
    policy: Policy  #: of the graph
    usage: Usage
    shapes: Mapping[int, Shapes]  #: the known shapes of inputs, by node index

    @cached_property
    def dtypes(self) -> Mapping[Output, str]:
        """The dtype of each output in the graph before casts, as MXNet infers it."""
        return infer_dtypes(self.graph, self.usage)


class Sites:
    """Builder of the `Site` (operator call, shapes and neighbors) of each node in a graph."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._readers = Counter(output for node in setting.graph.nodes for output in node.inputs)

    def at(self, i: int) -> Site:
        """Return the `Site` of node i: its operator call, shapes and neighbors."""
        graph, usage, policy = self.setting.graph, self.setting.usage, self.setting.policies[i]
        node, uses, casts_weight = graph.nodes[i], 0, False
        if node.inputs[1:]:
            weight = graph.nodes[node.inputs[1][0]]
            held = usage.dtypes.get(weight.name) == policy.target_dtype
            if not weight.is_variable or not (weight.name in usage.stored or held):
                uses = self._readers[node.inputs[1]]
            offline = weight.is_variable and weight.name in usage.offline and uses == 1
            casts_weight = uses > 0 and (usage.training or usage.converting) and not offline
        shapes = self.setting.shapes.get(i, ())
        return Site(node.operator, node.attrs, shapes, usage.training, uses, casts_weight)


class Passes:
    """A backend's passes (one per faster equivalent), indexed by name and by replaced operator."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.by_name: Mapping[str, Pass] = {str(one.name): one for one in passes}
        self.by_operator: dict[str, list[Pass]] = {}
        for one in passes:
            for operator in sorted(one.ops):
                self.by_operator.setdefault(operator, []).append(one)

    def match(self, call: Call) -> Match | None:
        """Return (name, numbers to build it) of a call's faster equivalent; None if none fits.

        A user who sets the class of an operator turns its substitutions off.
        """
        if call.operator not in self.by_operator or call.policy.rule(call.operator).given:
            return None
        phase = TRAINING if call.training else INFERENCE
        sizes = [math.prod(shape) for shape in call.shapes if shape is not None]
        size = max(sizes, default=math.inf) / (2 if call.training else 1)
        for one in self.by_operator[call.operator]:
            small = call.policy.target_dtype == "float32" and size < one.least_float32
            if one.name in call.policy.substitutions and one.phase in (None, phase) and not small:
                detail = one.match(call)
                if detail is not None:
                    return str(one.name), detail
        return None

    def match_in(self, setting: Setting, call: Call) -> Match | None:
        """Return the match of a node; None in a conversion, or if its input dtypes don't fit."""
        match = None if setting.usage.converting else self.match(call)
        if match is None:
            return None
        one = self.by_name[match[0]]
        read = [setting.dtypes[output] for output in one.inputs(setting.graph, call.node)]
        # A float32 policy leaves arrays in half precision to MXNet.
        castable = call.policy.target_dtype != "float32" or HALVES.isdisjoint(read)
        return match if castable and one.fits(read) else None

    def inputs(self, graph: Graph, node: Node) -> Sequence[Output]:
        """Return the tensors that a node's faster equivalent reads (by default, its inputs)."""
        passes = self.by_operator.get(node.operator)
        return passes[0].inputs(graph, node) if passes else node.inputs


def _input_shapes(
    graph: Graph, policies: Sequence[Policy], usage: Usage, passes: Passes
) -> Mapping[int, Shapes]:
    """Return input shapes by node index, for nodes whose rules or equivalents depend on shapes.

    A conversion knows no shapes of data: it reads those of weights.
    """
    shapes: dict[Output, Shape | None] = {}
    wanted: dict[int, Sequence[Output | None]] = {}
    for i, node in enumerate(graph.nodes):
        if node.is_variable:
            if node.name in usage.shapes:
                shapes[i, 0] = usage.shapes[node.name]
            continue
        by_shape = policies[i].rule(node.operator).by_shape
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


def last_reason(site: Site, rules: Sequence[ShapeRule]) -> Reason | None:
    """Return the reason of the last shape rule that keeps a call in float32, or None."""
    checks = shape_checks()
    kept = (one.reason for one in reversed(rules) if checks[one.name].holds(site, one.limit))
    return next(kept, None)


class ChoosingBackend(Backend):
    """Base class of backends that choose float32, or faster operators, depending on shapes."""

    passes: ClassVar[Passes] = Passes(())  #: for graphs that run

    def choose_nodes(self, setting: Setting) -> tuple[Mapping[int, Reason], Mapping[int, Match]]:
        """Return two dicts by node index: why nodes stay in float32, and what replaces nodes."""
        sites, kept = Sites(setting), {}
        for i, (node, policy) in enumerate(zip(setting.graph.nodes, setting.policies)):
            rules = () if node.is_variable else policy.rule(node.operator).by_shape
            reason = last_reason(sites.at(i), rules)
            if reason is not None:
                kept[i] = reason
        return kept, {}

    def choose(self, graph: Graph, policy: Policy, usage: Usage) -> Chosen:
        """Return the choices for a graph and its loop bodies; `NONE` if nothing is to change."""
        inside = (policy_for_node(policy, {REGION: mark}) for mark in graph.marks)
        if not any(one.depends_on_shapes for one in (policy, *inside)):
            return NONE
        policies = [policy_for_node(policy, node.attrs, usage.regions_only) for node in graph.nodes]
        known = _input_shapes(graph, policies, usage, self.passes)
        setting = Setting(graph, policies, policy, usage, known)
        kept, substituted = self.choose_nodes(setting)
        bodies: dict[tuple[int, int], Chosen] = {}
        for i, node in enumerate(graph.nodes):
            if rewrites_bodies(node, usage.training):
                dtypes = [setting.dtypes[output] for output in node.inputs]
                for k, body in enumerate(node.subgraphs):
                    inner = replace(body_usage(usage, node, k, dtypes), offline=frozenset())
                    bodies[i, k] = self.choose(body, policy, inner)
        chosen = frozenset((key, body) for key, body in bodies.items() if body)
        choices = Choices(frozenset(kept.items()), frozenset(substituted.items()), chosen)
        return choices if any(choices) else NONE

    def leaves_as_is(self, graph: Graph, policy: Policy) -> bool:
        """Return whether a graph runs exactly as in plain MXNet under a policy."""
        passes = (self.passes.by_operator.get(node.operator, ()) for node in graph.all_nodes)
        replaced = any(one.name in policy.substitutions for some in passes for one in some)
        return super().leaves_as_is(graph, policy) and not (replaced or graph.marks)

    def with_choices(self, graph: Graph, choices: Chosen, training: bool) -> Graph:
        """Return the graph with nodes replaced or marked float32 as `choices` says."""
        if not choices:
            return graph
        edit = Edit(graph, {})
        for i, reason in choices.kept_float32:
            edit.change(i, kept_float32=reason)
        for (i, k), body in choices.bodies:
            bodies = list(edit.node(i).subgraphs)
            bodies[k] = self.with_choices(bodies[k], body, training)
            edit.change(i, subgraphs=bodies)
        for i, (name, detail) in sorted(choices.substituted):
            one = self.passes.by_name[name]
            parts = Parts(edit, i, one, one.inputs(graph, graph.nodes[i]), training)
            for k, output in enumerate(one.apply(parts, detail) or ()):
                if output != (i, k):
                    edit.redirect((i, k), output)
        return edit.applied()

    def reason_by_shapes(self, rule: Rule, site: Site) -> Reason | None:
        """Return why the shapes of an eager call keep it in float32, or None."""
        checks = shape_checks()
        return last_reason(site, [one for one in rule.by_shape if checks[one.name].in_calls])

    def cached_op_flags(self, flags: Sequence[Any], graph: Graph) -> Sequence[Any]:
        """Return a CachedOp's flags, without static_shape if it breaks an RNN in the graph.

        It leaves the RNN's training flag unset.
        """
        unset = any(self.reads_unset_flag(node) for node in graph.nodes if node.op == "RNN")
        return [flag for flag in flags if flag[0] != "static_shape" or not unset]

    def reads_unset_flag(self, rnn: Node) -> bool:
        """Return whether an RNN reads its training flag, which static_shape leaves unset.

        If the memory of the flag says training, an LSTM with a projection fails in inference with
        "No training support", and an LSTM with dropout drops elements.
        """
        dropout, projection = rnn.attrs.get("p", "0"), rnn.attrs.get("projection_size", "None")
        return float(dropout) > 0 or projection != "None"
