"""Mixed precision for scripts that know nothing of it: TensorFlow's way.

`MXNET_ENABLE_AUTO_MIXED_PRECISION=1 python train.py` and `mxamp run train.py` turn it on before the
script begins, with one loss scale for all its trainers and modules.
"""

import ast
import atexit
import dis
import functools
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import CodeType
from typing import Any, Callable, Iterator, List, Optional, Sequence, Union

from mxnet.contrib import amp as stock
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
    "OWN_CALLS",
    "VARIABLE",
    "imports_mxamp",
    "is_child",
    "script_imports_mxamp",
    "show_log",
    "start",
    "start_from_environment",
    "waiting",
]

Start = Callable[[], None]


class _Waiting(FrontEnd):
    """Starts mixed precision with the first trainer or module; until then nothing is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self._start: Optional[Start] = None

    def patches(self) -> Sequence[Patch]:
        """Return the patches."""
        return [
            Patch(owner, name, functools.partial(_build, owner, name))
            for owner, name in ((Trainer, "__init__"), (Module, "bind"))
        ]

    def begin(self, start: Start) -> None:
        """Call `start` once somebody trains."""
        self._start = start
        self.open()

    def end(self) -> None:
        """Start, unless the program has switched mixed precision on itself."""
        start, self._start = self._start, None
        self.close()
        if start is not None and nearest_policy() is None:
            start()


#: One a process, as the classes that it patches are.
waiting = _Waiting()


def is_child() -> bool:
    """Tell whether this process is one that `multiprocessing` has started."""
    # A process that is spawned has no parent yet while it imports the program's main module.
    preparing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return preparing or multiprocessing.parent_process() is not None


def _build(owner: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trains(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting.end()
        # Looked up now: `start` has patched it.
        return getattr(owner, name)(self, *args, **kwargs)

    return trains


logger = logging.getLogger("mxamp")


class _Level(int):
    """A level that can be told from the same one set by the program."""


_INFO = _Level(logging.INFO)
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("mxamp: %(message)s"))


def show_log() -> None:
    """Let log lines be seen, until the program sets up logging itself.

    From then on its own handlers and levels count, and each line comes once.
    """
    if _level_chosen() or _handler in logger.handlers:
        return
    logger.setLevel(_INFO)
    if not _other_handlers():
        logger.addHandler(_handler)
    logger.addFilter(_give_way)


def _other_handlers() -> bool:
    return any(h is not _handler for h in (*logger.handlers, *logging.getLogger().handlers))


def _level_chosen() -> bool:
    """Tell whether the program has said which lines it wants.

    MXNet and many scripts call `logging.info` with nothing set up: logging then sets itself up as
    `basicConfig()` does, for warnings alone. Nobody has chosen that.
    """
    if (logger.level and logger.level is not _INFO) or set(logger.handlers) - {_handler}:
        return True
    root = logging.getLogger()
    formats = [getattr(handler.formatter, "_fmt", None) for handler in root.handlers]
    unchosen = root.level == logging.WARNING and formats in ([], [logging.BASIC_FORMAT])
    return not unchosen


def _give_way(record: logging.LogRecord) -> bool:
    """Leave log lines to the program's own handlers and levels; asked before each line."""
    if _other_handlers():
        logger.removeHandler(_handler)
    if not _level_chosen() or _handler in logger.handlers:
        # Until a handler of the program's takes over, which the first `logging.info` may add.
        return True
    # A new list: logging is going through the old one.
    logger.filters = [other for other in logger.filters if other is not _give_way]
    if logger.level is _INFO:
        logger.setLevel(logging.NOTSET)
    return logger.isEnabledFor(record.levelno)


OWN_AMP = "%s uses %s itself: automatic mixed precision leaves it alone"
OWN_CALLS = "%s calls %s of %s: from here on it runs by its own calls, by way of mxamp"


def imports_mxamp(source: Union[str, bytes, CodeType]) -> bool:
    """Tell whether Python code imports mxamp; False for what is no Python code."""
    if isinstance(source, CodeType):
        return any(name.split(".")[0] == "mxamp" for name in _imported_by(source))
    try:
        tree = ast.parse(source)
    except (ValueError, SyntaxError):
        return False
    return any(name.split(".")[0] == "mxamp" for node in ast.walk(tree) for name in _imported(node))


def script_imports_mxamp(path: Path) -> bool:
    """Tell whether a script imports mxamp; False for one that can't be read."""
    try:
        return imports_mxamp(path.read_bytes())
    except OSError:
        return False


def _imported(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def _imported_by(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported_by(constant)


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
