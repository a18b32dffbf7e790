"""The problems and notes of an installation, with advice: pure functions of its facts.

A problem is something to change. With a note, mxamp works.
"""

import re
from typing import Callable, Iterator, NamedTuple, Tuple

from ...framework.cuda import CUDA_WHEELS, NEWEST_WHEEL
from ...framework.machine import default_dtype
from ...framework.versions import NEWEST, lacking
from ...framework.wording import counted
from .facts import Facts, numbers, runs_on

__all__ = ["Finding", "findings", "verdict"]

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
MAX_ISA = "DNNL_MAX_CPU_ISA"
_PYTHONS = ((3, 8), (3, 13))
_TENSOR_CORES = (7, 0)
_GAIN = 1.2  #: times float32's speed


class Finding(NamedTuple):
    """A problem or a note, and what to do about it."""

    name: str
    level: str  #: "problem" or "note"
    what: str
    advice: str


def _problem(name: str, what: str, advice: str) -> Finding:
    return Finding(name, "problem", what, advice)


def _note(name: str, what: str, advice: str) -> Finding:
    return Finding(name, "note", what, advice)


def findings(facts: Facts) -> Tuple[Finding, ...]:
    """Return the problems, then the notes."""
    found = [finding for diagnosis in _DIAGNOSES for finding in diagnosis(facts)]
    return tuple(sorted(found, key=lambda finding: finding.level != "problem"))


def verdict(facts: Facts) -> str:
    """Return in a sentence whether this machine gains from mixed precision, and in which dtype."""
    if facts.mxnet is None:
        return "Nothing runs in mixed precision: MXNet can't be imported."
    gpu, speedup = facts.device == "gpu", facts.speedup
    capabilities = [numbers(gpu.capability) for gpu in facts.gpus if gpu.capability]
    tensor_cores = not capabilities or max(capabilities) >= _TENSOR_CORES
    faster = speedup >= _GAIN if speedup else tensor_cores if gpu else facts.cpu.computes_bfloat16
    measured = f" (measured: {speedup:.2g} times float32's speed)" if speedup else ""
    low = f"{default_dtype(facts.device)} on the {facts.device.upper()}{measured}"
    if faster:
        return f"This machine gains from mixed precision, in {low}."
    return f"This machine computes fastest in float32: {low} saves memory, not time."


# ---------------------------------------------------------------------- versions

#: Advice by a part of the reason why the import failed; the first that fits.
_IMPORT_ADVICE = {
    "is installed, and mxamp runs on": "install one of these; the newest lacks nothing",
    "not installed": 'pip install "mxamp[cpu]", or for NVIDIA GPUs "mxamp[cu112]"',
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


def _versions(facts: Facts) -> Iterator[Finding]:
    if facts.mxnet_error:
        advice = next(text for part, text in _IMPORT_ADVICE.items() if part in facts.mxnet_error)
        yield _problem("mxnet_import", f"MXNet can't be imported: {facts.mxnet_error}", advice)
    python = numbers(facts.python)[:2]
    if not _PYTHONS[0] <= python <= _PYTHONS[1]:
        what = f"Python {facts.python}: mxamp is made for Python 3.8 to 3.13"
        yield _problem("python_version", what, "use Python 3.11, which MXNet imports on as it is")
    if facts.mxnet:
        version, wheel = facts.mxnet.version, next(iter(facts.wheels), "mxnet")
        for feature in (one for _, one in lacking(version) if one.without):
            advice = f"MXNet {feature.since} and later have it: pip install {wheel}=={NEWEST}"
            yield _note("mxnet_version", f"MXNet {version} has {feature.without}", advice)
        if not facts.mxnet.onednn:
            what = "this MXNet is built without oneDNN: it has no bfloat16, and float32 is slow"
            yield _problem("no_onednn", what, f"install MXNet {NEWEST} from its wheel")
    if len(facts.wheels) > 1:
        what = f"{' and '.join(facts.wheels)} are installed together, and overwrite each other"
        yield _problem("two_wheels", what, "pip uninstall all of them, then install one")
    if numbers(facts.numpy) >= (1, 24) or python >= (3, 12):
        what = (
            f"MXNet can't be imported with NumPy {facts.numpy} on Python {facts.python}, and mxamp "
            "makes up for that. From NumPy 1.24 on, np.asarray of an NDArray raises an error"
        )
        advice = "import mxamp before mxnet and use array.asnumpy(), or use NumPy 1.23.5"
        yield _note("numpy_restored", what, advice)


# ---------------------------------------------------------------------- GPUs


def _gpus(facts: Facts) -> Iterator[Finding]:
    cuda, build = facts.cuda, facts.mxnet
    for gpu in sorted(set(facts.gpus), key=str):
        swap = f'pip uninstall {next(iter(facts.wheels), "mxnet")} && '
        swap += f'pip install "mxamp[{NEWEST_WHEEL}]"'
        capability = f"{gpu.name} (compute capability {gpu.capability})"
        if runs_on(gpu, NEWEST_WHEEL) is False:
            what = f"MXNet's wheels have no code for {capability}, only for 5.0 to 8.9"
            advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet yourself"
            yield Finding("gpu_without_code", "problem" if cuda else "note", what, advice)
        elif cuda and runs_on(gpu, cuda) is False:
            yield _problem("gpu_without_code", f"mxnet-{cuda} has no code for {capability}", swap)
        elif facts.wheels and not cuda:
            what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
            yield _problem("gpu_not_used", what, swap)
        needed = CUDA_WHEELS[cuda].driver if cuda and cuda in CUDA_WHEELS else "0"
        if numbers(gpu.driver) < numbers(needed):
            what = f"driver {gpu.driver} is too old for mxnet-{cuda}, which needs {needed}"
            yield _problem("gpu_driver", what, f"install driver {needed} or later")
    if facts.gpu_error:
        advice = "check the NVIDIA driver: nvidia-smi has to work before MXNet can use a GPU"
        yield Finding("nvidia_smi", "problem" if cuda else "note", facts.gpu_error, advice)
    elif cuda and build and not facts.gpus:
        what = f"mxnet-{cuda} is installed, nvidia-smi finds no GPU, and MXNet computes on the CPU"
        yield _note("no_gpu", what, "install mxnet==1.9.1, which is smaller, or check the driver")
    elif (
        cuda
        and build
        and build.gpus < len(facts.gpus)
        and ("CUDA_VISIBLE_DEVICES" not in facts.variables)
    ):
        what = f"nvidia-smi finds {counted(len(facts.gpus), 'GPU')}, and MXNet {build.gpus}"
        yield _problem("gpu_not_seen", what, "check the driver, and the container's access to GPUs")
    if cuda and facts.missing_libraries:
        what = "CUDA libraries are missing: " + ", ".join(facts.missing_libraries)
        advice = f'pip install "mxamp[{NEWEST_WHEEL}]"; libcuda.so.1 comes with the driver'
        if cuda != NEWEST_WHEEL:
            advice = f"install the CUDA that mxnet-{cuda} is for, its cuDNN and NCCL, or {advice}"
        yield _problem("cuda_libraries", what, advice)


# ---------------------------------------------------------------------- the CPU


def _threads(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    useful = min(cpu.processors, cpu.quota or cpu.processors)
    cores = max(int(min(cpu.physical, useful)), 1)
    advice = f"set OMP_NUM_THREADS={cores} before Python starts"
    if cpu.threads > max(useful, 1):
        what = f"MXNet's kernels run on {cpu.threads} threads, which is slow: the process may use "
        yield _problem("too_many_threads", f"{what}{useful:g} processors", advice)
    elif cpu.threads < cores and "OMP_NUM_THREADS" not in facts.variables:
        what = (
            f"MXNet's kernels use {cpu.threads} of {cores} cores: by default MXNet starts a thread "
            "for every second processor, as if each core had two"
        )
        yield _note("few_threads", what, advice)


def _bfloat16(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    lost = [name for name in cpu.instructions if name not in cpu.usable]
    if lost:
        what = f"{MAX_ISA} keeps oneDNN from instructions that this CPU has: {', '.join(lost)}"
        yield _problem("limited_instructions", what, f"unset {MAX_ISA}, unless you want that")
    elif not cpu.computes_bfloat16:
        what = "this CPU has no bfloat16 instructions: bfloat16 is right, and slower than float32"
        if "avx512" not in cpu.usable:
            what = "without avx512 there are no bfloat16 kernels: products run in float32"
        if cpu.virtual:
            what += ". The virtual machine may hide avx512_bf16 or amx_bf16 of its host"
        yield _note("no_bfloat16", what, "compute in float32 on this CPU, or in float16 on a GPU")
    if facts.speed_error:
        advice = "products in dtypes that are not shown are too slow, or fail"
        yield _problem("measuring", f"measuring failed: {facts.speed_error}", advice)


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
_HARMFUL_ON_GPUS = (
    ("MXNET_FC_TRUE_FP16", "(?i)1|true", "dense layers sum in float16: they lose accuracy"),
    ("MXNET_CUDA_ALLOW_TENSOR_CORE", "(?i)0|false",
     "no tensor cores: float16 products are slow"),
    ("MXNET_CUDA_TENSOR_OP_MATH_ALLOW_CONVERSION", "(?i)1|true",
     "float32 products are rounded to float16: float32 results are less exact"),
    ("MXNET_CUDNN_AUTOTUNE_DEFAULT", "0", "convolutions use algorithms that were not timed"),
    ("MXNET_USE_FUSION", "(?i)0|false", "elementwise operators are not fused: slower"),
)  # fmt: skip


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, harmful, effect in (*_HARMFUL, *(_HARMFUL_ON_GPUS if facts.cuda else ())):
        value = facts.variables.get(name)
        if value is not None and re.fullmatch(harmful, value):
            yield _problem("variable", f"{name}={value}: {effect}", f"unset {name}")
    wanted = facts.variables.get(AUTOMATIC, "").strip().lower()
    if wanted not in ("", "0", "false", "off", "no") and not facts.start_up_hook:
        what = f"{AUTOMATIC}={wanted} has no effect: Python did not load mxamp's start-up hook"
        yield _problem("automatic", what, "pip install mxamp in this Python, or use `mxamp run`")


_DIAGNOSES: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _versions, _gpus, _variables, _threads, _bfloat16,
)  # fmt: skip
