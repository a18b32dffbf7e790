"""One loss scale for several trainers and modules, where the script itself scales no loss.

`mxamp run`, `MXNET_ENABLE_AUTO_MIXED_PRECISION` and decorated optimizers have this in common. Who
scales the gradients is elsewhere (`frontends.backward`, `frontends.module_api`); here is the scale,
and a trainer's view of it.
"""

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from mxnet.gluon import Trainer

from .hook import TrainerHook, fresh_gradients, multiply
from .scaler import Scaler
from .trainer import attach_hook

__all__ = ["SharedScale", "TrainerView", "attach", "scale_of", "view_of"]


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

    def record(self, finite: bool) -> float:
        """Take note of a step done or skipped; return the next scale."""
        self.steps, self.skips = self.steps + finite, self.skips + (not finite)
        return self.scaler.update(finite)

    def __deepcopy__(self, memo: Any) -> "SharedScale":
        return self  # MXNet copies optimizers; the scale stays one


class TrainerView(Scaler):
    """A trainer's view of a `SharedScale`: the scale that its gradients carry until it steps."""

    def __init__(self, shared: SharedScale) -> None:
        super().__init__(1.0)
        self.shared = shared
        self.carried: Optional[float] = None  #: by gradients that wait for a step

    @property
    def loss_scale(self) -> float:
        """The scale of the gradients there are, or of the next."""
        return self.carried if self.carried is not None else self.shared.loss_scale

    def update(self, finite: bool) -> float:
        """Tell the `SharedScale` of a step."""
        self.carried = None
        return self.shared.record(finite)

    def state_dict(self) -> Dict[str, Any]:
        """Return the state of the shared scaler."""
        return self.shared.scaler.state_dict()

    def resumed(self, state: Mapping[str, Any]) -> Scaler:
        """Hand a trainer's saved state to the shared scaler."""
        self.shared.scaler = self.shared.scaler.resumed(state)
        return self


def attach(trainer: Trainer, shared: SharedScale) -> None:
    """Let a trainer take the shared scale out of its gradients, and skip what overflows."""
    attach_hook(trainer, TrainerView(shared), scaled_by=shared.scaled_by)


def view_of(trainer: Trainer) -> Optional[Tuple[TrainerHook, TrainerView]]:
    """Return a trainer's hook and its view of a shared scale; None where it has none."""
    hook = getattr(trainer, "_amp_loss_scaler", None)
    if isinstance(hook, TrainerHook) and isinstance(hook.scaler, TrainerView):
        return hook, hook.scaler
    return None


def scale_of(optimizer: Any) -> Optional[SharedScale]:
    """Return the scale that an optimizer was decorated with."""
    shared = getattr(optimizer, "_amp_scaling", None)
    return shared if isinstance(shared, SharedScale) else None


def rescale_waiting(attached: Sequence[Tuple[TrainerHook, TrainerView]], scale: float) -> None:
    """Give gradients that wait for a step this scale: what is added to them must have the same."""
    for hook, view in attached:
        if view.carried is not None and view.carried != scale:
            fresh = fresh_gradients(hook.trainer._params)
            multiply([g for _, gradients in fresh for g in gradients], scale / view.carried)
