"""One loss scale for everything that trains, where the script itself scales no loss.

`autograd.backward` and `NDArray.backward` multiply the gradients of their heads by the scale; the
trainers that are attached here take it out again and skip what overflows. This is what
`MXNET_ENABLE_AUTO_MIXED_PRECISION`, `mxamp run` and decorated optimizers have in common.
"""

import functools
import logging
import weakref
from typing import Any, Callable, List, Optional, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from . import clipping
from .autocast import autocast, hold
from .doors import on_shut, open_door
from .errors import AmpError
from .heads import scaled_heads
from .hook import TrainerHook, fresh_gradients, multiply
from .machine import dtype_name
from .patching import Patch
from .scaler import StaticLossScaler
from .trainer import init_trainer

__all__ = ["Scaling", "attach", "open_backward", "scaling_of"]

logger = logging.getLogger("mxamp")

# The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15

_trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()
on_shut(_trainers.clear)


class Scaling:
    """A scaler shared by trainers and modules, and what became of their steps.

    `door` names who has opened it, for errors.
    """

    def __init__(self, scaler: StaticLossScaler, door: str) -> None:
        self.scaler, self.door = scaler, door
        self.steps = self.skips = 0

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return self.scaler.loss_scale

    def record(self, finite: bool) -> float:
        """Take note of a step done or skipped; return the next scale."""
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        return self.scaler.update(finite)

    def __deepcopy__(self, memo: Any) -> "Scaling":
        return self  # MXNet copies optimizers; the scale stays one


class _Held(StaticLossScaler):
    """A trainer's view of a `Scaling`: the scale that its gradients carry, until it steps."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__(1.0)
        self.scaling = scaling
        self.held: Optional[float] = None

    @property
    def loss_scale(self) -> float:
        """The scale of the gradients there are, or of the next."""
        return self.held if self.held is not None else self.scaling.loss_scale

    def update(self, finite: bool) -> float:
        """Tell the `Scaling` of a step."""
        self.held = None
        return self.scaling.record(finite)

    def state_dict(self) -> Any:
        """Return the state of the shared scaler."""
        return self.scaling.scaler.state_dict()

    def resumed(self, state: Any) -> StaticLossScaler:
        """Hand a trainer's saved state to the shared scaler."""
        self.scaling.scaler = self.scaling.scaler.resumed(state)
        return self


_Attached = List[Tuple[TrainerHook, _Held]]


def attach(trainer: Trainer, scaling: Scaling) -> None:
    """Let a trainer take the shared scale out of its gradients, and skip what overflows."""
    init_trainer(trainer, _Held(scaling))
    trainer._amp_loss_scaler.door = scaling.door
    _trainers.add(trainer)


def scaling_of(optimizer: Any) -> Optional[Scaling]:
    """Return the scaling that an optimizer was decorated with."""
    found = getattr(optimizer, "_amp_scaling", None)
    return found if isinstance(found, Scaling) else None


def open_backward(default: Callable[[], Optional[Scaling]]) -> None:
    """Patch backward passes and trainers.

    `default` returns the scaling for trainers whose optimizer has none of its own, or None.
    """

    def build_init(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(self: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
            scaling = getattr(given, "scaling", None) or scaling_of(self._optimizer)
            asked = scaling is not None
            scaling = scaling or default()
            if scaling is not None:
                try:
                    attach(self, scaling)
                except AmpError as error:
                    if asked:
                        raise
                    logger.warning("%s: this trainer is left as it is: %s", scaling.door, error)

        return __init__

    hold()  # of clip_global_norm, too, where no policy is in force
    open_door(
        "backward",
        [
            Patch(Trainer, "__init__", build_init),
            Patch(autograd, "backward", _build_backward),
            Patch(NDArray, "backward", _build_method),
        ],
    )


def _build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        heads: Any, head_grads: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        attached = _attached()
        if not attached:
            original(heads, head_grads, retain_graph, train_mode)
            return
        listed = [heads] if isinstance(heads, NDArray) else list(heads)
        given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
        grads = list(given) if given is not None else [None] * len(listed)
        scale = _scale_for(attached, listed)
        if scale != 1:
            grads = [_scaled(head, grad, scale) for head, grad in zip(listed, grads)]
        _bring_to(attached, scale)
        with scaled_heads(scale):
            original(listed, grads, retain_graph, train_mode)
        for hook, scaler in attached:
            hook.mark_scaled()
            scaler.held = scale

    return backward


def _build_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        self: NDArray, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        if _trainers:
            # Looked up now: the patched one, while it is.
            autograd.backward([self], [out_grad], retain_graph, train_mode)
        else:
            original(self, out_grad, retain_graph, train_mode)

    return backward


def _outstanding() -> float:
    """Return the scale of gradients that wait for a step: they all carry the same."""
    held = [scaler.held for _, scaler in _attached() if scaler.held is not None]
    return held[0] if held else 1.0


clipping.scales.append(_outstanding)


def _attached() -> _Attached:
    hooks = [getattr(trainer, "_amp_loss_scaler", None) for trainer in list(_trainers)]
    return [
        (hook, hook.scaler)
        for hook in hooks
        if isinstance(hook, TrainerHook) and isinstance(hook.scaler, _Held)
    ]


def _scale_for(attached: _Attached, heads: List[NDArray]) -> float:
    scale = min(scaler.scaling.loss_scale for _, scaler in attached)
    if any(dtype_name(head.dtype) == "float16" for head in heads):
        scale = min(scale, _HALF_LIMIT)
    return scale


def _scaled(head: NDArray, grad: Optional[NDArray], scale: float) -> NDArray:
    with autograd.pause(), autocast(enabled=False):
        if grad is not None:
            return grad * scale
        numpy = isinstance(head, mx.np.ndarray)
        return (mx.np if numpy else mx.nd).ones_like(head) * scale


def _bring_to(attached: _Attached, scale: float) -> None:
    """Give gradients that wait for a step the scale in force: what is added must have the same."""
    for hook, scaler in attached:
        held = scaler.held
        if held is not None and held != scale:
            fresh = fresh_gradients(hook.trainer._params)
            multiply([g for _, grads in fresh for g in grads], scale / held)
