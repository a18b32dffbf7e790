"""The CPU as oneDNN uses it: instruction sets, and whether bfloat16 is fast."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Mapping

from ...framework import machine
from ...framework.data import own_tables

if TYPE_CHECKING:
    from ...policy.policy import Policy

# DNNL_MAX_CPU_ISA values under which oneDNN uses no avx512.
_BELOW_AVX512 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS"})
_MAX_ISA = "DNNL_MAX_CPU_ISA"
#: What lets oneDNN use AMX.
FOR_AMX = f"{_MAX_ISA}=AVX512_CORE_AMX"

SLOW = (
    "%s: bfloat16's results are right, but no faster than float32's, and convolutions without "
    "avx512 are up to 100 times slower%s"
)
IN_MODEL = (
    ". A model converted here computes in float32 on rounded values, on other CPUs too: for "
    "bfloat16 kernels, convert it on a CPU with avx512; for speed here, to float32 with `fuse=True`"
)
ONLY_TRUE = (
    "float16 on a CPU is for trying and testing: it rounds values to true float16, but most "
    "convolutional nets run 10 to 25 times slower than in float32. %s is the fast dtype here%s"
)
FOR_GPUS = ". For GPUs (--device gpu, Policy.default('float16', 'gpu')) a check runs like this too"


def onednn_features() -> frozenset[str]:
    """Return the CPU's features, such as avx512, that DNNL_MAX_CPU_ISA lets oneDNN use."""
    # oneDNN ignores unknown names, lower-case ones included.
    limit, flags = os.environ.get(_MAX_ISA, "ALL"), machine.cpu_features()
    if limit in _BELOW_AVX512:
        return frozenset()
    if limit in ("AVX512_CORE", "AVX512_CORE_VNNI"):
        return flags & {"avx512"}
    # MXNet's oneDNN, 2.4, uses AMX on demand alone.
    asks = f"{_MAX_ISA}={limit}" == FOR_AMX and "amx_bf16" in flags
    return flags if asks and _may_use_amx() else flags - {"amx_bf16"}


@lru_cache(maxsize=None)
def _may_use_amx() -> bool:
    """Ask Linux for permission to use AMX tiles; return whether it is granted."""
    # The system call arch_prctl with ARCH_REQ_XCOMP_PERM and the number of the tiles' state.
    return platform.system() == "Linux" and not ctypes.CDLL(None).syscall(158, 0x1023, 18)


def computes_bfloat16() -> bool:
    """Return whether bfloat16 is faster than float32 on this CPU.

    With AMX, avx512_bf16 takes 1.5 to 1.9 times as long as float32 (Xeon, 5th generation).
    """
    needed = "amx_bf16" if "amx_bf16" in machine.cpu_features() else "avx512_bf16"
    return needed in onednn_features()


def fast_dtype() -> str:
    """Return the dtype that "auto" stands for: bfloat16 if it is fast on this CPU, else float32."""
    return "bfloat16" if computes_bfloat16() else "float32"


def float32_substitutions() -> Mapping[str, str]:
    """Return the faster equivalents to use in float32 on this CPU, as {name: measured gain}."""
    instructions = "avx512" if "avx512" in onednn_features() else "avx2"
    gains: Mapping[str, str] = own_tables("float32")[instructions]
    return gains


def why_float32() -> str:
    """Return a text that says why "auto" is float32 on this CPU, for a log line."""
    cpu = f"this CPU ({machine.cpu_name()})"
    if "amx_bf16" in machine.cpu_features():
        return f"{cpu} is fast in bfloat16 if {FOR_AMX} is set before Python starts"
    if "avx512_bf16" in machine.cpu_features():
        limit = f"{_MAX_ISA}={os.environ.get(_MAX_ISA)}"
        return f"{limit} keeps oneDNN from the bfloat16 instructions of {cpu}"
    return f"{cpu} computes no bfloat16 in hardware"


def speed_warning(policy: Policy, of_model: bool) -> tuple[Any, ...] | None:
    """Return a warning (key, log line, *values) if a policy is slow on this CPU, else None."""
    if policy.target_dtype == "float16":
        return "float16", ONLY_TRUE, fast_dtype(), FOR_GPUS if of_model else ""
    if computes_bfloat16():
        return None
    advice = IN_MODEL if of_model and policy.rule("Convolution").no_kernel else ""
    return f"bfloat16{advice}", SLOW, why_float32(), advice
