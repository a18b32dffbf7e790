"""The machine: the dtypes and devices that MXNet has, and the features of the CPU."""

import logging
import os
import platform
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, Mapping, Union

import numpy as np

if TYPE_CHECKING:
    from mxnet.context import Context

logger = logging.getLogger("mxamp")

#: A dtype as users pass it: a name, a NumPy type, or the dtype itself; and a kind of device.
Dtype = Union[str, type, "np.dtype[Any]"]
Device = Union[str, "Context"]
#: Arrays of NumPy.
Values = Union["np.ndarray[Any, Any]"]

#: MXNet's bfloat16: a NumPy structure that holds the raw 16 bits.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
#: Its public name, which is that of `mxnet.contrib.amp.amp` too.
bfloat16 = BFLOAT16

#: MXNet's numbers for dtypes (mshadow/base.h), by name and back.
DTYPE_CODES: Mapping[str, int] = {
    "float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6,
    "bool": 7, "bfloat16": 12,
}  # fmt: skip
DTYPE_NAMES: Mapping[int, str] = {code: name for name, code in DTYPE_CODES.items()}

#: Names that other libraries have for dtypes; NumPy knows "half" and "single".
_ALIASES = {"bfloat16": BFLOAT16, "bf16": BFLOAT16, "fp16": "float16", "fp32": "float32"}

# MXNet's device types in CPU memory; all others are GPUs.
_CPU_TYPES = frozenset({"cpu", "cpu_pinned", "cpu_shared"})


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype passed as a string, a NumPy type or MXNet's bfloat16.

    >>> dtype_name(np.float16), dtype_name(BFLOAT16)
    ('float16', 'bfloat16')

    Any other value is returned as its `repr`, for an error message.
    """
    if isinstance(dtype, str):
        dtype = _ALIASES.get(dtype, dtype)
    try:
        parsed = np.dtype(dtype)
    except (TypeError, ValueError):
        return repr(dtype)
    return "bfloat16" if parsed == BFLOAT16 else parsed.name


def default_device() -> str:
    """Return the default kind of device: "gpu" if MXNet sees a GPU, else "cpu"."""
    return "gpu" if _gpu_count() else "cpu"


def device_kind(ctx: "Context") -> str:
    """Return the kind of device of an MXNet context, "cpu" or "gpu".

    All modules call this function, so that tests can patch it and run GPU paths on CPU arrays.
    """
    return "cpu" if ctx.device_type in _CPU_TYPES else "gpu"


@lru_cache(maxsize=None)
def _gpu_count() -> int:
    """Return how many GPUs MXNet sees; 0 without a usable driver."""
    import mxnet as mx

    try:
        return int(mx.context.num_gpus())
    except mx.base.MXNetError as error:  # a CUDA build without a usable driver
        logger.debug("counting GPUs failed, using the CPU: %s", error)
        return 0


def threads() -> int:
    """Return the number of threads that MXNet's CPU kernels use."""
    most, limit = (os.environ.get(n, "") for n in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))
    if most.isdigit() and int(most):
        return int(most)
    if limit.isdigit() and int(limit):
        return min(int(limit), processors())
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return max(processors() // 2, 1) if x86 else processors()


def processors() -> int:
    """Return the number of logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_core() -> int:
    """Return the number of logical processors (hyperthreads) in a CPU core."""
    siblings, cores = (_cpu_info().get(name, "") for name in ("siblings", "cpu cores"))
    both = siblings.isdigit() and cores.isdigit() and int(cores)
    return max(int(siblings) // int(cores), 1) if both else 1


@lru_cache(maxsize=None)
def _cpu_info() -> Dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@lru_cache(maxsize=None)
def cpu_features() -> FrozenSet[str]:
    """Return which of the features avx512, avx512_bf16 and amx_bf16 the CPU has."""
    flags = frozenset(_cpu_info().get("flags", "").split())
    # oneDNN calls these four avx512_core.
    avx512 = {"avx512"} if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags else set()
    return frozenset(avx512 | (flags & {"avx512_bf16", "amx_bf16"}))


def cpu_name() -> str:
    """Return the CPU's model name."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()
