"""Environment variables that change results or speed, and the effect of their values.

From MXNet 1.9.1's sources and documentation. The values of DNNL_MAX_CPU_ISA, MXNET_MKLDNN_ENABLED,
MXNET_ENGINE_TYPE, MXNET_SUBGRAPH_BACKEND, MXNET_CPU_TEMP_COPY and OMP_NUM_THREADS were tried on its
CPU wheel.
"""

from typing import Dict, Mapping, NamedTuple, Optional

from .facts import Setting, without_folders

__all__ = ["AUTOMATIC", "MAX_ISA", "OFF", "VARIABLES", "Variable", "settings"]

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
#: Its values that leave mixed precision off.
OFF = ("0", "false", "off", "no")
MAX_ISA = "DNNL_MAX_CPU_ISA"

_BOOLEANS = {"0": "0", "false": "0", "1": "1", "true": "1"}
NO_BOOLEAN = "MXNet takes 0, 1, true or false; other values raise an error or end the process"
NO_INTEGER = "MXNet takes a whole number; with another value the process ends at `import mxnet`"
GPU_ONLY = "nothing here: it is for GPUs, and this MXNet has none"
EMPTY = "nothing: it is empty"
UNKNOWN = "not known to mxamp doctor"
_DEFAULT = "nothing: as without it"


class Variable(NamedTuple):
    """A variable: its general effect, and the effects of values to change and of other values.

    The value "*" stands for all values that are not listed.
    """

    effect: str
    harmful: Mapping[str, str] = {}
    harmless: Mapping[str, str] = {}
    kind: str = ""  #: "boolean", "integer", or "" for a text
    gpu: bool = False


_INSTRUCTIONS = {
    "ALL": "oneDNN uses all instructions of the CPU, as without it",
    "AVX512_CORE_AMX": "oneDNN uses up to amx_bf16",
    "AVX512_CORE_BF16": "oneDNN uses up to avx512_bf16",
    "AVX512_CORE": "oneDNN uses avx512, and no bfloat16 instructions",
    "AVX512_CORE_VNNI": "oneDNN uses avx512, and no bfloat16 instructions",
    "AVX2": "oneDNN uses no avx512, so it has no bfloat16 kernels",
    "AVX": "oneDNN uses no avx512, so it has no bfloat16 kernels",
    "SSE41": "oneDNN uses no avx512, so it has no bfloat16 kernels",
}

VARIABLES: Mapping[str, Variable] = {
    AUTOMATIC: Variable("turns mixed precision on when MXNet is imported", {}, {
        **dict.fromkeys(OFF, "nothing: mixed precision stays off"),
        "auto": "turns mixed precision on when MXNet is imported, where that is fast",
    }),
    MAX_ISA: Variable("", {"*": "not a value that oneDNN knows, in capitals"}, _INSTRUCTIONS),
    "DNNL_DEFAULT_FPMATH_MODE": Variable("", {
        "*": "oneDNN may compute float32 products in bfloat16: float32 results are less exact",
    }, dict.fromkeys(("STRICT", "strict"), "nothing: as without it")),
    "DNNL_VERBOSE": Variable(
        "", {"*": "oneDNN prints a line for each kernel: slow"}, {"0": "nothing"}
    ),
    "MXNET_MKLDNN_ENABLED": Variable("oneDNN is on, as without it", {
        "0": "oneDNN is off: float32 is slow, bfloat16 fails",
    }, kind="boolean"),
    "MXNET_SUBGRAPH_BACKEND": Variable(
        "bound symbols and modules are split for this backend; an unknown one is an error",
        {}, {"NONE": "bound symbols and modules are not fused by oneDNN"},
    ),
    "OMP_NUM_THREADS": Variable("threads of each CPU kernel", kind="integer"),
    "MXNET_OMP_MAX_THREADS": Variable(
        "the most threads of a CPU kernel, without OMP_NUM_THREADS", kind="integer"
    ),
    "MXNET_CPU_WORKER_NTHREADS": Variable(
        "operators that run at once, each on all threads of a kernel", kind="integer"
    ),
    "MXNET_CPU_TEMP_COPY": Variable(
        "workspaces on the CPU (4 without it): 1 takes the least memory",
        {"0": "MXNet has no workspace on the CPU: the process ends when a kernel needs one"},
        kind="integer",
    ),
    "MXNET_ENGINE_TYPE": Variable("", {
        "NaiveEngine": "operators run one by one while Python waits: for debugging, and slower",
        **dict.fromkeys(("", "*"), "MXNet knows no such engine: all computing fails"),
    }, {
        "ThreadedEnginePerDevice": "nothing: as without it",
        "ThreadedEngine": "one pool of threads for all devices",
    }),
    "MXNET_EXEC_BULK_EXEC_TRAIN": Variable(_DEFAULT, {
        "0": "operators are scheduled singly in training: slower, most on GPUs",
    }, kind="boolean"),
    "MXNET_BACKWARD_DO_MIRROR": Variable(
        "1 recomputes activations in backward passes of modules: slower, with less memory",
        kind="integer",
    ),
    "MXNET_SAFE_ACCUMULATION": Variable("1 sums float16 values in float32", kind="boolean"),
    "MXNET_FC_TRUE_FP16": Variable(_DEFAULT, {
        "1": "dense layers sum in float16: they lose accuracy",
    }, kind="boolean", gpu=True),
    "MXNET_CUDA_ALLOW_TENSOR_CORE": Variable(_DEFAULT, {
        "0": "no tensor cores: float16 products are slow",
    }, kind="boolean", gpu=True),
    "MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION": Variable(_DEFAULT, {
        "1": "float32 products are rounded to float16: float32 results are less exact",
    }, kind="boolean", gpu=True),
    "MXNET_CUDNN_AUTOTUNE_DEFAULT": Variable("convolutions are timed to choose an algorithm", {
        "0": "convolutions use algorithms that were not timed: often slower",
    }, kind="integer", gpu=True),
    "MXNET_USE_FUSION": Variable(_DEFAULT, {
        "0": "elementwise operators are not fused: slower",
    }, kind="boolean", gpu=True),
    "CUDA_VISIBLE_DEVICES": Variable(
        "MXNet sees these GPUs only", {}, dict.fromkeys(("", "-1"), "MXNet sees no GPU"), gpu=True
    ),
}  # fmt: skip


def settings(environ: Mapping[str, str], cuda: Optional[str]) -> Dict[str, Setting]:
    """Return the variables of MXNet and oneDNN that are set, with the effect of each.

    `cuda` is None for MXNet's CPU build, where variables for GPUs have no effect.
    """
    found = {}
    for name, variable in VARIABLES.items():
        if name in environ:
            found[name] = _setting(name, variable, environ[name], cuda)
    for name in sorted(set(environ) - set(found)):
        if name.startswith(("MXNET_", "DNNL_", "MKLDNN_")):
            found[name] = Setting(without_folders(environ[name]), UNKNOWN)
    return found


def _setting(name: str, variable: Variable, value: str, cuda: Optional[str]) -> Setting:
    effects = {**variable.harmful, **variable.harmless}
    key = value
    if variable.kind == "boolean":
        key = _BOOLEANS.get(value.strip().lower(), "")
    if variable.gpu and cuda is None:
        return Setting(value, GPU_ONLY)
    if not value.strip() and "" not in effects:
        return Setting(value, EMPTY)
    if variable.kind == "boolean" and not key:
        return Setting(value, NO_BOOLEAN, f"set {name} to 0 or 1, or unset it")
    if variable.kind == "integer" and not value.strip().lstrip("+-").isdigit():
        return Setting(value, NO_INTEGER, f"set {name} to one number, or unset it")
    key = key if key in effects else "*"
    advice = f"unset {name}, unless you want that" if key in variable.harmful else ""
    return Setting(value, effects.get(key, variable.effect), advice)
