"""Collects the facts of this machine and installation; a process of its own imports MXNet."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Collection, Mapping

import numpy as np

from ..._version import __version__
from ...framework import machine
from ...framework.compat import BROKEN

#: Seconds: nvidia-smi may hang on a broken driver.
_GPU_SECONDS = 10
#: For importing MXNet and measuring: a few seconds are usual, 15 on a busy machine.
_PROBE_SECONDS = 60
_PROBE = "from mxamp.tools.doctor.probe import main; main()"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
#: Names of the environment variables to report: those of MXNet, oneDNN, OpenMP and CUDA.
_VARIABLES = re.compile(r"(MXNET|DNNL|MKLDNN)_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it."""

    name: str
    driver: str
    capability: str = ""  #: such as "8.6"; no number if the driver does not report it


def without_folders(text: str) -> str:
    """Return `text` with each absolute path cut to its last part: reports are made to be shared.

    >>> without_folders("/home/ann/libmxnet.so: cannot open")
    'libmxnet.so: cannot open'
    """
    return re.sub(r"(?:~|(?<![\w/]))/(?:[^\s/'\":;,]+/)*(?=[^\s/])", "", text)


def _run(command: list[str], seconds: float) -> tuple[int, str, str]:
    """Run a program; return its exit status, its output and its errors."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        status, output, errors = done.returncode, done.stdout, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        status, output = 1, late.stdout or b""
        errors = f"TimeoutError: it took longer than {seconds:g} s"
    return status, output.decode(errors="replace"), errors


def query_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and an error message, "" if it succeeded.

    A machine without nvidia-smi has no GPU, and that is no error.
    """
    if not shutil.which("nvidia-smi"):
        return (), ""
    # Drivers before 470 have no compute_cap.
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        status, output, errors = _run(command, _GPU_SECONDS)
        if "compute_cap" not in output + errors:
            break
    if status:
        text = " ".join((output + errors).split())
        return (), "" if "no devices" in text.lower() else f"nvidia-smi failed: {text[:200]}"
    return tuple(Gpu(*line.split(", ")) for line in output.splitlines() if ", " in line), ""


def probe() -> dict[str, Any]:
    """Import MXNet in another process and time it; return some fields of `Facts`.

    A setting may end the process at MXNet's import, and a dense layer may never end.
    """
    status, output, errors = _run([sys.executable, "-c", _PROBE], _PROBE_SECONDS)
    found: dict[str, Any] = {"mxnet_error": failure_reason(status, errors) if status else ""}
    # oneDNN and MXNet may print lines of their own.
    for line in re.findall(r"^mxamp-probe (\{.*\})$", output, re.M):
        found.update(json.loads(line))
    return found


def failure_reason(status: int, stderr: str) -> str:
    """Return in one line why a process failed, from its exit status and standard error."""
    # Clean-up code may print lines after the error's.
    messages = re.findall(r"^\s*(?:what\(\)|[\w.]*(?:Error|Exception)): +(.+)$", stderr, re.M)
    if not messages:
        return signal.Signals(-status).name if status < 0 else f"it ended with status {status}"
    text = messages[-1]
    for words in BROKEN.split("{error}"):
        text = text.replace(words, "")
    return without_folders(text).rstrip(".")[:500]


def _installed_wheels() -> dict[str, str]:
    """Return the version of each installed MXNet distribution by name, sorted."""
    installed = {
        (one.metadata["Name"] or "").lower().replace("_", "-"): one.version
        for one in metadata.distributions()
    }
    return {name: installed[name] for name in sorted(installed) if re.match(r"mxnet(-|$)", name)}


def cpu_quota() -> float:
    """Return the CPU limit of this container (cgroup 2) in processors; infinite without one."""
    try:
        quota, period = map(int, _QUOTA.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return float("inf")
    return quota / period


def _variables() -> dict[str, str]:
    """Return the environment variables that MXNet reads."""
    names = filter(_VARIABLES.fullmatch, sorted(os.environ))
    return {name: without_folders(os.environ[name]) for name in names}


@dataclass(frozen=True)
class Facts:
    """Facts about an installation; the defaults are those of this one."""

    mxamp: str = __version__
    python: str = field(default_factory=platform.python_version)
    numpy: str = np.__version__
    system: str = field(default_factory=platform.platform)
    #: MXNet's wheels: versions by name.
    wheels: Mapping[str, str] = field(default_factory=_installed_wheels)
    cpu: str = field(default_factory=machine.cpu_name)
    #: Of avx512, avx512_bf16 and amx_bf16, those of the CPU, and those that oneDNN may use.
    instructions: Collection[str] = field(default_factory=lambda: sorted(machine.cpu_features()))
    usable: Collection[str] = field(default_factory=lambda: sorted(machine.onednn_features()))
    #: The processors that this process may use, by its affinity and its container's limit.
    processors: float = field(default_factory=lambda: min(machine.processors(), cpu_quota()))
    physical: int = field(
        default_factory=lambda: machine.processors() // machine.threads_per_core()
    )
    #: Threads of one of MXNet's kernels.
    threads: int = field(default_factory=machine.threads)
    #: Whether Python loaded mxamp's hook when it started.
    start_up_hook: bool = field(default_factory=lambda: "mxamp_startup" in sys.modules)
    variables: Mapping[str, str] = field(default_factory=_variables)
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""  #: why nvidia-smi failed
    mxnet: str = ""  #: the version of MXNet; "" if it can't be imported
    mxnet_gpus: int = 0  #: the GPUs that MXNet sees
    mxnet_error: str = ""  #: why MXNet can't be imported, or why measuring failed
    speedup: float = 0.0  #: how many times as fast as float32 the low dtype is; 0 if not measured

    @property
    def device(self) -> str:
        """The default device, "gpu" or "cpu"."""
        return "gpu" if self.mxnet_gpus else "cpu"

    @property
    def fast_dtype(self) -> str:
        """The dtype of "auto" here, without a measurement."""
        if self.device == "gpu":
            return "float16"
        return "bfloat16" if {"avx512_bf16", "amx_bf16"} & {*self.usable} else "float32"


def collect() -> Facts:
    """Return the facts of this machine and installation.

    A dense layer is timed for two seconds. If the driver or MXNet hangs, the call takes 80 s.
    """
    gpus, error = query_gpus()
    return Facts(gpus=gpus, gpu_error=error, **probe())
