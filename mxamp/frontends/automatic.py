"""Mixed precision for scripts that know nothing of it: TensorFlow's way.

`MXNET_ENABLE_AUTO_MIXED_PRECISION=1 python train.py` and `mxamp run train.py` turn it on before the
script begins, with one loss scale for all its trainers and modules.
"""

import atexit
import dis
import functools
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any, Callable, List, Optional, Sequence, Union

from mxnet.gluon import Trainer
from mxnet.module import Module

from ..errors import ArgumentError, StateError
from ..framework import machine
from ..framework.patching import FrontEnd, Patch
from ..framework.wording import counted
from ..patches.announcements import announce, announce_float32
from ..patches.autocast import switch_off, switch_on
from ..policy.active import current_policy, nearest_policy, process
from ..policy.policy import Policy
from ..policy.targets import AUTO, TARGETS, TARGETS_OR_AUTO, check_target
from ..scaling.scaler import LossScaler, NoScaler
from ..scaling.shared_scale import SharedScale
from .backward import backward_patches
from .contrib import contrib_patches
from .module_api import module_patches

__all__ = [
    "OWN_AMP",
    "VARIABLE",
    "hand_over",
    "imports_mxamp",
    "show_log",
    "start",
    "start_from_environment",
]

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
OWN_AMP = "%s uses mxamp itself: automatic mixed precision leaves it alone"
OWN_CALLS = "%s calls %s: from here on it runs by its own calls, by way of mxamp"


class _AutomaticRun(FrontEnd):
    """An automatic run: its policy and its loss scale.

    It ends when the program calls `init` or `initialize`, of mxamp or of `mxnet.contrib.amp`. An
    import of `mxnet.contrib.amp` alone does not end it: many scripts use it on demand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy: Optional[Policy] = None
        self.scale: Optional[SharedScale] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patch of the public `init`; `initialize` calls `hand_over` itself."""
        public = sys.modules[__name__.split(".", maxsplit=1)[0]]
        return [Patch(public, "init", _build_init)]

    def begin(self, policy: Policy, scale: SharedScale) -> None:
        """Scale the backward passes of all trainers and modules from now on."""
        self.policy, self.scale = policy, scale
        contrib_patches.open()
        backward_patches.open()
        module_patches.open()
        backward_patches.default = module_patches.default = scale
        self.open()

    def close(self) -> None:
        """Take the patch off, forget the scale, and leave the trainers to other APIs."""
        super().close()
        if self.scale is not None:
            self.scale.end(backward_patches.trainers)
        self.policy = self.scale = None

    def summarize(self) -> None:
        """Log how the run went, unless it has ended before."""
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

    `dtype` is by default float16 with a GPU, else bfloat16. Does nothing if it is "auto" and that
    means float32. Errors and log lines call the caller `name`. A parent process that has logged the
    start passes `announced`. `instead` says how to turn mixed precision on despite "auto".
    Raises `StateError` if mixed precision is on already.
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
        # "auto" that does not stay off is the default dtype.
        given = dtype and dtype != AUTO
        policy = Policy.default(check_target(dtype) if given else machine.default_dtype())
    switch_on(policy)
    if not announced:
        announce(policy)
    scaler = LossScaler() if policy.target_dtype == "float16" else NoScaler()
    process.lowered.clear()
    _run.begin(policy, SharedScale(scaler, name))
    _at_fork_and_exit()


def _stays_off(dtype: Optional[str]) -> bool:
    return dtype == AUTO and machine.fast_dtype() == "float32"


def start_from_environment(imported_by_mxamp: bool = False) -> None:
    """Start an automatic run if the environment variable says so; for the start-up hook.

    `imported_by_mxamp`: the program has imported mxamp, and mxamp imports MXNet.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in _OFF:
        return
    if value not in (*_ON, *TARGETS_OR_AUTO):
        raise ArgumentError(UNKNOWN_VALUE.format(os.environ[VARIABLE]))
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if imported_by_mxamp and (program == "-m" or Path(program).name == "mxamp"):
        return  # the command `mxamp`
    if imported_by_mxamp or _script_imports_mxamp(program):
        show_log()
        logger.info(OWN_AMP, program or "this program")
        return
    dtype = value if value in TARGETS_OR_AUTO else None
    begin = functools.partial(_start_in_view, dtype, announced=_is_child())
    if _is_child() and not _stays_off(dtype):
        contrib_patches.open()
        _waiting.begin(begin)
    else:
        begin()


def _start_in_view(dtype: Optional[str], announced: bool) -> None:
    show_log()
    start(dtype, name=VARIABLE, announced=announced)


# ------------------------------------------------------------ programs that use mxamp themselves


def hand_over(function: str) -> None:
    """End an automatic run, if there is one: the program calls this function of mxamp itself."""
    if _run.is_open:
        logger.info(OWN_CALLS, sys.argv[0] or "this program", function)
        switch_off()
        # The program may import mxnet.contrib.amp later.
        contrib_patches.open()


def _build_init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        hand_over("init")
        return original(*args, **kwargs)

    return init


def imports_mxamp(code: Union[CodeType, str, bytes]) -> bool:
    """Return whether Python code imports mxamp; False for text that is not Python."""
    if not isinstance(code, CodeType):
        try:
            code = compile(code, "script", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
    level: Any = 0
    names: List[str] = []
    for instruction in dis.get_instructions(code):
        # An import loads its level (0: absolute) and the names it takes first.
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, int):
            level = instruction.argval
        elif instruction.opname == "IMPORT_NAME" and level == 0:
            names.append(instruction.argval)
    return any(name.split(".")[0] == "mxamp" for name in names) or any(
        imports_mxamp(one) for one in code.co_consts if isinstance(one, CodeType)
    )


def _script_imports_mxamp(path: str) -> bool:
    try:
        return imports_mxamp(Path(path).read_bytes())
    except OSError:
        return False


# ------------------------------------------------------------------------------ child processes


class _Waiting(FrontEnd):
    """Starts mixed precision with the first trainer or module of a child process.

    Until then it computes in float32: a worker of a data loader never trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start: Optional[Callable[[], None]] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patches of the calls that begin training."""
        return [
            Patch(owner, name, functools.partial(_build_training, owner, name))
            for owner, name in ((Trainer, "__init__"), (Module, "bind"))
        ]

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` when training begins."""
        self._start = start
        self.open()

    def end(self) -> None:
        """Start, unless the program has switched mixed precision on itself."""
        start, self._start = self._start, None
        self.close()
        if start is not None and nearest_policy() is None:
            start()


#: One a process, like the classes that it patches.
_waiting = _Waiting()


def _build_training(owner: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        _waiting.end()
        # Looked up now: `start` has patched it.
        return getattr(owner, name)(self, *args, **kwargs)

    return trains


def _is_child() -> bool:
    """Return whether `multiprocessing` has started this process."""
    # A spawned process has no parent yet while it imports the program's main module.
    preparing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return preparing or multiprocessing.parent_process() is not None


@functools.lru_cache(maxsize=1)
def _at_fork_and_exit() -> None:
    """Register, once, the summary at exit and the restart in forked processes."""
    atexit.register(_run.summarize)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_off_in_child)


def _off_in_child() -> None:
    policy, scale = _run.policy, _run.scale
    if policy is None or scale is None:
        return
    switch_off()
    contrib_patches.open()
    _waiting.begin(functools.partial(start, policy=policy, name=scale.scaled_by, announced=True))


# ------------------------------------------------------------------------- log lines on stderr


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows mxamp's log lines as long as no other handler does."""

    def handle(self, record: logging.LogRecord) -> Any:
        """Show a line if nothing else does."""
        handlers = (*logger.handlers, *logging.getLogger().handlers)
        return all(other is self for other in handlers) and super().handle(record)


def show_log() -> None:
    """Show mxamp's log lines until the program sets up logging: then its own settings count."""
    if logger.level or logger.handlers or _is_set_up():
        return
    logger.setLevel(logging.INFO)
    handler = _Handler()
    handler.setFormatter(logging.Formatter("mxamp: %(message)s"))
    logger.addHandler(handler)
    logger.addFilter(_give_way)


def _is_set_up() -> bool:
    """Return whether the program has said which log lines it wants.

    MXNet and many scripts call `logging.info` before any setup. Logging then sets itself up for
    warnings only, as `basicConfig()` does: nobody has chosen that.
    """
    root = logging.getLogger()
    formats = [getattr(handler.formatter, "_fmt", None) for handler in root.handlers]
    return root.level != logging.WARNING or formats not in ([], [logging.BASIC_FORMAT])


def _give_way(record: logging.LogRecord) -> bool:
    """Follow the levels of a program that has set up logging since `show_log`."""
    if logger.level == logging.INFO and _is_set_up():
        logger.setLevel(logging.NOTSET)
    return logger.isEnabledFor(record.levelno)
