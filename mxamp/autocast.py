"""Switching mixed precision on and off: for the process, or for a block of code.

`init` sets the process's policy, `autocast` one for the code inside it and the thread it runs in.
MXNet's functions are patched while either is in force and are its own again after that.
"""

import functools
import logging
import threading
from typing import Any, Callable, Iterable, List, Optional, Sequence, Tuple, TypeVar

from . import clipping, eager, machine, states, symbolic, updates
from .doors import shut_doors
from .errors import ArgumentError, StateError
from .patching import Patch
from .patching import apply as apply_patches
from .patching import undo as undo_patches
from .policy import Conditional, Policy, check_target

__all__ = ["autocast", "current_policy", "init", "is_enabled", "shutdown"]

logger = logging.getLogger("mxamp")

Function = TypeVar("Function", bound=Callable[..., Any])

DIFFERENT = (
    "mixed precision is on already, with another policy: {old}. Call mxamp.shutdown() before "
    "init() with different arguments, or use mxamp.autocast() for a part of the program."
)
SLOW = (
    "this CPU (%s) computes no bfloat16 in hardware: the results are right, but it will not be "
    "faster than float32"
)


class _Process:
    """The process's policy, and the patches with a count of who needs them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.policy: Optional[Policy] = None
        self.users = 0
        self.held = False
        self.patches: List[Patch] = []

    def acquire(self) -> None:
        with self.lock:
            if not self.users:
                patches = [
                    *eager.patches(current_policy),
                    *symbolic.patches(current_policy),
                    *states.patches(),
                    *updates.patches(current_policy),
                    *clipping.patches(lambda: autocast(enabled=False)),
                ]
                apply_patches(patches)
                self.patches = patches
            self.users += 1

    def release(self) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                undo_patches(self.patches)
                self.patches = []


class _Thread(threading.local):
    """A thread's stack of autocast regions: (policy or None for off)."""

    def __init__(self) -> None:
        self.regions: Tuple[Optional[Policy], ...] = ()


_process = _Process()
_thread = _Thread()


def current_policy() -> Optional[Policy]:
    """Return the policy that the current thread computes under, None where it is off."""
    regions = _thread.regions
    return regions[-1] if regions else _process.policy


def is_enabled() -> bool:
    """Tell whether mixed precision is on in the current thread."""
    return current_policy() is not None


def init(
    target_dtype: Any = "float16",
    target_precision_ops: Optional[Iterable[str]] = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    fp32_ops: Optional[Iterable[str]] = None,
    *,
    widest_ops: Optional[Iterable[str]] = None,
    policy: Optional[Policy] = None,
    ctx: Any = None,
    tuned: bool = True,
) -> None:
    """Turn mixed precision on for the whole process.

    >>> import mxamp as amp
    >>> amp.init("bfloat16")
    >>> amp.current_policy().target_dtype
    'bfloat16'
    >>> amp.shutdown()

    Blocks may be made, hybridized and imported before or after it.

    Parameters
    ----------
    target_dtype : str or dtype, default "float16"
        "float16", or "bfloat16" (CPUs only, as in MXNet 1.9.1).
    target_precision_ops, fp32_ops, widest_ops : list of str, optional
        Operators, by any of their names, to run in the target dtype, in float32, and in the
        widest dtype of their inputs. As in `mxnet.contrib.amp`, a list that is given replaces
        the default one; use `Policy.override` to change single operators.
    conditional_fp32_ops : list of (str, str, list of str), optional
        (operator, attribute, values): float32 where the attribute has one of the values.
    policy : Policy, optional
        A whole policy in place of all of the above.
    ctx : Context or str, optional
        The kind of device to run in mixed precision. By default the GPU if there is one, else
        the CPU. Arrays on other devices are left alone.
    tuned : bool, default True
        Let bfloat16 graphs choose faster equivalents of operators, and precisions by shape.
        False is `policy.untuned()`.

    Raises
    ------
    UnknownNameError
        An operator that MXNet does not know.
    ArgumentError
        An unknown dtype or device, or an operator in two lists.
    StateError
        Mixed precision is on already with other arguments.

    A second call with the same arguments does nothing. An error leaves nothing patched.
    """
    chosen = make_policy(
        target_dtype, target_precision_ops, conditional_fp32_ops, fp32_ops, widest_ops, policy, ctx
    )
    chosen = chosen if tuned else chosen.untuned()
    with _process.lock:
        if _process.policy is not None:
            if _process.policy != chosen:
                raise StateError(DIFFERENT.format(old=_process.policy))
            logger.debug("init: mixed precision is on already with the same policy")
            return
        _process.acquire()
        _process.policy = chosen
    logger.info("mixed precision is on: %s on %s", chosen.target_dtype, chosen.device)
    if chosen.target_dtype == "bfloat16" and not machine.features() & {"avx512_bf16", "amx_bf16"}:
        logger.warning(SLOW, machine.cpu_name())


def hold() -> None:
    """Keep MXNet's functions patched until `shutdown`, policy or not: for front doors."""
    with _process.lock:
        if not _process.held:
            _process.acquire()
            _process.held = True


def make_policy(
    target_dtype: Any,
    target_precision_ops: Optional[Iterable[str]] = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    fp32_ops: Optional[Iterable[str]] = None,
    widest_ops: Optional[Iterable[str]] = None,
    policy: Optional[Policy] = None,
    ctx: Any = None,
) -> Policy:
    """Return the policy that `init`'s arguments describe."""
    lists = (target_precision_ops, conditional_fp32_ops, fp32_ops, widest_ops)
    if policy is not None:
        if not isinstance(policy, Policy):
            raise ArgumentError(f"policy is an mxamp.Policy, not {policy!r}")
        if any(given is not None for given in lists) or ctx is not None:
            raise ArgumentError("a policy holds operator lists and device: give it alone")
        return policy
    base = Policy.default(check_target(target_dtype), device_type(ctx))
    if all(given is None for given in lists):
        return base
    return base.override(
        low=target_precision_ops, fp32=fp32_ops, widest=widest_ops,
        conditional=conditional_fp32_ops, replace_lists=True,
    )  # fmt: skip


def device_type(ctx: Any) -> Optional[str]:
    """Return "cpu" or "gpu" for a context, a list of contexts, or such a string."""
    if ctx is None:
        return None
    contexts: Sequence[Any] = ctx if isinstance(ctx, (list, tuple)) else [ctx]
    kinds = {getattr(c, "device_type", c) for c in contexts}
    if len(kinds) != 1:
        raise ArgumentError(f"ctx names one kind of device, not {sorted(map(str, kinds))}")
    kind = kinds.pop()
    if not isinstance(kind, str):
        raise ArgumentError(f"ctx is a Context, 'cpu' or 'gpu', not {ctx!r}")
    return "cpu" if kind.startswith("cpu") else kind


def shutdown() -> None:
    """Turn mixed precision off for the process: MXNet's functions are its own again.

    Does nothing where it is off. Blocks stay usable, and compute in float32. Regions of
    `autocast` that are open stay in force until they end.
    """
    shut_doors()
    with _process.lock:
        if _process.held:
            _process.held = False
            _process.release()
        if _process.policy is None:
            return
        _process.policy = None
        _process.release()
    logger.info("mixed precision is off")


class autocast:
    """Mixed precision for a block of code or a function, in the current thread.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.is_enabled()
    True

    Regions nest; `enabled=False` makes an island of plain MXNet in one. `init` is not needed.

    Parameters
    ----------
    dtype : str or dtype, optional
        "float16" or "bfloat16". By default the one in force around it, else "float16".
    enabled : bool, default True
        False turns mixed precision off inside.
    policy : Policy, optional
        A whole policy in place of the default one for `dtype`.
    """

    def __init__(
        self, dtype: Any = None, enabled: bool = True, policy: Optional[Policy] = None
    ) -> None:
        if isinstance(dtype, bool) or (callable(dtype) and not isinstance(dtype, type)):
            raise ArgumentError(f"autocast takes a dtype first, not {dtype!r}: @amp.autocast()")
        if policy is not None and dtype is not None:
            raise ArgumentError("a policy holds its target dtype: give policy or dtype, not both")
        self._dtype = check_target(dtype) if dtype is not None else None
        self._policy = make_policy("float16", policy=policy) if policy is not None else None
        self._enabled = bool(enabled)
        self._entered: List[Tuple[Optional[Policy], ...]] = []

    def __enter__(self) -> "autocast":
        """Begin the region; the same object may be entered again inside it."""
        chosen = self._choose() if self._enabled else None
        _process.acquire()
        self._entered.append(_thread.regions)
        _thread.regions = (*_thread.regions, chosen)
        return self

    def __exit__(self, *_error: Any) -> None:
        """End it; what was in force before is again."""
        _thread.regions = self._entered.pop()
        _process.release()

    def _choose(self) -> Policy:
        if self._policy is not None:
            return self._policy
        around = current_policy()
        if around is None:
            around = next((p for p in reversed(_thread.regions) if p is not None), _process.policy)
        if around is not None and self._dtype in (None, around.target_dtype):
            return around
        return Policy.default(self._dtype or "float16")

    def __call__(self, function: Function) -> Function:
        """Return `function` with a region around each call of it."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # A fresh region a call: the function may recurse or run in several threads.
            with autocast(self._dtype, self._enabled, self._policy):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]
