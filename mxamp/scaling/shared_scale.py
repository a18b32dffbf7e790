"""One loss scale for several trainers and modules, where the script itself scales no loss.

`mxamp run`, `MXNET_ENABLE_AUTO_MIXED_PRECISION` and decorated optimizers have this in common. The
scale never leaves the backward pass (`frontends.scaled_pass`): gradients are those of the loss as
it is, and updates are skipped where the pass has overflowed.
"""

from typing import Any, Dict, Iterable, Mapping, Optional, Sequence

from mxnet.gluon import Trainer

from .attach import attach_hook, hook_in_force, hook_of
from .hook import Stage, TrainerHook
from .numbers import count
from .scaler import Scaler

__all__ = [
    "SharedScale",
    "TrainerView",
    "attach",
    "hook_with_shared_scale",
    "scale_in_force",
    "scale_of",
]

#: After so many times the backward passes of a step without one a trainer is not in use.
_UNUSED = 8


class SharedScale:
    """A scaler shared by trainers and modules, with counts of their steps.

    `scaled_by` names the API that scales the losses, for errors.
    """

    def __init__(self, scaler: Scaler, scaled_by: str) -> None:
        self.scaler, self.scaled_by = scaler, scaled_by
        self.steps = self.skips = 0

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return self.scaler.loss_scale

    @property
    def checks(self) -> bool:
        """Whether gradients are checked, and steps skipped where one is not finite."""
        return self.scaler.checks

    def record(self, finite: bool) -> float:
        """Take note of a step done or skipped; return the next scale."""
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        return self.scaler.update(finite)

    def lower(self, scale: float) -> float:
        """Lower the scale after a pass with this one overflowed and no step will be skipped."""
        return min(self.scaler.update(False), scale)

    def end(self, trainers: Iterable[Trainer]) -> None:
        """Scale no more: other APIs may scale the losses of these trainers from now on.

        Gradients that wait for their update are still checked.
        """
        for trainer in trainers:
            hook = hook_with_shared_scale(trainer)
            view = hook.scaler if hook is not None else None
            if hook is not None and isinstance(view, TrainerView) and view.shared is self:
                hook.retired = True

    def __repr__(self) -> str:
        return (
            f"SharedScale({self.loss_scale:g}, {self.steps} steps, {self.skips} skipped, "
            f"by {self.scaled_by})"
        )

    def __deepcopy__(self, memo: Any) -> "SharedScale":
        return self  # MXNet copies optimizers; the scale stays one

    def __reduce__(self) -> Any:
        # MXNet pickles optimizers into state files, which plain MXNet has to load.
        return dict, ()


class TrainerView(Scaler):
    """What a trainer's hook takes for its scaler: a `SharedScale`, told of the trainer's steps."""

    def __init__(self, shared: SharedScale) -> None:
        super().__init__(1.0)
        self.shared = shared

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward pass."""
        return self.shared.loss_scale

    @property
    def origin(self) -> Scaler:
        """The shared scaler."""
        return self.shared.scaler.origin

    @property
    def checks(self) -> bool:
        """Whether the shared scaler has gradients checked."""
        return self.shared.checks

    def __repr__(self) -> str:
        return repr(self.shared)

    def update(self, finite: bool) -> float:
        """Tell the `SharedScale` of a step."""
        return self.shared.record(finite)

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of the shared scaler, and its counts."""
        counts = {"shared_steps": self.shared.steps, "shared_skips": self.shared.skips}
        return {**self.shared.scaler.state_dict(), **counts}

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Hand a trainer's saved state to the shared scaler."""
        steps, skips = (
            count(name, state.get(name, 0)) for name in ("shared_steps", "shared_skips")
        )
        self.shared.scaler = self.shared.scaler.resumed(state)
        self.shared.steps, self.shared.skips = steps, skips
        return self


def attach(trainer: Trainer, shared: SharedScale) -> None:
    """Let a trainer skip the steps whose backward pass has overflowed."""
    attach_hook(trainer, TrainerView(shared), scaled_by=shared.scaled_by)
    # Where other workers alone compute gradients in the first step.
    hook_of(trainer).last_stage = Stage.UNSCALED


def hook_with_shared_scale(trainer: Trainer) -> Optional[TrainerHook]:
    """Return the hook of a trainer with a shared scale; None where it has none."""
    hook = hook_in_force(trainer)
    return hook if hook is not None and isinstance(hook.scaler, TrainerView) else None


def scale_in_force(hooks: Sequence[TrainerHook]) -> SharedScale:
    """Return the lowest scale of the trainers that step now and then.

    One that has not stepped for far more backward passes than steps take here is not in use any
    more, nor is one whose parameters all have another trainer since: its scale does not count.
    """
    owning = [
        hook for hook in hooks if any(p._trainer is hook.trainer for p in hook.trainer._params)
    ] or hooks
    limit = _UNUSED * max(1, *(hook.most_losses for hook in owning))
    used = [hook for hook in owning if hook.losses <= limit] or owning
    views = [hook.scaler for hook in used if isinstance(hook.scaler, TrainerView)]
    return min((view.shared for view in views), key=lambda shared: shared.loss_scale)


def scale_of(optimizer: Any) -> Optional[SharedScale]:
    """Return the scale that an optimizer was decorated with."""
    shared = getattr(optimizer, "_amp_scaling", None)
    return shared if isinstance(shared, SharedScale) else None
