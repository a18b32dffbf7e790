"""The backend of GPUs: which dtype is fast, and workarounds for MXNet's CUDA kernels.

float16 alone: MXNet has no bfloat16 kernel on GPUs.
"""

# ruff: noqa: D102  # `Backend` says what the methods do

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ...framework.environment import variable
from ...framework.machine import default_device
from ...policy.policy import Policy
from ...policy.values import same_value
from .. import Site, rule
from ..choices import ChoosingBackend
from . import libraries

NO_GPU = (
    "mixed precision is on for GPUs, but MXNet sees no GPU: arrays on the CPU stay as they are, "
    "so nothing runs in mixed precision. For the CPU leave ctx out, or give ctx=mx.cpu(); for a "
    "GPU run `mxamp doctor`, which checks the driver and the wheel"
)


class Cuda(ChoosingBackend):
    """The backend of GPUs, whose kernels are CUDA's."""

    name = "CUDA"
    dtypes = ("float16",)
    in_host_memory = False
    casts_empty_arrays = False  # amp_cast launches an empty grid, which is an error

    def fast_dtype(self) -> str:
        return libraries.fast_dtype()

    def why_float32(self) -> str:
        return libraries.why_float32()

    def speed_warning(self, policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
        sees_none = default_device() == "cpu" and not of_model
        return ("gpu", NO_GPU) if sees_none else None

    def binding(self, groups: object) -> AbstractContextManager[Any]:
        # MXNet's fusion fails for some graphs on several devices, or ends the process, without
        # casts too.
        return variable(libraries.FUSION, "0" if groups else None)


@rule("long_sums", changes_results=True, in_calls=True, reads_weight=True)
def has_long_sums(site: Site, limit: int) -> bool:
    """Return whether a matrix product may sum more than `limit` terms; True if unknown.

    Some kernels sum in half precision, which loses digits in long sums. A product of M by K and K
    by N sums K terms, and its gradients sum N and M.
    """
    shapes = (*site.shapes, None, None)[:2]
    if site.training:
        return not all(shapes) or max(n for one in shapes for n in (one or ())[-2:]) > limit
    transposed = same_value(site.attrs.get("transpose_a", "0"), "1")
    first = shapes[0]
    return not first or first[-2 if transposed else -1] > limit
