"""Collects the facts of this machine and installation; a process of its own imports MXNet."""

import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from ..._version import __version__
from ...framework import machine
from ...framework.compat import BROKEN
from ...framework.cuda import missing_libraries
from .facts import Build, Cpu, Facts, Gpu, Speed, without_folders

__all__ = ["collect", "cpu_quota", "kernel_threads", "nvidia_smi", "probe", "reason"]

#: Seconds: nvidia-smi may hang on a broken driver.
_GPU_LIMIT = 10
#: Seconds for importing MXNet and measuring: a few are usual, 15 on a busy machine.
_PROBE_LIMIT = 60
_PROBE = "from mxamp.tools.doctor.probe import main; main()"
#: Variables of MXNet, oneDNN, OpenMP and CUDA.
_VARIABLES = re.compile(r"(MXNET|DNNL|MKLDNN)_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


def collect(measure: bool = True) -> Facts:
    """Return the facts of this machine and installation.

    `measure` times products for two seconds on each device. If the driver or MXNet hangs, the call
    takes 80 s.
    """
    gpus, gpu_error = nvidia_smi()
    wheels = _wheels()
    known = probe(measure)
    build = Build(**known["mxnet"]) if "mxnet" in known else None
    return Facts(
        mxamp=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=" ".join((platform.system(), platform.release(), platform.machine())),
        cpu=_cpu(),
        wheels=wheels,
        mxnet=build,
        mxnet_error="" if build else known["error"],
        gpus=gpus,
        gpu_error=gpu_error,
        missing_libraries=tuple(missing_libraries())
        if any("-cu" in name for name in wheels)
        else (),
        fast_dtype=machine.fast_dtype("gpu" if build and build.gpus else "cpu"),
        start_up_hook="mxamp_startup" in sys.modules,
        variables={
            name: without_folders(value)
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
        speed=tuple(Speed(*one) for one in known.get("speed", ())),
        speed_error=known["error"] if build else "",
    )


def nvidia_smi() -> Tuple[Tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and why it failed; no nvidia-smi means no GPU."""
    # Drivers before 470 have no compute_cap.
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_GPU_LIMIT, check=False
            )
        except FileNotFoundError:
            return (), ""
        except (OSError, subprocess.TimeoutExpired) as error:
            return (), f"nvidia-smi can't be run: {without_folders(str(error))}"
        text = " ".join((done.stdout + done.stderr).split())
        if "compute_cap" not in text:
            break
    if done.returncode and "no devices" not in text.lower():
        return (), f"nvidia-smi failed with status {done.returncode}: {text[:200]}"
    rows = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    known = [[*row, ""] for row in rows]
    return tuple(
        Gpu(name, one if one[:1].isdigit() else None, driver) for name, driver, one, *_ in known
    ), ""


def probe(measure: bool, limit: float = _PROBE_LIMIT) -> Dict[str, Any]:
    """Import MXNet in another process; return its results within `limit` seconds.

    They are "mxnet" if the import succeeded, "speed" as far as it was measured, and "error".
    """
    command = [sys.executable, "-c", _PROBE, *([] if measure else ["--no-measure"])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False
        )
        output, status = done.stdout, done.returncode
        error = reason(status, done.stderr.decode(errors="replace")) if status else ""
    except subprocess.TimeoutExpired as late:
        output, error = late.stdout or b"", f"it took longer than {limit:g} s"
    found: Dict[str, Any] = {"error": error}
    # oneDNN and MXNet may print lines of their own.
    for line in re.findall(rb"^mxamp-probe (\{.*\})$", output, re.M):
        found.update(json.loads(line))
    return found


def reason(status: int, errors: str) -> str:
    """Return in one line why a process failed, from its standard error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Clean-up code may print lines after the error's.
    said = re.findall(r"^\s*(?:what\(\)|[\w.]*(?:Error|Exception)): +(.+)$", errors, re.M)
    if not said and status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"the process died of {names.get(-status, f'signal {-status}')}"
    text = (said or lines or [f"it ended with status {status}"])[-1]
    wrapped = re.fullmatch(re.escape(BROKEN).replace(re.escape("{error}"), "(.*)"), text)
    return without_folders(wrapped[1] if wrapped else text).rstrip(".")[:500]


def _wheels() -> Dict[str, str]:
    """Return the installed distributions of MXNet, name and version."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"mxnet(-(cu\d+|mkl|native|nightly))*", name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _cpu() -> Cpu:
    processors = machine.processors()
    return Cpu(
        name=machine.cpu_name(),
        instructions=tuple(sorted(machine.cpu_features())),
        usable=tuple(sorted(machine.onednn_features())),
        processors=processors,
        physical=math.ceil(processors / machine.threads_per_core()),
        quota=cpu_quota(),
        threads=kernel_threads(os.environ, processors),
        virtual="hypervisor" in machine.cpu_flags(),
    )


def kernel_threads(environ: Mapping[str, str], processors: int) -> int:
    """Return the number of threads of MXNet's CPU kernels (MXNet 1.9.1, src/engine/openmp.cc)."""
    wanted, most = (environ.get(n, "") for n in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))
    if wanted.isdigit() and int(wanted):
        return int(wanted)
    if most.isdigit() and int(most):
        return min(int(most), processors)
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return max(processors // 2, 1) if x86 else processors


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> Optional[float]:
    """Return the container's limit, in processors, or None without a limit."""
    versions: List[Tuple[str, ...]] = [
        ("cpu.max",),
        ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
    ]
    for files in versions:
        try:
            quota, period = " ".join((root / name).read_text() for name in files).split()
        except (OSError, ValueError):
            continue
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
