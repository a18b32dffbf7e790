"""Mixed precision for scripts that know nothing of it: TensorFlow's way.

`MXNET_ENABLE_AUTO_MIXED_PRECISION=1 python train.py` and `mxamp run train.py` turn it on before the
script begins, with one loss scale for all its trainers and modules.
"""

import ast
import atexit
import functools
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Union

from mxnet.contrib import amp as stock

from ..errors import ArgumentError, StateError
from ..framework import machine
from ..framework.patching import FrontEnd, Patch
from ..framework.wording import counted
from ..patches.autocast import init, shutdown
from ..policy.active import current_policy, process
from ..policy.policy import Policy
from ..policy.targets import check_target
from ..scaling.scaler import LossScaler, NoScaler
from ..scaling.shared_scale import SharedScale
from .backward import backward_patches
from .module_api import module_patches

__all__ = ["VARIABLE", "show_log", "start", "start_from_environment", "uses_amp"]

logger = logging.getLogger("mxamp")

VARIABLE = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")

OWN_AMP = "%s uses %s itself: automatic mixed precision leaves it alone"
SUMMARY = "automatic mixed precision: %s on %s, %s lowered, %s, %d skipped, " "final loss scale %g"


class _AutomaticRun(FrontEnd):
    """An automatic run: its policy and scale, and the `init` functions that would end it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: Optional[Policy] = None
        self.scale: Optional[SharedScale] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patches: a script that calls an `init` of its own is left alone."""
        owners = (sys.modules[__name__.split(".", maxsplit=1)[0]], stock, stock.amp)
        return [Patch(owner, "init", _build_init) for owner in owners]

    def begin(self, policy: Policy, scale: SharedScale) -> None:
        """Scale the backward passes of all trainers and modules from now on."""
        self.policy, self.scale = policy, scale
        backward_patches.open()
        module_patches.open()
        backward_patches.default = module_patches.default = scale
        self.open()

    def close(self) -> None:
        """Take the patches off, and forget the scale."""
        super().close()
        self.policy = self.scale = None

    def summarize(self) -> None:
        """Log how the run went; nothing where it has ended before."""
        if self.policy is not None and self.scale is not None:
            logger.info(
                SUMMARY,
                self.policy.target_dtype,
                self.policy.device,
                counted(len(process.lowered), "operator"),
                counted(self.scale.steps, "step"),
                self.scale.skips,
                self.scale.loss_scale,
            )


#: One a process: a script is run in mixed precision once.
_run = _AutomaticRun()


def start(
    dtype: Any = None, policy: Optional[Policy] = None, name: str = "automatic mixed precision"
) -> None:
    """Turn mixed precision on, loss scaling included, for code that does neither.

    `dtype` is by default float16 where there is a GPU, else bfloat16. `name` is what errors and
    log lines call what has started it. Raises `StateError` where mixed precision is on already.
    """
    if current_policy() is not None:
        raise StateError(f"{name} comes before anything else, and mixed precision is on already")
    if policy is not None and dtype is not None:
        raise ArgumentError("a policy holds its target dtype: give policy or dtype, not both")
    if policy is None:
        policy = Policy.default(check_target(dtype or machine.default_dtype()))
    init(policy=policy)
    scaler = LossScaler() if policy.target_dtype == "float16" else NoScaler()
    process.lowered.clear()
    _run.begin(policy, SharedScale(scaler, name))
    _at_fork_and_exit()


def start_from_environment() -> None:
    """Do what the environment variable says: nothing, or `start`; for the start-up hook."""
    value = os.environ.get(VARIABLE, "").strip()
    if value.lower() in _OFF or multiprocessing.parent_process() is not None:
        return
    if value.lower() not in (*_ON, "float16", "bfloat16"):
        raise ArgumentError(
            f"{VARIABLE} is 0, 1, float16 or bfloat16, not {value!r}: mixed precision stays off"
        )
    show_log()
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else None
    own = uses_amp(script) if script is not None else None
    if own is not None:
        logger.info(OWN_AMP, script, own)
        return
    start(value.lower() if value.lower() not in _ON else None, name=VARIABLE)


def uses_amp(script: Union[str, Path]) -> Optional[str]:
    """Return the AMP that a script imports, "mxamp" or "mxnet.contrib.amp"; None for neither."""
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        for name in _imported(node):
            if name.split(".")[0] == "mxamp":
                return "mxamp"
            if name.startswith("mxnet.contrib.amp"):
                return "mxnet.contrib.amp"
    return None


def _imported(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def show_log() -> None:
    """Let mxamp's log lines be seen, where the program has not set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("mxamp: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_of_its_own(*args: Any, **kwargs: Any) -> Any:
        theirs = original.__module__.startswith("mxnet.")
        name = "mxnet.contrib.amp" if theirs else "mxamp"
        logger.info(OWN_AMP, sys.argv[0] or "this program", name)
        shutdown()
        return original(*args, **kwargs)

    return init_of_its_own


@functools.lru_cache(maxsize=1)
def _at_fork_and_exit() -> None:
    """Register, once, what is done at exit and in forked processes."""
    atexit.register(_run.summarize)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _off_in_child() -> None:
    # Data loaders' workers compute as without mxamp: nothing there is worth lowering.
    if _run.is_open:
        logger.disabled = True  # one line from each worker would be noise
        shutdown()
