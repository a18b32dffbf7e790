"""Writing a trace: a line of JSON for each step of a trainer."""

import atexit
import logging
import os
import platform
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..._version import __version__
from ...errors import ArgumentError, InstallError, StateError
from ...framework import machine
from ...framework.arrays import KIND_NAMES, cast, flat_view, kind_code, plain_array
from ...framework.machine import device_kind
from ...framework.wording import shown
from ...policy.active import current_policy, suspended
from ...scaling.hook import TrainerHook
from ...scaling.report import StepReport
from ...scaling.step_observers import observe_steps, stop_observing
from .numerics.check import NumericsCheck
from .trace_lines import SCHEMA, LineFile, checked_path, encoded, plain
from .trace_reading import last_steps

__all__ = [
    "Trace",
    "add_scalars",
    "event_writer",
    "gpu_memory_used",
    "header",
    "mean_of",
    "rank_of",
    "resident_memory",
    "trace",
]

_STATM = "/proc/self/statm"


def resident_memory() -> Optional[int]:
    """Return the bytes of memory that the process holds now; None where the system does not say.

    Takes 3 us.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        descriptor = os.open(_STATM, os.O_RDONLY)
    except OSError:  # no /proc here
        return None
    try:
        return int(os.read(descriptor, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(descriptor)


def gpu_memory_used(device: int) -> Optional[int]:
    """Return the bytes in use on a GPU, by all processes; None where it can't be asked."""
    try:
        free, total = mx.context.gpu_memory_info(device)
    except mx.base.MXNetError:
        return None
    return int(total - free)


NO_TENSORBOARD = "tensorboard= needs tensorboardX: pip install 'mxamp[tensorboard]'"


def event_writer() -> Any:
    """Return the class that writes event files into a folder."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InstallError(NO_TENSORBOARD) from None
    return SummaryWriter


def add_scalars(writer: Any, line: Dict[str, Any], loss: Optional[float], several: bool) -> None:
    """Write a step's line, with its loss; `several`: under the number of its trainer."""
    prefix = f"trainer {line['trainer']}/" if several else "training/"
    scalars = {
        "loss": loss,
        "loss scale": line["loss_scale"],
        "skipped": float(not line["stepped"]),
        "seconds a step": line["seconds"],
        "memory": line["memory"],
    }
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(prefix + name, value, line["step"], walltime=line["time"])


#: What tells processes of one run apart, where the kvstore does not.
_RANKS = ("DMLC_WORKER_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


def rank_of(trainers: Sequence[Trainer]) -> Optional[int]:
    """Return the number of this process in a distributed run; None where it runs alone."""
    for trainer in trainers:
        kvstore = trainer._kvstore or trainer._kvstore_params["kvstore"]
        if "dist" in str(getattr(kvstore, "type", "")):
            return int(kvstore.rank)
    found = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None


def header(
    trainers: Sequence[Trainer], rank: Optional[int], counts: Dict[int, int]
) -> Dict[str, Any]:
    """Return the first line of a trace, given the last steps of the trainers before it."""
    policy = current_policy()
    described = None
    if policy is not None:
        described = {
            "target_dtype": policy.target_dtype,
            "device": policy.device,
            "fp32_layers": list(policy.fp32_layers),
            "substitutions": sorted(policy.substitutions),
        }
    return {
        "kind": "header",
        "schema": SCHEMA,
        "time": time.time(),
        "mxamp": __version__,
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": {
            "cpu": machine.cpu_name(),
            "cores": machine.threads(),
            "features": sorted(machine.features()),
            "device": machine.default_device(),
            "system": platform.system(),
        },
        "dtype": policy.target_dtype if policy is not None else "float32",
        "policy": described,
        "trainers": [_described(trainer) for trainer in trainers],
        "rank": rank,
        "resumed_after": max(counts.values(), default=None),
    }


def _described(trainer: Trainer) -> Dict[str, Any]:
    hook = getattr(trainer, "_amp_loss_scaler", None)
    scaling = hook if isinstance(hook, TrainerHook) else None
    shapes = [param.shape for param in trainer._params]
    known = all(shape is not None and 0 not in shape for shape in shapes)
    return {
        "optimizer": type(trainer._optimizer).__name__,
        "learning_rate": trainer.learning_rate,
        "parameters": len(shapes),
        "elements": int(sum(np.prod(shape) for shape in shapes)) if known else None,
        "scaled_by": scaling.scaled_by if scaling is not None else None,
        "scaler": scaling.scaler.state_dict().get("kind") if scaling is not None else None,
        "devices": [str(context) for context in trainer._contexts],
    }


#: Larger losses than this are summed where they are.
_SMALL = 2**12


def mean_of(losses: Sequence[NDArray]) -> float:
    """Return the mean of all elements of losses, in any dtype; waits for them."""
    count = sum(loss.size for loss in losses)
    with np.errstate(all="ignore"):
        return float(sum(map(_sum, losses))) / count if count else float("nan")


def _sum(loss: NDArray) -> float:
    array = plain_array(loss)
    kind = KIND_NAMES.get(kind_code(array))
    if kind == "float32" and device_kind(array.context) == "cpu":
        # As it lies in memory: asnumpy() copies.
        return float(flat_view(array, np.float32).sum(dtype=np.float64)) if array.size else 0.0
    with autograd.pause(), suspended():
        wide = cast(array, "float32") if kind in ("float16", "bfloat16") else array
        if wide.size > _SMALL:
            return float(wide.mean().asscalar()) * int(wide.size)
        values = wide.asnumpy()
        return float(values.sum(dtype=np.float64))


logger = logging.getLogger("mxamp")

# GPUs are asked for their memory this often at most.
_GPU_SECONDS = 1.0

CLOSED = "this trace is closed: its lines are written; open another with trace(trainer, path)"
CAN_NOT_WRITE = "the trace %s ends here, and training goes on: it can't be written (%s)"
WHOLE_CHECK = (
    "a record is one finding, not a whole check: give check.first, or one of check.findings"
)

Trainers = Union[Trainer, Sequence[Trainer]]


def trace(
    trainer: Trainers, path: Union[str, "os.PathLike[str]"], *, tensorboard: Optional[str] = None
) -> "Trace":
    """Write a line of JSON for each step of a trainer, until the trace is closed.

    ::

        with amp.debugging.trace(trainer, "trace.jsonl"):
            for data, label in batches:
                ...
                trainer.step(batch_size)

    `mxamp report trace.jsonl --out report.html` makes a page of it, and `read_trace` reads it. Each
    line holds the step's number, loss, loss scale, whether the step was skipped and which gradients
    were not finite, the seconds since the step before, and the memory in use.

    Parameters
    ----------
    trainer : gluon.Trainer or list of them
        With any loss scaling of mxamp's, or with none, before or after it is set up.
    path : str or path
        A new file, or a trace that goes on: lines are added to it. `{rank}` in it stands for the
        number of the process in a distributed run.
    tensorboard : str, optional
        A folder for TensorBoard's event files, written too. Needs `pip install mxamp[tensorboard]`.

    Raises
    ------
    ArgumentError
        Not a trainer; or a file that is no trace, which is left as it is.
    StateError
        Another trace is writing to the file, or the loss scaler is not mxamp's.

    The loss is the mean of what went through `scale_loss`, or `GradScaler.scale`, or where neither
    is used the last backward pass; a trainer without loss scaling needs `Trace.loss`. Reading it
    waits for nothing: gradients have been checked by then, and what `Trace.loss` is given is read
    one step later. A line is with the system when the step is done, and survives `kill -9`.

    Cost: 0.1 to 0.3 ms a step; about 1 us when it is closed.
    """
    return Trace(trainer, path, tensorboard)


class Trace:
    """A trace that is being written; `close()` it, or use it in a `with` statement."""

    def __init__(
        self, trainer: Trainers, path: Union[str, "os.PathLike[str]"], tensorboard: Optional[str]
    ) -> None:
        trainers = _listed(trainer)
        named = checked_path(path)
        if tensorboard is not None:
            checked_path(tensorboard, "TensorBoard's folder")
        make_writer = event_writer() if tensorboard is not None else None
        rank = rank_of(trainers)
        self.path = Path(named.replace("{rank}", str(rank or 0)))
        self._lock = threading.RLock()
        self._closed = False
        self._lines = LineFile(self.path)
        self._loss: Union[None, float, NDArray] = None  # of the next step
        self._held: Optional[Tuple[Dict[str, Any], NDArray]] = None  # its loss may not be there yet
        self._writer: Any = None
        self._watched: List[_Watched] = []
        try:
            counts = last_steps(self.path)
            if make_writer is not None and tensorboard is not None:
                self._writer = make_writer(os.fspath(tensorboard))
            self._write(header(trainers, rank, counts))
            for number, one in enumerate(trainers):
                self._watched.append(_Watched(self, one, number, counts.get(number, 0)))
                self._watched[-1].begin()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """The number of the last step, of the first trainer."""
        return self._watched[0].step if self._watched else 0

    def loss(self, value: Union[float, NDArray]) -> None:
        """Give the loss of the step that comes next: a number, or an array, whose mean is taken.

        An array is read one step later, so that nothing waits for it.
        """
        self._check_open()
        with suppress(TypeError, ValueError):
            self._loss = value.detach() if isinstance(value, NDArray) else float(value)
            return
        raise ArgumentError(f"a loss must be a number or an NDArray, not {shown(value)}")

    def record(self, kind: str, data: Any) -> None:
        """Add a line of another kind: "operators", "plan", "histogram", "culprit", or your own.

        `data` is a dict, or what makes one: operator statistics, a plan, a dataclass.
        """
        self._check_open()
        if not isinstance(kind, str) or not kind or kind in ("header", "step"):
            raise ArgumentError(f"a kind of record must be a name of your own, not {shown(kind)}")
        if isinstance(data, NumericsCheck):
            raise ArgumentError(WHOLE_CHECK)
        content = plain(data)
        if not isinstance(content, dict):
            raise ArgumentError(
                f"a record's data must be a dict or have to_dict(), not {shown(data)}"
            )
        with self._lock:
            self._release()
            line = {"kind": kind, "step": self.step, "time": time.time(), "data": content}
            self._write(line)

    def close(self) -> None:
        """Write what is left, and leave the trainers alone; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            for watched in self._watched:
                watched.end()
            try:
                self._release()
            finally:
                self._end()

    def _end(self) -> None:
        self._closed = True
        self._lines.close()
        if self._writer is not None:
            self._writer.close()
        atexit.unregister(self.close)

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Trace: {str(self.path)!r}, step {self.step}{', closed' if self._closed else ''}>"

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(CLOSED)

    # ------------------------------------------------------------------ what trainers tell

    def see(self, line: Dict[str, Any], losses: Sequence[NDArray]) -> None:
        """Take note of a step, and of its loss where that is known."""
        with self._lock:
            if self._closed:
                return
            self._release()
            given, self._loss = self._loss, None
            if isinstance(given, NDArray):
                self._held = (line, given)
                return
            loss = mean_of(losses) if given is None and losses else given
            self._write_step(line, loss)

    def _release(self) -> None:
        """Write the step whose loss was not waited for."""
        if self._held is not None:
            (line, given), self._held = self._held, None
            self._write_step(line, mean_of([given]))

    def _write_step(self, line: Dict[str, Any], loss: Optional[float]) -> None:
        finite = loss is None or bool(np.isfinite(loss))
        self._write({**line, "loss": loss, "loss_finite": line["loss_finite"] and finite})
        if self._writer is not None:
            add_scalars(self._writer, line, loss, len(self._watched) > 1)

    def _write(self, line: Dict[str, Any]) -> None:
        if self._closed:
            return
        try:
            self._lines.write(encoded(line))
        except OSError as error:  # a full disk must not end the training
            logger.warning(CAN_NOT_WRITE, self.path, error)
            for watched in self._watched:
                watched.end()
            self._end()


class _Watched:
    """A trainer whose steps are traced. It is not kept alive."""

    def __init__(self, owner: Trace, trainer: Trainer, number: int, step: int) -> None:
        self._owner, self._number, self.step = owner, number, step
        self._trainer = weakref.ref(trainer)
        self._gpus = sorted(c.device_id for c in trainer._contexts if device_kind(c) == "gpu")
        self._gpu_memory: Optional[int] = None
        self._asked = -_GPU_SECONDS
        self._last: Optional[float] = None
        self._observing = False

    def begin(self) -> None:
        """Be told of its steps."""
        observe_steps(self._trainer(), self._see)
        self._observing = True

    def end(self) -> None:
        """Be told no more."""
        trainer, observing, self._observing = self._trainer(), self._observing, False
        if trainer is not None and observing:
            stop_observing(trainer, self._see)

    def _see(self, report: StepReport, losses: Sequence[NDArray]) -> None:
        now = time.monotonic()
        self.step += 1
        line = {
            "kind": "step",
            "trainer": self._number,
            "step": self.step,
            "time": time.time(),
            **report._asdict(),
            "seconds": None if self._last is None else now - self._last,
            "memory": resident_memory(),
        }
        if self._gpus:
            line["gpu_memory"] = self._memory_of_gpus(now)
        self._owner.see(line, losses)
        self._last = now

    def _memory_of_gpus(self, now: float) -> Optional[int]:
        if now - self._asked >= _GPU_SECONDS:
            self._asked = now
            used = [gpu_memory_used(device) for device in self._gpus]
            self._gpu_memory = sum(n for n in used if n is not None) if any(used) else None
        return self._gpu_memory


def _listed(trainer: Any) -> List[Trainer]:
    listed = list(trainer) if isinstance(trainer, (list, tuple)) else [trainer]
    wrong = [one for one in listed if not isinstance(one, Trainer)]
    if wrong or not listed:
        given = wrong[0] if wrong else trainer
        raise ArgumentError(f"trace takes a gluon.Trainer or a list of them, not {shown(given)}")
    if len({id(one) for one in listed}) < len(listed):
        raise ArgumentError("trace takes each trainer once, and one is in the list twice")
    return listed
