"""The layers of a model in low precision: what each costs in accuracy, and gains in time.

Each layer is measured alone, in one float32 run. It computes in both precisions from the same
inputs. The difference, times the gradient of the model's outputs with respect to the layer's, is to
first order the error that it causes in them. Gradients are taken of random combinations of the
outputs, whose mean square is the size of the change of all of them.
"""

import contextlib
import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol.numpy import _Symbol

from ...framework.arrays import cast, dtypes_of
from ...graph.casts.insert import rewrite
from ...graph.inspect import run_node
from ...graph.ir import Graph, Node, Output
from ...graph.speed.shape_rules import choose
from ...policy.active import suspended
from ...policy.decision import CASTABLE, decide, fixed_inputs
from ...policy.policy import Policy
from ..debugging.isolated import dense_values, outputs_of, tensors_in, with_masks
from .deadline import Deadline, OutOfTimeError
from .model import Traced

__all__ = [
    "Layer",
    "costs_of",
    "differentiable",
    "lowered_layers",
    "random_signs",
    "substitutions_in",
    "with_probes",
    "zeros_like",
]


@dataclass(frozen=True)
class Layer:
    """A layer in low precision. Nodes of one name are one layer, since policies go by names."""

    name: str
    operator: str
    position: int  #: the first node's in `Graph.all_nodes`
    error: Optional[float] = None  #: relative, of the outputs, to first order; None: not measured
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
    # Parts of a substituted node have names of their own.
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


_NORMS = frozenset({"BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm"})


def with_probes(graph: Graph, entries: Sequence[Output]) -> Tuple[Graph, Dict[Output, str]]:
    """Return a graph with an input added to each of these entries, and the names of the inputs."""
    wanted = set(entries)
    nodes: List[Node] = []
    places: Dict[Output, Output] = {}
    names: Dict[Output, str] = {}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for i, node in enumerate(graph.nodes):
        added = add(replace(node, inputs=[places[entry] for entry in node.inputs]))
        for k in range(node.num_outputs):
            places[i, k] = added, k
            if (i, k) in wanted:
                names[i, k] = f"_mxamp_probe{len(names)}"
                probe = add(Node("null", names[i, k]))
                reads = [(added, k), (probe, 0)]
                places[i, k] = add(Node("elemwise_add", f"{names[i, k]}_add", {}, reads)), 0
    return Graph(nodes, [places[head] for head in graph.heads], graph.attrs), names


def differentiable(graph: Graph) -> Graph:
    """Return a graph that computes in training mode as this one does in inference."""
    return replace(graph, nodes=[_as_in_inference(node) for node in graph.nodes])


def _as_in_inference(node: Node) -> Node:
    if node.is_variable:
        return node
    if node.operator in _NORMS:
        return replace(node, attrs={**node.attrs, "use_global_stats": "True"})
    if node.operator == "Dropout" and node.attrs.get("mode", "training") == "training":
        return replace(node, op="_copy", attrs={}, inputs=node.inputs[:1], num_outputs=1)
    if node.operator == "RNN":
        return replace(node, attrs={**node.attrs, "p": "0"})
    if node.operator == "LeakyReLU" and node.attrs.get("act_type") == "rrelu":
        bounds = (node.attrs.get("lower_bound", 0.125), node.attrs.get("upper_bound", 0.334))
        slope = sum(map(float, bounds)) / len(bounds)
        return replace(node, attrs={"act_type": "leaky", "slope": repr(slope)})
    return node


def zeros_like(array: NDArray) -> NDArray:
    """Return zeros of an array's shape and class."""
    zeros = mx.nd.zeros(array.shape, ctx=array.context)
    return zeros.as_np_ndarray() if isinstance(array, mx.np.ndarray) else zeros


def random_signs(output: NDArray, random: np.random.RandomState) -> NDArray:
    """Return random signs for an output's elements, divided by the output's norm."""
    values = output.asnumpy()
    signs = random.choice([-1.0, 1.0], size=values.shape) / (np.linalg.norm(values) or 1.0)
    heads = mx.nd.array(signs, ctx=output.context, dtype="float32")
    return heads.as_np_ndarray() if isinstance(output, mx.np.ndarray) else heads


logger = logging.getLogger("mxamp")

#: The number of random combinations of the outputs.
_PROBES = 2
_REPEATS = 2
#: Elements of activations that are measured together; four copies of each are held (0.5 GB).
_TOGETHER = 2**25


def costs_of(
    traced: Traced,
    layers: Sequence[Layer],
    policy: Policy,
    training: bool,
    seed: int,
    deadline: Deadline,
    until: float,
) -> List[Layer]:
    """Return the layers with the error and the gain of low precision in each.

    Layers inside loops, and those not reached within the share `until` of the budget, have none.
    """
    deadline.phase("layers")
    found = {layer.position: layer for layer in layers}
    with suspended(), contextlib.suppress(OutOfTimeError):
        looking = _Costs(
            traced, policy, training, seed, [p for p in found if p < len(traced.graph.nodes)]
        )
        for group in looking.groups():
            deadline.check(looking.seconds, until)
            for position, (error, gain) in looking.look_at(group).items():
                found[position] = replace(found[position], error=error, gain=gain)
    return [found[layer.position] for layer in layers]


class _Costs:
    """Measures layers, a group at a time: their activations are many."""

    def __init__(
        self,
        traced: Traced,
        policy: Policy,
        training: bool,
        seed: int,
        positions: Sequence[int],
    ) -> None:
        self._policy, self._training = policy, training
        self._context, self._class = traced.context, traced.symbol_class
        self._is_np = traced.symbol_class is _Symbol
        self._random = np.random.RandomState(seed)
        self.seconds = 0.0  #: of the longest group
        with self._mode():
            self._graph, masks = with_masks(traced.graph, traced.tensors)
        made = {name: mx.nd.array(mask, ctx=traced.context) for name, mask in masks.items()}
        # Detached: gradients of parameters are not needed.
        self._values = {n: array.detach() for n, array in {**traced.values, **made}.items()}
        # The inputs for masks are inserted in between.
        own = (i for i, node in enumerate(self._graph.nodes) if node.name not in masks)
        places = dict(enumerate(own))
        #: The layers, by node of the graph with masks.
        self._positions = {places[position]: position for position in positions}
        self._tensors = tensors_in(self._graph, traced.symbol_class, self._values)
        read = [e for node in self._graph.nodes for e in node.inputs]
        self._read = {*read, *self._graph.heads}

    def _mode(self) -> Any:
        return autograd.pause(train_mode=self._training)

    def _outputs(self, i: int) -> List[Output]:
        """Return the float32 outputs of a node that are read, or are outputs of the model."""
        entries = [(i, k) for k in range(self._graph.nodes[i].num_outputs)]
        return [e for e in entries if e in self._read and self._tensors[e].dtype == "float32"]

    def groups(self) -> Iterator[List[int]]:
        """Yield the nodes of the layers in groups that fit into memory."""
        group: List[int] = []
        size = 0
        for i in self._positions:
            own = sum(self._tensors[entry].size for entry in self._needed(i))
            if group and size + own > _TOGETHER:
                yield group
                group, size = [], 0
            group.append(i)
            size += own
        if group:
            yield group

    def _needed(self, i: int) -> List[Output]:
        inputs = [e for e in self._graph.nodes[i].inputs if not self._graph.nodes[e[0]].is_variable]
        return [*self._outputs(i), *inputs]

    def look_at(self, group: Sequence[int]) -> Dict[int, Tuple[float, float]]:
        """Return error and gain of some layers, by their positions."""
        began = time.perf_counter()
        needed = list(dict.fromkeys(entry for i in group for entry in self._needed(i)))
        with self._mode():
            arrays = outputs_of(replace(self._graph, heads=needed), self._class, self._values)
        known = dict(zip(needed, arrays))
        for i, node in enumerate(self._graph.nodes):
            if node.is_variable:
                known[i, 0] = self._values[node.name]
        moves: Dict[Output, Any] = {}
        gains: Dict[int, float] = {}
        for i in group:
            moved = self._moved(i, known)
            if moved is not None:
                gains[i] = moved[0]
                moves.update(moved[1])
        errors = self._errors(moves, known)
        self.seconds = max(self.seconds, time.perf_counter() - began)
        return {self._positions[i]: (errors.get(i, 0.0), gain) for i, gain in gains.items()}

    def _moved(
        self, i: int, known: Mapping[Output, NDArray]
    ) -> Optional[Tuple[float, Dict[Output, Any]]]:
        """Return the seconds that low precision gains at a node, and the change of its outputs."""
        node = self._graph.nodes[i]
        given = [
            self._rounded(known[entry]) if entry[0] in self._positions else known[entry]
            for entry in node.inputs
        ]
        try:
            plain, slow = self._timed(lambda: self._run(node, given))
            other, fast = self._timed(lambda: self._run_low(node, given))
        except MXNetError as error:
            logger.debug("tune: %s can't be looked at alone: %s", node.name, error)
            return None
        moves = {}
        for entry in self._outputs(i):
            values, there = dense_values(plain[entry[1]]), dense_values(other[entry[1]])
            with np.errstate(invalid="ignore"):
                moves[entry] = there - values
            # Elements that are not finite in float32 either are not lost.
            moves[entry][~np.isfinite(values)] = 0.0
        return slow - fast, moves

    def _errors(
        self, moves: Mapping[Output, Any], known: Mapping[Output, NDArray]
    ) -> Dict[int, float]:
        """Return the errors that changes of nodes' outputs cause in the model's, by node."""
        sums: Dict[int, List[float]] = {i: [0.0] * _PROBES for i, _ in moves}
        lost = {entry[0] for entry, move in moves.items() if not np.isfinite(move).all()}
        finite = {entry: move for entry, move in moves.items() if entry[0] not in lost}
        graph, names = with_probes(
            self._graph if self._training else differentiable(self._graph), list(finite)
        )
        probes = {name: zeros_like(known[entry]) for entry, name in names.items()}
        for probe in probes.values():
            probe.attach_grad()
        try:
            # MaxPool has a right gradient only after a pass in training mode.
            with autograd.record(train_mode=True):
                outputs = outputs_of(graph, self._class, {**self._values, **probes})
            outputs = [one for one in outputs if dtypes_of([one])[0] == "float32"]
            for number in range(_PROBES):
                heads = [random_signs(one, self._random) for one in outputs]
                autograd.backward(outputs, heads, retain_graph=number + 1 < _PROBES)
                for entry, name in names.items():
                    gradient = dense_values(probes[name].grad)
                    sums[entry[0]][number] += float(np.vdot(gradient, finite[entry]))
        except MXNetError as error:
            # An operator has no gradient: layers are ranked by their own errors.
            logger.debug("tune: no gradients of the outputs: %s", error)
            sums = {i: [0.0] for i in sums}
            for entry, move in finite.items():
                size = float(np.linalg.norm(dense_values(known[entry]))) or 1.0
                sums[entry[0]][0] += float(np.linalg.norm(move)) / size
        errors = {i: math.sqrt(sum(x**2 for x in some) / len(some)) for i, some in sums.items()}
        return {i: math.inf if i in lost else error for i, error in errors.items()}

    # ------------------------------------------------------------------ one node

    def _run(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        with self._mode():
            return list(run_node(node, inputs, self._context, self._is_np))

    def _run_low(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        """Run a node as the policy does if its inputs are in the target dtype already."""
        target = self._policy.target_dtype
        kinds = dtypes_of(inputs)
        fixed = fixed_inputs(self._policy.rule(node.operator), node.attrs, len(kinds))
        asked = [
            target if kind in CASTABLE and position not in fixed else kind
            for position, kind in enumerate(kinds)
        ]
        decision = decide(node.operator, node.attrs, asked, self._policy)
        with self._mode():
            read = []
            for array, kind, wanted in zip(inputs, asked, decision.reads):
                low = cast(array, target, self._is_np) if kind == target else array
                read.append(low if wanted is None else cast(low, wanted, self._is_np))
            outputs = list(run_node(node, read, self._context, self._is_np))
            if decision.through is None:
                return outputs
            return [
                cast(one, decision.through, self._is_np)
                if decision.rounds(k, dtypes_of([one])[0])
                else one
                for k, one in enumerate(outputs)
            ]

    def _rounded(self, array: NDArray) -> NDArray:
        """Return an input rounded as by a layer in low precision, unless that is not finite."""
        if dtypes_of([array])[0] != "float32":
            return array
        there = cast(cast(array, self._policy.target_dtype, self._is_np), "float32", self._is_np)
        lost = np.isfinite(array.asnumpy()).all() and not np.isfinite(there.asnumpy()).all()
        return array if lost else there

    def _timed(self, run: Callable[[], List[NDArray]]) -> Tuple[List[NDArray], float]:
        seconds, outputs = math.inf, []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            outputs = run()
            mx.nd.waitall()
            seconds = min(seconds, time.perf_counter() - began)
        return outputs, seconds
