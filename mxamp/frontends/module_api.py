"""Loss scaling for the symbolic Module API.

The graph that a module binds takes the scale as one more input (`graph.gradients`), a state
of the module. `backward` unscales the gradients. If one of them is not finite, all devices and
workers skip the update.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable
from weakref import WeakSet

import mxnet as mx
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray

from ..errors import StateError
from ..framework.arrays import map_arrays
from ..framework.distributed import PARAMETER_SERVER, is_distributed, is_horovod_optimizer
from ..framework.environment import variable
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..graph.gradients import SCALE_INPUT, with_scale_input
from ..graph.ir import Graph
from ..patches.symbolic import scaled_executors
from ..policy.active import chose_float32, current_policy, suspended
from ..scaling.distributed import COMPRESSED, check_settings, fill
from ..scaling.finite import all_finite, divide_and_check, multiply
from ..scaling.running import BackwardPass, run
from ..scaling.scaler import LossScaler, SharedScale, scale_of
from ..scaling.statistics import RunningStatistics
from .backward import backward_patches

logger = logging.getLogger("mxamp")

ON_KVSTORE = (
    "parameters are updated on the kvstore {kind!r}, where no overflow can be kept out: decorate "
    "the optimizer in a line before init_optimizer's, for a synchronous kvstore such as 'local'"
)
HOROVOD = (
    "Horovod sums gradients in updates: to skip some, use gluon.Trainer or kvstore 'dist_sync'"
)
SKIPPED = "module update skipped, gradients are not finite; loss scale %g"
NOT_DECORATED = "nothing scales this module's losses, which float16 needs: decorate its optimizer"


#: Modules that were bound with the patches.
_bound: WeakSet[Module] = WeakSet()


class DecoratedName(str):
    """An optimizer's name that also holds its loss scale; a str, as `Module` expects."""


@dataclass
class _ModuleScaling:
    """The loss scaling state of a module: scale, overflow flag, saved BatchNorm statistics."""

    scale: float = 1.0  #: in its graph since the last forward
    overflown: bool = False  #: a gradient was not finite
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    group: Any = None  #: the executors whose losses, if they have any, take the scale


def _state_of(module: Module) -> _ModuleScaling:
    """Return the loss scaling state of a module; create it on first use."""
    return vars(module).setdefault("_amp_state", _ModuleScaling())  # type: ignore[no-any-return]


def _patched_bind(
    original: Original,
    self: Module,
    data_shapes: object,
    label_shapes: object = None,
    for_training: bool = True,
    *args: object,
    **kwargs: object,
) -> None:
    """Bind a module; in training, its graph gets an input for the loss scale."""
    _patch_override(type(self))
    symbol, names, graph, group = self._symbol, self._state_names, None, self._exec_group
    if for_training and not chose_float32():
        graph = with_scale_input(Graph.from_symbol(symbol))
    try:
        if graph is not None:
            self._symbol, self._state_names = graph.to_symbol(type(symbol)), [*names, SCALE_INPUT]
        with scaled_executors():
            original(self, data_shapes, label_shapes, for_training, *args, **kwargs)
    finally:
        self._symbol, self._state_names = symbol, names  # the module saves its own symbol
    if self._exec_group is not group and not chose_float32():  # MXNet ignores a second `bind`
        _state_of(self).group = self._exec_group
    _bound.add(self)


def _scale_arrays(module: Module) -> list[NDArray]:
    """Return the arrays of a module's loss scale input, one for each device; [] without it."""
    group = module._exec_group
    if group is None or SCALE_INPUT not in group.state_names:
        return []
    return list(group.state_arrays[group.state_names.index(SCALE_INPUT)])


def _patched_init_optimizer(
    original: Original,
    self: Module,
    kvstore: object = "local",
    optimizer: object = "sgd",
    *args: object,
    **kwargs: object,
) -> None:
    """Initialize a module's optimizer; attach the loss scale of `decorate` or an automatic run."""
    shared = scale_of(optimizer) or backward_patches.default_scale
    checks = shared is not None and shared.scaler.is_scaling
    if checks:
        if is_horovod_optimizer(optimizer):
            raise StateError(HOROVOD)
        check_kvstore(self, kvstore)
    # MXNet updates parameters outside the kvstore.
    with variable("MXNET_UPDATE_ON_KVSTORE", "0" if checks else None):
        original(self, kvstore, optimizer, *args, **kwargs)
    if shared is None:
        policy = current_policy()
        # SVRGModule's own method calls this one with an optimizer around the decorated one.
        is_outermost = original is getattr(type(self).init_optimizer, "__wrapped__", original)
        if policy is not None and policy.target_dtype == "float16" and is_outermost:
            logger.warning(NOT_DECORATED)
        return
    if checks and self._update_on_kvstore:
        raise StateError(ON_KVSTORE.format(kind=getattr(self._kvstore, "type", kvstore)))
    self._optimizer._amp_scaling = shared
    if checks and is_distributed(self._kvstore):
        _synchronize_workers(self, shared)


def _patch_override(kind: type) -> None:
    """Patch `init_optimizer` of a `Module` subclass that overrides it, such as SVRGModule."""
    owner = next(one for one in kind.__mro__ if "init_optimizer" in vars(one))
    if not hasattr(vars(owner)["init_optimizer"], "__wrapped__"):  # not patched yet
        FrontEnd([Patch(owner, "init_optimizer", wrapping(_patched_init_optimizer))]).open()


def _patched_forward(original: Original, self: Module, *args: object, **kwargs: object) -> None:
    """Run a module forward, after writing the current loss scale to its graph's input."""
    scaler = _scaler_of(self)
    # Not in `backward`: with `group2ctxs` MXNet copies inputs to other devices in the forward pass.
    _set_scale(self, 1.0 if scaler is None else scaler.loss_scale)
    original(self, *args, **kwargs)


def _set_scale(module: Module, scale: float) -> None:
    """Write the loss scale to a module's graph, if the graph has an input for it."""
    _state_of(module).scale = scale
    with suspended():
        for array in _scale_arrays(module):
            array[:] = scale


def _scaler_of(module: Module) -> LossScaler | None:
    """Return the loss scaler of a module's optimizer; None if its losses are not scaled."""
    shared = scale_of(module._optimizer) if module.optimizer_initialized else None
    return shared.scaler if shared is not None and shared.scaler.is_scaling else None


def _patched_backward(original: Original, self: Module, out_grads: object = None) -> None:
    """Run a module backward with scaled gradients, then unscale them and record an overflow."""
    scaler, state = _scaler_of(self), _state_of(self)
    has_dropped, state.overflown = state.overflown, False
    in_graph = bool(_scale_arrays(self))
    # Bound before `decorate`, losses of their own would not carry the scale that `out_grads` do.
    is_scaled = state.group is self._exec_group and (in_graph or out_grads is not None)
    if scaler is None or not is_scaled:
        original(self, out_grads)
        return
    state.statistics.before_pass(partial(_running_statistics, self))
    scale = state.scale if in_graph else scaler.loss_scale
    # Without an update since; a sum may hold the same overflow still.
    has_dropped = has_dropped and all_finite(_gradients(self, adding=True))
    # The sum has to carry the same scale as what is added to it.
    multiply(_gradients(self, adding=True), scale)
    with suspended():
        scaled = map_arrays(out_grads, lambda array: array * scale, lambda other: other)
    run(BackwardPass((), scale=scale), partial(original, self, scaled))
    state.overflown = bool(divide_and_check(_gradients(self), scale))
    if has_dropped and state.overflown and not is_distributed(self._kvstore):
        scaler.update(False)


def _running_statistics(module: Module) -> list[tuple[str, NDArray]]:
    """Return the auxiliary states of a module on all devices, such as BatchNorm's statistics."""
    group = module._exec_group
    return [(n, one) for n, arrays in zip(group.aux_names, group.aux_arrays) for one in arrays]


def _gradients(module: Module, adding: bool = False) -> list[NDArray]:
    """Return the gradients of a module: all, or with `adding` those with `grad_req="add"`."""
    group = module._exec_group
    return [
        gradient
        for executor in group.execs
        for name, gradient in executor.grad_dict.items()
        if gradient is not None and (not adding or group.grad_req.get(name) == "add")
    ]


def _patched_update(original: Original, self: Module) -> None:
    """Update a module's parameters if all gradients are finite, then update the loss scale."""
    shared, scaler, finite = scale_of(self._optimizer), _scaler_of(self), True
    if scaler is None:
        original(self)
    else:
        state = _state_of(self)
        finite = _update_if_finite(self, scaler, state.overflown, original)
        state.overflown = False
        state.statistics.after_step(finite, partial(_running_statistics, self))
    if shared is not None:
        shared.scaler.update(finite)


def _update_if_finite(
    module: Module, scaler: LossScaler, overflown: bool, original: Callable[..., Any]
) -> bool:
    """Update a module's parameters if all gradients are finite; return whether they are."""
    group, kvstore = module._exec_group, module._kvstore
    if module._update_on_kvstore:  # `init_optimizer` was looked up before `decorate` patched it
        raise StateError(ON_KVSTORE.format(kind=kvstore.type))
    if kvstore:
        if overflown and is_distributed(kvstore):
            fill(_gradients(module), float("inf"))
        # Before the check, so that all devices and workers decide alike.
        for i, (name, gradients) in enumerate(zip(group.param_names, group.grad_arrays)):
            if gradients[0] is not None:
                kvstore.push(name, gradients, priority=-i)
                kvstore.pull(name, out=gradients, priority=-i)
    if overflown or not all_finite(_gradients(module)):
        logger.info(SKIPPED, scaler.loss_scale)
        return False
    module._kvstore = None
    try:
        original(module)
    finally:
        module._kvstore = kvstore
    return True


# ------------------------------------------- several workers: same weights, settings and steps


def check_kvstore(module: Module, kvstore: object) -> None:
    """Raise if a module's kvstore compresses gradients or can't send the parameters' dtypes."""
    if not is_distributed(kvstore):
        return
    if module._compression_params:
        raise StateError(COMPRESSED)
    group = module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        PARAMETER_SERVER.check_arrays(f"the parameter {name!r}", arrays)


def _synchronize_workers(module: Module, shared: SharedScale) -> None:
    """Copy worker 0's weights to a module, and raise if the workers' settings differ.

    MXNet shares weights only if the kvstore updates them.
    """
    kvstore, group = module._kvstore, module._exec_group
    for name, arrays in zip(group.param_names, group.param_arrays):
        kvstore.pull(name, out=arrays)
    mx.nd.waitall()
    module._params_dirty = True
    check_settings(kvstore, shared.scaler.state_dict(), key_type=str)


class _ModulePatches(FrontEnd):
    """Patches of `Module` for loss scaling; undoing them sets the scale in all graphs to 1."""

    def close(self) -> None:
        super().close()
        for module in _bound:
            _set_scale(module, 1.0)


#: One a process, like the class that it patches.
module_patches = _ModulePatches(
    [
        Patch(Module, "bind", wrapping(_patched_bind)),
        Patch(Module, "init_optimizer", wrapping(_patched_init_optimizer)),
        Patch(Module, "forward", wrapping(_patched_forward)),
        Patch(Module, "backward", wrapping(_patched_backward)),
        Patch(Module, "update", wrapping(_patched_update)),
    ]
)
