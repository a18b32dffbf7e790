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
from typing import Any, Callable, Iterator, List, Optional, Sequence

from mxnet.module import Module, SequentialModule
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import StateError
from ..framework.distributed import is_distributed
from ..framework.patching import FrontEnd, Patch
from ..graph.gradients import SCALE_INPUT, with_scale_input
from ..graph.ir import Graph
from ..patches.symbolic import scaled_executors
from ..policy.active import chose_float32, current_policy, suspended
from ..scaling.distributed import poison
from ..scaling.finite import all_finite, multiply, unscale
from ..scaling.loss_outputs import scaled_custom_ops
from ..scaling.shared_scale import SharedScale, scale_of
from .module_workers import check_before, check_step, patient, summed_by_horovod, synchronize

__all__ = ["DecoratedName", "module_patches"]

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
        with scaled_custom_ops(scale, stays_inside=True):
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
