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
from typing import Any, Callable, List, Optional, Union

from mxnet.contrib import amp as stock

from . import machine
from .autocast import current_policy, init, shutdown
from .doors import on_shut, open_door, opened
from .errors import ArgumentError, StateError
from .modules import open_modules
from .patching import Patch
from .policy import Policy, check_target
from .scaler import LossScaler, NoScaler
from .seen import lowered
from .shared import Scaling, open_backward

__all__ = ["VARIABLE", "scaling", "start", "start_from_environment", "uses_amp"]

logger = logging.getLogger("mxamp")

VARIABLE = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")

OWN_AMP = "%s uses %s itself: automatic mixed precision leaves it alone"
SUMMARY = (
    "automatic mixed precision: %s on %s, %d operators lowered, %d steps, %d skipped, "
    "final loss scale %g"
)

_on: List[Scaling] = []  # one while it is on


def scaling() -> Optional[Scaling]:
    """Return the loss scaling of automatic mixed precision, None where that is off."""
    return _on[0] if _on else None


def start(
    dtype: Any = None, policy: Optional[Policy] = None, door: str = "automatic mixed precision"
) -> None:
    """Turn mixed precision on, loss scaling included, for code that does neither.

    `dtype` is by default float16 where there is a GPU, else bfloat16. Raises `StateError` where
    mixed precision is on already.
    """
    if current_policy() is not None:
        raise StateError(f"{door} comes before anything else, and mixed precision is on already")
    if policy is not None and dtype is not None:
        raise ArgumentError("a policy holds its target dtype: give policy or dtype, not both")
    if policy is None:
        default = "float16" if machine.default_device() == "gpu" else "bfloat16"
        policy = Policy.default(check_target(dtype or default))
    init(policy=policy)
    half = policy.target_dtype == "float16"
    found = Scaling(LossScaler() if half else NoScaler(), door)
    _on[:] = [found]
    lowered.clear()
    open_backward(scaling)
    open_modules(scaling)
    open_door(door, [Patch(owner, "init", _build_init) for owner in _owners()])
    # Data loaders' workers compute as without mxamp: nothing there is worth lowering.
    _at_fork()
    atexit.register(_summary, policy, found)


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
    start(value.lower() if value.lower() not in _ON else None, door=VARIABLE)


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


def _owners() -> List[Any]:
    import mxamp

    return [mxamp, stock, stock.amp]


def _build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_of_its_own(*args: Any, **kwargs: Any) -> Any:
        logger.info(OWN_AMP, sys.argv[0] or "this program", original.__module__.rsplit(".", 1)[0])
        shutdown()
        return original(*args, **kwargs)

    return init_of_its_own


@functools.lru_cache(maxsize=1)
def _at_fork() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _off_in_child() -> None:
    if _on:
        logger.disabled = True  # one line from each worker would be noise
        shutdown()


on_shut(_on.clear)


def _summary(policy: Policy, found: Scaling) -> None:
    if found in _on and opened("backward"):
        logger.info(
            SUMMARY, policy.target_dtype, policy.device, len(lowered), found.steps, found.skips,
            found.loss_scale,
        )  # fmt: skip
