"""The checks of `mxamp doctor`: problems of an installation, with advice."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Iterator, NamedTuple, Tuple

import numpy as np

from .._version import __version__
from ..backends.cuda import libraries
from ..backends.cuda.libraries import DRIVER, MAJORS, WHEEL
from ..backends.onednn import cpu
from ..framework import machine
from ..framework.compat import BROKEN, MXNET, release
from ..framework.environment import AUTOMATIC, automatic_value
from ..framework.wording import counted

#: Imports MXNet in a process of its own, which some settings end, and prints the default device.
_IMPORT = "from mxamp.framework import machine; print('\\nmxamp', machine.default_device())"
#: Seconds: an import takes 15 on a busy machine, and nvidia-smi may hang on a broken driver.
_IMPORT_SECONDS, _GPU_SECONDS = 60, 10
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Names of the environment variables to report: those of MXNet, oneDNN, OpenMP and CUDA.
_VARIABLES = re.compile(r"(MXNET|DNNL|MKLDNN)_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")
#: No index has mxamp: its extras are installed from a clone or from a wheel.
_CU112 = f'pip install ".[cu112]" in a clone, or "mxamp-{__version__}-py3-none-any.whl[cu112]"'
#: Advice by a part of the message of the failed import; the first part found counts.
_IMPORT_ADVICE = {
    "cannot open shared object": f"install the CUDA libraries: {_CU112}",
    "Invalid Parameter format": "set that environment variable to such a value, or unset it",
    "longer than": "run mxamp doctor again when the machine is idle; check nvidia-smi",
    # MXNet's metadata asks for NumPy below 2, of which there is no wheel for Python 3.13.
    "": f"pip install mxnet=={MXNET} in a new virtual environment; on Python 3.13 "
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
PROBLEM, NOTE = "problem", "note"


#: A GPU as nvidia-smi lists it: name, driver and compute capability, which is no number if unknown.
Gpu = Tuple[str, ...]


class Diagnosis(NamedTuple):
    """A problem of an installation, or a note about it, with advice."""

    level: str  #: "problem", or "note": with a note, mxamp works
    what: str
    advice: str


def examine() -> tuple[dict[str, str], list[Diagnosis]]:
    """Return facts about the machine and the installation, and diagnoses, problems first.

    If the driver or MXNet hangs, the call takes 80 s.
    """
    gpus, gpu_error = query_gpus()
    device, error = import_mxnet()
    wheels = installed_wheels()
    kind = libraries if device == "gpu" else cpu
    usable, dtype = cpu.onednn_features(), kind.fast_dtype()
    auto = "; 'auto' is float32 with faster equivalents of operators" if kind is cpu else ""
    variables = filter(_VARIABLES.fullmatch, sorted(os.environ))
    facts = {
        "mxamp": __version__,
        "MXNet": ", ".join(map(" ".join, wheels.items())) or "no wheel is installed",
        "NumPy, Python": f"{np.__version__}, {platform.python_version()} on {platform.platform()}",
        "CPU": f"{machine.cpu_name()}, with {', '.join(sorted(usable)) or 'no avx512'}",
        "processors": f"{processors():g}; MXNet computes on {counted(machine.threads(), 'thread')}",
        **({"GPU": "; ".join(map(", ".join, gpus))} if gpus else {}),
        **{name: without_folders(os.environ[name]) for name in variables},
        "fastest dtype": f"float32: {kind.why_float32()}{auto}" if dtype == "float32" else dtype,
    }
    of_gpus = [*_gpus(gpus, wheels), *_driver(gpus, gpu_error, WHEEL in wheels, device)]
    found = [*_installation(wheels, error), *of_gpus, *_cpu()]
    return facts, sorted(found, key=lambda one: one.level != PROBLEM)


def _installation(wheels: dict[str, str], error: str) -> Iterator[Diagnosis]:
    """Yield diagnoses of MXNet's import, its wheels and environment variables."""
    if error:
        advice = next(text for part, text in _IMPORT_ADVICE.items() if part in error)
        yield Diagnosis(PROBLEM, f"MXNet can't be imported: {error}", advice)
    if len(wheels) > 1:
        both = f"{' and '.join(wheels)} are installed together, and overwrite each other"
        yield Diagnosis(PROBLEM, both, "pip uninstall all of them, then install one")
    for name, (pattern, effect) in _HARMFUL.items():
        value = os.environ.get(name, "")
        if value and re.fullmatch(pattern, value):
            yield Diagnosis(PROBLEM, f"{name}={value}: {effect}", f"unset {name}")
    automatic = automatic_value()
    if automatic and "mxamp_startup" not in sys.modules:
        what = f"{AUTOMATIC}={automatic} has no effect: Python did not load mxamp's start-up hook"
        yield Diagnosis(PROBLEM, what, "pip install . in a clone, or use `mxamp run`")


def _gpus(gpus: list[Gpu], wheels: dict[str, str]) -> Iterator[Diagnosis]:
    """Yield diagnoses of GPUs that the installed MXNet wheel can't use, or not fully."""
    cuda = WHEEL in wheels
    for name, _, capability in dict.fromkeys(gpus):
        if capability[:1].isdigit() and release(capability)[0] not in MAJORS:
            what = f"MXNet's wheels have no code for {name}, compute capability {capability}"
            advice = "compute on the CPU (ctx=mx.cpu()), use another GPU, or build MXNet yourself"
            yield Diagnosis(PROBLEM if cuda else NOTE, what, advice)
        elif wheels and not cuda:
            what = f"{name} is not used: the installed MXNet is a CPU build"
            yield Diagnosis(PROBLEM, what, f"pip uninstall mxnet && {_CU112}")


def _driver(gpus: list[Gpu], error: str, cuda: bool, device: str) -> Iterator[Diagnosis]:
    """Yield diagnoses of the NVIDIA driver, and of GPUs that MXNet does not see.

    `error` is that of nvidia-smi, and `device` is MXNet's default one.
    """
    if error:
        advice = "check the NVIDIA driver, or install a newer one: nvidia-smi has to list the GPUs"
        yield Diagnosis(PROBLEM if cuda and device != "gpu" else NOTE, error, advice)
    if gpus and cuda and device == "cpu" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        what = f"nvidia-smi finds {gpus[0][0]}, driver {gpus[0][1]}, and MXNet no GPU"
        advice = f"install driver {DRIVER} or later, and check the container's access to GPUs"
        yield Diagnosis(PROBLEM, what, advice)
    if cuda and device == "cpu" and not gpus and not error:
        advice = f"check the NVIDIA driver ({DRIVER} or later); without a GPU, install mxnet"
        yield Diagnosis(NOTE, f"{WHEEL} is installed, and MXNet sees no GPU", advice)


def _cpu() -> Iterator[Diagnosis]:
    """Yield diagnoses of the number of threads, and of disabled CPU instructions."""
    usable, threads = processors(), machine.threads()
    cores = max(1, int(min(machine.processors() // machine.threads_per_core(), usable)))
    too_many = threads > max(usable, 1)
    if too_many or (threads < cores and "OMP_NUM_THREADS" not in os.environ):
        what = f"MXNet's kernels run on {counted(threads, 'thread')}, slower than on {cores} here"
        advice = f"set OMP_NUM_THREADS={cores} before Python starts, if nothing else runs here"
        yield Diagnosis(PROBLEM if too_many else NOTE, what, advice)
    if cpu.onednn_features() < machine.cpu_features() - {"amx_bf16"}:
        what = "DNNL_MAX_CPU_ISA keeps oneDNN from instructions that this CPU has"
        yield Diagnosis(PROBLEM, what, "unset DNNL_MAX_CPU_ISA, unless you want that")


def import_mxnet() -> tuple[str, str]:
    """Import MXNet in a subprocess; return (default device, "") or ("", error message)."""
    status, output, errors = _run([sys.executable, "-c", _IMPORT], _IMPORT_SECONDS)
    # oneDNN and MXNet may print lines of their own.
    device = re.search(r"^mxamp (\w+)$", output, re.M)
    return (device[1], "") if device and not status else ("", failure_reason(status, errors))


def failure_reason(status: int, stderr: str) -> str:
    """Return one line that says why a subprocess failed."""
    # Clean-up code may print lines after the error's.
    messages = re.findall(r"^\s*(?:what\(\)|[\w.]*(?:Error|Exception)): +(.+)$", stderr, re.M)
    if not messages:
        return signal.Signals(-status).name if status < 0 else f"it ended with status {status}"
    text = messages[-1]
    for words in BROKEN.split("{error}"):
        text = text.replace(words, "")
    return without_folders(text).rstrip(".")[:500]


def query_gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs that nvidia-smi lists, and its error message or "".

    A machine without nvidia-smi has no GPU, and that is no error.
    """
    if not shutil.which("nvidia-smi"):
        return [], ""
    query = "--query-gpu=name,driver_version,compute_cap"
    status, output, errors = _run(["nvidia-smi", query, "--format=csv,noheader"], _GPU_SECONDS)
    if status:
        text = " ".join((output + errors).split())
        return [], "" if "no devices" in text.lower() else f"nvidia-smi failed: {text[:200]}"
    return [tuple(line.split(", ")) for line in output.splitlines() if ", " in line], ""


def _run(command: list[str], seconds: float) -> tuple[int, str, str]:
    """Run a command; return its exit status, standard output and standard error."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return 1, "", f"TimeoutError: it took longer than {seconds:g} s"
    return done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace")


def installed_wheels() -> dict[str, str]:
    """Return the installed MXNet distributions as a sorted dict from name to version."""
    named = [(one.metadata["Name"] or "", one.version) for one in metadata.distributions()]
    found = {name.lower().replace("_", "-"): version for name, version in named}
    return {name: found[name] for name in sorted(found) if re.match(r"mxnet(-|$)", name)}


def processors() -> float:
    """Return the number of processors that affinity and container let this process use.

    The limit is that of cgroup 2.
    """
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return machine.processors()
    return min(machine.processors(), quota / period)


def without_folders(text: str) -> str:
    """Return `text` with folders cut from absolute paths, since users share reports.

    >>> without_folders("/home/ann/libmxnet.so: cannot open")
    'libmxnet.so: cannot open'
    """
    return re.sub(r"(?:~|(?<![\w/]))/(?:[^\s/'\":;,]+/)*(?=[^\s/])", "", text)
