"""Problems and notes about an installation, with advice: pure functions of its facts.

A problem is something to change. With a note, mxamp works.
"""

import re
from typing import Callable, Iterator, NamedTuple, Tuple

from ...framework.compat import MXNET, release
from ...framework.cuda import DRIVER, WHEEL
from ...framework.machine import default_dtype
from ...framework.wording import counted
from .facts import Facts, lacks_code_for

__all__ = ["Finding", "findings", "next_step", "verdict"]

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
MAX_ISA = "DNNL_MAX_CPU_ISA"
_PYTHONS = ((3, 8), (3, 13))
_TENSOR_CORES = (7, 0)
_MIN_SPEEDUP = 1.2  #: the least speedup over float32 that counts as a gain

IF_IT_GAINS = (
    "amp.benchmark(net, batch) times your model; mxamp run train.py runs a script as it is"
)
IF_NOT = "mxamp tune model looks for a faster form of a saved model, also in float32"


class Finding(NamedTuple):
    """A problem or a note about an installation, and what to do about it."""

    name: str
    level: str  #: "problem" or "note"
    what: str
    advice: str


def findings(facts: Facts) -> Tuple[Finding, ...]:
    """Return all findings about an installation: the problems, then the notes.

    Without MXNet there are problems only: the notes are about how MXNet runs.
    """
    unsorted = [finding for check in _CHECKS for finding in check(facts)]
    if facts.mxnet is None and _NOT_INSTALLED in facts.mxnet_error:
        unsorted = [finding for finding in unsorted if finding.level == "problem"]
    return tuple(sorted(unsorted, key=lambda finding: finding.level != "problem"))


def verdict(facts: Facts) -> str:
    """Return in a sentence whether this machine gains from mixed precision, and in which dtype."""
    if facts.mxnet is None:
        return "Nothing runs in mixed precision: MXNet can't be imported."
    measured = f" (measured: {facts.speedup:.2g} times float32's speed)" if facts.speedup else ""
    low = f"{default_dtype(facts.device)} on the {facts.device.upper()}{measured}"
    if _gains(facts):
        return f"This machine gains from mixed precision, in {low}."
    return f"This machine computes fastest in float32: {low} saves memory, not time."


def next_step(facts: Facts) -> str:
    """Return in a sentence what to do next on a machine without problems."""
    return f"Next: {IF_IT_GAINS if _gains(facts) else IF_NOT}."


def _gains(facts: Facts) -> bool:
    """Return whether this machine is faster in mixed precision: as measured, or by its hardware."""
    if facts.speedup:
        return facts.speedup >= _MIN_SPEEDUP
    capabilities = [release(gpu.capability) for gpu in facts.gpus if gpu.capability]
    tensor_cores = not capabilities or max(capabilities) >= _TENSOR_CORES
    return tensor_cores if facts.device == "gpu" else facts.cpu.computes_bfloat16


# ---------------------------------------------------------------------- versions

#: In the message of an import without MXNet.
_NOT_INSTALLED = "not installed"
#: MXNet's metadata asks for NumPy below 2, of which there is no wheel for Python 3.13.
_ON_313 = f"pip install --no-deps mxnet=={MXNET} && pip install requests"
#: Advice by a part of the message of the failed import; the first part found counts.
_IMPORT_ADVICE = {
    "but mxamp needs MXNet": "uninstall that MXNet, then run the command that the message names",
    _NOT_INSTALLED: 'pip install "mxamp[cpu]", or for NVIDIA GPUs "mxamp[cu112]"',
    "libcuda.so": "install the NVIDIA driver, or the CPU build: pip uninstall mxnet-cu112 && "
    "pip install mxnet==1.9.1",
    "cannot open shared object": 'install the CUDA libraries: pip install "mxamp[cu112]"; the CPU '
    "build needs none",
    "Invalid Parameter format": "set that environment variable to such a value, or unset it",
    "Cannot find Engine": "unset MXNET_ENGINE_TYPE",
    "SIGILL": "this CPU lacks instructions that MXNet's wheel uses: build MXNet from source",
    "longer than": "run mxamp doctor again when the machine is idle; if that does not help, "
    "check the GPU driver with nvidia-smi",
    "": 'try a new virtual environment: pip install "mxamp[cpu]", then run mxamp doctor there',
}


def _check_versions(facts: Facts) -> Iterator[Finding]:
    """Yield findings about MXNet's import and the versions of MXNet, Python and NumPy."""
    python = release(facts.python)[:2]
    if facts.mxnet_error:
        advice = next(text for part, text in _IMPORT_ADVICE.items() if part in facts.mxnet_error)
        if python >= (3, 13) and _NOT_INSTALLED in facts.mxnet_error:
            advice = _ON_313
        what = f"MXNet can't be imported: {facts.mxnet_error}"
        yield Finding("mxnet_import", "problem", what, advice)
    if not _PYTHONS[0] <= python <= _PYTHONS[1]:
        what = f"Python {facts.python}: mxamp is made for Python 3.8 to 3.13"
        advice = "use Python 3.11, which MXNet imports on as it is"
        yield Finding("python_version", "problem", what, advice)
    if facts.mxnet and not facts.mxnet.onednn:
        what = "this MXNet is built without oneDNN: it has no bfloat16, and float32 is slow"
        yield Finding("no_onednn", "problem", what, f"install MXNet {MXNET} from its wheel")
    if len(facts.wheels) > 1:
        what = f"{' and '.join(facts.wheels)} are installed together, and overwrite each other"
        yield Finding("two_wheels", "problem", what, "pip uninstall all of them, then install one")
    if release(facts.numpy) >= (1, 24) or python >= (3, 12):
        what = (
            f"MXNet can't be imported with NumPy {facts.numpy} on Python {facts.python}, and mxamp "
            "makes up for that. From NumPy 1.24 on, np.asarray of an NDArray raises an error"
        )
        advice = "import mxamp before mxnet and use array.asnumpy(), or use NumPy 1.23.5"
        yield Finding("numpy_restored", "note", what, advice)


# ---------------------------------------------------------------------- GPUs


def _check_gpus(facts: Facts) -> Iterator[Finding]:
    """Yield findings about GPUs, their driver, and the CUDA libraries of MXNet's wheel."""
    cuda, build = facts.cuda_wheel, facts.mxnet
    swap = f'pip uninstall {next(iter(facts.wheels), "mxnet")} && pip install "mxamp[cu112]"'
    if cuda and cuda != WHEEL:
        what = f"{cuda} is built for a CUDA version that mxamp does not support"
        yield Finding("cuda_version", "problem", what, swap)
    for gpu in sorted(set(facts.gpus), key=str):
        capability = f"{gpu.name} (compute capability {gpu.capability})"
        if lacks_code_for(gpu):
            what = f"MXNet's wheels have no code for {capability}, only for 5.0 to 8.9"
            advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet yourself"
            yield Finding("gpu_without_code", "problem" if cuda else "note", what, advice)
        elif facts.wheels and not cuda:
            what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
            yield Finding("gpu_not_used", "problem", what, swap)
        if cuda == WHEEL and release(gpu.driver) < release(DRIVER):
            what = f"driver {gpu.driver} is too old for {WHEEL}, which needs {DRIVER}"
            yield Finding("gpu_driver", "problem", what, f"install driver {DRIVER} or later")
    if facts.gpu_error:
        advice = "check the NVIDIA driver: nvidia-smi has to work before MXNet can use a GPU"
        yield Finding("nvidia_smi", "problem" if cuda else "note", facts.gpu_error, advice)
    elif cuda and build and not facts.gpus:
        what = f"{cuda} is installed, nvidia-smi finds no GPU, and MXNet computes on the CPU"
        advice = "install mxnet==1.9.1, which is smaller, or check the driver"
        yield Finding("no_gpu", "note", what, advice)
    elif (
        cuda
        and build
        and build.gpus < len(facts.gpus)
        and "CUDA_VISIBLE_DEVICES" not in facts.variables
    ):
        what = f"nvidia-smi finds {counted(len(facts.gpus), 'GPU')}, and MXNet {build.gpus}"
        advice = "check the driver, and the container's access to GPUs"
        yield Finding("gpu_not_seen", "problem", what, advice)
    if cuda and facts.missing_libraries:
        what = "CUDA libraries are missing: " + ", ".join(facts.missing_libraries)
        advice = 'pip install "mxamp[cu112]"; libcuda.so.1 comes with the driver'
        yield Finding("cuda_libraries", "problem", what, advice)


# ---------------------------------------------------------------------- the CPU


def _check_threads(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the number of threads of MXNet's CPU kernels."""
    cpu = facts.cpu
    useful = min(cpu.processors, cpu.quota or cpu.processors)
    cores = max(int(min(cpu.physical, useful)), 1)
    advice = f"set OMP_NUM_THREADS={cores} before Python starts"
    if cpu.threads > max(useful, 1):
        what = f"MXNet's kernels run on {cpu.threads} threads, which is slow: the process may use "
        yield Finding("too_many_threads", "problem", f"{what}{useful:g} processors", advice)
    elif cpu.threads < cores and "OMP_NUM_THREADS" not in facts.variables:
        what = (
            f"MXNet's kernels use {cpu.threads} of {cores} cores: by default MXNet starts a thread "
            "for every second processor, as if each core had two"
        )
        yield Finding("few_threads", "note", what, f"{advice}, if nothing else runs on them")


def _check_bfloat16(facts: Facts) -> Iterator[Finding]:
    """Yield findings about the CPU's bfloat16 instructions and the measured speeds."""
    cpu = facts.cpu
    lost = [name for name in cpu.instructions if name not in cpu.usable]
    if lost:
        what = f"{MAX_ISA} keeps oneDNN from instructions that this CPU has: {', '.join(lost)}"
        advice = f"unset {MAX_ISA}, unless you want that"
        yield Finding("limited_instructions", "problem", what, advice)
    elif not cpu.computes_bfloat16:
        what = "this CPU has no bfloat16 instructions: bfloat16 is right, and slower than float32"
        if "avx512" not in cpu.usable:
            what = "without avx512 there are no bfloat16 kernels: products run in float32"
        if cpu.virtual:
            what += ". The virtual machine may hide avx512_bf16 or amx_bf16 of its host"
        advice = "compute in float32 on this CPU, or in float16 on a GPU"
        yield Finding("no_bfloat16", "note", what, advice)
    if facts.speed_error:
        advice = "products in dtypes that are not shown are too slow, or fail"
        yield Finding("measuring", "problem", f"measuring failed: {facts.speed_error}", advice)


# ---------------------------------------------------------------------- settings

#: Variables, patterns of their harmful values, and the effect; from MXNet 1.9.1's sources.
_HARMFUL = (
    (MAX_ISA, r"(?!(ALL|SSE41|AVX2?|AVX512_CORE(_VNNI|_BF16|_AMX)?)?$).*",
     "not a value that oneDNN knows, in capitals"),
    ("DNNL_DEFAULT_FPMATH_MODE", r"(?i)(?!strict$).+",
     "oneDNN may compute float32 products in bfloat16: float32 results are less exact"),
    ("DNNL_VERBOSE", "[^0].*", "oneDNN prints a line for each kernel: slow"),
    ("MXNET_MKLDNN_ENABLED", "(?i)0|false", "oneDNN is off: float32 is slow, bfloat16 fails"),
    ("MXNET_CPU_TEMP_COPY", "0", "the process ends when a kernel needs a workspace on the CPU"),
    ("MXNET_ENGINE_TYPE", "(?!ThreadedEngine(PerDevice)?$).*",
     "operators run one by one while Python waits, or fail where MXNet has no such engine"),
    ("MXNET_EXEC_BULK_EXEC_TRAIN", "(?i)0|false", "operators are scheduled singly: slower"),
)  # fmt: skip
_HARMFUL_WITH_CUDA = (
    ("MXNET_FC_TRUE_FP16", "(?i)1|true", "dense layers sum in float16: they lose accuracy"),
    ("MXNET_CUDA_ALLOW_TENSOR_CORE", "(?i)0|false",
     "no tensor cores: float16 products are slow"),
    ("MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION", "(?i)1|true",
     "float32 products are rounded to float16: float32 results are less exact"),
    ("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0", "convolutions use algorithms that were not timed"),
    ("MXNET_USE_FUSION", "(?i)0|false", "elementwise operators are not fused: slower"),
)  # fmt: skip


def _check_variables(facts: Facts) -> Iterator[Finding]:
    """Yield findings about environment variables with harmful values, or without effect."""
    for name, pattern, effect in (*_HARMFUL, *(_HARMFUL_WITH_CUDA if facts.cuda_wheel else ())):
        value = facts.variables.get(name)
        if value is not None and re.fullmatch(pattern, value):
            yield Finding("variable", "problem", f"{name}={value}: {effect}", f"unset {name}")
    automatic = facts.variables.get(AUTOMATIC, "").strip().lower()
    if automatic not in ("", "0", "false", "off", "no") and not facts.start_up_hook:
        what = f"{AUTOMATIC}={automatic} has no effect: Python did not load mxamp's start-up hook"
        advice = "pip install mxamp in this Python, or use `mxamp run`"
        yield Finding("automatic", "problem", what, advice)


_CHECKS: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _check_versions, _check_gpus, _check_variables, _check_threads, _check_bfloat16,
)  # fmt: skip
