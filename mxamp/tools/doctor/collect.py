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
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..._version import __version__
from ...framework import machine
from ...framework.compat import BROKEN
from ...framework.cuda import CUDA_WHEELS, missing_libraries
from .facts import (
    MARK,
    Build,
    Cpu,
    Facts,
    Gpu,
    Speed,
    Wheel,
    numbers,
    without_folders,
)
from .variables import settings

__all__ = [
    "collect",
    "cpu_quota",
    "kernel_threads",
    "probe",
    "probed",
    "query",
    "reason",
    "runs_on",
]

_FIELDS = "--query-gpu=name,compute_cap,driver_version"
#: Drivers before 470 have no compute_cap.
_OLD_FIELDS = "--query-gpu=name,driver_version"
_LIMIT = 10  #: seconds: nvidia-smi may hang on a broken driver

TIMED_OUT = f"nvidia-smi gave no answer in {_LIMIT} s"

#: Runs a command; returns its exit status and what it printed.
Run = Callable[[Sequence[str]], Tuple[int, str]]


def runs_on(gpu: Gpu, cuda: str) -> Optional[bool]:
    """Return whether a wheel has code for a GPU, or None if that is unknown."""
    if gpu.capability is None or cuda not in CUDA_WHEELS:
        return None
    return numbers(gpu.capability)[0] in CUDA_WHEELS[cuda].majors


def query(run: Optional[Run] = None) -> Tuple[Tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and why it failed; no nvidia-smi means no GPU."""
    run = run or _run
    reason = ""
    for fields in (_FIELDS, _OLD_FIELDS):
        try:
            status, output = run(["nvidia-smi", fields, "--format=csv,noheader"])
        except FileNotFoundError:
            return (), ""
        except OSError as error:
            return (), f"nvidia-smi can't be run: {error.strerror}"
        except subprocess.TimeoutExpired:
            return (), TIMED_OUT
        text = " ".join(output.split())
        if "no devices" in text.lower():
            return (), ""
        if status == 0:
            return _gpus(output), ""
        reason = reason or f"nvidia-smi failed with status {status}: {text[:200]}"
        if "compute_cap" not in text:
            break
    return (), reason


def _gpus(output: str) -> Tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's lines, such as "Tesla T4, 7.5, 470.57.02"."""
    gpus = []
    for line in output.splitlines():
        name, *rest = [part.strip() for part in line.split(",")]
        if rest:
            *middle, driver = rest
            known = [part for part in middle if len(numbers(part)) > 1]
            gpus.append(Gpu(name, known[0] if known else None, driver))
    return tuple(gpus)


def _run(command: Sequence[str]) -> Tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    return done.returncode, done.stdout + done.stderr


#: Seconds for importing MXNet and measuring: a few are usual, 15 on a busy machine.
PROBE_LIMIT = 60
#: Imports MXNet as programs do: first, if the start-up hook is to turn mixed precision on; else
#: after mxamp, which makes MXNet importable.
_PROBE = """
import os, sys
if "mxamp_startup" in sys.modules and os.environ.get("MXNET_ENABLE_AUTO_MIXED_PRECISION"):
    import mxnet
import mxamp
from mxamp.tools.doctor.probe import main
main()
"""
#: Instructions of 16-bit kernels, and avx2, without which MXNet is slow.
_INSTRUCTIONS = ("avx2", "f16c", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16")

DIED = "the process died of {signal}"
TOO_LONG = "it took longer than {limit} s"
NO_REASON = "it ended with status {status}, and printed nothing"


class Probed(NamedTuple):
    """The results of the process that imports MXNet."""

    mxnet: Optional[Build] = None
    speed: Tuple[Speed, ...] = ()
    error: str = ""  #: why it failed


def collect(measure: bool = True) -> Facts:
    """Return the facts of this machine and installation.

    `measure` times products for two seconds on each device. If the driver or MXNet hangs, the call
    takes 80 s.
    """
    found, gpu_error = query()
    wheels = tuple(_wheels())
    cuda = next((wheel.cuda for wheel in wheels if wheel.cuda), None)
    known = probe(measure)
    return Facts(
        mxamp=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        system=_system(),
        cpu=_cpu(),
        wheels=wheels,
        mxnet=known.mxnet,
        mxnet_error=known.error if known.mxnet is None else "",
        gpus=found,
        gpu_error=gpu_error,
        missing_libraries=tuple(missing_libraries()) if cuda else (),
        fast_dtype=machine.fast_dtype("gpu" if known.mxnet and known.mxnet.gpus else "cpu"),
        start_up_hook="mxamp_startup" in sys.modules,
        variables=settings(os.environ, cuda),
        speed=known.speed,
        speed_error=known.error if measure and known.mxnet is not None else "",
    )


# ---------------------------------------------------------------------- MXNet, from outside


def probe(measure: bool, limit: float = PROBE_LIMIT) -> Probed:
    """Import MXNet in another process; return its results within `limit` seconds."""
    command = [sys.executable, "-c", _PROBE, *([] if measure else ["--no-measure"])]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return probed(_decoded(late.stdout), TOO_LONG.format(limit=f"{limit:g}"))
    error = reason(done.returncode, _decoded(done.stderr)) if done.returncode else ""
    return probed(_decoded(done.stdout), error)


def _decoded(output: Optional[bytes]) -> str:
    return (output or b"").decode(errors="replace")


def probed(output: str, error: str) -> Probed:
    """Return the results in the probe's output, which may be incomplete."""
    build, speeds = None, {}
    for line in output.splitlines():
        if line.startswith(MARK):
            found: Dict[str, Any] = json.loads(line[len(MARK) :])
            if "mxnet" in found:
                given = found["mxnet"]
                build = Build(**{**given, "patched": tuple(given["patched"])})
            else:
                device, dtype, gflops = found["speed"]
                speeds[device, dtype] = Speed(device, dtype, gflops)
    return Probed(build, tuple(speeds.values()), error)


def reason(status: int, errors: str) -> str:
    """Return in one line why a process failed, from its standard error."""
    # mxamp's own line is the last one, except for lines of clean-up code.
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [
        line for line in lines if re.match(r"what\(\): |([\w.]+\.)?\w*(Error|Exception): ", line)
    ]
    text = re.sub(r"^(what\(\):|[\w.]+:) +", "", said[-1]) if said else ""
    if not text and status > 0:
        text = lines[-1] if lines else NO_REASON.format(status=status)
    if not text:
        text = DIED.format(signal=_signal(-status))
    wrapped = re.fullmatch(re.escape(BROKEN).replace(re.escape("{error}"), "(.*)"), text)
    return without_folders(wrapped[1] if wrapped else text).rstrip(".")[:500]


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---------------------------------------------------------------------- what is installed


def _wheels() -> List[Wheel]:
    """Return the installed distributions of MXNet."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if re.fullmatch(r"mxnet(-(cu\d+|mkl|native|nightly))*", name):
            found[name] = Wheel(name, distribution.version)
    return [found[name] for name in sorted(found)]


def _system() -> str:
    libc = " ".join(platform.libc_ver()).strip()
    parts = (f"{platform.system()} {platform.release()} {platform.machine()}", libc)
    return ", ".join(part for part in parts if part)


# ---------------------------------------------------------------------- the CPU


def _cpu() -> Cpu:
    flags = machine.cpu_flags()
    processors = machine.processors()
    has = (flags | machine.cpu_features()) & set(_INSTRUCTIONS)
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return Cpu(
        name=machine.cpu_name(),
        instructions=tuple(name for name in _INSTRUCTIONS if name in has),
        usable=tuple(name for name in _INSTRUCTIONS if name in machine.features()),
        processors=processors,
        physical=math.ceil(processors / machine.threads_per_core()),
        quota=cpu_quota(),
        threads=kernel_threads(os.environ, processors, x86),
        virtual="hypervisor" in flags,
    )


def kernel_threads(environ: Mapping[str, str], processors: int, x86: bool) -> int:
    """Return the number of threads of MXNet's CPU kernels (MXNet 1.9.1, src/engine/openmp.cc)."""
    wanted, most = (
        int(value) if value.isdigit() else 0
        for value in (environ.get(n, "") for n in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))
    )
    if wanted:
        return wanted
    if most:
        return min(most, processors)
    return max(processors // 2, 1) if x86 else processors


def cpu_quota(root: Path = Path("/")) -> Optional[float]:
    """Return the limit of the process's control groups, in processors; None without a limit."""
    quotas = (_quota(folder) for folder in _groups(root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path) -> Sequence[Path]:
    """Return the folders of the process's control groups and of their parents."""
    base = root / "sys" / "fs" / "cgroup"
    folders = [base, base / "cpu"]
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if not controllers or "cpu" in controllers.split(","):
            start = base / "cpu" if controllers else base
            inner = start / path.strip("/")
            folders += [inner, *(folder for folder in inner.parents if start in folder.parents)]
    return folders


def _quota(folder: Path) -> Optional[float]:
    """Return the limit of one control group of version 2 or 1, in processors, or None."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
