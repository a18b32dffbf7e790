"""`mxnet.contrib.amp` beside mxamp: both in one process would cast twice, so that is an error."""

from typing import Any, Callable

from mxnet.contrib import amp as contrib_amp

from ..errors import StateError

__all__ = ["CONTRIB_AMP_MODULES", "check_contrib_is_off", "refuse_init", "refuse_init_trainer"]

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

#: The two modules that hold the functions of `mxnet.contrib.amp`.
CONTRIB_AMP_MODULES = (contrib_amp, contrib_amp.amp)


def check_contrib_is_off() -> None:
    """Raise `StateError` if `mxnet.contrib.amp.init` has run in this process."""
    # vars(), since patch_contrib changes what an attribute's lookup returns.
    if vars(contrib_amp.amp)["_amp_initialized"]:
        raise StateError(CONTRIB_IS_ON)


def refuse_init(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that makes contrib's `init` raise: it calls this function first."""

    def _wrap_symbol_functions(*_args: Any, **_kwargs: Any) -> None:
        # MXNet's init sets the flag before it calls this function.
        contrib_amp.amp._amp_initialized = False
        raise StateError(MXAMP_IS_ON.format(name="init"))

    return _wrap_symbol_functions


def refuse_init_trainer(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for contrib's `init_trainer`, whose own error asks for its `init`."""

    def init_trainer(*_args: Any, **_kwargs: Any) -> None:
        raise StateError(MXAMP_IS_ON.format(name="init_trainer"))

    return init_trainer
