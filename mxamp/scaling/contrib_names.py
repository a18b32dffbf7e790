"""The attributes of the loss scaler of `mxnet.contrib.amp`, for scripts that keep them in files."""

from typing import Any

from mxnet.gluon import Trainer

from .numbers import count, positive_count
from .scaler import LossScaler, Scaler

__all__ = ["ContribNames"]


class ContribNames:
    """Lets scripts read and assign the scale, and when it grows, by contrib's names.

    A scale that is assigned is that of the next loss, whatever the limits of the scaler are. A
    scaler whose scale never grows has no count and no limit: it takes no notice of those.
    """

    trainer: Trainer
    scaler: Scaler

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss."""
        return self.scaler.loss_scale

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self._next_loss_scale = scale

    @property
    def _next_loss_scale(self) -> float:
        return self.scaler.loss_scale

    @_next_loss_scale.setter
    def _next_loss_scale(self, scale: float) -> None:
        self.scaler.origin.assign_scale(scale)
        self.trainer.amp_loss_scale = self.loss_scale

    @property
    def _unskipped(self) -> int:
        return int(self._of_growth("_clean_steps", 0))

    @_unskipped.setter
    def _unskipped(self, steps: int) -> None:
        self._set_of_growth("_clean_steps", count("_unskipped", steps))

    @property
    def _scale_seq_len(self) -> int:
        return int(self._of_growth("_growth_interval", LossScaler()._growth_interval))

    @_scale_seq_len.setter
    def _scale_seq_len(self, steps: int) -> None:
        self._set_of_growth("_growth_interval", positive_count("_scale_seq_len", steps))

    @property
    def _max_loss_scale(self) -> float:
        return float(self._of_growth("_max_scale", self.loss_scale))

    @_max_loss_scale.setter
    def _max_loss_scale(self, scale: float) -> None:
        self._set_of_growth("_max_scale", float(scale))

    def _of_growth(self, name: str, default: Any) -> Any:
        return getattr(self.scaler.origin, name, default)

    def _set_of_growth(self, name: str, value: Any) -> None:
        if isinstance(self.scaler.origin, LossScaler):
            setattr(self.scaler.origin, name, value)
