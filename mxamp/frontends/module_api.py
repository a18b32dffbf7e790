"""Loss scaling for the symbolic Module API.

The graph that a module binds takes the scale as one more input (`graph.scale_input`), a state of
the module. `backward` takes the scale out of the gradients again; updates are skipped on all
devices where one gradient is not finite.
"""

import functools
import logging
import os
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.module import Module, SequentialModule
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import StateError
from ..framework.horovod import check_gradients, is_horovod_optimizer, store_of
from ..framework.kvstores import is_distributed
from ..framework.patching import FrontEnd, Patch
from ..framework.transports import PARAMETER_SERVER
from ..framework.waiting import waiting
from ..graph.casts.scale_input import SCALE_INPUT, with_scale_input
from ..graph.ir import Graph
from ..patches.symbolic import scaled_executors
from ..policy.active import chose_float32, current_policy, suspended
from ..scaling import custom_gradients
from ..scaling.finite import all_finite, multiply, unscale
from ..scaling.reduction import poison
from ..scaling.shared_scale import SharedScale, scale_of
from ..scaling.workers import GRADIENTS, Workers

__all__ = [
    "DecoratedName",
    "check_before",
    "check_step",
    "module_patches",
    "patient",
    "summed_by_horovod",
    "synchronize",
]

COMPRESSED = (
    "gradient compression makes finite numbers of Inf and NaN, so workers can't see that another "
    "has overflowed: leave compression_params out, or train in float32"
)

#: An attribute of a kvstore, as the modules of several buckets share one. Held anywhere else, it
#: would keep the kvstore alive until MXNet is gone, and the process would abort.
_WORKERS = "_amp_workers"
#: By the optimizers of Horovod that modules have.
_by_optimizer: "WeakKeyDictionary[Any, Workers]" = WeakKeyDictionary()


def check_before(module: Module, kvstore: Any) -> None:
    """Raise where a module can't train in mixed precision on this kvstore."""
    if not is_distributed(kvstore):
        return
    if module._compression_params:
        raise StateError(COMPRESSED)
    group = module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        PARAMETER_SERVER.check_arrays(f"the parameter {name!r}", arrays)


def synchronize(module: Module, shared: SharedScale) -> None:
    """Give a module the weights of worker 0, and compare the workers' settings.

    MXNet shares them by itself only where parameters are updated on the kvstore. With Horovod the
    program does, by `broadcast_parameters`.
    """
    kvstore, group, optimizer = module._kvstore, module._exec_group, module._optimizer
    if is_horovod_optimizer(optimizer):
        store = store_of(optimizer)
        if store is not None and optimizer not in _by_optimizer:
            _by_optimizer[optimizer] = Workers(store)
            _by_optimizer[optimizer].check_settings(shared.scaler.state_dict())
        return
    if not is_distributed(kvstore):
        return
    for name, arrays in zip(group.param_names, group.param_arrays):
        kvstore.pull(name, out=arrays)
    mx.nd.waitall()
    module._params_dirty = True
    workers = Workers(kvstore, string_keys=True)
    workers.check_settings(shared.scaler.state_dict())
    setattr(kvstore, _WORKERS, workers)


@contextmanager
def patient(module: Module) -> Iterator[None]:
    """Say what this worker waits for, if the sum of a module's gradients lasts long."""
    workers = getattr(module._kvstore, _WORKERS, None)
    if workers is None:  # Horovod says so itself
        yield
        return
    with waiting(GRADIENTS, workers.rank):
        yield


@contextmanager
def summed_by_horovod(module: Module, overflown: bool) -> Iterator[None]:
    """Sum a module's gradients now, and not in the updates of its Horovod optimizer.

    An update that one worker skips, the others would wait for. `overflown` tells that this
    worker's gradients are known to have overflowed: all are to know. Does nothing with optimizers
    that are not Horovod's.
    """
    optimizer = module._optimizer
    if not is_horovod_optimizer(optimizer):
        yield
        return
    group = module._exec_group
    listed = [
        (name, gradients)
        for name, gradients in zip(group.param_names, group.grad_arrays)
        if gradients[0] is not None
    ]
    if optimizer in _by_optimizer:
        for name, gradients in listed:
            check_gradients(name, gradients)
            if overflown:
                poison(gradients)
        arrays = [gradients[0] for _, gradients in listed]
        optimizer._do_allreduce(list(range(len(arrays))), arrays)
    optimizer._do_allreduce = _do_nothing
    try:
        yield
    finally:
        del optimizer._do_allreduce


def _do_nothing(*_: Any) -> None:
    """Stand for a sum that has been done."""


def check_step(module: Module, values: Mapping[str, Any]) -> None:
    """Compare the workers after a step, if the environment asks for it."""
    workers = getattr(module._kvstore, _WORKERS, None) or _by_optimizer.get(module._optimizer)
    if workers is not None:
        workers.check_step(values)


logger = logging.getLogger("mxamp")

_UPDATE_SWITCH = "MXNET_UPDATE_ON_KVSTORE"

ON_KVSTORE = (
    "this module updates its parameters on the kvstore {kind!r}, where a gradient that overflowed "
    "can't be kept out: use a synchronous kvstore, such as 'local', 'device' or 'dist_sync'"
)
NOT_DECORATED = "nothing scales this module's losses, which float16 needs: decorate its optimizer"


class DecoratedName(str):
    """An optimizer's name with a scale: `Module` makes the optimizer itself."""

    scaling: SharedScale

    def __repr__(self) -> str:
        return f"DecoratedName({str(self)!r}, {getattr(self, 'scaling', None)!r})"


class _BoundState:
    """What is known of one module: whether its graph takes the scale, and its last backward."""

    def __init__(self, scalable: bool) -> None:
        self.scalable = scalable
        self.scale = 1.0  #: that its graph was given in the last forward
        self.overflown = False  #: a gradient was not finite
        self.counts = True  #: its update is a step; not that of a later module of a sequence


class _ModulePatches(FrontEnd):
    """Patches of `Module`, and what is known of each module."""

    def __init__(self) -> None:
        super().__init__()
        #: For modules whose optimizer has no scale of its own; None leaves them as they are.
        self.default: Optional[SharedScale] = None
        self.states: "weakref.WeakKeyDictionary[Module, _BoundState]" = weakref.WeakKeyDictionary()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Module, "bind", _build_bind),
            Patch(Module, "init_optimizer", _build_init_optimizer),
            Patch(Module, "forward", _build_forward),
            Patch(Module, "backward", _build_backward),
            Patch(Module, "update", _build_update),
            Patch(SequentialModule, "update", _build_update_of_all),
        ]

    def close(self) -> None:
        """Take the patches off, and forget the modules."""
        super().close()
        self.default = None
        self.states.clear()


#: One a process, as the class that it patches is.
module_patches = _ModulePatches()


def _build_bind(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bind(
        self: Module,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        again = kwargs.get("force_rebind") or args[1:2] == (True,)
        scalable = None
        if for_training and (again or not self.binded) and not chose_float32():
            scalable = _with_scale(self._symbol)
        with _bound_as(self, scalable), scaled_executors():
            original(self, data_shapes, label_shapes, for_training, *args, **kwargs)
        if scalable is not None:
            module_patches.states[self] = _BoundState(True)

    return bind


def _with_scale(symbol: Symbol) -> Optional[Symbol]:
    graph = with_scale_input(Graph.from_symbol(symbol))
    return None if graph is None else graph.to_symbol(type(symbol))


@contextmanager
def _bound_as(module: Module, scalable: Optional[Symbol]) -> Iterator[None]:
    """Let a module bind another symbol: only executors take the scale, what is saved does not."""
    symbol, names = module._symbol, module._state_names
    try:
        if scalable is not None:
            module._symbol, module._state_names = scalable, [*names, SCALE_INPUT]
        yield
    finally:
        module._symbol, module._state_names = symbol, names


def _build_init_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_optimizer(
        self: Module, kvstore: Any = "local", optimizer: Any = "sgd", *args: Any, **kwargs: Any
    ) -> None:
        asked = getattr(optimizer, "scaling", None) or scale_of(optimizer)
        shared = asked or module_patches.default
        if shared is None:
            policy = current_policy()
            if policy is not None and policy.target_dtype == "float16":
                logger.warning(NOT_DECORATED)
            original(self, kvstore, optimizer, *args, **kwargs)
            return
        if not shared.checks:
            original(self, kvstore, optimizer, *args, **kwargs)
            self._optimizer._amp_scaling = shared
            return
        check_before(self, kvstore)
        with _updates_off_kvstore():
            original(self, kvstore, optimizer, *args, **kwargs)
        if self._update_on_kvstore:
            raise StateError(ON_KVSTORE.format(kind=getattr(self._kvstore, "type", kvstore)))
        self._optimizer._amp_scaling = shared
        synchronize(self, shared)

    return init_optimizer


def _build_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Module, *args: Any, **kwargs: Any) -> None:
        state = module_patches.states.get(self)
        if state is not None and state.scalable:
            shared = _shared_by(self)
            state.scale = 1.0 if shared is None else shared.loss_scale
            # Now, not in `backward`: where `group2ctxs` spreads a graph over devices, MXNet copies
            # inputs to the others in the forward pass.
            _set_scale(self, state.scale)
        original(self, *args, **kwargs)

    return forward


def _shared_by(module: Module) -> Optional[SharedScale]:
    """Return the scale of a module's optimizer; None where nothing is to be scaled."""
    shared = scale_of(module._optimizer) if module.optimizer_initialized else None
    return shared if shared is not None and shared.checks else None


def _build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(self: Module, out_grads: Any = None) -> None:
        shared = _shared_by(self)
        state = module_patches.states.setdefault(self, _BoundState(False))
        state.overflown = False
        if shared is None or not (state.scalable or out_grads is not None):
            original(self, out_grads)
            return
        scale = state.scale if state.scalable else shared.loss_scale
        # What gradients are added to has to carry the same scale as what is added.
        multiply(_gradients(self, adding=True), scale)
        with custom_gradients.scaled(scale, stays_inside=True):
            original(self, _times(out_grads, scale))
        state.overflown = bool(unscale(_gradients(self), scale))

    return backward


def _gradients(module: Module, adding: bool = False) -> List[NDArray]:
    """Return the gradients that a backward pass writes; with `adding`, those it adds to."""
    group = module._exec_group
    return [
        gradient
        for executor in group.execs
        for name, gradient in executor.grad_dict.items()
        if gradient is not None and (not adding or group.grad_req.get(name) == "add")
    ]


def _build_update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Module) -> None:
        shared = scale_of(self._optimizer)
        if shared is None or self not in module_patches.states:
            original(self)
            return
        state, finite = module_patches.states[self], True
        if shared.checks:
            with patient(self), summed_by_horovod(self, state.overflown):
                finite = _update(self, shared, state.overflown, original)
        else:
            original(self)
        if state.counts:
            scale = shared.record(finite)
            decision = "update" if finite else "skip"
            step = shared.steps + shared.skips
            check_step(self, {"step": step, "decision": decision, "loss scale": scale})

    return update


def _build_update_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: SequentialModule) -> None:
        # One batch is one step: all its modules update, or none, and it counts once.
        states = [module_patches.states[m] for m in self._modules if m in module_patches.states]
        overflown = any(state.overflown for state in states)
        for i, state in enumerate(states):
            state.overflown, state.counts = overflown, i == 0
        original(self)

    return update


def _update(
    module: Module, shared: SharedScale, overflown: bool, original: Callable[..., Any]
) -> bool:
    """Update a module's parameters unless a gradient is not finite; tell whether all are."""
    group, kvstore = module._exec_group, module._kvstore
    if kvstore:
        if overflown and is_distributed(kvstore):
            poison([g for of_one in group.grad_arrays for g in of_one if g is not None])
        # Before the check, so that all devices and workers decide alike.
        for i, (name, gradients) in enumerate(zip(group.param_names, group.grad_arrays)):
            if gradients[0] is not None:
                kvstore.push(name, gradients, priority=-i)
                kvstore.pull(name, out=gradients, priority=-i)
    gradients = [g for of_one in group.grad_arrays for g in of_one if g is not None]
    finite = not overflown and all_finite(gradients)
    if finite:
        module._kvstore = None
        try:
            original(module)
        finally:
            module._kvstore = kvstore
    else:
        scale = shared.loss_scale
        logger.info("module update skipped, gradients are not finite; loss scale %g", scale)
    return finite


def _set_scale(module: Module, scale: float) -> None:
    group = module._exec_group
    with suspended():
        for array in group.state_arrays[group.state_names.index(SCALE_INPUT)]:
            array[:] = scale


def _times(arrays: Any, factor: float) -> Any:
    if arrays is None or factor == 1:
        return arrays
    if isinstance(arrays, NDArray):
        with suspended():
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
        del os.environ[_UPDATE_SWITCH]
        if before is not None:
            os.environ[_UPDATE_SWITCH] = before
