"""Models that a policy was tuned for, known by their graph: whatever their layers are called.

Gluon numbers the layers of a process, so that the same model made twice has other names.
"""

import hashlib
import json
import logging
from dataclasses import replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..framework.wording import counted, shortened
from ..policy.evidence import Evidence, LayerCost, Trial
from ..policy.layers import exactly
from ..policy.policy import Policy
from .ir import Graph, Node

__all__ = ["fingerprint", "layer_costs", "recognised", "warn_of_eager", "warn_of_way"]

logger = logging.getLogger("mxamp")

OTHER_MODEL = (
    "the policy was tuned for another model (of %s, fingerprint %s) than the one that runs (of %s, "
    "fingerprint %s)%s: it may be wrong, or slower than float32. Tune this model"
)
NOT_THERE = "; it has no layers called %s, which were to stay in float32"
EAGER = (
    "%s runs as an eager call in %s, and the policy was tuned for a model in which layers of that "
    "operator stay in float32 (%s): eager calls have no names. Hybridize the model"
)
SLOWER = (
    "the policy was tuned for %s models (%.2f times float32's speed); under init and autocast it "
    "was measured at %.2f times: convert the model with it, by convert_hybrid_block(net, "
    "policy=policy)"
)

#: Operators by which a model is known from the small graphs beside it: losses, metrics.
_MODELS = frozenset({
    "Convolution", "Deconvolution", "FullyConnected", "RNN", "Embedding",
})  # fmt: skip


def fingerprint(graph: Graph) -> str:
    """Return a number for what a graph computes, names and values of parameters apart."""
    return hashlib.sha256(json.dumps(_structure(graph)).encode()).hexdigest()[:16]


def _structure(graph: Graph) -> List[Any]:
    nodes = [
        [
            node.op if node.is_variable else node.operator,
            sorted((k, v) for k, v in node.attrs.items() if _is_computed(node, k)),
            node.inputs,
            [_structure(body) for body in node.subgraphs],
        ]
        for node in graph.nodes
    ]
    return [nodes, graph.heads]


def _is_computed(node: Node, attribute: str) -> bool:
    return not (node.is_variable or attribute.startswith("__"))


def recognised(policy: Policy, graph: Graph) -> Policy:
    """Return a policy for a graph: tuned for this one, by the names that its layers have here.

    Another model than the one that it was tuned for is a warning, once.
    """
    evidence = policy.evidence
    if evidence is None:
        return policy
    known: Dict[str, Policy] = policy.caches.setdefault("recognised", {})
    number = fingerprint(graph)
    placed = _placed(evidence, graph, number)
    nodes = graph.all_nodes
    names = tuple(nodes[layer.position].name for layer in placed)
    key = "\n".join((number, *names))
    if key not in known:
        known[key] = _renamed(policy, placed, names)
        if number != evidence.model:
            _warn_of_model(policy, evidence, graph, number)
    return known[key]


def layer_costs(policy: Policy, graph: Graph) -> Mapping[str, LayerCost]:
    """Return what was measured of a graph's layers, by the names that they have in it.

    There is nothing where the policy was tuned for another graph.
    """
    evidence = policy.evidence
    if evidence is None or fingerprint(graph) != evidence.model:
        return {}
    names = [node.name for node in graph.all_nodes]
    return {
        names[layer.position]: layer
        for layer in reversed(evidence.layers)
        if 0 <= layer.position < len(names)
    }


def _placed(evidence: Evidence, graph: Graph, number: str) -> Sequence[LayerCost]:
    """Return the layers that stay in float32 whose place in a graph of this number is known."""
    layers = evidence.layers if number == evidence.model else ()
    count = len(graph.all_nodes)
    return [one for one in layers if one.kept and 0 <= one.position < count]


def _renamed(policy: Policy, placed: Sequence[LayerCost], names: Tuple[str, ...]) -> Policy:
    there = [exactly(layer.name) for layer in placed]
    here = [exactly(name) for name in names]
    if there == here:
        return policy
    others = [pattern for pattern in policy.fp32_layers if pattern not in there]
    renamed = replace(policy, fp32_layers=tuple(dict.fromkeys((*others, *here))))
    # Interned, as all policies are, and not tuned for anything but this graph.
    return renamed.with_evidence(None)


def _warn_of_model(policy: Policy, evidence: Evidence, graph: Graph, number: str) -> None:
    if _MODELS.isdisjoint(graph.operators):
        return
    names = {node.name for node in graph.all_nodes}
    kept = [layer.name for layer in evidence.layers if layer.kept]
    missing = [name for name in kept if name not in names]
    count = sum(not node.is_variable for node in graph.nodes)
    logger.warning(
        OTHER_MODEL,
        counted(evidence.operators, "operator"),
        evidence.model,
        counted(count, "operator"),
        number,
        NOT_THERE % shortened(missing) if missing else "",
    )


def warn_of_eager(policy: Policy, operator: str) -> None:
    """Warn, once for each policy, that an operator of a layer to keep in float32 runs eagerly."""
    if policy.evidence is None or "eager warning" in policy.caches:
        return
    kept = [one.name for one in policy.evidence.layers if one.kept and one.operator == operator]
    if kept:
        policy.caches["eager warning"] = True
        logger.warning(EAGER, operator, policy.target_dtype, shortened(kept))


def warn_of_way(policy: Policy) -> None:
    """Warn, once for each policy, where it was measured to be slower than float32 as it is used."""
    evidence = policy.evidence
    if evidence is None or "way warning" in policy.caches:
        return
    policy.caches["way warning"] = True
    chosen, under_init = evidence.chosen, _under_init(evidence)
    if chosen is not None and under_init is not None and under_init.speedup < 1 / _MARGIN:
        logger.warning(SLOWER, evidence.way, chosen.speedup, under_init.speedup)


#: What is slower by less may be chance.
_MARGIN = 1.02


def _under_init(evidence: Evidence) -> Optional[Trial]:
    """Return what was measured of the chosen policy under `autocast`."""
    chosen = evidence.chosen
    if chosen is None or chosen.way not in ("converted", "fused"):
        return None
    switches = chosen.precision, chosen.substitutions, chosen.kept
    alike = (
        trial
        for trial in evidence.trials
        if trial.way == "autocast"
        and (trial.precision, trial.substitutions, trial.kept) == switches
    )
    return next(alike, None)
