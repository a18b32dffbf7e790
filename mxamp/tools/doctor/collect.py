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
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ..._version import __version__
from ...framework import machine
from ...framework.compat import BROKEN
from ...framework.cuda import missing_libraries
from .facts import Build, Cpu, Facts, Gpu, Speed, without_folders

__all__ = ["collect", "cpu_quota", "failure_reason", "probe", "query_gpus"]

#: Seconds: nvidia-smi may hang on a broken driver.
_GPU_SECONDS = 10
#: For importing MXNet and measuring: a few seconds are usual, 15 on a busy machine.
_PROBE_SECONDS = 60
_PROBE = "from mxamp.tools.doctor.probe import main; main()"
#: Names of the environment variables to report: those of MXNet, oneDNN, OpenMP and CUDA.
_VARIABLES = re.compile(r"(MXNET|DNNL|MKLDNN)_.*|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


def collect(measure: bool = True) -> Facts:
    """Return the facts of this machine and installation.

    With `measure`, a dense layer is timed for two seconds on each device. If the driver or MXNet
    hangs, the call takes 80 s.
    """
    gpus, gpu_error = query_gpus()
    wheels = _installed_wheels()
    probed = probe(measure)
    build = Build(**probed["mxnet"]) if "mxnet" in probed else None
    return Facts(
        mxamp=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=" ".join((platform.system(), platform.release(), platform.machine())),
        cpu=_collect_cpu(),
        wheels=wheels,
        mxnet=build,
        mxnet_error="" if build else probed["error"],
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
        speed=tuple(Speed(*one) for one in probed.get("speed", ())),
        speed_error=probed["error"] if build else "",
    )


def query_gpus() -> Tuple[Tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and an error message, "" if it succeeded.

    A machine without nvidia-smi has no GPU, and that is no error.
    """
    # Drivers before 470 have no compute_cap.
    for fields in ("name,driver_version,compute_cap", "name,driver_version"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_GPU_SECONDS, check=False
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


def probe(measure: bool, limit: float = _PROBE_SECONDS) -> Dict[str, Any]:
    """Import MXNet in another process, for at most `limit` seconds; return its results by name.

    They are "mxnet", fields of `Build`, if the import succeeded; "speed", fields of each `Speed`
    that was measured; and "error", a message, "" without an error.
    """
    command = [sys.executable, "-c", _PROBE, *([] if measure else ["--no-measure"])]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False
        )
        output, status = done.stdout, done.returncode
        error = failure_reason(status, done.stderr.decode(errors="replace")) if status else ""
    except subprocess.TimeoutExpired as late:
        output, error = late.stdout or b"", f"it took longer than {limit:g} s"
    found: Dict[str, Any] = {"error": error}
    # oneDNN and MXNet may print lines of their own.
    for line in re.findall(rb"^mxamp-probe (\{.*\})$", output, re.M):
        found.update(json.loads(line))
    return found


def failure_reason(status: int, stderr: str) -> str:
    """Return in one line why a process failed, from its exit status and standard error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # Clean-up code may print lines after the error's.
    messages = re.findall(r"^\s*(?:what\(\)|[\w.]*(?:Error|Exception)): +(.+)$", stderr, re.M)
    if not messages and status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"the process died of {names.get(-status, f'signal {-status}')}"
    text = (messages or lines or [f"it ended with status {status}"])[-1]
    wrapped = re.fullmatch(re.escape(BROKEN).replace(re.escape("{error}"), "(.*)"), text)
    return without_folders(wrapped[1] if wrapped else text).rstrip(".")[:500]


def _installed_wheels() -> Dict[str, str]:
    """Return the version of each installed MXNet distribution by name, sorted."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"mxnet(-(cu\d+|mkl|native|nightly))*", name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _collect_cpu() -> Cpu:
    processors = machine.processors()
    return Cpu(
        name=machine.cpu_name(),
        instructions=tuple(sorted(machine.cpu_features())),
        usable=tuple(sorted(machine.onednn_features())),
        processors=processors,
        physical=math.ceil(processors / machine.threads_per_core()),
        quota=cpu_quota(),
        threads=machine.threads(),
        virtual="hypervisor" in machine.cpu_flags(),
    )


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> Optional[float]:
    """Return the CPU limit of this container in processors, or None without a limit.

    `root` is the folder of cgroup version 1 or 2.
    """
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
