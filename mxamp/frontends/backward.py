"""Backward passes that scale, for scripts that scale no loss themselves.

`autograd.backward` and `NDArray.backward` multiply the gradients of their heads by the shared
scale; the trainers that are attached take it out again and skip what overflows.
"""

import functools
import logging
import weakref
from typing import Any, Callable, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..errors import AmpError
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Patch
from ..policy.active import suspended
from ..scaling.hook import TrainerHook
from ..scaling.loss_outputs import scaled_heads
from ..scaling.shared_scale import (
    SharedScale,
    TrainerView,
    attach,
    rescale_waiting,
    scale_of,
    view_of,
)

__all__ = ["backward_patches"]

logger = logging.getLogger("mxamp")

# The largest power of two that a float16 head gradient can hold.
_HALF_LIMIT = 2.0**15


class _BackwardPatches(FrontEnd):
    """Patches of backward passes and trainers; the trainers that are attached."""

    def __init__(self) -> None:
        super().__init__()
        #: For trainers whose optimizer has no scale of its own; None leaves them as they are.
        self.default: Optional[SharedScale] = None
        self.trainers: "weakref.WeakSet[Trainer]" = weakref.WeakSet()

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(Trainer, "__init__", _build_init),
            Patch(autograd, "backward", _build_backward),
            Patch(NDArray, "backward", _build_method),
            Patch(gluon.utils, "clip_global_norm", _build_clip),
        ]

    def close(self) -> None:
        """Take the patches off, and forget the trainers."""
        super().close()
        self.default = None
        self.trainers.clear()

    def attach(self, trainer: Trainer, shared: SharedScale) -> None:
        """Let a trainer take the scale out of its gradients."""
        attach(trainer, shared)
        self.trainers.add(trainer)

    def attached(self) -> List[Tuple[TrainerHook, TrainerView]]:
        """Return the hook and the view of the scale of each trainer that is attached."""
        views = [view_of(trainer) for trainer in list(self.trainers)]
        return [view for view in views if view is not None]

    def waiting_scale(self) -> float:
        """Return the scale of gradients that wait for a step: they all carry the same."""
        carried = [view.carried for _, view in self.attached() if view.carried is not None]
        return carried[0] if carried else 1.0


#: One a process, as the functions that it patches are.
backward_patches = _BackwardPatches()


def _build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __init__(self: Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        asked = getattr(given, "scaling", None) or scale_of(self._optimizer)
        if asked is not None:
            backward_patches.attach(self, asked)
        elif backward_patches.default is not None:
            _attach_if_possible(self, backward_patches.default)

    return __init__


def _attach_if_possible(trainer: Trainer, shared: SharedScale) -> None:
    try:
        backward_patches.attach(trainer, shared)
    except AmpError as error:
        logger.warning("%s: this trainer is left as it is: %s", shared.scaled_by, error)


def _build_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        heads: Any, head_grads: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        attached = backward_patches.attached()
        if not attached:
            original(heads, head_grads, retain_graph, train_mode)
            return
        listed = [heads] if isinstance(heads, NDArray) else list(heads)
        given = [head_grads] if isinstance(head_grads, NDArray) else head_grads
        gradients = list(given) if given is not None else [None] * len(listed)
        scale = _scale_for(attached, listed)
        if scale != 1:
            gradients = [_scaled(head, grad, scale) for head, grad in zip(listed, gradients)]
        rescale_waiting(attached, scale)
        with scaled_heads(scale):
            original(listed, gradients, retain_graph, train_mode)
        for hook, view in attached:
            hook.mark_scaled()
            view.carried = scale

    return backward


def _build_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(
        self: NDArray, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        if backward_patches.trainers:
            # Looked up now: the patched one, while it is.
            autograd.backward([self], [out_grad], retain_graph, train_mode)
        else:
            original(self, out_grad, retain_graph, train_mode)

    return backward


def _build_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_global_norm(arrays: Any, max_norm: float, check_isfinite: bool = True) -> Any:
        # The gradients carry a scale that the script knows nothing of.
        scale = max(1.0, backward_patches.waiting_scale())
        with suspended():
            return original(arrays, max_norm * scale, check_isfinite) / scale

    return clip_global_norm


def _scale_for(
    attached: Sequence[Tuple[TrainerHook, TrainerView]], heads: Sequence[NDArray]
) -> float:
    scale = min(view.shared.loss_scale for _, view in attached)
    if any(dtype_name(head.dtype) == "float16" for head in heads):
        scale = min(scale, _HALF_LIMIT)
    return scale


def _scaled(head: NDArray, gradient: Optional[NDArray], scale: float) -> NDArray:
    with autograd.pause(), suspended():
        if gradient is not None:
            return gradient * scale
        numpy = isinstance(head, mx.np.ndarray)
        return (mx.np if numpy else mx.nd).ones_like(head) * scale
