"""Automatic mixed precision for unchanged scripts, turned on by an environment variable.

`MXNET_ENABLE_AUTO_MIXED_PRECISION=1 python train.py` and `mxamp run train.py` turn it on before the
script begins; in float16, with one loss scale for all its trainers and modules.
"""

import atexit
import logging
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Optional, Sequence

from ..errors import ArgumentError
from ..framework.environment import AUTOMATIC, OFF_VALUES, automatic_value
from ..framework.patching import FrontEnd, Original, Patch, wrapping
from ..framework.wording import counted
from ..patches.announcements import announce
from ..patches.autocast import switch_off, switch_on
from ..policy.active import process
from ..policy.policy import Policy, chosen_policy
from ..policy.targets import AUTO, DTYPES, DTYPES_OR_AUTO
from ..scaling.scaler import LossScaler, SharedScale
from .backward import backward_patches, shared_states
from .contrib import contrib_patches
from .module_api import module_patches

logger = logging.getLogger("mxamp")

_ON = ("1", "true", "on", "yes")

UNKNOWN_VALUE = (
    f"{AUTOMATIC} must be {', '.join((*_ON, *DTYPES))} or {AUTO}, or to leave mixed precision off "
    f"{', '.join(OFF_VALUES[1:])}, not {{!r}}: mixed precision stays off"
)
SUMMARY = "automatic mixed precision: %s on %s, %s in 16 bits"
STEPS = "%s, %d skipped, final loss scale %g"
OWN_AMP = "%s imports mxamp: it runs in its own precision. To choose that here, remove the import"
OWN_CALLS = "%s calls %s: it runs by its own calls, in %s where they name no dtype, by way of mxamp"


class _AutomaticRun(FrontEnd):
    """An automatic run: mixed precision and loss scaling of a script that never calls mxamp.

    It ends when the program calls `init` or `initialize`, of mxamp or of `mxnet.contrib.amp`. An
    import of `mxnet.contrib.amp` alone does not end it: many scripts use it on demand.
    """

    def patches(self) -> Sequence[Patch]:
        """Return monkey patches by which a script's own `init` ends the automatic run.

        `initialize` is patched too.
        """
        public = sys.modules[__name__.partition(".")[0]]
        return [Patch(public, name, wrapping(_patched_init)) for name in ("init", "initialize")]

    def close(self) -> None:
        """End the automatic run: undo its patches, and detach its loss scaling from trainers."""
        super().close()
        for state in shared_states():  # gradients that wait for their step are checked
            state.scaled_by = ""

    def summarize(self) -> None:
        """Log the automatic run's dtype at exit and, in float16, its numbers of steps and skips."""
        policy, scale = process.policy, backward_patches.default_scale
        if policy and self.is_open:
            operators = counted(len(process.lowered), "operator")
            logger.info(SUMMARY, policy.precision, policy.device, operators)
            if scale is not None:
                logger.info(STEPS, counted(scale.steps, "step"), scale.skips, scale.loss_scale)


#: One a process: a script is run in mixed precision once.
_run = _AutomaticRun()


def start(dtype: Optional[str] = None, policy: Optional[Policy] = None) -> None:
    """Start an automatic run: mixed precision and loss scaling for an unchanged script.

    `dtype` is by default "auto". If that means float32, `init` and `initialize` in the program mean
    float32 too.
    """
    chosen = policy or chosen_policy(dtype or AUTO)
    switch_on(chosen)
    process.lowered.clear()
    scaling = [backward_patches, module_patches] if chosen.target_dtype == "float16" else []
    for front_end in (contrib_patches, *scaling, _run):
        front_end.open()
    if scaling:
        backward_patches.default_scale = SharedScale(LossScaler(), AUTOMATIC)
    wanted = dtype or AUTO if policy is None else None
    announce(chosen, wanted, advice=f"{AUTOMATIC}=bfloat16 chooses bfloat16")


def start_from_environment(imported_by_mxamp: bool = False) -> None:
    """Start an automatic run if the variable MXNET_ENABLE_AUTO_MIXED_PRECISION asks for it.

    `imported_by_mxamp`: the program has imported mxamp, and mxamp imports MXNet.
    """
    value = automatic_value()
    if not value:
        return
    if value not in (*_ON, *DTYPES_OR_AUTO):
        raise ArgumentError(UNKNOWN_VALUE.format(os.environ[AUTOMATIC]))
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    script = Path(program).read_bytes() if os.path.isfile(program) else b""
    if imported_by_mxamp or imports_mxamp(script):
        show_log()
        logger.info(OWN_AMP, program or "this program")
        return
    # A process spawned by `multiprocessing` has no parent yet while it imports the main module.
    preparing = getattr(multiprocessing.current_process(), "_inheriting", False)
    if preparing or multiprocessing.parent_process() is not None:
        contrib_patches.open()
        return
    show_log()
    path = os.environ.get("MXAMP_POLICY")
    policy = Policy.load(path) if path else None
    start(value if value in DTYPES_OR_AUTO else None, policy)


# ------------------------------------------------------------ programs that use mxamp themselves


def end_automatic_run(function: str = "", dtype: str = "") -> None:
    """End the automatic run that an environment variable or `mxamp run` started, if any.

    `function` is the function of mxamp that the program calls; a forked process gives none. `dtype`
    is the dtype of the run.
    """
    if _run.is_open:
        if function:
            logger.info(OWN_CALLS, sys.argv[0] or "this program", function, dtype)
        switch_off()
        # The program may import mxnet.contrib.amp later.
        contrib_patches.open()


def _patched_init(original: Original, *args: object, **kwargs: object) -> object:
    """End the automatic run; call the script's `init` or `initialize` with the run's dtype.

    Their own default is float16, as in `mxnet.contrib.amp`; whoever starts the run has the last
    word.
    """
    if _run.is_open:
        policy, name = process.policy, original.__name__
        dtype = policy.target_dtype if policy else AUTO
        end_automatic_run(name, dtype)
        if name == "initialize":
            kwargs.setdefault("dtype", dtype)
        elif policy and not args and not kwargs:
            kwargs["policy"] = policy
        elif not args and "policy" not in kwargs:
            kwargs.setdefault("target_dtype", dtype)
    return original(*args, **kwargs)


def imports_mxamp(code: bytes) -> bool:
    """Return whether the source code of a Python script imports mxamp."""
    return re.search(rb"^\s*(import\s(.*[\s,])?|from\s+)mxamp\b", code, re.MULTILINE) is not None


def show_log() -> None:
    """Print mxamp's log lines to stderr, unless the program has configured logging itself."""
    if logger.level or logger.handlers or logging.getLogger().level != logging.WARNING:
        return
    logger.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    # As long as no other handler shows them.
    handler.addFilter(lambda _: [*logger.handlers, *logging.getLogger().handlers] == [handler])
    handler.setFormatter(logging.Formatter("mxamp: %(message)s"))
    logger.addHandler(handler)


atexit.register(_run.summarize)
if hasattr(os, "register_at_fork"):
    # The workers of data loaders compute as without mxamp.
    os.register_at_fork(after_in_child=end_automatic_run)
