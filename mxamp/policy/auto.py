"""What "auto" means: mixed precision in the dtype that is fast on this machine, if there is one."""

from typing import Any, Iterable, Optional

from ..errors import ArgumentError
from ..framework import machine
from .active import FLOAT32, Choice
from .overrides import Conditional, Names
from .policy import Policy
from .targets import DEFAULT_TARGET, TARGETS_OR_AUTO, check_target, device_type, is_auto

__all__ = ["chosen_policy"]

OTHER_POLICY = (
    "'auto' is {chosen} here, and the policy is for {own}: leave 'auto' out to use the policy as "
    "it is, or give ctx for the kind of device that you mean"
)


def chosen_policy(
    target_dtype: Any,
    low: Names = None,
    fp32: Names = None,
    widest: Names = None,
    conditional: Optional[Iterable[Conditional]] = None,
    *,
    policy: Optional[Policy] = None,
    ctx: Any = None,
) -> Choice:
    """Return the policy that the arguments of `init` describe, or `FLOAT32`.

    As `Policy.from_lists`, but that "auto" is taken too. Wrong arguments are errors where that
    means float32 as well, though nothing is done with them.
    """
    if policy is None or target_dtype is not DEFAULT_TARGET:
        target_dtype = check_target(target_dtype, TARGETS_OR_AUTO)
    lists = (low, fp32, widest, conditional)
    if not is_auto(target_dtype):
        return Policy.from_lists(target_dtype, *lists, policy=policy, ctx=ctx)
    device = device_type(ctx) or machine.default_device()
    dtype = machine.fast_dtype(device)
    if policy is None:
        wanted = Policy.from_lists(machine.default_dtype(device), *lists, ctx=device)
    else:
        wanted = Policy.from_lists(DEFAULT_TARGET, *lists, policy=policy, ctx=ctx)
    if dtype == "float32":
        return FLOAT32
    if (wanted.target_dtype, wanted.device) != (dtype, device):
        own = f"{wanted.target_dtype} on the {wanted.device.upper()}"
        chosen = f"{dtype} on the {device.upper()}"
        raise ArgumentError(OTHER_POLICY.format(chosen=chosen, own=own))
    return wanted
