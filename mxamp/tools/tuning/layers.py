"""The layers of a model that a policy computes in its target dtype."""

from dataclasses import dataclass
from typing import Dict, List, Optional

from ...graph.casts.insert import rewrite
from ...graph.speed.shape_rules import choose
from ...policy.policy import Policy
from .traced import Traced

__all__ = ["Layer", "lowered_layers", "substitutions_in"]


@dataclass(frozen=True)
class Layer:
    """A layer that a policy lowers; nodes of one name are one layer, for a policy knows names."""

    name: str
    operator: str
    position: int  #: the first node's in `Graph.all_nodes`
    error: Optional[float] = None  #: relative, of the outputs, to first order; None: not known
    gain: Optional[float] = None  #: seconds, forward


def lowered_layers(traced: Traced, policy: Policy, training: bool) -> List[Layer]:
    """Return the layers of a graph that a policy computes in its target dtype, in order."""
    usage = traced.usage(training)
    choices = choose(traced.graph, policy, usage)
    low = {
        node.name
        for _, node, decision in rewrite(traced.graph, policy, usage, choices).decided()
        if decision.precision == policy.target_dtype
    }
    # Of what is substituted, parts with names of their own may be low.
    substituted = {i for i, _ in choices.substituted}
    layers: Dict[str, Layer] = {}
    for i, node in enumerate(traced.graph.all_nodes):
        if node.is_variable:
            continue
        parts = i in substituted and any(name.startswith(f"{node.name}_") for name in low)
        if node.name in low or parts:
            layers.setdefault(node.name, Layer(node.name, node.operator, i))
    return list(layers.values())


def substitutions_in(traced: Traced, policy: Policy, training: bool) -> List[str]:
    """Return the substitutions that a policy makes in a graph, sorted."""
    choices = choose(traced.graph, policy, traced.usage(training))
    return sorted({name for _, (name, _) in choices.substituted})
