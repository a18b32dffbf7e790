"""One loss scale for several trainers and modules, for scripts that scale no loss themselves.

`mxamp run`, `MXNET_ENABLE_AUTO_MIXED_PRECISION` and decorated optimizers use it. The scale never
leaves the backward pass (`frontends.scaled_pass`): gradients are those of the unscaled loss, and
updates are skipped if the pass has overflowed.
"""

from typing import Any, Dict, Iterable, Mapping, Optional, Sequence

from mxnet.gluon import Trainer

from .hook import Stage, TrainerHook
from .scaler import Scaler, whole_number
from .trainer import active_hook, attach_hook, hook_of

__all__ = ["SharedScale", "attach_shared_scale", "lowest_scale", "scale_of", "shared_scale_hook"]

#: A trainer that has not stepped for this many times the backward passes of a step is unused.
_UNUSED = 8


class SharedScale(Scaler):
    """A scaler shared by trainers and modules, with counts of their steps.

    `scaled_by` names the API that scales the losses, for errors.
    """

    def __init__(self, scaler: Scaler, scaled_by: str) -> None:
        super().__init__(1.0)
        self.scaler, self.scaled_by = scaler, scaled_by
        self.steps = self.skips = 0

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return self.scaler.loss_scale

    @property
    def origin(self) -> Scaler:
        """The scaler that is shared."""
        return self.scaler

    @property
    def checks(self) -> bool:
        """Whether gradients are checked, and steps with non-finite ones skipped."""
        return self.scaler.checks

    def update(self, finite: bool) -> float:
        """Count a step done or skipped; return the next scale."""
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        return self.scaler.update(finite)

    def lower(self, scale: float) -> float:
        """Lower the scale after a pass with `scale` overflowed; return the next pass's scale."""
        return min(self.scaler.update(False), scale)

    def retire_hooks(self, trainers: Iterable[Trainer]) -> None:
        """Mark these trainers' hooks as retired: other APIs may scale their losses from now on.

        Gradients that wait for their update are still checked.
        """
        for trainer in trainers:
            hook = active_hook(trainer)
            if hook is not None and hook.scaler is self:
                hook.retired = True

    def state_dict(self) -> Dict[str, Any]:
        """Return the scaler's state and the counts."""
        counts = {"shared_steps": self.steps, "shared_skips": self.skips}
        return {**self.scaler.state_dict(), **counts}

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Resume from `state`, for all trainers."""
        steps, skips = (
            whole_number(name, state.get(name, 0)) for name in ("shared_steps", "shared_skips")
        )
        self.scaler = self.scaler.resumed(state)
        self.steps, self.skips = steps, skips
        return self

    def __repr__(self) -> str:
        return (
            f"SharedScale({self.loss_scale:g}, {self.steps} steps, {self.skips} skipped, "
            f"by {self.scaled_by})"
        )

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __deepcopy__(self, memo: Any) -> "SharedScale":
        return self  # MXNet copies optimizers; their scale stays shared

    def __reduce__(self) -> Any:
        # MXNet pickles optimizers into state files, and plain MXNet has to load them.
        return dict, ()


def attach_shared_scale(trainer: Trainer, shared_scale: SharedScale) -> None:
    """Give a trainer a hook with a shared scale, which skips steps whose gradients overflowed."""
    attach_hook(trainer, shared_scale, scaled_by=shared_scale.scaled_by)
    # For a first step whose gradients only other workers have computed.
    hook_of(trainer).last_stage = Stage.UNSCALED


def shared_scale_hook(trainer: Trainer) -> Optional[TrainerHook]:
    """Return a trainer's hook; None if it has none, or one without a `SharedScale`."""
    hook = active_hook(trainer)
    return hook if hook is not None and isinstance(hook.scaler, SharedScale) else None


def lowest_scale(hooks: Sequence[TrainerHook]) -> SharedScale:
    """Return the shared scale that is lowest now among the trainers in use.

    A trainer is unused if it has not stepped for far more backward passes than steps take here, or
    if all its parameters have another trainer since.
    """
    owning = [
        hook for hook in hooks if any(p._trainer is hook.trainer for p in hook.trainer._params)
    ] or hooks
    limit = _UNUSED * max(1, *(hook.max_loss_count for hook in owning))
    used = [hook for hook in owning if hook.loss_count <= limit] or owning
    shared = [hook.scaler for hook in used if isinstance(hook.scaler, SharedScale)]
    return min(shared, key=lambda one: one.loss_scale)


def scale_of(optimizer: Any) -> Optional[SharedScale]:
    """Return the `SharedScale` of a decorated optimizer, or of its name; None for any other."""
    for name in ("_amp_scaling", "scaling"):
        scale = getattr(optimizer, name, None)
        if isinstance(scale, SharedScale):
            return scale
    return None
