"""`mxnet.contrib.amp` beside mxamp: both in one process would cast twice, so that is an error."""

import inspect
import sys
from typing import Any

from mxnet.contrib import amp as contrib_amp

from ..errors import StateError

__all__ = [
    "CONTRIB_AMP_MODULES",
    "REFUSED",
    "RefusedScale",
    "check_contrib_is_off",
    "refuse_contrib",
]

CONTRIB_IS_ON = (
    "mxnet.contrib.amp is on in this process: its init has changed MXNet's operators and can't be "
    "undone. Start a new process without that init, or call mxamp.patch_contrib() before it, which "
    "makes its functions mxamp's"
)
MXAMP_IS_ON = (
    "mxamp's mixed precision is on in this process, and mxnet.contrib.amp's {name} would add a "
    "second one: call mxamp.{name}, or mxamp.patch_contrib() before mxnet.contrib.amp is used, "
    "which makes its functions mxamp's"
)
SCALED_BY_MXAMP = (
    "mxamp scales this trainer's losses, and mxnet.contrib.amp's scale_loss, imported by name, "
    "would scale them again: write `with mxamp.scale_loss(loss, trainer) as scaled:`"
)

#: The two modules that hold the functions of `mxnet.contrib.amp`.
CONTRIB_AMP_MODULES = (contrib_amp, contrib_amp.amp)


def check_contrib_is_off() -> None:
    """Raise `StateError` if `mxnet.contrib.amp.init` has run in this process."""
    # vars(), since patch_contrib changes what an attribute's lookup returns.
    if vars(contrib_amp.amp)["_amp_initialized"]:
        raise StateError(CONTRIB_IS_ON)


class _OffFlag:
    """contrib's flag of being initialized, while mxamp is on: false, and an error in its functions.

    Functions that a script has imported by name read this global, whatever replaces them.
    """

    def __bool__(self) -> bool:
        caller = sys._getframe(1)
        if caller.f_globals is vars(contrib_amp.amp):
            raise StateError(MXAMP_IS_ON.format(name=caller.f_code.co_name))
        return False


class _TrainerModule:
    """`mxnet.gluon.trainer` as contrib's functions see it while mxamp is on: an error."""

    @property
    def Trainer(self) -> None:  # noqa: N802
        raise StateError(MXAMP_IS_ON.format(name=sys._getframe(1).f_code.co_name))


class RefusedScale:
    """A trainer's original scale, which contrib's `scale_loss` divides first: an error."""

    def __truediv__(self, _scale: float) -> None:
        raise StateError(SCALED_BY_MXAMP)


def refuse_contrib(original: Any) -> Any:
    """Return a replacement for a global of contrib's functions that makes them raise."""
    return _TrainerModule() if inspect.ismodule(original) else _OffFlag()


#: The globals of `mxnet.contrib.amp.amp` that `refuse_contrib` replaces: `init` and `init_trainer`
#: read the first, `unscale` the second.
REFUSED = ("_amp_initialized", "trainer")
