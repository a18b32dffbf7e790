"""Writing a trace: a line of JSON for each step of a trainer."""

import atexit
import functools
import logging
import os
import platform
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray.ndarray import NDArray

from ..._version import __version__
from ...errors import ArgumentError, InstallError, StateError
from ...framework import machine
from ...framework.arrays import cast, flat_view, plain_array
from ...framework.keywords import checked_call
from ...framework.wording import shown
from ...policy.active import current_policy, suspended
from ...scaling.state import State, StepReport
from .numerics.check import NumericsCheck
from .numerics.findings import values_of
from .steps import observe_steps, stop_observing
from .trace_lines import SCHEMA, LineFile, encode_line, path_text, to_jsonable
from .trace_reading import last_step_numbers

__all__ = ["Trace", "gpu_memory_used", "mean_loss", "resident_memory", "trace"]

logger = logging.getLogger("mxamp")

#: Least seconds between two reads of the memory in use on GPUs.
_GPU_SECONDS = 1.0
#: Losses of more elements are averaged on their GPU.
_LARGE_LOSS = 2**12
#: Environment variables with the rank of a process, set by launchers.
_RANKS = ("DMLC_WORKER_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")

CLOSED = "this trace is closed: its lines are written; open another with trace(trainer, path)"
CAN_NOT_WRITE = "the trace %s ends here, and training goes on: it can't be written (%s)"
WHOLE_CHECK = (
    "a record is one finding, not a whole check: give check.first, or one of check.findings"
)
NO_TENSORBOARD = "tensorboard= needs tensorboardX: pip install 'mxamp[tensorboard]'"

Trainers = Union[Trainer, Sequence[Trainer]]


@checked_call(file="write path=")
def trace(
    trainer: Trainers, path: Union[str, "os.PathLike[str]"], *, tensorboard: Optional[str] = None
) -> "Trace":
    """Write a line of JSON for each step of a trainer, until the trace is closed.

    ::

        with amp.debugging.trace(trainer, "trace.jsonl") as trace:
            for data, label in batches:
                with autograd.record():
                    loss = loss_function(net(data), label)
                loss.backward()
                trace.loss(loss)
                trainer.step(batch_size)

    `mxamp report trace.jsonl --out report.html` makes a page of it, and `read_trace` reads it. Each
    line holds the step's number, loss, loss scale, whether the step was skipped and which gradients
    were not finite, the seconds since the step before, and the memory in use.

    Parameters
    ----------
    trainer : gluon.Trainer or list of them
        With or without mxamp's loss scaling, which may also be set up later.
    path : str or path
        A new file, or a trace to resume: lines are appended to it. `{rank}` in the path stands for
        the number of the process in a distributed run.
    tensorboard : str, optional
        A folder for TensorBoard event files, also written. Needs `pip install mxamp[tensorboard]`.

    Raises
    ------
    ArgumentError
        Not a trainer; or a file that is no trace, which is left unchanged.
    StateError
        Another trace is writing to the file, or the loss scaler is not mxamp's.

    The loss is the mean of the losses given to `scale_loss` or `GradScaler.scale`, or without
    both, to the last backward pass. A trainer without loss scaling needs `Trace.loss`. Reading the
    loss does not wait: gradients have been checked by then, and a loss given to `Trace.loss` is
    read one step later. Each line is written when its step is done, and survives `kill -9`.

    Cost: 0.1 to 0.3 ms a step; about 1 us when it is closed.
    """
    return Trace(trainer, path, tensorboard)


class Trace:
    """An open trace; `close()` it, or use it in a `with` statement.

    ::

        trace = amp.debugging.trace(trainer, "trace.jsonl")
        trace.record("plan", amp.explain(net, "bfloat16"))
        trace.close()
    """

    def __init__(
        self, trainer: Trainers, path: Union[str, "os.PathLike[str]"], tensorboard: Optional[str]
    ) -> None:
        trainers = _trainer_list(trainer)
        named = path_text(path)
        make_writer = _event_writer_opener(tensorboard) if tensorboard is not None else None
        rank = _rank(trainers)
        self.path = Path(named.replace("{rank}", str(rank or 0)))
        self._lock = threading.RLock()
        self._closed = False
        self._lines = LineFile(self.path)
        self._loss: Union[None, float, NDArray] = None  # of the next step
        # A step whose loss may still be computed.
        self._pending: Optional[Tuple[Dict[str, Any], NDArray]] = None
        self._writer: Any = None
        self._observers: List[_TrainerObserver] = []
        try:
            last = last_step_numbers(self.path)
            if make_writer is not None:
                self._writer = make_writer()
            self._write(_header_line(trainers, rank, max(last.values(), default=None)))
            for number, one in enumerate(trainers):
                watched = _TrainerObserver(self, one, number, last.get(number, 0))
                observe_steps(one, watched)
                self._observers.append(watched)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """The number of the first trainer's last step."""
        return self._observers[0].step if self._observers else 0

    def loss(self, value: Union[float, NDArray]) -> None:
        """Set the loss of the next step: a number, or an array, whose mean is taken.

        An array is read one step later, so that the program does not wait for it.
        """
        self._check_open()
        with suppress(TypeError, ValueError):
            self._loss = value.detach() if isinstance(value, NDArray) else float(value)
            return
        raise ArgumentError(f"a loss must be a number or an NDArray, not {shown(value)}")

    def record(self, kind: str, data: Any) -> None:
        """Add a line of another kind: "operators", "plan", "histogram", "culprit", or your own.

        `data` is a dict, a dataclass, or an object with `to_dict()`, such as a plan.
        """
        self._check_open()
        if not isinstance(kind, str) or not kind or kind in ("header", "step"):
            raise ArgumentError(f"a kind of record must be a name of your own, not {shown(kind)}")
        if isinstance(data, NumericsCheck):
            raise ArgumentError(WHOLE_CHECK)
        content = to_jsonable(data)
        if not isinstance(content, dict):
            raise ArgumentError(
                f"a record's data must be a dict or have to_dict(), not {shown(data)}"
            )
        with self._lock:
            self._write_pending()
            self._write({"kind": kind, "step": self.step, "time": time.time(), "data": content})

    def close(self) -> None:
        """Write the last lines and stop observing the trainers; a second call is a no-op."""
        with self._lock:
            if self._closed:
                return
            try:
                self._write_pending()
            finally:
                self._stop()

    def _stop(self) -> None:
        """Stop observing the trainers and close the files; a second call is a no-op."""
        if self._closed:
            return
        self._closed = True
        for watched in self._observers:
            watched.stop()
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
        """Raise `StateError` if the trace is closed."""
        if self._closed:
            raise StateError(CLOSED)

    # ------------------------------------------------------------------ steps

    def add_step(self, line: Dict[str, Any], losses: Sequence[NDArray]) -> None:
        """Write a step's line, or keep it until the loss given to `loss` can be read."""
        with self._lock:
            if self._closed:
                return
            self._write_pending()
            given, self._loss = self._loss, None
            if isinstance(given, NDArray):
                self._pending = (line, given)
            else:
                self._write_step(line, mean_loss(losses) if given is None and losses else given)

    def _write_pending(self) -> None:
        """Write the line that waits for its loss, if there is one."""
        if self._pending is not None:
            (line, loss), self._pending = self._pending, None
            self._write_step(line, mean_loss([loss]))

    def _write_step(self, line: Dict[str, Any], loss: Optional[float]) -> None:
        """Write a step's line with its loss, and its event for TensorBoard."""
        finite = loss is None or bool(np.isfinite(loss))
        self._write({**line, "loss": loss, "loss_finite": line["loss_finite"] and finite})
        if self._writer is not None:
            self._write_event(line, loss)

    def _write_event(self, line: Dict[str, Any], loss: Optional[float]) -> None:
        """Write the numbers of a step's line to TensorBoard's event file."""
        group = f"trainer {line['trainer']}" if len(self._observers) > 1 else "training"
        scalars = {
            "loss": loss,
            "loss scale": line["loss_scale"],
            "skipped": float(not line["stepped"]),
            "seconds a step": line["seconds"],
            "memory": line["memory"],
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(
                    f"{group}/{name}", value, line["step"], walltime=line["time"]
                )

    def _write(self, line: Dict[str, Any]) -> None:
        """Append a line to the file; log a warning and close the trace if that fails."""
        if self._closed:
            return
        try:
            self._lines.write(encode_line(line))
        except OSError as error:  # a full disk must not end the training
            logger.warning(CAN_NOT_WRITE, self.path, error)
            self._stop()


class _TrainerObserver:
    """Passes a line for each step of a trainer to a trace; does not keep the trainer alive."""

    def __init__(self, owner: Trace, trainer: Trainer, number: int, step: int) -> None:
        self._trace, self._number, self.step = owner, number, step
        self._trainer = weakref.ref(trainer)
        contexts = trainer._contexts
        self._gpus = sorted(c.device_id for c in contexts if machine.device_kind(c) == "gpu")
        self._gpu_memory: Optional[int] = None
        self._gpu_memory_at = -_GPU_SECONDS
        self._last_step_at: Optional[float] = None

    def stop(self) -> None:
        """Stop observing the trainer."""
        trainer = self._trainer()
        if trainer is not None:
            stop_observing(trainer, self)

    def __call__(self, report: StepReport, losses: Sequence[NDArray]) -> None:
        now = time.monotonic()
        self.step += 1
        line = {
            "kind": "step",
            "trainer": self._number,
            "step": self.step,
            "time": time.time(),
            **report._asdict(),
            "seconds": None if self._last_step_at is None else now - self._last_step_at,
            "memory": resident_memory(),
        }
        if self._gpus:
            if now - self._gpu_memory_at >= _GPU_SECONDS:
                self._gpu_memory_at = now
                used = [gpu_memory_used(device) for device in self._gpus]
                self._gpu_memory = None if None in used else sum(used)  # type: ignore[arg-type]
            line["gpu_memory"] = self._gpu_memory
        self._trace.add_step(line, losses)
        self._last_step_at = now


def _trainer_list(trainer: Any) -> List[Trainer]:
    """Return a trainer, or several, as a list; raise `ArgumentError` for anything else."""
    listed = list(trainer) if isinstance(trainer, (list, tuple)) else [trainer]
    wrong = [one for one in listed if not isinstance(one, Trainer)]
    if wrong or not listed:
        given = wrong[0] if wrong else trainer
        raise ArgumentError(f"trace takes a gluon.Trainer or a list of them, not {shown(given)}")
    if len({id(one) for one in listed}) < len(listed):
        raise ArgumentError("trace takes each trainer once, and one is in the list twice")
    return listed


def _event_writer_opener(folder: Any) -> Callable[[], Any]:
    """Return a function that opens an event file in TensorBoard's folder; raise if it can't."""
    named = path_text(folder, "TensorBoard's folder")
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InstallError(NO_TENSORBOARD) from None
    return functools.partial(SummaryWriter, named)


# ---------------------------------------------------------------------- values of a line


def mean_loss(losses: Sequence[NDArray]) -> float:
    """Return the mean of all elements of losses in any dtype; NaN without elements. Waits."""
    count = sum(loss.size for loss in losses)
    with np.errstate(all="ignore"), autograd.pause(), suspended():
        return float(sum(map(_loss_sum, losses))) / count if count else float("nan")


def _loss_sum(loss: NDArray) -> float:
    """Return the sum of a loss's elements, in float64 unless it is large and on a GPU."""
    on_cpu = machine.device_kind(loss.context) == "cpu"
    if on_cpu and loss.size and loss.dtype == np.float32:
        # asnumpy() would copy.
        return float(flat_view(plain_array(loss), np.float32).sum(dtype=np.float64))
    if on_cpu or loss.size <= _LARGE_LOSS:
        return float(values_of(loss).sum(dtype=np.float64))
    wide = cast(plain_array(loss), "float32")
    return float(values_of(wide.mean()).sum()) * int(loss.size)


def resident_memory() -> Optional[int]:
    """Return the bytes of memory that the process holds; None without /proc. Takes 3 us."""
    try:
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None
    try:
        return int(os.read(descriptor, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(descriptor)


def gpu_memory_used(device: int) -> Optional[int]:
    """Return the bytes in use on a GPU, by all processes; None if MXNet can't read them."""
    try:
        free, total = mx.context.gpu_memory_info(device)
    except mx.base.MXNetError:
        return None
    return int(total - free)


def _rank(trainers: Sequence[Trainer]) -> Optional[int]:
    """Return the number of this process in a distributed run; None if it runs alone."""
    for trainer in trainers:
        kvstore = trainer._kvstore or trainer._kvstore_params["kvstore"]
        if "dist" in str(getattr(kvstore, "type", "")):
            return int(kvstore.rank)
    found = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else None


def _header_line(
    trainers: Sequence[Trainer], rank: Optional[int], resumed_after: Optional[int]
) -> Dict[str, Any]:
    """Return the header of a run: versions, machine, policy, trainers, rank.

    `resumed_after` is the last step of the trace that the run resumes.
    """
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
            "features": sorted(machine.onednn_features()),
            "device": machine.default_device(),
            "system": platform.system(),
        },
        "dtype": policy.target_dtype if policy is not None else "float32",
        "policy": described,
        "trainers": [_describe_trainer(trainer) for trainer in trainers],
        "rank": rank,
        "resumed_after": resumed_after,
    }


def _describe_trainer(trainer: Trainer) -> Dict[str, Any]:
    """Return a trainer's entry in the header."""
    hook = getattr(trainer, "_amp_loss_scaler", None)
    scaling = hook if isinstance(hook, State) else None
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
