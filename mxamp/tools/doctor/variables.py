"""Environment variables that change results or speed, and what each of them does here.

By MXNet 1.9.1's sources and documentation. Values of DNNL_MAX_CPU_ISA, MXNET_MKLDNN_ENABLED,
MXNET_ENGINE_TYPE, MXNET_SUBGRAPH_BACKEND, MXNET_CPU_TEMP_COPY and OMP_NUM_THREADS were tried on its
CPU wheel.
"""

from typing import Dict, Mapping, NamedTuple, Optional, Tuple

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


class Variable(NamedTuple):
    """What a variable does, by its value; "*" stands for all others."""

    effects: Mapping[str, str]
    harmful: Tuple[str, ...] = ()  #: values that are to be changed
    kind: str = ""  #: "boolean", "integer", or "" for a text
    gpu: bool = False


_INSTRUCTIONS = {
    "ALL": "oneDNN uses all instructions of the CPU, as without it",
    "AVX512_CORE_AMX": "oneDNN uses up to amx_bf16",
    "AVX512_CORE_BF16": "oneDNN uses up to avx512_bf16",
    **dict.fromkeys(
        ("AVX512_CORE", "AVX512_CORE_VNNI"), "oneDNN uses avx512, and no bfloat16 instructions"
    ),
    **dict.fromkeys(
        ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS"),
        "oneDNN uses no avx512, so it has no bfloat16 kernels",
    ),
    "*": "oneDNN knows no such value and ignores it; the names are in capitals",
}

_ROUNDED = "oneDNN may compute float32 products in bfloat16: float32 results are less exact"

VARIABLES: Mapping[str, Variable] = {
    # --- mixed precision
    AUTOMATIC: Variable({
        **dict.fromkeys(OFF, "nothing: mixed precision stays off"),
        "auto": "turns mixed precision on when MXNet is imported, where that is fast",
        "*": "turns mixed precision on when MXNet is imported",
    }),
    # --- oneDNN
    MAX_ISA: Variable(_INSTRUCTIONS, ("*",)),
    "DNNL_DEFAULT_FPMATH_MODE": Variable(
        {**dict.fromkeys(("STRICT", "strict"), "nothing: as without it"), "*": _ROUNDED}, ("*",)
    ),
    "DNNL_VERBOSE": Variable(
        {"0": "nothing", "*": "oneDNN prints a line for each kernel: slow"}, ("*",)
    ),
    "MXNET_MKLDNN_ENABLED": Variable(
        {"0": "oneDNN is off: float32 is slow, bfloat16 fails", "1": "oneDNN is on, as without it"},
        ("0",), "boolean",
    ),
    "MXNET_SUBGRAPH_BACKEND": Variable({
        "NONE": "bound symbols and modules are not fused by oneDNN; blocks never are by default",
        "MKLDNN": "oneDNN fuses float32 operators of bound symbols and modules, as without it",
        "*": "bound symbols and modules are split for this backend; an unknown one is an error",
    }),
    "MXNET_USE_MKLDNN_RNN": Variable(
        {"0": "float32 recurrent layers run without oneDNN", "1": "nothing: as without it"},
        kind="boolean",
    ),
    # --- threads and execution
    "OMP_NUM_THREADS": Variable({"*": "threads of each CPU kernel"}, kind="integer"),
    "MXNET_OMP_MAX_THREADS": Variable(
        {"*": "the most threads of a CPU kernel, where OMP_NUM_THREADS is not set"}, kind="integer"
    ),
    "MXNET_CPU_WORKER_NTHREADS": Variable(
        {"1": "nothing: as without it",
         "*": "so many operators run at once, each on all threads of a kernel"}, kind="integer",
    ),
    "MXNET_CPU_TEMP_COPY": Variable({
        "0": "MXNet has no workspace on the CPU: the process ends where a kernel needs one",
        "*": "workspaces on the CPU, each as large as the largest that a kernel asked for; 4 "
        "without it, and 1 takes the least memory",
    }, ("0",), "integer"),
    "MXNET_ENGINE_TYPE": Variable({
        "ThreadedEnginePerDevice": "nothing: as without it",
        "ThreadedEngine": "one pool of threads for all devices",
        "NaiveEngine": "operators run one by one while Python waits: for debugging, and slower",
        **dict.fromkeys(("", "*"), "MXNet knows no such engine: all computing fails"),
    }, ("NaiveEngine", "", "*")),
    "MXNET_EXEC_BULK_EXEC_TRAIN": Variable(
        {"0": "operators are scheduled singly in training: slower, most on GPUs",
         "1": "nothing: as without it"}, ("0",), "boolean",
    ),
    "MXNET_BACKWARD_DO_MIRROR": Variable(
        {"0": "nothing: as without it", "1": "backward passes of bound symbols and modules compute "
         "activations again: slower, with less memory"}, kind="integer",
    ),
    # --- sums, and tensor cores
    "MXNET_SAFE_ACCUMULATION": Variable({
        "0": "nothing: as without it", "1": "float16 sums are float32 inside: changes results "
        "where a program computes them in float16; mxamp computes most of them in float32 anyway",
    }, kind="boolean"),
    "MXNET_FC_TRUE_FP16": Variable(
        {"0": "nothing: as without it", "1": "dense layers sum in float16: they lose accuracy"},
        ("1",), "boolean", gpu=True,
    ),
    "MXNET_CUDA_ALLOW_TENSOR_CORE": Variable(
        {"0": "no tensor cores: float16 products are slow", "1": "nothing: as without it"},
        ("0",), "boolean", gpu=True,
    ),
    "MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION": Variable(
        {"0": "nothing: as without it", "1": "float32 products are rounded to float16: float32 "
         "results are less exact"}, ("1",), "boolean", gpu=True,
    ),
    "NVIDIA_TF32_OVERRIDE": Variable(
        {"0": "float32 products never use TF32", "*": "float32 products may use TF32"}, gpu=True
    ),
    "MXNET_CUDNN_AUTOTUNE_DEFAULT": Variable(
        {"0": "convolutions use algorithms that were not timed: often slower",
         "1": "nothing: as without it", "*": "convolutions are timed with more memory"},
        ("0",), "integer", gpu=True,
    ),
    "MXNET_USE_FUSION": Variable(
        {"0": "elementwise operators are not fused: slower", "1": "nothing: as without it"},
        ("0",), "boolean", gpu=True,
    ),
    "MXNET_ENFORCE_DETERMINISM": Variable(
        {"0": "nothing: as without it", "1": "only algorithms that give the same result each time: "
         "may be slower"}, kind="boolean", gpu=True,
    ),
    "CUDA_VISIBLE_DEVICES": Variable(
        {**dict.fromkeys(("", "-1"), "MXNet sees no GPU"), "*": "MXNet sees these GPUs only"},
        gpu=True,
    ),
}  # fmt: skip


def settings(environ: Mapping[str, str], cuda: Optional[str]) -> Dict[str, Setting]:
    """Return the variables that are set, with what they do to the MXNet that is installed.

    `cuda` is None for MXNet's CPU build, where what is for GPUs does nothing.
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
    effects = variable.effects
    if variable.gpu and cuda is None:
        return Setting(value, GPU_ONLY)
    if not value.strip() and "" not in effects:
        return Setting(value, EMPTY)
    key = value
    if variable.kind == "boolean":
        if value.strip().lower() not in _BOOLEANS:
            return Setting(value, NO_BOOLEAN, f"set {name} to 0 or 1, or unset it")
        key = _BOOLEANS[value.strip().lower()]
    if variable.kind == "integer" and not value.strip().lstrip("+-").isdigit():
        return Setting(value, NO_INTEGER, f"set {name} to one number, or unset it")
    key = key if key in effects else "*"
    advice = f"unset {name}, unless you want that" if key in variable.harmful else ""
    return Setting(value, effects.get(key, UNKNOWN), advice)
