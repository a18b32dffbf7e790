"""What low precision costs in accuracy, and gains in time, layer by layer.

Each layer is looked at alone, in one float32 run. It is computed in both precisions from the same
inputs; the difference, times the gradient of the model's outputs with respect to the layer's,
is to first order what it does to them. Gradients are taken of random combinations of the outputs,
whose mean square is the size of the change of all of them.
"""

import contextlib
import logging
import math
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import MXNetError
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol.numpy import _Symbol

from ...framework.arrays import cast, dtypes_of
from ...graph.inspect import run_node
from ...graph.ir import Node, Output
from ...policy.active import suspended
from ...policy.decision import CASTABLE, decide, fixed_inputs
from ...policy.policy import Policy
from ..debugging.isolated import dense_values, outputs_of, tensors_in, with_masks
from .deadline import Deadline, OutOfTimeError
from .layers import Layer
from .probes import differentiable, random_signs, with_probes, zeros_like
from .traced import Traced

__all__ = ["costs_of"]

logger = logging.getLogger("mxamp")

#: How many random combinations of the outputs gradients are taken of.
_PROBES = 2
_REPEATS = 2
#: Elements of activations that are looked at together: of each, four copies are held (0.5 GB).
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
    """Return the layers with what low precision costs and gains in each.

    Those that are not reached within the share `until` of the budget, and those inside loops, come
    back as they are.
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
    """Looks at layers, a group at a time: their activations are many."""

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
        self.seconds = 0.0  #: what a group took, at most
        with self._mode():
            self._graph, masks = with_masks(traced.graph, traced.tensors)
        made = {name: mx.nd.array(mask, ctx=traced.context) for name, mask in masks.items()}
        # Detached: nobody asks for the gradients of parameters.
        self._values = {n: array.detach() for n, array in {**traced.values, **made}.items()}
        # What stands for masks comes in between.
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
        """Return the float32 outputs of a node that are read, or come out."""
        entries = [(i, k) for k in range(self._graph.nodes[i].num_outputs)]
        return [e for e in entries if e in self._read and self._tensors[e].dtype == "float32"]

    def groups(self) -> Iterator[List[int]]:
        """Yield the layers' nodes, so many at a time as fit into memory."""
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
        """Return what low precision gains at a node, and how it moves the outputs."""
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
            # What is not finite in float32 either is no loss.
            moves[entry][~np.isfinite(values)] = 0.0
        return slow - fast, moves

    def _errors(
        self, moves: Mapping[Output, Any], known: Mapping[Output, NDArray]
    ) -> Dict[int, float]:
        """Return what moves of nodes' outputs do to the outputs of the model, by node."""
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
            # MaxPool has a gradient after a pass in training mode only: elsewhere it is garbage.
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
            # An operator without a gradient: layers are ranked by their own errors then.
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
        """Run a node as the policy does where its inputs are in the target dtype already."""
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
