"""Trainers that ask a loss scaler before they update, as MXNet's do since 1.8."""

from functools import partial

from mxnet.gluon import Trainer

from ..framework.versions import has_feature

__all__ = ["ask_before_updates", "ask_no_more"]


def ask_before_updates(trainer: Trainer) -> None:
    """Have a trainer of MXNet 1.7 ask its `_amp_loss_scaler` too, and skip where that says so."""
    if has_feature("skipped_updates"):
        return
    trainer._update = partial(_update_where_finite, trainer)
    optimizer = trainer._optimizer  # mxnet.contrib.amp may have replaced its method
    own = getattr(optimizer, "old_update_multi_precision", None)
    if own is not None:
        optimizer.update_multi_precision = own


def ask_no_more(trainer: Trainer) -> None:
    """Give a trainer its own updates back."""
    own = vars(trainer).get("_update")
    if isinstance(own, partial) and own.func is _update_where_finite:
        del trainer._update


def _update_where_finite(trainer: Trainer, ignore_stale_grad: bool = False) -> None:
    if not trainer._amp_loss_scaler.has_overflow(trainer._params):
        type(trainer)._update(trainer, ignore_stale_grad)
