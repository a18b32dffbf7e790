"""Switches of mixed precision: `init` for the process, `autocast` for a `with` block.

MXNet's functions are patched while either is in force, and restored afterwards. If a graph contains
regions while mixed precision is off around it, the patches stay until `shutdown`.
"""

import functools
import inspect
import logging
from typing import Any, Callable, Iterable, Optional, TypeVar

from ..errors import ArgumentError, StateError
from ..framework.contrib_amp import check_contrib_is_off
from ..framework.distributed import end_worker_on_errors
from ..framework.interrupts import ending
from ..framework.keywords import checked_call
from ..framework.machine import Device, Dtype
from ..framework.patching import FrontEnd, locked
from ..framework.wording import shown
from ..policy import active, regions
from ..policy.overrides import Conditional
from ..policy.policy import PLAIN_FLOAT32, Policy, PolicyChoice, chosen_policy
from ..policy.targets import DEFAULT_TARGET, DTYPES_OR_AUTO, check_bool, check_target
from .announcements import announce, warn_of_speed, warn_of_unknown_layers
from .table import GRAPHS, casting_patches

logger = logging.getLogger("mxamp")

Function = TypeVar("Function", bound=Callable[..., Any])

DIFFERENT = (
    "init() was called before, with another policy than now ({before} instead of {wanted}). Call "
    "mxamp.shutdown() before init() with other arguments, or use mxamp.autocast() for a part of "
    "the program"
)
NO_TARGET = "'auto' has chosen float32 here: give the target dtype, 'float16' or 'bfloat16'"


@checked_call
def init(
    target_dtype: Dtype = DEFAULT_TARGET,
    target_precision_ops: Optional[Iterable[str]] = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    fp32_ops: Optional[Iterable[str]] = None,
    *,
    widest_ops: Optional[Iterable[str]] = None,
    policy: Optional[Policy] = None,
    ctx: Optional[Device] = None,
    tuned: bool = True,
) -> None:
    """Turn mixed precision on for the whole process.

    >>> import mxamp as amp
    >>> amp.init("bfloat16")
    >>> amp.current_policy().target_dtype
    'bfloat16'
    >>> amp.shutdown()

    You may create, hybridize and import blocks before or after the call.

    Parameters
    ----------
    target_dtype : str or dtype, default "float16"
        "float16", "bfloat16" (on CPUs only, as in MXNet 1.9.1), "float32" or "auto". If you pass
        `policy`, the default is the dtype of the policy.
        "float32" casts nothing down: graphs get those faster equivalents of operators that gain in
        float32 on this CPU. Loss scales are 1, and trainers skip no step.
        "auto" is the dtype that is fast on the device: float16 on GPUs, bfloat16 on CPUs with
        bfloat16 arithmetic, and float32 elsewhere, where a log line says why.
    target_precision_ops : list of str, optional
        Operators to run in the target dtype, under any of their names in MXNet. As in
        `mxnet.contrib.amp`, the list replaces the whole default list. To change single operators,
        pass a `policy` from `Policy.override`.
    conditional_fp32_ops : list of (str, str, list of str), optional
        (operator, attribute, values): float32 where the attribute has one of the values.
    fp32_ops : list of str, optional
        Operators to run in float32, in place of the whole default list.
    widest_ops : list of str, optional
        Operators to run in the widest dtype of their inputs, in place of the whole default list.
    policy : Policy, optional
        A whole policy in place of the operator lists. With "auto", the policy has to be for the
        dtype that is fast on this machine; if that is float32, the policy is ignored.
    ctx : Context or str, optional
        The kind of device to run in mixed precision. The default is the GPU if there is one, else
        the CPU. mxamp does not cast the inputs of operators on other devices.
    tuned : bool, default True
        In graphs in bfloat16 or float32, replace operators by faster equivalents, and choose
        precisions by shape. False turns both off, as `policy.untuned()` does; float32 is then plain
        MXNet, bit for bit.

    Raises
    ------
    UnknownNameError
        An operator is unknown to MXNet.
    ArgumentError
        A dtype or device is unknown, an operator is in two lists, or `policy` is for another dtype
        or device than the arguments.
    StateError
        Mixed precision is on already with other arguments.

    A second call with the same arguments does nothing. A call that raises leaves MXNet unpatched.
    """
    check_bool("tuned", tuned)
    lists = target_precision_ops, fp32_ops, widest_ops, conditional_fp32_ops
    wanted = chosen_policy(target_dtype, *lists, policy=policy, ctx=ctx)
    if isinstance(wanted, Policy) and not tuned:
        wanted = PLAIN_FLOAT32 if wanted.target_dtype == "float32" else wanted.untuned()
    turn_on(wanted, target_dtype)


def turn_on(wanted: PolicyChoice, dtype: object) -> None:
    """Turn mixed precision on with a policy, as `init` does, and log the policy's dtype."""
    end_worker_on_errors()
    announce(wanted, dtype, is_new=switch_on(wanted))


@locked
def switch_on(wanted: PolicyChoice) -> bool:
    """Turn mixed precision on with a policy, without a log line; return whether it was off.

    `PLAIN_FLOAT32` is recorded, but patches nothing.
    """
    check_contrib_is_off()
    before = active.process.policy
    if before is not None:
        if before != wanted:
            raise StateError(DIFFERENT.format(before=before, wanted=wanted))
        return False
    try:
        if wanted is not PLAIN_FLOAT32:
            casting_patches.acquire(active.process)
        active.process.policy = wanted
    except BaseException:
        casting_patches.release(active.process)
        raise
    return True


def shutdown() -> None:
    """Turn mixed precision off for the process, and restore MXNet's operators.

    >>> import mxamp as amp
    >>> amp.init("bfloat16")
    >>> amp.shutdown()
    >>> amp.is_enabled()
    False

    `shutdown` does nothing if mixed precision is off. Blocks stay usable and compute in float32,
    except in `autocast` regions inside their own code. Open `autocast` regions stay in force until
    they end. While a scaled loss waits for its backward pass, or scaled gradients for their
    step, backward passes and trainers stay patched, and keep the loss scale: the step restores
    them.
    """
    if switch_off():
        logger.info("mixed precision is off")


def switch_off() -> bool:
    """Turn mixed precision off without a log line; return whether it was on."""
    FrontEnd.close_all()
    return _end_policy()


@locked
def _end_policy() -> bool:
    """Unset the policy that `init` has set; return whether there was one."""
    casting_patches.release(GRAPHS)
    active.process.has_marked_nodes = False
    before, active.process.policy = active.process.policy, None
    casting_patches.release(active.process)
    if not before:
        return False
    warn_of_unknown_layers(before)
    return True


class autocast(active.Regional):
    """Turn mixed precision on in a `with` block or a function, for the current thread or task.

    >>> import mxamp as amp
    >>> with amp.autocast("bfloat16"):
    ...     amp.is_enabled()
    True

    `autocast` works without `init`. Regions nest. A region inside `hybrid_forward`, or around code
    that creates a symbol, applies to the operators in the graph.

    Parameters
    ----------
    dtype : str or dtype, optional
        "float16", "bfloat16", "float32", or "auto", the dtype that is fast on this machine (see
        `init`). The default is the dtype in force around the region, or "float16" if mixed
        precision is off there.
    enabled : bool, default True
        False turns mixed precision off in the region.
    policy : Policy, optional
        A whole policy in place of the default one for `dtype`.

    Raises
    ------
    ArgumentError
        The dtype is unknown, or `policy` is for another dtype.
    """

    @checked_call
    def __init__(
        self, dtype: Optional[Dtype] = None, enabled: bool = True, policy: Optional[Policy] = None
    ) -> None:
        if isinstance(dtype, bool) or (callable(dtype) and not isinstance(dtype, type)):
            raise ArgumentError(
                f"autocast's first argument must be a dtype, not {shown(dtype)}; write "
                "@amp.autocast() to decorate a function, enabled= for True or False"
            )
        self._dtype = check_target(dtype, DTYPES_OR_AUTO) if dtype is not None else None
        self._policy: Optional[PolicyChoice] = None
        if policy is not None:
            self._policy = chosen_policy(self._dtype or DEFAULT_TARGET, policy=policy)
        self._enabled = check_bool("enabled", enabled)

    def __enter__(self) -> "autocast":
        """Turn mixed precision on until the `with` block ends; blocks may be nested."""
        policy = self._policy if self._enabled else None
        if self._enabled and policy is None:
            policy = regions.policy_inside(self._dtype, active.nearest_policy())
        mark = regions.mark_of(self._dtype, self._enabled, self._policy)
        region = active.autocast_region(policy, mark)
        region.close = ending(_leave, region).close
        try:
            if region.policy is not None:
                announce(region.policy, self._dtype, is_new=False)
            if region.policy is not PLAIN_FLOAT32:
                casting_patches.acquire(region)
            if region.policy:
                warn_of_speed(region.policy)
            active.begin(region)
            return self
        except BaseException:
            region.close()  # undoes whatever was done of this
            raise

    def __call__(self, function: Function) -> Function:
        """Decorate `function` so that each call runs inside this `autocast`."""
        check_runs_at_once(function)

        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> object:
            with self:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def _leave(region: active.Region) -> None:
    """Leave an `autocast` region; keep the patches if graph nodes created in regions need them."""
    active.end(region)
    if region.policy and active.process.has_marked_nodes and active.current_policy() is None:
        casting_patches.acquire(GRAPHS)
    casting_patches.release(region)


RUNS_LATER = (
    "{given} is a generator or coroutine: its code runs after the call has returned, outside the "
    "decorator. Leave the decorator out, and write `with amp.autocast(...):` in the body, around "
    "code that neither yields nor awaits"
)
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_runs_at_once(function: Any) -> None:
    """Raise for a generator or coroutine function, whose body would run after `autocast` ends."""
    if any(is_one(function) or is_one(function.__call__) for is_one in _RUN_LATER):
        raise ArgumentError(RUNS_LATER.format(given=shown(function)))


def policy_for(dtype: Optional[Dtype], policy: Optional[Policy]) -> Policy:
    """Return the policy that `autocast(dtype, policy=policy)` applies; raise if there is none."""
    with autocast(check_target(dtype) if dtype is not None else None, policy=policy):
        chosen = active.current_policy()
    if chosen is None:
        raise ArgumentError(NO_TARGET)
    return chosen
