"""The problems and notes of an installation, with advice: pure functions of its facts.

A problem is something to change. With a note, mxamp works.
"""

from dataclasses import dataclass
from typing import Callable, Iterator, List, Mapping, Tuple

from ...framework.cuda import CUDA_WHEELS, NEWEST_WHEEL
from ...framework.versions import NEWEST, lacking
from ...framework.wording import counted
from .collect import runs_on
from .facts import Facts, Gpu, numbers
from .variables import AUTOMATIC, MAX_ISA, OFF

__all__ = ["Finding", "findings"]

PYTHONS = ((3, 8), (3, 13))
#: The instructions that `DNNL_MAX_CPU_ISA` can take from oneDNN.
_LIMITED = ("avx512", "avx512_bf16", "amx_bf16")
_SLOW = 1.2  #: times float32's speed


@dataclass(frozen=True)
class Finding:
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
    found: List[Finding] = []
    for diagnosis in _DIAGNOSES:
        found.extend(diagnosis(facts))
    return tuple(sorted(found, key=lambda finding: finding.level != "problem"))


# ---------------------------------------------------------------------- versions

#: Advice by a part of the reason why the import failed; the first that fits.
_IMPORT_ADVICE: Mapping[str, str] = {
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


def _imports(facts: Facts) -> Iterator[Finding]:
    if facts.mxnet_error:
        advice = next(text for part, text in _IMPORT_ADVICE.items() if part in facts.mxnet_error)
        yield _problem("mxnet_import", f"MXNet can't be imported: {facts.mxnet_error}", advice)


def _versions(facts: Facts) -> Iterator[Finding]:
    python = numbers(facts.python)[:2]
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        what = f"Python {facts.python}: mxamp is made for Python 3.8 to 3.13"
        yield _problem("python_version", what, "use Python 3.11, which MXNet imports on as it is")
    build = facts.mxnet
    if build is not None:
        wheel = facts.wheels[0].name if facts.wheels else "mxnet"
        for feature in (one for _, one in lacking(build.version) if one.without):
            what = f"MXNet {build.version} has {feature.without}"
            advice = f"MXNet {feature.since} and later have it: pip install {wheel}=={NEWEST}"
            yield _note("mxnet_version", what, advice)
        if build.policies_error:
            what = f"mxamp's operator lists do not fit this MXNet: {build.policies_error}"
            yield _problem("policies", what, f"install MXNet {NEWEST} from its wheel")
        if not build.features.get("MKLDNN", True):
            what = "this MXNet is built without oneDNN: it has no bfloat16, and float32 is slow"
            yield _problem("no_onednn", what, f"install MXNet {NEWEST} from its wheel")
    if len(facts.wheels) > 1:
        names = " and ".join(wheel.name for wheel in facts.wheels)
        what = f"{names} are installed together, and overwrite each other's files"
        yield _problem("two_wheels", what, "pip uninstall all of them, then install one")


def _restored(facts: Facts) -> Iterator[Finding]:
    numpy = numbers(facts.numpy)
    advice = (
        "import mxamp before mxnet, as this command does; or use NumPy 1.23.5 on Python 3.8 to 3.11"
    )
    if numpy >= (1, 24):
        what = (
            f"NumPy {facts.numpy} lacks names that MXNet's import needs, and mxamp restores them. "
            "np.asarray of an NDArray raises an error: use array.asnumpy()"
        )
        yield _note("numpy_restored", what, advice)
    elif numbers(facts.python)[:2] >= (3, 12):
        what = f"Python {facts.python} has no distutils, which MXNet imports: mxamp replaces it"
        yield _note("distutils_restored", what, advice)
    if numpy >= (2, 3):
        what = f"NumPy {facts.numpy} has no ndarray.tostring: mx.recordio.pack_img and pack fail"
        yield _note("numpy_tostring", what, "use NumPy 2.2 or older to write record files")


# ---------------------------------------------------------------------- GPUs


def _gpu_wheels(facts: Facts) -> Iterator[Finding]:
    for gpu in sorted(set(facts.gpus), key=str):
        if facts.cuda is None:
            yield from _cpu_wheel(gpu, facts)
            continue
        if runs_on(gpu, facts.cuda) is False:
            yield _no_code(gpu, facts.cuda)
        needed = CUDA_WHEELS[facts.cuda].driver if facts.cuda in CUDA_WHEELS else "0"
        if numbers(gpu.driver) < numbers(needed):
            what = f"driver {gpu.driver} is too old for mxnet-{facts.cuda}, which needs {needed}"
            yield _problem("gpu_driver", what, f"install driver {needed} or later")


def _cpu_wheel(gpu: Gpu, facts: Facts) -> Iterator[Finding]:
    if runs_on(gpu, NEWEST_WHEEL) is False:
        what = f"{gpu.name}: {_lacks_code(gpu)}"
        yield _note("gpu_without_code", what, "compute on the CPU, as the installed MXNet does")
    elif facts.wheels:
        what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
        advice = f'pip uninstall {facts.wheels[0].name} && pip install "mxamp[{NEWEST_WHEEL}]"'
        yield _problem("gpu_not_used", what, advice)


def _no_code(gpu: Gpu, cuda: str) -> Finding:
    if runs_on(gpu, NEWEST_WHEEL):
        what = f"mxnet-{cuda} has no code for {gpu.name} (compute capability {gpu.capability})"
        advice = f'pip uninstall mxnet-{cuda} && pip install "mxamp[{NEWEST_WHEEL}]"'
    else:
        what = f"no kernel starts on {gpu.name}: {_lacks_code(gpu)}"
        advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet from source"
    return _problem("gpu_without_code", what, advice)


def _lacks_code(gpu: Gpu) -> str:
    return (
        f"it has compute capability {gpu.capability}, and MXNet's wheels have code for 5.0 to 8.6 "
        "(8.9 runs the code of 8.6)"
    )


def _gpus_seen(facts: Facts) -> Iterator[Finding]:
    build, cuda = facts.mxnet, facts.cuda
    if facts.gpu_error:
        level = "problem" if cuda else "note"
        advice = "check the NVIDIA driver: nvidia-smi has to work before MXNet can use a GPU"
        yield Finding("nvidia_smi", level, facts.gpu_error, advice)
    if facts.missing_libraries:
        what = "CUDA libraries are missing: " + ", ".join(facts.missing_libraries)
        advice = f'pip install "mxamp[{NEWEST_WHEEL}]"; libcuda.so.1 comes with the driver'
        if cuda != NEWEST_WHEEL:
            advice = f"install the CUDA that mxnet-{cuda} is for, its cuDNN and NCCL, or {advice}"
        yield _problem("cuda_libraries", what, advice)
    if cuda is None or build is None or facts.gpu_error:
        return
    if not facts.gpus:
        what = f"mxnet-{cuda} is installed, nvidia-smi finds no GPU, and MXNet computes on the CPU"
        yield _note("no_gpu", what, "install mxnet==1.9.1, which is smaller, or check the driver")
    elif build.gpus < len(facts.gpus) and "CUDA_VISIBLE_DEVICES" not in facts.variables:
        what = f"nvidia-smi finds {len(facts.gpus)} GPUs, and MXNet {build.gpus}"
        yield _problem("gpu_not_seen", what, "check the driver, and the container's access to GPUs")


# ---------------------------------------------------------------------- the CPU


def _threads(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    useful = min(cpu.processors, cpu.quota or cpu.processors)
    cores = max(int(min(cpu.physical, useful)), 1)
    advice = f"set OMP_NUM_THREADS={cores} before Python starts"
    if cpu.threads > max(useful, 1):
        limit = counted(cpu.processors, "processor")
        if cpu.quota and cpu.quota < cpu.processors:
            limit = f"{cpu.quota:g} processors' time by the container's limit"
        what = f"MXNet's kernels run on {cpu.threads} threads, and have {limit}: that slows them"
        yield _problem("too_many_threads", what, advice)
    elif cpu.threads < cores and "OMP_NUM_THREADS" not in facts.variables:
        what = (
            f"MXNet's kernels use {cpu.threads} of {cores} cores: by default MXNet starts a thread "
            "for every second processor, as if each core had two"
        )
        yield _note("few_threads", what, advice)


def _bfloat16(facts: Facts) -> Iterator[Finding]:
    cpu, measured = facts.cpu, facts.ratio("cpu", "bfloat16")
    lost = [name for name in cpu.instructions if name in _LIMITED and name not in cpu.usable]
    if lost:
        what = f"{MAX_ISA} keeps oneDNN from instructions that this CPU has: {', '.join(lost)}"
        yield _problem("limited_instructions", what, f"unset {MAX_ISA}, unless you want that")
    if cpu.computes_bfloat16 and 0 < measured < _SLOW:
        what = f"bfloat16 has instructions here, and ran at {measured:.2g} times float32's speed"
        advice = "run mxamp doctor again while no other program runs"
        yield _note("bfloat16_slow", what, advice)
    if cpu.computes_bfloat16 or any("bf16" in name for name in lost):
        return
    what = "without avx512 there are no bfloat16 kernels: products run in float32 on rounded values"
    if "avx512" in cpu.usable:
        what = "this CPU has no bfloat16 instructions: bfloat16 is right, and slower than float32"
        what += f" (measured: {measured:.2g} times float32's speed)" if measured else ""
    if cpu.virtual:
        what += (
            ". It is a virtual one: the host may have instructions that it does not show "
            "(avx512_bf16, amx_bf16)"
        )
    yield _note("no_bfloat16", what, "compute in float32 on this CPU, or in float16 on a GPU")


def _measuring(facts: Facts) -> Iterator[Finding]:
    if facts.speed_error:
        what = f"measuring failed: {facts.speed_error}"
        advice = "products fail, for this reason"
        if facts.speed:
            advice = "products in dtypes that are not shown are too slow, or fail"
        yield _problem("measuring", what, advice)


# ---------------------------------------------------------------------- settings


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, setting in facts.variables.items():
        if setting.advice:
            yield _problem("variable", f"{name}={setting.value}: {setting.effect}", setting.advice)


def _automatic(facts: Facts) -> Iterator[Finding]:
    setting = facts.variables.get(AUTOMATIC)
    if setting is None or facts.mxnet is None or facts.mxnet.on is not None:
        return
    value = setting.value.strip().lower()
    if value in ("", *OFF) or (value == "auto" and facts.fast_dtype == "float32"):
        return
    what = f"{AUTOMATIC}={setting.value}, and mixed precision stays off"
    advice = "set it to 1, auto, float16 or bfloat16"
    if not facts.start_up_hook:
        what += ": Python did not load mxamp's start-up hook"
        advice = "install mxamp with pip in this Python, or use `mxamp run`"
    yield _problem("automatic", what, advice)


_DIAGNOSES: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _imports,
    _versions,
    _gpu_wheels,
    _gpus_seen,
    _variables,
    _automatic,
    _threads,
    _measuring,
    _restored,
    _bfloat16,
)
