"""Target dtypes and kinds of devices, as users give them."""

from typing import Any, Optional, Sequence

from ..errors import ArgumentError
from ..framework.machine import default_device, dtype_name

__all__ = ["TARGETS", "check_device", "check_target", "device_type"]

TARGETS = ("float16", "bfloat16")


def check_target(dtype: Any) -> str:
    """Return the target dtype's name; strings, NumPy types and MXNet's bfloat16 are taken."""
    name = dtype_name(dtype)
    if name not in TARGETS:
        raise ArgumentError(f"target_dtype is 'float16' or 'bfloat16', not {dtype!r}")
    return name


def check_device(dtype: str, device: Optional[str]) -> str:
    """Return the kind of device that a policy for `dtype` is made for."""
    if device is None:
        # MXNet 1.9.1 has no bfloat16 kernel on GPUs, so bfloat16 always means the CPU.
        return default_device() if dtype == "float16" else "cpu"
    if device not in ("cpu", "gpu"):
        raise ArgumentError(f"a policy's device is 'cpu' or 'gpu', not {device!r}")
    if dtype == "bfloat16" and device == "gpu":
        raise ArgumentError(
            "MXNet 1.9.1 has no bfloat16 kernels on GPUs: use target_dtype='float16' there, or "
            "ctx=mx.cpu()"
        )
    return device


def device_type(ctx: Any) -> Optional[str]:
    """Return "cpu" or "gpu" for a context, a list of contexts, or such a string."""
    if ctx is None:
        return None
    contexts: Sequence[Any] = ctx if isinstance(ctx, (list, tuple)) else [ctx]
    names = {getattr(c, "device_type", c) for c in contexts}
    if len(names) != 1:
        raise ArgumentError(f"ctx names one kind of device, not {sorted(map(str, names))}")
    name = names.pop()
    if not isinstance(name, str):
        raise ArgumentError(f"ctx is a Context, 'cpu' or 'gpu', not {ctx!r}")
    return "cpu" if name.startswith("cpu") else name
