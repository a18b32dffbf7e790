"""Mixed precision for scripts that know nothing of it: TensorFlow's way.

`MXNET_ENABLE_AUTO_MIXED_PRECISION=1 python train.py` and `mxamp run train.py` turn it on before the
script begins, with one loss scale for all its trainers and modules.
"""

import atexit
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

from mxnet.contrib import amp as stock

from ..errors import ArgumentError, StateError
from ..framework import machine
from ..framework.patching import FrontEnd, Patch
from ..framework.wording import counted
from ..patches.announcements import announce, announce_float32
from ..patches.autocast import switch_off, switch_on
from ..policy.active import current_policy, process
from ..policy.policy import Policy
from ..policy.targets import AUTO, TARGETS, TARGETS_OR_AUTO, check_target
from ..scaling.scaler import LossScaler, NoScaler
from ..scaling.shared_scale import SharedScale
from .backward import backward_patches
from .children import is_child, waiting
from .contrib import contrib_patches
from .log_lines import show_log
from .module_api import module_patches
from .own_amp import OWN_AMP, OWN_CALLS, script_imports_mxamp

__all__ = ["VARIABLE", "start", "start_from_environment"]

logger = logging.getLogger("mxamp")

VARIABLE = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")

UNKNOWN_VALUE = (
    f"{VARIABLE} must be {', '.join((*_ON, *TARGETS))} or {AUTO}, or to leave mixed precision off "
    f"{', '.join(_OFF[1:])}, not {{!r}}: mixed precision stays off"
)
INSTEAD = f"set {VARIABLE}=bfloat16"
SUMMARY = "automatic mixed precision: %s on %s, %s lowered, %s, %d skipped, final loss scale %g"


class _AutomaticRun(FrontEnd):
    """An automatic run: its policy and scale, and the functions that end it.

    A program that calls `init`, of mxamp or of `mxnet.contrib.amp`, goes on by its own calls. One
    that only imports `mxnet.contrib.amp` runs automatically, as many do that use it on demand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy: Optional[Policy] = None
        self.scale: Optional[SharedScale] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        public = sys.modules[__name__.split(".", maxsplit=1)[0]]
        theirs = functools.partial(_build_init, "mxnet.contrib.amp")
        ours = functools.partial(_build_init, "mxamp")
        return [
            *(Patch(public, name, ours) for name in ("init", "initialize")),
            *(Patch(module, "init", theirs) for module in (stock, stock.amp)),
        ]

    def begin(self, policy: Policy, scale: SharedScale) -> None:
        """Scale the backward passes of all trainers and modules from now on."""
        self.policy, self.scale = policy, scale
        contrib_patches.open()
        backward_patches.open()
        module_patches.open()
        backward_patches.default = module_patches.default = scale
        self.open()

    def close(self) -> None:
        """Take the patches off, forget the scale, and leave the trainers to other APIs."""
        super().close()
        if self.scale is not None:
            self.scale.end(backward_patches.trainers)
        self.policy = self.scale = None

    def summarize(self) -> None:
        """Log how the run went; nothing where it has ended before."""
        if self.policy is not None and self.scale is not None:
            logger.info(
                SUMMARY,
                self.policy.target_dtype if self.policy.lowers else "float32",
                self.policy.device,
                counted(len(process.lowered), "operator"),
                counted(self.scale.steps, "step"),
                self.scale.skips,
                self.scale.loss_scale,
            )


#: One a process: a script is run in mixed precision once.
_run = _AutomaticRun()


def start(
    dtype: Optional[str] = None,
    policy: Optional[Policy] = None,
    name: str = "automatic mixed precision",
    announced: bool = False,
    instead: str = INSTEAD,
) -> None:
    """Turn mixed precision on, loss scaling included, for code that does neither.

    `dtype` is by default float16 where there is a GPU, else bfloat16. Where "auto" is float32,
    nothing is done. `name` is what errors and log lines call what has started it. `announced` tells
    that the process that started this one has said so, `instead` how to turn it on all the same.
    Raises `StateError` where mixed precision is on already.
    """
    if current_policy() is not None:
        raise StateError(f"{name} comes before anything else, and mixed precision is on already")
    if policy is not None and dtype is not None:
        raise ArgumentError("a policy holds its target dtype: give policy or dtype, not both")
    if _stays_off(dtype):
        if not announced:
            announce_float32(instead)
        return
    if policy is None:
        policy = Policy.default(_target(dtype))
    switch_on(policy)
    if not announced:
        announce(policy)
    scaler = LossScaler() if policy.target_dtype == "float16" else NoScaler()
    process.lowered.clear()
    _run.begin(policy, SharedScale(scaler, name))
    _at_fork_and_exit()


def _stays_off(dtype: Optional[str]) -> bool:
    return dtype == AUTO and machine.fast_dtype() == "float32"


def _target(dtype: Optional[str]) -> str:
    # Where "auto" does not stay off, it is the default dtype.
    return check_target(dtype) if dtype and dtype != AUTO else machine.default_dtype()


def start_from_environment(imported_by_mxamp: bool = False) -> None:
    """Do what the environment variable says: nothing, or `start`; for the start-up hook.

    `imported_by_mxamp` tells that the program has imported mxamp, and not MXNet.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in _OFF:
        return
    if value not in (*_ON, *TARGETS_OR_AUTO):
        raise ArgumentError(UNKNOWN_VALUE.format(os.environ[VARIABLE]))
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if imported_by_mxamp and (program == "-m" or Path(program).name == "mxamp"):
        return  # the command `mxamp`
    if imported_by_mxamp or script_imports_mxamp(Path(program)):
        show_log()
        logger.info(OWN_AMP, program or "this program", "mxamp")
        return
    dtype = value if value in TARGETS_OR_AUTO else None
    if is_child() and not _stays_off(dtype):
        contrib_patches.open()
        waiting.begin(functools.partial(_start_in_view, dtype, announced=True))
    else:
        _start_in_view(dtype, announced=is_child())


def _start_in_view(dtype: Optional[str], announced: bool = False) -> None:
    show_log()
    start(dtype, name=VARIABLE, announced=announced)


def _build_init(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_of_its_own(*args: Any, **kwargs: Any) -> Any:
        if _run.is_open:
            program = sys.argv[0] or "this program"
            logger.info(OWN_CALLS, program, original.__name__, name)
            switch_off()
            # What the program has imported, or is going to, stays mxamp's.
            contrib_patches.open()
        return original(*args, **kwargs)

    return init_of_its_own


@functools.lru_cache(maxsize=1)
def _at_fork_and_exit() -> None:
    """Register, once, what is done at exit and in forked processes."""
    atexit.register(_run.summarize)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _off_in_child() -> None:
    policy, scale = _run.policy, _run.scale
    if policy is None or scale is None:
        return
    switch_off()
    contrib_patches.open()
    waiting.begin(functools.partial(start, policy=policy, name=scale.scaled_by, announced=True))
