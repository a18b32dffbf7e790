"""The machine and its dtypes: what MXNet calls them, and what the CPU can do."""

import logging
import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, Mapping, Optional

import numpy as np

__all__ = [
    "BFLOAT16",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "computes_bfloat16",
    "cpu_features",
    "cpu_flags",
    "cpu_name",
    "default_device",
    "default_dtype",
    "device_kind",
    "dtype_name",
    "fast_dtype",
    "features",
    "processors",
    "threads",
    "threads_per_core",
    "why_float32",
]

logger = logging.getLogger("mxamp")

#: MXNet's bfloat16: a NumPy structure that holds the raw 16 bits.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

#: MXNet's numbers for dtypes (mshadow/base.h), by name and back.
DTYPE_CODES: Mapping[str, int] = {
    "float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6,
    "bool": 7, "bfloat16": 12,
}  # fmt: skip
DTYPE_NAMES: Mapping[int, str] = {code: name for name, code in DTYPE_CODES.items()}

# MXNet's device types that are memory of the CPU's: all others are GPUs.
_CPU_TYPES = frozenset({"cpu", "cpu_pinned", "cpu_shared"})
# DNNL_MAX_CPU_ISA values under which oneDNN uses no avx512.
_BELOW_AVX512 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS"}
_MAX_ISA = "DNNL_MAX_CPU_ISA"
#: The instructions for bfloat16 arithmetic.
_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as a string, a NumPy type or MXNet's bfloat16.

    >>> dtype_name(np.float16), dtype_name(BFLOAT16)
    ('float16', 'bfloat16')

    What is no dtype comes back as its `repr`, for the error that follows.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        return repr(dtype)
    return "bfloat16" if parsed == BFLOAT16 else parsed.name


def default_device() -> str:
    """Return "gpu" where MXNet sees one, else "cpu"."""
    return "gpu" if _gpus() else "cpu"


def device_kind(ctx: Any) -> str:
    """Return "cpu" or "gpu" for a context of MXNet's.

    All of mxamp asks here, so that tests can run the paths for GPUs on arrays of the CPU.
    """
    return "cpu" if ctx.device_type in _CPU_TYPES else "gpu"


def default_dtype(device: Optional[str] = None) -> str:
    """Return the target dtype for a kind of device, this machine's by default.

    That is float16 for GPUs and bfloat16 for CPUs.
    """
    return "float16" if (device or default_device()) == "gpu" else "bfloat16"


def fast_dtype(device: Optional[str] = None) -> str:
    """Return what "auto" means for a kind of device, this machine's by default.

    That is float16 for GPUs, bfloat16 for CPUs with arithmetic for it, and float32 for others.
    """
    if (device or default_device()) == "gpu":
        return "float16"
    return "bfloat16" if computes_bfloat16() else "float32"


def why_float32() -> str:
    """Return why float32 is the fast dtype of this CPU, as a part of a sentence."""
    if cpu_features() & _BFLOAT16_FEATURES:
        limit = f"{_MAX_ISA}={os.environ.get(_MAX_ISA)}"
        return f"{limit} keeps oneDNN from the bfloat16 instructions of this CPU ({cpu_name()})"
    return f"this CPU ({cpu_name()}) computes no bfloat16 in hardware"


@lru_cache(maxsize=None)
def _gpus() -> int:
    import mxnet as mx

    try:
        return int(mx.context.num_gpus())
    except mx.base.MXNetError as error:  # a CUDA build without a usable driver
        logger.debug("counting GPUs failed, using the CPU: %s", error)
        return 0


def threads() -> int:
    """Return how many cores MXNet's kernels may use."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if limit.isdigit() and int(limit):
        return int(limit)
    return processors()


def processors() -> int:
    """Return how many logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def features() -> FrozenSet[str]:
    """Return which of avx512, avx512_bf16 and amx_bf16 oneDNN may use on this CPU.

    `DNNL_MAX_CPU_ISA`, which limits oneDNN, limits this too.
    """
    # As oneDNN reads it: names that it does not know, lower-case ones among them, limit nothing.
    limit = os.environ.get(_MAX_ISA, "ALL")
    flags = cpu_features()
    if limit in _BELOW_AVX512:
        return frozenset()
    if limit in ("AVX512_CORE", "AVX512_CORE_VNNI"):
        return flags & {"avx512"}
    return flags


def computes_bfloat16() -> bool:
    """Tell whether the CPU has arithmetic for bfloat16 that oneDNN may use."""
    return bool(features() & _BFLOAT16_FEATURES)


def cpu_flags() -> FrozenSet[str]:
    """Return all flags of the CPU, as Linux names them."""
    return frozenset(_cpu_info().get("flags", "").split())


def threads_per_core() -> int:
    """Return how many logical processors a core has."""
    siblings, cores = (_cpu_info().get(name, "") for name in ("siblings", "cpu cores"))
    both = siblings.isdigit() and cores.isdigit() and int(cores)
    return max(int(siblings) // int(cores), 1) if both else 1


@lru_cache(maxsize=None)
def _cpu_info() -> Dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo, or macOS's words for them."""
    if platform.system() == "Darwin":
        keys = {"model name": "machdep.cpu.brand_string", "flags": "machdep.cpu.leaf7_features"}
        info = {}
        for name, key in keys.items():
            done = subprocess.run(
                ["sysctl", "-n", key], capture_output=True, text=True, check=False
            )
            info[name] = done.stdout.strip().lower() if name == "flags" else done.stdout.strip()
        return info
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@lru_cache(maxsize=None)
def cpu_features() -> FrozenSet[str]:
    """Return which of avx512, avx512_bf16 and amx_bf16 the CPU has."""
    flags = cpu_flags()
    # What oneDNN calls avx512_core.
    avx512 = {"avx512"} if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags else set()
    return frozenset(avx512 | (flags & {"avx512_bf16", "amx_bf16"}))


def cpu_name() -> str:
    """Return what the CPU calls itself."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()
