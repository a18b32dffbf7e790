"""What is wrong with an installation, and what to do about it: pure functions of its facts.

A problem is something to change. A note is something to know, with which mxamp works.
"""

from dataclasses import dataclass
from typing import Callable, Iterator, List, Mapping, Tuple

from ...framework.cuda import CUDA_WHEELS, NEWEST_WHEEL
from ...framework.versions import NEWEST, lacking
from ...framework.wording import counted
from .collect import runs_on
from .facts import Facts, Gpu, numbers
from .variables import AUTOMATIC, MAX_ISA, OFF

__all__ = [
    "Finding",
    "GPU_DIAGNOSES",
    "findings",
    "note",
    "problem",
]


@dataclass(frozen=True)
class Finding:
    """A problem or a note: what was found, and what to do."""

    name: str
    level: str  #: "problem" or "note"
    what: str
    advice: str


def problem(name: str, what: str, advice: str) -> Finding:
    """Return something to change."""
    return Finding(name, "problem", what, advice)


def note(name: str, what: str, advice: str) -> Finding:
    """Return something to know, with which mxamp works."""
    return Finding(name, "note", what, advice)


def _gpu_wheels(facts: Facts) -> Iterator[Finding]:
    for gpu in sorted(set(facts.gpus), key=str):
        if facts.cuda is None:
            yield from _cpu_wheel(gpu, facts)
        elif runs_on(gpu, facts.cuda) is False:
            yield from _no_code(gpu, facts.cuda)
        if facts.cuda is not None and facts.cuda in CUDA_WHEELS:
            needed = CUDA_WHEELS[facts.cuda].driver
            if numbers(gpu.driver) < numbers(needed):
                what = (
                    f"driver {gpu.driver} is too old for mxnet-{facts.cuda}, which needs {needed}"
                )
                yield problem("gpu_driver", what, f"install driver {needed} or later")


def _cpu_wheel(gpu: Gpu, facts: Facts) -> Iterator[Finding]:
    if runs_on(gpu, NEWEST_WHEEL) is False:
        what = f"{gpu.name}: {_lacks_code(gpu)}"
        yield note("gpu_without_code", what, "compute on the CPU, as the installed MXNet does")
    elif facts.wheels:
        what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
        advice = f'pip uninstall {facts.wheels[0].name} && pip install "mxamp[{NEWEST_WHEEL}]"'
        yield problem("gpu_not_used", what, advice)


def _no_code(gpu: Gpu, cuda: str) -> Iterator[Finding]:
    if runs_on(gpu, NEWEST_WHEEL):
        what = f"mxnet-{cuda} has no code for {gpu.name} (compute capability {gpu.capability})"
        advice = f'pip uninstall mxnet-{cuda} && pip install "mxamp[{NEWEST_WHEEL}]"'
        yield problem("gpu_without_code", what, advice)
        return
    what = f"no kernel starts on {gpu.name}: {_lacks_code(gpu)}"
    advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet from source"
    yield problem("gpu_without_code", what, advice)


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
        yield problem("cuda_libraries", what, advice)
    if cuda is None or build is None or facts.gpu_error:
        return
    if not facts.gpus:
        what = f"mxnet-{cuda} is installed, and nvidia-smi finds no GPU: all computes on the CPU"
        yield note("no_gpu", what, "install mxnet==1.9.1, which is smaller, or look for the driver")
    elif build.gpus < len(facts.gpus) and "CUDA_VISIBLE_DEVICES" not in facts.variables:
        what = f"nvidia-smi finds {len(facts.gpus)} GPUs, and MXNet {build.gpus}"
        yield problem("gpu_not_seen", what, "check the driver, and the container's access to GPUs")


GPU_DIAGNOSES: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (_gpu_wheels, _gpus_seen)

PYTHONS = ((3, 8), (3, 13))


def findings(facts: Facts) -> Tuple[Finding, ...]:
    """Return the problems, and after them the notes."""
    found: List[Finding] = []
    for diagnosis in _DIAGNOSES:
        found.extend(diagnosis(facts))
    return tuple(sorted(found, key=lambda finding: finding.level != "problem"))


# ---------------------------------------------------------------------- versions

#: What MXNet's import fails with, and what to do; the first that is found in the reason.
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
}


def _imports(facts: Facts) -> Iterator[Finding]:
    if facts.mxnet_error:
        other = (
            'try a new virtual environment: pip install "mxamp[cpu]", then run mxamp doctor there'
        )
        advice = (text for part, text in _IMPORT_ADVICE.items() if part in facts.mxnet_error)
        what = f"MXNet can't be imported: {facts.mxnet_error}"
        yield problem("mxnet_import", what, next(advice, other))


def _versions(facts: Facts) -> Iterator[Finding]:
    python = numbers(facts.python)[:2]
    if not PYTHONS[0] <= python <= PYTHONS[1]:
        what = f"Python {facts.python}: mxamp is made for Python 3.8 to 3.13"
        yield problem("python_version", what, "use Python 3.11, which MXNet imports on as it is")
    build = facts.mxnet
    if build is not None:
        for feature in (one for _, one in lacking(build.version) if one.without):
            what = f"MXNet {build.version} has {feature.without}"
            wheel = facts.wheels[0].name if facts.wheels else "mxnet"
            advice = f"MXNet {feature.since} and later have it: pip install {wheel}=={NEWEST}"
            yield note("mxnet_version", what, advice)
        if build.policies_error:
            what = f"mxamp's operator lists do not fit this MXNet: {build.policies_error}"
            yield problem("policies", what, f"install MXNet {NEWEST} from its wheel")
    if len(facts.wheels) > 1:
        names = " and ".join(wheel.name for wheel in facts.wheels)
        what = f"{names} are installed together, and overwrite each other's files"
        yield problem("two_wheels", what, "pip uninstall all of them, then install one")


def _restored(facts: Facts) -> Iterator[Finding]:
    numpy = numbers(facts.numpy)
    advice = (
        "import mxamp before mxnet, as this command does; or use NumPy 1.23.5 on Python 3.8 to 3.11"
    )
    if numpy >= (1, 24):
        what = (
            f"NumPy {facts.numpy} lacks names that MXNet reads while it is imported; mxamp puts "
            "them back. np.asarray of an NDArray raises an error: use array.asnumpy()"
        )
        yield note("numpy_restored", what, advice)
    elif numbers(facts.python)[:2] >= (3, 12):
        what = f"Python {facts.python} has no distutils, which MXNet reads: mxamp stands in for it"
        yield note("distutils_restored", what, advice)
    if numpy >= (2, 3):
        what = f"NumPy {facts.numpy} has no ndarray.tostring: mx.recordio.pack_img and pack fail"
        yield note("numpy_tostring", what, "use NumPy 2.2 or older to write record files")


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
        yield problem("too_many_threads", what, advice)
    elif cpu.threads < cores and "OMP_NUM_THREADS" not in facts.variables:
        what = (
            f"MXNet's kernels use {cpu.threads} of {cores} cores: by default it takes half of the "
            "processors, as if each core had two"
        )
        yield note("few_threads", what, advice)


_LIMITED = ("avx512", "avx512_bf16", "amx_bf16")


def _bfloat16(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    lost = [name for name in cpu.instructions if name in _LIMITED and name not in cpu.usable]
    if lost:
        what = f"{MAX_ISA} keeps oneDNN from instructions that this CPU has: {', '.join(lost)}"
        yield problem("limited_instructions", what, f"unset {MAX_ISA}, unless you want that")
    if cpu.computes_bfloat16 or any("bf16" in name for name in lost):
        return
    measured = _ratio(facts, "cpu", "bfloat16")
    times = f" (measured: {measured:.2g} times float32's speed)" if measured else ""
    hidden = ""
    if cpu.virtual:
        hidden = (
            ". It is a virtual one: the host may have instructions that it does not show "
            "(avx512_bf16, amx_bf16)"
        )
    if "avx512" in cpu.usable:
        what = (
            "this CPU has no bfloat16 instructions: bfloat16 is right, and slower than float32"
            f"{times}{hidden}"
        )
    else:
        what = (
            "without avx512 there are no bfloat16 kernels: products run in float32 on rounded "
            f"values, right and not faster{hidden}"
        )
    yield note("no_bfloat16", what, "compute in float32 on this CPU, or in float16 on a GPU")


def _slower(facts: Facts) -> Iterator[Finding]:
    ratio = _ratio(facts, "cpu", "bfloat16")
    if facts.cpu.computes_bfloat16 and ratio and ratio < 1.2:  # noqa: PLR2004
        what = f"bfloat16 has instructions here, and ran at {ratio:.2g} times float32's speed"
        yield note(
            "bfloat16_slow", what, "run it again with nothing beside: other work distorts it"
        )
    ratio = _ratio(facts, "gpu", "float16")
    if ratio and ratio < 1.2:  # noqa: PLR2004
        what = f"float16 ran at {ratio:.2g} times float32's speed on the GPU"
        yield note("float16_slow", what, "tensor cores need compute capability 7.0 or later")


def _ratio(facts: Facts, device: str, dtype: str) -> float:
    """Return a dtype's speed over float32's on a device, 0 where it is not measured."""
    gflops = {speed.dtype: speed.gflops for speed in facts.speed if speed.device == device}
    return gflops[dtype] / gflops["float32"] if {dtype, "float32"} <= set(gflops) else 0.0


def _measuring(facts: Facts) -> Iterator[Finding]:
    if facts.speed_error:
        what = f"measuring came to no end: {facts.speed_error}"
        advice = "products fail: the reason above says why"
        if facts.speed:
            advice = "products in other dtypes than those shown are too slow, or fail"
        yield problem("measuring", what, advice)


# ---------------------------------------------------------------------- settings


def _build_lacks(facts: Facts) -> Iterator[Finding]:
    if facts.mxnet is not None and not facts.mxnet.features.get("MKLDNN", True):
        what = "this MXNet is built without oneDNN: it has no bfloat16, and float32 is slow"
        yield problem("no_onednn", what, f"install MXNet {NEWEST} from its wheel")


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, setting in facts.variables.items():
        if setting.advice:
            yield problem("variable", f"{name}={setting.value}: {setting.effect}", setting.advice)


def _automatic(facts: Facts) -> Iterator[Finding]:
    setting, build = facts.variables.get(AUTOMATIC), facts.mxnet
    if build is None:
        return
    value = setting.value.strip().lower() if setting is not None else ""
    stays_off = value == "auto" and facts.fast_dtype == "float32"
    wanted = value not in ("", *OFF) and not stays_off
    if wanted and setting is not None and build.on is None:
        what = f"{AUTOMATIC}={setting.value}, and mixed precision stays off"
        advice = "set it to 1, auto, float16 or bfloat16"
        if not facts.start_up_hook:
            what += ": Python did not load mxamp's start-up hook"
            advice = "install mxamp with pip in this Python, or use `mxamp run`"
        yield problem("automatic", what, advice)
    if build.patched and not wanted:
        patched = counted(len(build.patched), "function")
        what = f"MXNet is patched as soon as it is imported ({patched})"
        advice = "look for a sitecustomize module that switches mixed precision on"
        yield note("patched", what, advice)


_DIAGNOSES: Tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _imports, _versions, *GPU_DIAGNOSES, _variables, _automatic, _build_lacks, _threads,
    _measuring, _restored, _bfloat16, _slower,
)  # fmt: skip
