"""Loss scaling for the symbolic Module API.

`SoftmaxOutput` and its kin ignore the gradient that comes to them, so the scale enters the graph
as data: each one's input x becomes x + (x*s - BlockGrad(x*s)), with s = scale - 1 a state of the
module. That leaves every value as it is and multiplies the gradient by 1 + s. Updates take the
scale out again, and are skipped on all devices where one gradient is not finite.
"""

import functools
import logging
import os
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional

from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from .autocast import autocast
from .doors import on_shut, open_door
from .errors import StateError
from .finite import all_finite
from .graph import Graph, Node, Output
from .heads import OUTPUTS
from .patching import Patch
from .shared import Scaling, scaling_of

__all__ = ["DecoratedName", "open_modules", "with_scale_input"]

logger = logging.getLogger("mxamp")

SCALE = "amp_loss_scale_minus_one"

#: Operators that start the backward pass, whatever gradient comes to them.
_STARTS = frozenset({*OUTPUTS, "SVMOutput", "MakeLoss", "make_loss"})

_UPDATE_SWITCH = "MXNET_UPDATE_ON_KVSTORE"

ON_KVSTORE = (
    "this module updates its parameters on the kvstore {kind!r}, where a gradient that overflowed "
    "can't be kept out: use a synchronous kvstore, such as 'local', 'device' or 'dist_sync'"
)


class DecoratedName(str):
    """An optimizer's name with a scaling: `Module` makes the optimizer itself."""

    scaling: Scaling


class _State:
    """What is known of one module: whether its graph takes the scale, and what was used."""

    def __init__(self, scalable: bool) -> None:
        self.scalable = scalable
        self.used = 1.0  #: the scale that its gradients carry


_states: "weakref.WeakKeyDictionary[Module, _State]" = weakref.WeakKeyDictionary()
on_shut(_states.clear)


def with_scale_input(symbol: Symbol) -> Optional[Symbol]:
    """Return `symbol` with the input `amp_loss_scale_minus_one`; None where nothing takes it."""
    graph = Graph.from_symbol(symbol)
    nodes: List[Node] = [Node("null", SCALE, {"__shape__": "(1,)", "__dtype__": "0"})]
    places: Dict[int, int] = {}
    found = False
    for i, node in enumerate(graph.nodes):
        inputs = [(places[source], k) for source, k in node.inputs]
        if not node.is_variable and node.operator in _STARTS:
            found = True
            inputs[0] = _scaled(nodes, node.name, inputs[0])
        places[i] = len(nodes)
        nodes.append(Node(node.op, node.name, node.attrs, inputs, node.subgraphs, node.num_outputs))
    if not found:
        return None
    heads = [(places[i], k) for i, k in graph.heads]
    return Graph(nodes, heads, graph.attrs).to_symbol(type(symbol))


def _scaled(nodes: List[Node], name: str, data: Output) -> Output:
    """Append x + (x*s - BlockGrad(x*s)) for an output x of `nodes`; return where it is."""

    def add(op: str, suffix: str, *inputs: Output) -> Output:
        nodes.append(Node(op, f"{name}_amp_{suffix}", {}, list(inputs)))
        return len(nodes) - 1, 0

    product = add("broadcast_mul", "scaled", data, (0, 0))
    zero = add("elemwise_sub", "zero", product, add("BlockGrad", "block", product))
    return add("elemwise_add", "input", data, zero)


def open_modules(default: Callable[[], Optional[Scaling]]) -> None:
    """Patch `Module`.

    `default` returns the scaling for optimizers that have none of their own, or None.
    """

    def build_bind(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def bind(
            self: Module, data_shapes: Any, label_shapes: Any = None, for_training: bool = True,
            *args: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            scalable = with_scale_input(self._symbol) if for_training else None
            if self.binded and not (kwargs.get("force_rebind") or args[1:2] == (True,)):
                scalable = None
            symbol, names = self._symbol, self._state_names
            try:
                if scalable is not None:
                    # Only the executors take the scale: what is saved stays the user's graph.
                    self._symbol, self._state_names = scalable, [*names, SCALE]
                original(self, data_shapes, label_shapes, for_training, *args, **kwargs)
            finally:
                self._symbol, self._state_names = symbol, names
            if scalable is not None:
                _states[self] = _State(True)
                _set_scale(self, 1.0)

        return bind

    def build_init_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_optimizer(
            self: Module, kvstore: Any = "local", optimizer: Any = "sgd", *args: Any, **kwargs: Any
        ) -> None:
            scaling = getattr(optimizer, "scaling", None) or scaling_of(optimizer) or default()
            if scaling is None:
                original(self, kvstore, optimizer, *args, **kwargs)
                return
            with _updates_off_kvstore():
                original(self, kvstore, optimizer, *args, **kwargs)
            if self._update_on_kvstore:
                raise StateError(ON_KVSTORE.format(kind=getattr(self._kvstore, "type", kvstore)))
            self._optimizer._amp_scaling = scaling

        return init_optimizer

    def build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(self: Module, out_grads: Any = None) -> None:
            scaling = scaling_of(self._optimizer) if self.optimizer_initialized else None
            state = _states.setdefault(self, _State(False))
            if scaling is not None and (state.scalable or out_grads is not None):
                state.used = scaling.loss_scale
                out_grads = _times(out_grads, state.used)
            else:
                state.used = 1.0
            if state.scalable:
                _set_scale(self, state.used)
            original(self, out_grads)

        return backward

    def build_input_grads(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_input_grads(self: Module, *args: Any, **kwargs: Any) -> Any:
            used = _states[self].used if self in _states else 1.0
            return _times(original(self, *args, **kwargs), 1 / used)

        return get_input_grads

    def build_update(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(self: Module) -> None:
            scaling = scaling_of(self._optimizer)
            if scaling is None or self not in _states:
                original(self)
            else:
                _update(self, scaling, _states[self].used, original)

        return update

    open_door(
        "modules",
        [
            Patch(Module, "bind", build_bind),
            Patch(Module, "init_optimizer", build_init_optimizer),
            Patch(Module, "backward", build_backward),
            Patch(Module, "get_input_grads", build_input_grads),
            Patch(Module, "update", build_update),
        ],
    )


def _update(module: Module, scaling: Scaling, used: float, update: Callable[..., Any]) -> None:
    """Update a module's parameters with the scale taken out, or skip it."""
    group, kvstore, optimizer = module._exec_group, module._kvstore, module._optimizer
    if kvstore:
        # Before the check, so that all devices and workers decide alike.
        for i, (name, grads) in enumerate(zip(group.param_names, group.grad_arrays)):
            if grads[0] is not None:
                kvstore.push(name, grads, priority=-i)
                kvstore.pull(name, out=grads, priority=-i)
    finite = all_finite([g for grads in group.grad_arrays for g in grads if g is not None])
    if finite:
        rescale = optimizer.rescale_grad
        optimizer.rescale_grad, module._kvstore = rescale / used, None
        try:
            update(module)
        finally:
            optimizer.rescale_grad, module._kvstore = rescale, kvstore
    else:
        logger.info("module update skipped, gradients are not finite; loss scale %g", used)
    scaling.record(finite)


def _set_scale(module: Module, scale: float) -> None:
    group = module._exec_group
    with autocast(enabled=False):
        for array in group.state_arrays[group.state_names.index(SCALE)]:
            array[:] = scale - 1


def _times(arrays: Any, factor: float) -> Any:
    if arrays is None or factor == 1:
        return arrays
    if isinstance(arrays, NDArray):
        with autocast(enabled=False):
            return arrays * factor
    return [_times(array, factor) for array in arrays]


@contextmanager
def _updates_off_kvstore() -> Iterator[None]:
    """Tell MXNet to update parameters outside of kvstores, by its own switch."""
    before = os.environ.get(_UPDATE_SWITCH)
    os.environ[_UPDATE_SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UPDATE_SWITCH]
        else:
            os.environ[_UPDATE_SWITCH] = before
