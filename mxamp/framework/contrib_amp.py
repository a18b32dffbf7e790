"""Guard that raises if `mxnet.contrib.amp` and mxamp are used together: both would cast."""

import sys
from typing import List

from mxnet.contrib import amp as contrib_amp

from ..errors import StateError
from .patching import Patch

_PATCH_IT = "mxamp.patch_contrib() before it, which makes contrib's functions mxamp's"
CONTRIB_IS_ON = (
    "mxnet.contrib.amp is on in this process, and can't be undone. Start a new process without its "
    f"init, or call {_PATCH_IT}"
)
MXAMP_IS_ON = (
    "mxamp's mixed precision is on, and mxnet.contrib.amp's {name} would add a second one: call "
    f"mxamp.{{name}}, or {_PATCH_IT}"
)
SCALED_BY_MXAMP = (
    "mxamp scales this trainer's losses, and mxnet.contrib.amp's scale_loss would scale them "
    f"again: call mxamp.scale_loss, or, where a library such as GluonCV makes it, {_PATCH_IT}"
)

#: The two modules that hold the functions of `mxnet.contrib.amp`.
CONTRIB_AMP_MODULES = (contrib_amp, contrib_amp.amp)


def check_contrib_is_off() -> None:
    """Raise `StateError` if `mxnet.contrib.amp.init` has run in this process."""
    # vars(), since patch_contrib changes what an attribute's lookup returns.
    if vars(contrib_amp.amp)["_amp_initialized"]:
        raise StateError(CONTRIB_IS_ON)


class _Refusal:
    """Stand-in for a global of `mxnet.contrib.amp` that makes contrib's functions raise.

    A script may have imported the functions by name, so replacing them would not do: they read
    these globals wherever they were imported, and GluonNLP reads the flag. A check inside mxamp's
    functions would come too late, since contrib's `init` changes MXNet's operators for good.
    """

    def __bool__(self) -> bool:
        caller = sys._getframe(1)
        if caller.f_globals is vars(contrib_amp.amp):
            raise StateError(MXAMP_IS_ON.format(name=caller.f_code.co_name))
        return False

    @property
    def Trainer(self) -> None:  # noqa: N802
        raise StateError(MXAMP_IS_ON.format(name=sys._getframe(1).f_code.co_name))


def refusals() -> List[Patch]:
    """Return monkey patches that make `mxnet.contrib.amp` raise while mxamp is in use.

    `init` and `init_trainer` read the flag, `unscale` reads `trainer.Trainer`.
    """
    names = ("_amp_initialized", "trainer")
    return [Patch(contrib_amp.amp, name, lambda _original: _Refusal()) for name in names]


class RefusedScale:
    """Stand-in for a trainer's `_amp_original_scale` that makes contrib's `scale_loss` raise."""

    def __truediv__(self, _scale: float) -> None:
        raise StateError(SCALED_BY_MXAMP)
