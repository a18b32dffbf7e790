"""The search for layers to keep in float32: their errors, and the smallest set that works.

Each layer is measured alone, in one float32 run. It computes in both precisions from the same
inputs. The difference, times the gradient of the model's outputs with respect to the layer's, is to
first order the error that it causes in them. Gradients are taken of random combinations of the
outputs, whose mean square is the size of the change of all of them.
"""

import contextlib
import logging
import math
import time
from dataclasses import replace
from itertools import combinations
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol.numpy import _Symbol

from ...framework.arrays import cast, dtypes_of
from ...graph.casts.insert import rewrite
from ...graph.edit import Edit
from ...graph.inspect import run_node
from ...graph.ir import Graph, Node, Output
from ...graph.speed.shape_rules import choose
from ...policy.decision import CASTABLE, decide, fixed_inputs
from ...policy.policy import Policy
from ..debugging.isolated import BoundGraph, dense_values
from .accuracy import Subject
from .deadline import Deadline, OutOfTimeError
from .tuning import LayerCost

__all__ = ["EXHAUSTIVE", "Layers", "Search", "lowered_layers", "measured_layers"]

logger = logging.getLogger("mxamp")

#: Layers by the place of their first node in `Graph.all_nodes`, in order. Nodes of one name are one
#: layer, since policies go by names.
Layers = Dict[int, LayerCost]

_NORMS = frozenset({"BatchNorm", "_contrib_BatchNormWithReLU", "_contrib_SyncBatchNorm"})
#: The number of random combinations of the outputs.
_PROBES = 2
_REPEATS = 2
#: Elements of activations that are measured together; four copies of each are held (0.5 GB).
_TOGETHER = 2**25
#: With up to so many layers, all smaller sets are tried.
EXHAUSTIVE = 10
#: With more layers, so many sets of each size are tried, if a smaller set is not ruled out.
_TRIES = 66


def lowered_layers(subject: Subject, policy: Policy) -> Tuple[Layers, List[str]]:
    """Return the layers that `policy` runs in its target dtype, and its substitutions' names."""
    graph, usage = subject.graph, subject.usage()
    choices = choose(graph, policy, usage)
    low = {
        node.name
        for _, node, decision in rewrite(graph, policy, usage, choices).decided()
        if decision.precision == policy.target_dtype
    }
    # Parts of a substituted node have names of their own.
    substituted = {i for i, _ in choices.substituted}
    layers: Dict[str, int] = {}
    for i, node in enumerate(graph.all_nodes):
        parts = i in substituted and any(name.startswith(f"{node.name}_") for name in low)
        if not node.is_variable and (node.name in low or parts):
            layers.setdefault(node.name, i)
    found = {
        i: LayerCost(name, graph.all_nodes[i].operator, False, math.nan)
        for name, i in layers.items()
    }
    return found, sorted({name for _, (name, _) in choices.substituted})


def measured_layers(
    subject: Subject, layers: Layers, policy: Policy, seed: int, deadline: Deadline
) -> Layers:
    """Return `layers` with the measured error and time gain of low precision in each.

    Layers inside loops are not measured, nor are those that the phase has no time for.
    """
    outside_loops = [i for i in layers if i < len(subject.graph.nodes)]
    measurements = _LayerMeasurements(subject, policy, seed, outside_loops)
    found = dict(layers)
    with contextlib.suppress(OutOfTimeError):
        for group in measurements.groups():
            deadline.check(measurements.seconds)
            for i, (error, gain) in measurements.measure(group).items():
                found[i] = replace(found[i], error=error, gain=gain * 1e3)
    return found


def _with_probe_inputs(graph: Graph, entries: Sequence[Output]) -> Tuple[Graph, Dict[Output, str]]:
    """Return a graph that adds a new input to each output in `entries`, and the inputs' names."""
    edit = Edit(graph, {})
    names = {entry: f"_mxamp_probe{i}" for i, entry in enumerate(entries)}
    for entry, name in names.items():
        probe = edit.add_node(Node("null", name))
        edit.redirect(entry, edit.add("elemwise_add", f"{name}_add", [entry, probe]))
    return edit.applied(), names


def _inference_form(node: Node) -> Node:
    """Return a node that computes in training mode what `node` computes in inference."""
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


def _zeros_like(array: NDArray) -> NDArray:
    """Return float32 zeros of an array's shape, context and class (mx.nd or mx.np)."""
    zeros = mx.nd.zeros(array.shape, ctx=array.context)
    return zeros.as_np_ndarray() if isinstance(array, mx.np.ndarray) else zeros


def _random_signs(output: NDArray, random: np.random.RandomState) -> NDArray:
    """Return a random sign for each element of an output, divided by the output's norm."""
    values = output.asnumpy()
    heads = _zeros_like(output)
    heads[:] = random.choice([-1.0, 1.0], size=values.shape) / (np.linalg.norm(values) or 1.0)
    return heads


class _LayerMeasurements:
    """Measures the error and gain of low precision in layers, as many at a time as fit in memory.

    `layer_nodes` are the indices of the layers' nodes in the model's graph.
    """

    def __init__(
        self, subject: Subject, policy: Policy, seed: int, layer_nodes: Sequence[int]
    ) -> None:
        self._policy, self._training = policy, subject.training
        self._context = subject.context
        self._is_np = subject.symbol_class is _Symbol
        self._random = np.random.RandomState(seed)
        self.seconds = 0.0  #: of the longest group
        unmasked = BoundGraph(subject.graph, subject.symbol_class, subject.values())
        with self._running_mode():
            self._bound = unmasked.with_masks()
        self._graph, self._tensors = self._bound.graph, self._bound.tensors
        masks = self._bound.values.keys() - unmasked.values.keys()
        # The inputs for masks are inserted in between.
        own = [i for i, node in enumerate(self._graph.nodes) if node.name not in masks]
        #: The index in the model's graph of each layer's node in the graph with masks.
        self._layer_nodes = {own[i]: i for i in layer_nodes}
        read = [e for node in self._graph.nodes for e in node.inputs]
        self._read = {*read, *self._graph.heads}

    def _running_mode(self) -> Any:
        """Context without recording, in the model's mode: training or inference."""
        return autograd.pause(train_mode=self._training)

    def _measured_outputs(self, i: int) -> List[Output]:
        """Return the float32 outputs of node `i` that a node reads or that the model returns."""
        entries = [(i, k) for k in range(self._graph.nodes[i].num_outputs)]
        return [e for e in entries if e in self._read and self._tensors[e].dtype == "float32"]

    def groups(self) -> Iterator[List[int]]:
        """Yield the indices of the layers' nodes in groups whose activations fit into memory."""
        group: List[int] = []
        size = 0
        for i in self._layer_nodes:
            own = sum(self._tensors[entry].size for entry in self._needed_tensors(i))
            if group and size + own > _TOGETHER:
                yield group
                group, size = [], 0
            group.append(i)
            size += own
        if group:
            yield group

    def _needed_tensors(self, i: int) -> List[Output]:
        """Return the activations that measuring node `i` needs: its outputs and its inputs."""
        inputs = [e for e in self._graph.nodes[i].inputs if not self._graph.nodes[e[0]].is_variable]
        return [*self._measured_outputs(i), *inputs]

    def measure(self, group: Sequence[int]) -> Dict[int, Tuple[float, float]]:
        """Return the error and gain of a group's layers, by node index in the model's graph."""
        began = time.perf_counter()
        needed = list(dict.fromkeys(entry for i in group for entry in self._needed_tensors(i)))
        with self._running_mode():
            arrays = self._bound.with_heads(needed).run()
        known = dict(zip(needed, arrays))
        for i, node in enumerate(self._graph.nodes):
            if node.is_variable:
                known[i, 0] = self._bound.values[node.name]
        changes: Dict[Output, Any] = {}
        gains: Dict[int, float] = {}
        for i in group:
            compared = self._compare_precisions(i, known)
            if compared is not None:
                gains[i] = compared[0]
                changes.update(compared[1])
        errors = self._model_errors(changes, known)
        self.seconds = max(self.seconds, time.perf_counter() - began)
        return {self._layer_nodes[i]: (errors.get(i, 0.0), gain) for i, gain in gains.items()}

    def _compare_precisions(
        self, i: int, known: Mapping[Output, NDArray]
    ) -> Optional[Tuple[float, Dict[Output, Any]]]:
        """Return the seconds that low precision saves at node `i`, and its outputs' changes.

        `known` are the float32 values of variables and activations. Returns None if the node does
        not run alone.
        """
        node = self._graph.nodes[i]
        inputs = [
            self._round_trip(known[entry]) if entry[0] in self._layer_nodes else known[entry]
            for entry in node.inputs
        ]
        try:
            plain, slow = self._time(lambda: self._run_node(node, inputs))
            low, fast = self._time(lambda: self._run_node_low(node, inputs))
        except MXNetError as error:
            logger.debug("tune: %s can't be measured alone: %s", node.name, error)
            return None
        changes = {}
        for entry in self._measured_outputs(i):
            values, low_values = dense_values(plain[entry[1]]), dense_values(low[entry[1]])
            with np.errstate(invalid="ignore"):
                changes[entry] = low_values - values
            # Elements that are not finite in float32 either are not lost.
            changes[entry][~np.isfinite(values)] = 0.0
        return slow - fast, changes

    def _model_errors(
        self, changes: Mapping[Output, Any], known: Mapping[Output, NDArray]
    ) -> Dict[int, float]:
        """Return by node the error that `changes` of its outputs cause in the model's outputs."""
        sums: Dict[int, List[float]] = {i: [0.0] * _PROBES for i, _ in changes}
        lost = {entry[0] for entry, change in changes.items() if not np.isfinite(change).all()}
        finite = {entry: change for entry, change in changes.items() if entry[0] not in lost}
        graph = self._graph
        if not self._training:
            graph = replace(graph, nodes=[_inference_form(node) for node in graph.nodes])
        graph, names = _with_probe_inputs(graph, list(finite))
        probes = {name: _zeros_like(known[entry]) for entry, name in names.items()}
        for probe in probes.values():
            probe.attach_grad()
        try:
            # MaxPool has a right gradient only after a pass in training mode.
            with autograd.record(train_mode=True):
                values = {**self._bound.values, **probes}
                outputs = replace(self._bound, graph=graph, values=values).run()
            outputs = [one for one in outputs if dtypes_of([one])[0] == "float32"]
            for number in range(_PROBES):
                heads = [_random_signs(one, self._random) for one in outputs]
                autograd.backward(outputs, heads, retain_graph=number + 1 < _PROBES)
                for entry, name in names.items():
                    gradient = dense_values(probes[name].grad)
                    sums[entry[0]][number] += float(np.vdot(gradient, finite[entry]))
        except MXNetError as error:
            # An operator has no gradient: layers are ranked by their own errors.
            logger.debug("tune: no gradients of the outputs: %s", error)
            sums = {i: [0.0] for i in sums}
            for entry, change in finite.items():
                size = float(np.linalg.norm(dense_values(known[entry]))) or 1.0
                sums[entry[0]][0] += float(np.linalg.norm(change)) / size
        errors = {i: math.sqrt(sum(x**2 for x in some) / len(some)) for i, some in sums.items()}
        return {i: math.inf if i in lost else error for i, error in errors.items()}

    def _run_node(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        return list(run_node(node, inputs, self._context, self._is_np))

    def _run_node_low(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        """Run a node as under the policy, from inputs that are in the target dtype already."""
        target = self._policy.target_dtype
        kinds = dtypes_of(inputs)
        fixed = fixed_inputs(self._policy.rule(node.operator), node.attrs, len(kinds))
        asked = [
            target if kind in CASTABLE and position not in fixed else kind
            for position, kind in enumerate(kinds)
        ]
        decision = decide(node.operator, node.attrs, asked, self._policy)
        low = [
            cast(array, target, self._is_np) if kind == target else array
            for array, kind in zip(inputs, asked)
        ]
        read = [
            array if wanted is None else cast(array, wanted, self._is_np)
            for array, wanted in zip(low, decision.reads)
        ]
        return [
            cast(one, decision.through, self._is_np)
            if decision.through is not None and decision.rounds(k, dtypes_of([one])[0])
            else one
            for k, one in enumerate(self._run_node(node, read))
        ]

    def _round_trip(self, array: NDArray) -> NDArray:
        """Return a float32 array rounded to the target dtype, or as it is if that gives Inf."""
        if dtypes_of([array])[0] != "float32":
            return array
        there = cast(cast(array, self._policy.target_dtype, self._is_np), "float32", self._is_np)
        lost = np.isfinite(array.asnumpy()).all() and not np.isfinite(there.asnumpy()).all()
        return array if lost else there

    def _time(self, run: Callable[[], List[NDArray]]) -> Tuple[List[NDArray], float]:
        """Return the arrays that `run` returns, and the seconds of its fastest call of a few."""
        seconds, outputs = math.inf, []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            with self._running_mode():
                outputs = run()
            mx.nd.waitall()
            seconds = min(seconds, time.perf_counter() - began)
        return outputs, seconds


# ---------------------------------------------------------------------- the smallest set


class Search:
    """A search for the smallest set of layers with which in float32 the model is accurate enough.

    `works` returns whether it is with a set of layers; with all of them it is. It may raise to end
    the search: `best` is the smallest set that worked so far. `order` holds all layers, those that
    most likely have to stay in float32 first.

    Bisection finds, one by one, layers that can't be done without: the last layer of the shortest
    prefix of `order` that works is one. For k layers of n there are at most some 2 log2(n) +
    (k - 1) log2(n) + 4k evaluations. Where keeping more layers hurts, the set may be larger than
    needed, but it has always been tried.
    """

    def __init__(self, works: Callable[[FrozenSet[int]], bool], order: Sequence[int]) -> None:
        self._works = works
        self._order = list(order)
        self._known: Dict[FrozenSet[int], bool] = {frozenset(order): True}
        self.best: FrozenSet[int] = frozenset(order)
        self.proven = False  #: whether no smaller set works, if keeping more never hurts

    @property
    def evaluations(self) -> int:
        """The number of different sets that `works` was called with."""
        return len(self._known) - 1

    def run(self) -> FrozenSet[int]:
        """Search to the end; return the smallest set found."""
        if self._try([]):
            self.proven = True
            return self.best
        found: List[int] = []
        rest = self._order
        while not self._try(found):
            length = self._shortest_prefix(found, rest, gallop=not found)
            found, rest = [*found, rest[length - 1]], rest[: length - 1]
        self._drop_unneeded()
        if len(self.best) == 1 or len(self._order) <= EXHAUSTIVE:
            self._try_smaller_sets()
            self.proven = True
            return self.best
        everything = set(self._order)
        self.proven = not any(self._try(everything - {one}) for one in self.best)
        if not self.proven:
            self._try_smaller_sets(most=_TRIES)
        return self.best

    def _try(self, kept: "Sequence[int] | FrozenSet[int] | set[int]") -> bool:
        """Return whether the set of layers works, calling `works` once a set; update `best`."""
        layers = frozenset(kept)
        if layers not in self._known:
            self._known[layers] = self._works(layers)
        if self._known[layers] and len(layers) < len(self.best):
            self.best = layers
        return self._known[layers]

    def _shortest_prefix(self, found: List[int], rest: Sequence[int], gallop: bool) -> int:
        """Return the length of the shortest prefix of `rest` that works together with `found`.

        The empty prefix fails, the full one works. With `gallop`, lengths 1, 2, 4, ... come first.
        """
        fails, works = 0, len(rest)
        while gallop and 2 * fails + 1 < works:
            middle = max(1, 2 * fails)
            if self._try([*found, *rest[:middle]]):
                works = middle
                break
            fails = middle
        while works - fails > 1:
            middle = (fails + works) // 2
            if self._try([*found, *rest[:middle]]):
                works = middle
            else:
                fails = middle
        return works

    def _drop_unneeded(self) -> None:
        """Remove from `best`, one by one, the layers without which the rest still works."""
        for one in sorted(self.best, key=self._order.index, reverse=True):
            if len(self.best) > 1 and one in self.best:
                self._try(self.best - {one})

    def _try_smaller_sets(self, most: float = math.inf) -> None:
        """Try sets smaller than `best`, the smallest first, at most `most` of each size.

        Where errors add up, bisection can end in a set that needs each of its layers.
        """
        for size in range(1, len(self.best)):
            lengths = range(len(self._order), -1, -1)
            first = next(n for n in lengths if math.comb(n, size) <= most)
            if any(map(self._try, combinations(self._order[:first], size))):
                break
