"""GPUs, found without MXNet, and which of them MXNet's wheels have code for."""

import subprocess
from typing import Callable, Optional, Sequence, Tuple

from ...framework.cuda import CUDA_WHEELS
from .facts import Gpu, numbers

__all__ = ["parse", "query", "runs_on"]

_FIELDS = "--query-gpu=name,compute_cap,driver_version"
#: Drivers before 470 know no compute_cap.
_OLD_FIELDS = "--query-gpu=name,driver_version"
_LIMIT = 10  # seconds; a driver that is broken may never answer

TIMED_OUT = f"nvidia-smi gave no answer in {_LIMIT} s"

#: Runs a command; returns its exit status and what it printed.
Run = Callable[[Sequence[str]], Tuple[int, str]]


def runs_on(gpu: Gpu, cuda: str) -> Optional[bool]:
    """Tell whether a wheel has code for a GPU; None where that is not known."""
    if gpu.capability is None or cuda not in CUDA_WHEELS:
        return None
    return numbers(gpu.capability)[0] in CUDA_WHEELS[cuda].majors


def query(run: Optional[Run] = None) -> Tuple[Tuple[Gpu, ...], str]:
    """Return the GPUs that nvidia-smi lists, and the reason where it fails.

    No nvidia-smi means no driver, and is no failure.
    """
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
            return parse(output), ""
        reason = reason or f"nvidia-smi failed with status {status}: {text[:200]}"
        if "compute_cap" not in text:
            break
    return (), reason


def parse(output: str) -> Tuple[Gpu, ...]:
    """Return the GPUs of nvidia-smi's lines: name, compute capability if it tells, driver.

    >>> parse("Tesla T4, 7.5, 470.57.02")
    (Gpu(name='Tesla T4', capability='7.5', driver='470.57.02'),)
    """
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
