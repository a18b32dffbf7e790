"""What low precision costs in accuracy, and gains in time, layer by layer.

Each layer is looked at alone, in one float32 run. It is computed in both precisions from the same
inputs; the difference, times the gradient of the model's outputs with respect to the layer's,
is to first order what it does to them. Gradients are taken of random combinations of the outputs,
whose mean square is the size of the change of all of them.
"""

import math
import time
from dataclasses import replace
from typing import AbstractSet, Any, Callable, Dict, List, Mapping, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol.numpy import _Symbol

from ..debugging.comparing.isolated import dense_values, outputs_of, tensors_in
from ..debugging.comparing.randomness import with_masks
from ..framework.arrays import cast, dtypes_of
from ..graph.census import Tensor
from ..graph.graph import Graph, Node, Output
from ..graph.interpret import run_node
from ..policy.active import suspended
from ..policy.decision import CASTABLE, decide, fixed_inputs
from ..policy.policy import Policy
from .deadline import Deadline, OutOfTimeError
from .layers import Layer
from .traced import Traced

__all__ = ["costs_of"]

_PROBES = 3
_REPEATS = 2


def costs_of(
    traced: Traced,
    layers: Sequence[Layer],
    policy: Policy,
    training: bool,
    seed: int,
    deadline: Deadline,
    until: float,
) -> List[Layer]:
    """Return the layers with what low precision costs and gains in each.

    Those that are not reached within the share `until` of the budget, and those inside loops, come
    back as they are.
    """
    deadline.phase("layers")
    with suspended():
        looked_at = _Costs(traced, policy, training, seed)
        found, result = {layer.position: layer for layer in layers}, list(layers)
        for number, layer in enumerate(layers):
            if layer.position < 0 or layer.position not in found:
                continue
            try:
                deadline.check(until=until)
            except OutOfTimeError:
                break
            result[number] = looked_at.of(layer, found.keys())
    return result


class _Costs:
    """What is needed to look at any layer: all values, and gradients with respect to them."""

    def __init__(self, traced: Traced, policy: Policy, training: bool, seed: int) -> None:
        self._policy, self._training = policy, training
        self._context, self._is_np = traced.context, traced.symbol_class is _Symbol
        with self._mode():
            self._graph, masks = with_masks(traced.graph, traced.tensors)
        made = {name: mx.nd.array(mask, ctx=traced.context) for name, mask in masks.items()}
        values = {**traced.values, **made}
        # What stands for masks comes in between.
        own = (i for i, node in enumerate(self._graph.nodes) if node.name not in masks)
        self._places = dict(enumerate(own))
        entries = _float_entries(self._graph, tensors_in(self._graph, traced.symbol_class, values))
        with self._mode():
            outputs = outputs_of(replace(self._graph, heads=entries), traced.symbol_class, values)
        self._arrays = dict(zip(entries, outputs))
        for i, node in enumerate(self._graph.nodes):
            if node.is_variable:
                self._arrays[i, 0] = values[node.name]
        self._gradients = self._gradients_of(entries, traced.symbol_class, values, seed)

    def _mode(self, recording: bool = False) -> Any:
        if recording:
            return autograd.record(train_mode=self._training)
        return autograd.pause(train_mode=self._training)

    def _gradients_of(
        self, entries: Sequence[Output], symbol_class: Any, values: Dict[str, NDArray], seed: int
    ) -> List[Dict[Output, Any]]:
        """Return gradients of random combinations of the outputs; none where MXNet has none."""
        graph, names = _with_probes(self._graph, entries)
        probes = {n: _zeros_like(self._arrays[entry]) for entry, n in names.items()}
        for probe in probes.values():
            probe.attach_grad()
        random, found = np.random.RandomState(seed), []
        try:
            with self._mode(recording=True):
                outputs = outputs_of(graph, symbol_class, {**values, **probes})
            outputs = [one for one in outputs if dtypes_of([one])[0] == "float32"]
            for _ in range(_PROBES):
                heads = [_random_signs(one, random) for one in outputs]
                autograd.backward(outputs, heads, retain_graph=True)
                mx.nd.waitall()
                found.append({e: probes[n].grad.asnumpy() for e, n in names.items()})
        except MXNetError:
            # An operator without a gradient: layers are ranked by their own errors then.
            return []
        return found

    # ------------------------------------------------------------------ one layer

    def of(self, layer: Layer, lowered: AbstractSet[int]) -> Layer:
        """Return a layer with what low precision there costs and gains."""
        i = self._places[layer.position]
        node = self._graph.nodes[i]
        low = {self._places[position] for position in lowered if position >= 0}
        inputs = [self._arrays.get(entry) for entry in node.inputs]
        if any(array is None for array in inputs):
            return layer
        given = [
            self._rounded(array) if source in low else array
            for (source, _), array in zip(node.inputs, inputs)
        ]
        try:
            plain, slow = self._timed(lambda: self._run(node, given))
            other, fast = self._timed(lambda: self._run_low(node, given))
        except MXNetError:
            return layer
        return replace(layer, error=self._error(i, plain, other), gain=slow - fast)

    def _run(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        with self._mode():
            return list(run_node(node, inputs, self._context, self._is_np))

    def _run_low(self, node: Node, inputs: Sequence[NDArray]) -> List[NDArray]:
        """Run a node as the policy does where its inputs are in the target dtype already."""
        target = self._policy.target_dtype
        kinds = dtypes_of(inputs)
        fixed = fixed_inputs(self._policy.rule(node.operator), node.attrs)
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
        """Return an input as a lowered layer gives it; as it is where that would not be finite."""
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

    def _error(self, i: int, plain: Sequence[NDArray], other: Sequence[NDArray]) -> float:
        """Return what a difference of a layer's outputs does to those of the model."""
        sums = [0.0] * max(len(self._gradients), 1)
        for k, (ours, theirs) in enumerate(zip(plain, other)):
            if (i, k) not in self._arrays:
                continue
            values, moved = dense_values(ours), dense_values(theirs)
            if not np.isfinite(moved[np.isfinite(values)]).all():
                return math.inf
            with np.errstate(invalid="ignore"):
                difference = np.nan_to_num(moved - values, nan=0.0, posinf=0.0, neginf=0.0)
            for number, gradients in enumerate(self._gradients):
                sums[number] += float(np.vdot(gradients[i, k], difference))
            if not self._gradients:
                sums[0] += float(np.linalg.norm(difference) / (np.linalg.norm(values) or 1.0))
        return math.sqrt(sum(one**2 for one in sums) / len(sums))


def _float_entries(graph: Graph, tensors: Mapping[Output, Tensor]) -> List[Output]:
    """Return the float32 outputs of nodes that are read, or come out."""
    read = dict.fromkeys([*(e for node in graph.nodes for e in node.inputs), *graph.heads])
    return [
        entry
        for entry in read
        if not graph.nodes[entry[0]].is_variable and tensors[entry].dtype == "float32"
    ]


def _with_probes(graph: Graph, entries: Sequence[Output]) -> Tuple[Graph, Dict[Output, str]]:
    """Return a graph in which an input is added to each of these entries, and the inputs' names."""
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


def _zeros_like(array: NDArray) -> NDArray:
    zeros = mx.nd.zeros(array.shape, ctx=array.context)
    return zeros.as_np_ndarray() if isinstance(array, mx.np.ndarray) else zeros


def _random_signs(output: NDArray, random: np.random.RandomState) -> NDArray:
    """Return a combination of an output's elements, relative to their norm."""
    values = output.asnumpy()
    signs = random.choice([-1.0, 1.0], size=values.shape) / (np.linalg.norm(values) or 1.0)
    heads = mx.nd.array(signs, ctx=output.context, dtype="float32")
    return heads.as_np_ndarray() if isinstance(output, mx.np.ndarray) else heads
