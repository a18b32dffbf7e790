"""Loss scaling for the symbolic Module API.

The graph that a module binds takes the scale as one more input (`graph.gradients`), a state
of the module. `backward` unscales the gradients. If one of them is not finite, all devices and
workers skip the update.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import StateError
from ..framework.distributed import PARAMETER_SERVER, is_distributed, is_horovod_optimizer
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..graph.gradients import SCALE_INPUT, with_scale_input
from ..graph.ir import Graph
from ..patches.symbolic import scaled_executors
from ..policy.active import chose_float32, current_policy, suspended
from ..scaling.distributed import COMPRESSED, check_settings, fill
from ..scaling.finite import all_finite, multiply, unscale
from ..scaling.loss_outputs import scaled_custom_ops
from ..scaling.scaler import LossScaler, SharedScale, scale_of
from ..scaling.statistics import RunningStatistics

logger = logging.getLogger("mxamp")

_UPDATE_SWITCH = "MXNET_UPDATE_ON_KVSTORE"

ON_KVSTORE = (
    "this module updates its parameters on the kvstore {kind!r}, where a gradient that overflowed "
    "can't be kept out: use a synchronous kvstore, such as 'local', 'device' or 'dist_sync'"
)
HOROVOD = (
    "Horovod's optimizers sum gradients in the update, where workers that skip it would be waited "
    "for: train with gluon.Trainer, or give the module a kvstore such as 'dist_sync'"
)
SKIPPED = "module update skipped, gradients are not finite; loss scale %g"
NOT_DECORATED = "nothing scales this module's losses, which float16 needs: decorate its optimizer"


class DecoratedName(str):
    """An optimizer's name that carries a scale to `Module`, which makes the optimizer itself."""

    _amp_scaling: SharedScale
    scaling: SharedScale


@dataclass
class _State:
    """A module's loss scaling, from its last forward and backward passes."""

    in_graph: bool = False  #: its graph takes the scale
    scale: float = 1.0  #: in its graph since the last forward
    overflown: bool = False  #: a gradient was not finite
    statistics: RunningStatistics = field(default_factory=RunningStatistics)


class _ModulePatches(FrontEnd):
    """Patches of `Module`, with the loss-scaling state of each module."""

    def __init__(self) -> None:
        super().__init__()
        #: For modules whose optimizer was not decorated; None leaves them as they are.
        self.default_scale: SharedScale | None = None
        self.states: WeakKeyDictionary[Module, _State] = WeakKeyDictionary()
        self.overriding: list[type] = []  #: subclasses whose own `init_optimizer` is patched

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Module, "bind", wrapping(_patched_bind)),
            Patch(Module, "init_optimizer", wrapping(_patched_init_optimizer)),
            Patch(Module, "forward", wrapping(_patched_forward)),
            Patch(Module, "backward", wrapping(_patched_backward)),
            Patch(Module, "update", wrapping(_patched_update)),
        ]

    def close(self) -> None:
        """Undo the patches, and forget the modules."""
        super().close()
        self.default_scale = None
        self.states.clear()
        self.overriding.clear()


#: One a process, like the classes that it patches.
module_patches = _ModulePatches()


def _patched_bind(
    original: Original,
    self: Module,
    data_shapes: Any,
    label_shapes: Any = None,
    for_training: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Bind a module to a symbol with an input for the loss scale, if it trains and has losses."""
    _patch_override(type(self))
    again = kwargs.get("force_rebind") or args[1:2] == (True,)
    graph = None
    if for_training and (again or not self.binded) and not chose_float32():
        graph = with_scale_input(Graph.from_symbol(self._symbol))
    scalable = None if graph is None else graph.to_symbol(type(self._symbol))
    with _with_symbol(self, scalable), scaled_executors():
        original(self, data_shapes, label_shapes, for_training, *args, **kwargs)
    if scalable is not None:
        module_patches.states[self] = _State(in_graph=True)


@contextmanager
def _with_symbol(module: Module, scalable: Symbol | None) -> Iterator[None]:
    """Context in which a module binds `scalable`; its own symbol, which it saves, stays."""
    symbol, names = module._symbol, module._state_names
    try:
        if scalable is not None:
            module._symbol, module._state_names = scalable, [*names, SCALE_INPUT]
        yield
    finally:
        module._symbol, module._state_names = symbol, names


def _patched_init_optimizer(
    original: Original,
    self: Module,
    kvstore: Any = "local",
    optimizer: Any = "sgd",
    *args: Any,
    **kwargs: Any,
) -> None:
    """Initialize a module's optimizer, and attach its loss scale, if any, to it."""
    shared = scale_of(optimizer) or module_patches.default_scale
    checks = shared is not None and shared.scaler.checks
    if checks:
        if is_horovod_optimizer(optimizer):
            raise StateError(HOROVOD)
        check_kvstore(self, kvstore)
    with _updates_off_kvstore() if checks else nullcontext():
        original(self, kvstore, optimizer, *args, **kwargs)
    if shared is None:
        policy = current_policy()
        if policy is not None and policy.target_dtype == "float16":
            logger.warning(NOT_DECORATED)
        return
    if checks and self._update_on_kvstore:
        raise StateError(ON_KVSTORE.format(kind=getattr(self._kvstore, "type", kvstore)))
    self._optimizer._amp_scaling = shared
    if checks and is_distributed(self._kvstore):
        _synchronize_workers(self, shared)


def _patch_override(kind: type) -> None:
    """Patch a subclass's own `init_optimizer`: SVRGModule's chooses a kvstore before Module's."""
    owner = next(one for one in kind.__mro__ if "init_optimizer" in vars(one))
    if owner is not Module and owner not in module_patches.overriding:
        module_patches.overriding.append(owner)
        FrontEnd([Patch(owner, "init_optimizer", wrapping(_patched_override))]).open()


def _patched_override(original: Original, self: Module, *args: Any, **kwargs: Any) -> None:
    """Initialize an optimizer whose updates have to be off the kvstore from the beginning."""
    given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
    shared = scale_of(given) or module_patches.default_scale
    checks = shared is not None and shared.scaler.checks
    with _updates_off_kvstore() if checks else nullcontext():
        original(self, *args, **kwargs)


def _patched_forward(original: Original, self: Module, *args: Any, **kwargs: Any) -> None:
    """Run a module forward with the current loss scale in its input for the scale."""
    state = module_patches.states.get(self)
    if state is not None and state.in_graph:
        scaler = _scaler_of(self)
        state.scale = 1.0 if scaler is None else scaler.loss_scale
        # Not in `backward`: with `group2ctxs` MXNet copies inputs to other devices in the
        # forward pass.
        group = self._exec_group
        with suspended():
            for array in group.state_arrays[group.state_names.index(SCALE_INPUT)]:
                array[:] = state.scale
    original(self, *args, **kwargs)


def _scaler_of(module: Module) -> LossScaler | None:
    """Return the scaler of a module's optimizer; None if its losses are not scaled."""
    shared = scale_of(module._optimizer) if module.optimizer_initialized else None
    return shared.scaler if shared is not None and shared.scaler.checks else None


def _patched_backward(original: Original, self: Module, out_grads: Any = None) -> None:
    """Run a module backward with scaled gradients, unscale them, and record an overflow."""
    scaler = _scaler_of(self)
    state = module_patches.states.setdefault(self, _State())
    state.overflown = False
    if scaler is None or not (state.in_graph or out_grads is not None):
        original(self, out_grads)
        return
    if scaler.scales:
        state.statistics.before_pass(partial(_running_statistics, self))
    scale = state.scale if state.in_graph else scaler.loss_scale
    # The sum has to carry the same scale as what is added to it.
    multiply(_gradients(self, adding=True), scale)
    with scaled_custom_ops(scale, unscaled_outside=True):
        original(self, _times(out_grads, scale))
    state.overflown = bool(unscale(_gradients(self), scale))


def _running_statistics(module: Module) -> dict[str, NDArray]:
    """Return a module's auxiliary states on all devices."""
    group = module._exec_group
    return {
        f"{name} on {array.context}": array
        for name, arrays in zip(group.aux_names, group.aux_arrays)
        for array in arrays
    }


def _gradients(module: Module, adding: bool = False) -> list[NDArray]:
    """Return all gradients of a module; with `adding`, those with `grad_req="add"`."""
    group = module._exec_group
    return [
        gradient
        for executor in group.execs
        for name, gradient in executor.grad_dict.items()
        if gradient is not None and (not adding or group.grad_req.get(name) == "add")
    ]


def _patched_update(original: Original, self: Module) -> None:
    """Update a module's parameters if all gradients are finite, then update the loss scale."""
    shared = scale_of(self._optimizer)
    if shared is None or self not in module_patches.states:
        original(self)
        return
    state, scaler = module_patches.states[self], shared.scaler
    if not scaler.checks:
        original(self)
        scaler.update(True)
        return
    finite = _update_if_finite(self, scaler, state.overflown, original)
    if scaler.scales:
        state.statistics.after_step(finite, partial(_running_statistics, self))
    scaler.update(finite)


def _update_if_finite(
    module: Module, scaler: LossScaler, overflown: bool, original: Callable[..., Any]
) -> bool:
    """Update a module's parameters if all gradients are finite; return whether they are."""
    group, kvstore = module._exec_group, module._kvstore
    if kvstore:
        if overflown and is_distributed(kvstore):
            fill(_trained_gradients(group), float("inf"))
        # Before the check, so that all devices and workers decide alike.
        for i, (name, gradients) in enumerate(zip(group.param_names, group.grad_arrays)):
            if gradients[0] is not None:
                kvstore.push(name, gradients, priority=-i)
                kvstore.pull(name, out=gradients, priority=-i)
    if overflown or not all_finite(_trained_gradients(group)):
        logger.info(SKIPPED, scaler.loss_scale)
        return False
    module._kvstore = None
    try:
        original(module)
    finally:
        module._kvstore = kvstore
    return True


def _trained_gradients(group: Any) -> list[NDArray]:
    """Return the gradients of the trained parameters, on all devices."""
    return [g for of_one in group.grad_arrays for g in of_one if g is not None]


def _times(arrays: Any, factor: float) -> Any:
    """Return an array, or nested lists of arrays, times a factor; None stays None."""
    if arrays is None or factor == 1:
        return arrays
    if isinstance(arrays, NDArray):
        with suspended():
            return arrays * factor
    return [_times(array, factor) for array in arrays]


@contextmanager
def _updates_off_kvstore() -> Iterator[None]:
    """Context with `MXNET_UPDATE_ON_KVSTORE=0`: MXNet updates parameters outside the kvstore."""
    before = os.environ.get(_UPDATE_SWITCH)
    os.environ[_UPDATE_SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[_UPDATE_SWITCH]
        if before is not None:
            os.environ[_UPDATE_SWITCH] = before


# ------------------------------------------- several workers: same weights, settings and steps


def check_kvstore(module: Module, kvstore: Any) -> None:
    """Raise if a module's kvstore compresses gradients, or can't send its parameters."""
    if not is_distributed(kvstore):
        return
    if module._compression_params:
        raise StateError(COMPRESSED)
    group = module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        PARAMETER_SERVER.check_arrays(f"the parameter {name!r}", arrays)


def _synchronize_workers(module: Module, shared: SharedScale) -> None:
    """Give a module the weights of worker 0, and compare the workers' settings.

    MXNet shares weights only if the kvstore updates them.
    """
    kvstore, group = module._kvstore, module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        kvstore.pull(name, out=arrays)
    mx.nd.waitall()
    module._params_dirty = True
    check_settings(kvstore, shared.scaler.state_dict(), key_type=str)
