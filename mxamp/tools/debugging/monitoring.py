"""Outputs inside a graph, by MXNet's monitor, and gradients of eager calls, by zeros.

A zero is added to an input of a call: its gradient is that which the call makes of that input.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections import Counter, deque
from typing import Any, Callable, Mapping, Optional, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, NDArrayHandle, SymbolHandle, check_call
from mxnet.gluon import Block
from mxnet.ndarray import CachedOp
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ...framework.arrays import dtype_of, invoke
from ...framework.operators import handle_of, resolve
from ...framework.patching import original
from ...framework.zero_gradients import zero_gradient_inputs
from ...graph.ir import Graph
from .blocks import BlockNames
from .findings import Fault, Site, Tensor, gradient_fault, nonfinite, site_of

#: An output as the monitor names it: node, whether in the backward pass, and the output's number.
#: Operators name hidden outputs in other ways, whose values may be anything.
_OUTPUT = re.compile(r"(.+?)(_backward)?_(?:output)?(\d*)")
#: Operators that read the shape of their input alone.
_SHAPES = frozenset({"ones_like", "shape_array", "size_array", "zeros_like"})

#: Called with the site, the inputs if they are known, None in the backward pass, and an output.
OnOutput = Callable[[Site, Optional[Sequence[Tensor]], Tensor], None]


class GraphMonitor:
    """Hands each output that MXNet computes in a graph to `on_output`."""

    def __init__(self, symbol: Symbol, block: Block | None, on_output: OnOutput) -> None:
        self._graph, self._block_names = Graph.from_symbol(symbol), BlockNames(block)
        self._on_output = on_output
        #: The nodes of each name: Gluon gives those of a block that is called twice one name.
        self._places: dict[str, list[int]] = {}
        consumers: dict[int, set[str]] = {}
        for i, node in enumerate(self._graph.nodes):
            if not node.is_variable:
                self._places.setdefault(node.name, []).append(i)
            for source, _ in node.inputs:
                consumers.setdefault(source, set()).add(node.op)
        # MXNet does not compute what nobody reads: its memory may hold anything.
        self._unread = {i for i, ops in consumers.items() if ops <= _SHAPES}
        self.begin({})

    def begin(self, inputs: Mapping[str, NDArray]) -> None:
        """Begin a forward pass on these inputs, or end one."""
        self._variables = {name: Tensor(name, array) for name, array in inputs.items()}
        for name, tensor in self._variables.items():
            tensor.variable = name
        self._seen: dict[tuple[int, int], Tensor] = {}
        self._calls: Counter[str] = Counter()

    def __call__(self, name: Any, *operator_and_handle: Any) -> None:
        """Take an output: its name, in cached ops its operator's name, and the array's handle."""
        array = NDArray(NDArrayHandle(operator_and_handle[-1]), writable=False)
        found = _OUTPUT.fullmatch(name.decode() if isinstance(name, bytes) else name)
        if found is None:
            return
        node, number = found[1], int(found[3] or 0)
        places = self._places.get(node, [])
        if found[2] or not places:
            site = self._site(places[0]) if places else Site("", node, "add_n")
            of = site.names[number] if number < len(site.names) else f"input {number}"
            self._on_output(site, None, Tensor(f"gradient of {of}", array))
            return
        self._calls[node] += number == 0
        i = places[min(self._calls[node], len(places)) - 1]
        if i in self._unread:
            return
        site = self._site(i)
        # At once, as another operator may write over it.
        output = self._seen[i, number] = Tensor(site.output, array, now=True)
        inputs = map(self._input, self._graph.nodes[i].inputs, site.names)
        self._on_output(site, [tensor for tensor in inputs if tensor is not None], output)

    def _input(self, entry: tuple[int, int], name: str) -> Tensor | None:
        """Return an input of a node, as it is called there; None if the monitor did not name it."""
        source = self._graph.nodes[entry[0]]
        found = self._variables.get(source.name) if source.is_variable else self._seen.get(entry)
        return found if found is None else found.called(name)

    def _site(self, i: int) -> Site:
        return site_of(self._graph, self._graph.nodes[i], self._block_names)


def monitored_op(symbol: Symbol, monitor: GraphMonitor) -> CachedOp:
    """Return a cached op of a symbol that calls `monitor`, which static graphs do not."""
    op = CachedOp(symbol, [("inline_limit", "0")])  # nodes of inlined graphs aren't monitored
    op._register_op_hook(monitor)
    return op


#: Inputs whose gradient no operator can read on CPUs: oneDNN can't bring it to the plain layout.
_UNREADABLE = {"Deconvolution": (1,)}
#: The calls that no backward pass has reached yet; older ones are forgotten.
_MOST_CALLS = 10_000
_ZEROS, _NEGATIVE, _SUM = handle_of("zeros_like"), handle_of("negative"), handle_of("add_n")
_TIMES = handle_of("_mul_scalar")
_mark_variables = original(autograd, "mark_variables")


class RecordedCall:
    """A call that autograd has recorded, and the zeros of its inputs by position."""

    def __init__(self, site: Site, inputs: Sequence[NDArray]) -> None:
        self.site, self.inputs = site, inputs
        self.zeros: dict[int, NDArray] = {}
        self.outputs: Sequence[NDArray] = ()
        self.is_ignored = False  #: faults of its gradients are not reported
        self.is_half = False
        self.graph: Any = None  #: for the call of a block, what watches its graph

    def gradients(self) -> dict[int, Tensor]:
        """Return the gradients of its inputs by position, if the last backward pass reached it."""
        found = {i: zero.grad for i, zero in self.zeros.items() if zero._fresh_grad}
        if found or not self.zeros:
            leaves = enumerate(self.inputs)
            found.update({i: x.grad for i, x in leaves if x.grad is not None and x._fresh_grad})
        names = self.site.names
        return {i: Tensor(f"gradient of {names[i]}", array) for i, array in sorted(found.items())}


class EagerGradients:
    """The recorded calls whose backward pass has not run."""

    def __init__(self) -> None:
        self._calls: deque[RecordedCall] = deque(maxlen=_MOST_CALLS)
        self._lock = threading.Lock()

    def record(self, site: Site, inputs: Sequence[NDArray]) -> tuple[RecordedCall, list[NDArray]]:
        """Record a call; return it, and its inputs plus zeros where that tells their gradients."""
        call = RecordedCall(site, inputs)
        with self._lock:
            self._calls.append(call)
        return call, [_plus_zero(call, i, array) for i, array in enumerate(inputs)]

    def fault(self) -> tuple[RecordedCall, Fault] | None:
        """Return the call and the first fault of the backward pass that has just run, or None."""
        with self._lock:
            reached = [(call, found) for call in self._calls if (found := call.gradients())]
            gone = {id(call) for call, _ in reached}
            self._calls = deque((c for c in self._calls if id(c) not in gone), _MOST_CALLS)
        # Whether values other than 0 have come to an array, by id, from the calls that read it.
        alive: dict[int, bool] = {}
        for call, gradients in reversed(reached):
            came = [alive[id(output)] for output in call.outputs if id(output) in alive]
            for i, gradient in gradients.items():
                array = id(call.inputs[i])
                alive[array] = alive.get(array, False) or gradient.nonzero > 0
                if gradient.is_bad:
                    return call, nonfinite(call.site, gradient)
            all_zero = not any(gradient.nonzero for gradient in gradients.values())
            if all_zero and call.is_half and call.graph is None and (not came or any(came)):
                fault = gradient_fault(call.site, next(iter(gradients.values())), is_half=True)
                if fault is not None:
                    return call, fault
        return None


def _plus_zero(call: RecordedCall, i: int, array: NDArray) -> NDArray:
    """Return an input of a call plus a new zero; the input itself where that can't be told apart.

    A parameter is left alone: its own gradient can be read, and layers treat an array that was
    computed in another way.
    """
    if array.stype != "default" or not Tensor("", array).is_checkable or not _is_recorded(array):
        return array
    is_sparse = array.grad is not None and array.grad.stype != "default"
    if is_sparse or (array.grad is not None and i > 0) or i in _unwatched(call.site.operator):
        return array
    with autograd.pause():
        gradient = invoke(_ZEROS, [array], [], [], None, False, False)
        # Zeros with a sign, which change no value, not even that of a zero.
        zero = invoke(_NEGATIVE, [gradient], [], [], None, False, False)
    _mark_variables([zero], [gradient])
    call.zeros[i] = zero
    is_np = isinstance(array, mx.np.ndarray)
    if dtype_of(array) == "bfloat16":  # oneDNN adds no views
        array = invoke(_TIMES, [array], ["scalar"], ["1.0"], None, is_np, False)
    result: NDArray = invoke(_SUM, [array, zero], ["num_args"], ["2"], None, is_np, False)
    return result


def _unwatched(operator: str) -> set[int]:
    """Return the positions of inputs whose gradients are always zero, or can't be read."""
    found = resolve(operator)
    positions = zero_gradient_inputs().get(found.handle, frozenset())
    without = set(range(1000)) if positions is None else set(positions)
    return without.union(found.mutable_inputs, _UNREADABLE.get(operator, ()))


def _is_recorded(array: NDArray) -> bool:
    """Return whether autograd computes a gradient for an array."""
    symbol = SymbolHandle()
    if _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)):
        return False
    check_call(_LIB.NNSymbolFree(symbol))
    return True
