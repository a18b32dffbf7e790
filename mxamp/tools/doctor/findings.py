"""Problems and notes about an installation, with advice: pure functions of its facts."""

from __future__ import annotations

import re
from typing import Any, Iterator, NamedTuple

from ...framework.compat import MXNET, release
from ...framework.cuda import DRIVER, MAJORS, WHEEL
from ...framework.machine import default_dtype
from .collect import Facts

AUTOMATIC = "MXNET_ENABLE_AUTO_MIXED_PRECISION"
_MIN_SPEEDUP = 1.2  #: the least speedup over float32 that counts as a gain

IF_IT_GAINS = "amp.benchmark(net, batch) times your model; mxamp run train.py runs a script"
IF_NOT = "mxamp tune model looks for a faster form of a saved model, also in float32"

#: Advice by a part of the message of the failed import; the first part found counts.
_IMPORT_ADVICE = {
    "cannot open shared object": 'install the CUDA libraries: pip install "mxamp[cu112]"',
    "Invalid Parameter format": "set that environment variable to such a value, or unset it",
    "longer than": "run mxamp doctor again when the machine is idle; check nvidia-smi",
    # MXNet's metadata asks for NumPy below 2, of which there is no wheel for Python 3.13.
    "": 'pip install "mxamp[cpu]" in a new virtual environment; on Python 3.13 '
    f"pip install --no-deps mxnet=={MXNET} && pip install requests",
}
#: Patterns of harmful values of variables, and their effect; from MXNet 1.9.1's sources.
_HARMFUL = {
    "DNNL_DEFAULT_FPMATH_MODE": ("(?i)(?!strict$).+", "float32 products may be less exact"),
    "MXNET_MKLDNN_ENABLED": ("(?i)0|false", "oneDNN is off: float32 is slow, bfloat16 fails"),
    "MXNET_ENGINE_TYPE": ("NaiveEngine", "operators run one by one while Python waits"),
    "MXNET_FC_TRUE_FP16": ("(?i)1|true", "dense layers sum in float16: they lose accuracy"),
    "MXNET_CUDA_ALLOW_TENSOR_CORE": ("(?i)0|false", "no tensor cores: float16 is slow"),
}


class Finding(NamedTuple):
    """A problem or a note about an installation, and what to do about it."""

    level: str  #: "problem", or "note": with a note, mxamp works
    what: str
    advice: str


def findings(facts: Facts) -> list[Finding]:
    """Return all findings about an installation: the problems, then the notes."""
    checks = (*_installation(facts), *_gpus(facts), *_cpu(facts))
    found = [Finding(*finding) for holds, *finding in checks if holds]
    return sorted(found, key=lambda one: one.level != "problem")


def verdict(facts: Facts) -> str:
    """Return in a sentence whether this machine gains from mixed precision, and in which dtype."""
    if not facts.mxnet:
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
    return facts.speedup >= _MIN_SPEEDUP if facts.speedup else facts.fast_dtype != "float32"


#: Whether the finding holds, and its fields.
Checks = Iterator["tuple[Any, str, str, str]"]


def _installation(facts: Facts) -> Checks:
    """Yield checks of MXNet's import, its wheels and environment variables."""
    error = facts.mxnet_error
    advice = next(text for part, text in _IMPORT_ADVICE.items() if part in error)
    failed = "measuring failed" if facts.mxnet else "MXNet can't be imported"
    yield error, "problem", f"{failed}: {error}", advice
    both = f"{' and '.join(facts.wheels)} are installed together, and overwrite each other"
    yield len(facts.wheels) > 1, "problem", both, "pip uninstall all of them, then install one"
    for name, (pattern, effect) in _HARMFUL.items():
        value = facts.variables.get(name, "")
        harmful = value and re.fullmatch(pattern, value)
        yield harmful, "problem", f"{name}={value}: {effect}", f"unset {name}"
    automatic = facts.variables.get(AUTOMATIC, "").strip().lower()
    ignored = automatic not in ("", "0", "false", "off", "no") and not facts.start_up_hook
    what = f"{AUTOMATIC}={automatic} has no effect: Python did not load mxamp's start-up hook"
    yield ignored, "problem", what, "pip install mxamp in this Python, or use `mxamp run`"


def _gpus(facts: Facts) -> Checks:
    """Yield checks of GPUs, their driver, and the CUDA libraries of MXNet's wheel."""
    cuda = WHEEL in facts.wheels
    for gpu in dict.fromkeys(facts.gpus):
        known = gpu.capability[:1].isdigit()
        lacking = known and release(gpu.capability)[0] not in MAJORS
        what = f"MXNet's wheels have no code for {gpu.name} (compute capability {gpu.capability})"
        advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet yourself"
        yield lacking, "problem" if cuda else "note", what, advice
        what = f"{gpu.name} is not used: the installed MXNet is a CPU build"
        advice = 'pip uninstall mxnet && pip install "mxamp[cu112]"'
        yield facts.wheels and not cuda and not lacking, "problem", what, advice
        what = f"driver {gpu.driver} is too old for {WHEEL}, which needs {DRIVER}"
        old = cuda and release(gpu.driver) < release(DRIVER)
        yield old, "problem", what, f"install driver {DRIVER} or later"
    advice = "check the NVIDIA driver: nvidia-smi has to work before MXNet can use a GPU"
    yield facts.gpu_error, "problem" if cuda else "note", facts.gpu_error, advice
    hidden = facts.mxnet_gpus < len(facts.gpus) and "CUDA_VISIBLE_DEVICES" not in facts.variables
    what = f"nvidia-smi finds {len(facts.gpus)} GPUs, and MXNet {facts.mxnet_gpus}"
    advice = "check the driver, and the container's access to GPUs"
    yield cuda and facts.mxnet and hidden, "problem", what, advice


def _cpu(facts: Facts) -> Checks:
    """Yield checks of the CPU's bfloat16 instructions and the threads of MXNet's kernels."""
    cores = max(1, int(min(facts.physical, facts.processors)))
    advice = f"set OMP_NUM_THREADS={cores} before Python starts"
    what = f"MXNet's kernels run on {facts.threads} threads, which is slow: the process may use "
    many = facts.threads > max(facts.processors, 1)
    yield many, "problem", f"{what}{facts.processors:g} processors", advice
    few = facts.threads < cores and "OMP_NUM_THREADS" not in facts.variables
    what = f"MXNet's kernels use {facts.threads} of {cores} cores"
    yield few, "note", what, f"{advice}, if nothing else runs on them"
    lost = [name for name in facts.instructions if name not in facts.usable]
    what = f"DNNL_MAX_CPU_ISA keeps oneDNN from instructions of this CPU: {', '.join(lost)}"
    yield lost, "problem", what, "unset DNNL_MAX_CPU_ISA, unless you want that"
    what = "this CPU, or its virtual machine, has no bfloat16 instructions: float32 is faster"
    advice = "compute in float32 on this CPU, or in float16 on a GPU"
    yield not lost and facts.fast_dtype == "float32", "note", what, advice
