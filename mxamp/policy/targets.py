"""Checks of the arguments `target_dtype`, `device` and `ctx` of public functions."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..backends import DEVICES, backend_of
from ..errors import ArgumentError
from ..framework.machine import default_device, dtype_name
from ..framework.wording import one_of, shown

OTHER_POLICY = "the policy is for {own}, but {given} is given beside it: leave {given} out"

TARGETS = ("float16", "bfloat16")
#: The dtypes of policies: under float32, graphs get faster equivalents, and nothing is cast down.
DTYPES = (*TARGETS, "float32")
#: Stands for the target dtype that is fast on this machine.
AUTO = "auto"
DTYPES_OR_AUTO = (*DTYPES, AUTO)

ONE_DEVICE = "{} must name one kind of device ({}, or a Context of it), not {}"
NO_DTYPE = "MXNet has no {dtype} kernels on {device}s: give {has}, or another device"
NOT_POLICY = "; give a policy by its keyword, policy="


class _Default(str):
    """Type of `DEFAULT_TARGET`: a str object that marks an omitted argument."""

    __slots__ = ()


#: The default of `target_dtype` arguments: float16, or the dtype of a policy given beside it.
DEFAULT_TARGET: str = _Default("float16")


def default_dtype(device: str | None = None) -> str:
    """Return the default 16-bit dtype of a kind of device: float16 or bfloat16."""
    return backend_of(device or default_device()).dtypes[0]


def is_auto(dtype: object) -> bool:
    """Return whether the argument `target_dtype` is "auto"."""
    return isinstance(dtype, str) and dtype == AUTO


def check_target(dtype: object, allowed: Sequence[str] = DTYPES) -> str:
    """Return the name of a target dtype; raise `ArgumentError` unless it is allowed.

    `dtype` is a string, a NumPy type, MXNet's bfloat16, or "auto", which is returned as it is.
    """
    if is_auto(dtype) and AUTO in allowed:
        return AUTO
    # np.dtype(array) returns the array's dtype, but an array is not a valid argument.
    name = dtype_name(dtype) if isinstance(dtype, (str, type, np.dtype)) else None
    if name is None or name not in allowed:
        said = f"the target dtype must be {one_of(allowed)}, not {shown(dtype)}"
        raise ArgumentError(said + (NOT_POLICY if hasattr(dtype, "target_dtype") else ""))
    return name


def check_bool(name: str, value: object) -> bool:
    """Return the argument `name` as a bool; raise unless it is True, False or an integer."""
    if not isinstance(value, (bool, np.bool_, int)):
        raise ArgumentError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def check_device(dtype: str, device: str | None) -> str:
    """Return the kind of device for a policy in `dtype`; raise if it can't run that dtype."""
    if device is None:
        kinds = (default_device(), *DEVICES)
        return next(kind for kind in kinds if dtype in (*backend_of(kind).dtypes, "float32"))
    has = (*backend_of(device).dtypes, "float32")
    if dtype not in has:
        raise ArgumentError(NO_DTYPE.format(dtype=dtype, device=device.upper(), has=one_of(has)))
    return device


def device_type(ctx: object, argument: str = "ctx") -> str | None:
    """Return "cpu" or "gpu" for a Context, a device's name, or a list of them; None for None.

    `argument` is the name of the public argument, for messages.
    """
    if ctx is None:
        return None
    contexts: Sequence[Any] = ctx if isinstance(ctx, (list, tuple)) else [ctx]
    names = {str(getattr(one, "device_type", one)) for one in contexts}
    kinds = [device for device in DEVICES for name in names if name.startswith(device)]
    if len(names) != 1 or not kinds:
        raise ArgumentError(ONE_DEVICE.format(argument, one_of(DEVICES), shown(ctx)))
    return kinds[0]


def check_same_target(own_dtype: str, own_device: str, target_dtype: object, ctx: object) -> None:
    """Raise if `target_dtype` or `ctx` contradicts a policy that is passed with it."""
    dtype = own_dtype if target_dtype is DEFAULT_TARGET else check_target(target_dtype)
    for given, own in ((dtype, own_dtype), (device_type(ctx) or own_device, own_device)):
        if given != own:
            raise ArgumentError(OTHER_POLICY.format(own=own, given=given))
