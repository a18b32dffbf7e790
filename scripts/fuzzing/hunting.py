"""Find programs that fail with mixed precision, and shrink them."""

import multiprocessing
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

from .generating import random_program
from .programs import Program, shrunk

#: What makes a program a finding.
FAILURES = ("different", "error", "died", "hung")
LIMIT = 60.0  #: seconds for a program
LIFE = 300  #: programs of one worker
TRIALS = 250  #: programs run to shrink one
FOLDER = Path(__file__).resolve().parents[1]

NAN = "oneDNN's relu makes 0 of NaN, in values or gradients"
#: Known differences that are no defects of mxamp, by the features of a program.
EXPLAINED: Dict[FrozenSet[str], str] = {
    **{frozenset({op, "not finite"}): NAN for op in
       ("Activation", "LeakyReLU", "relu", "clip", "npx.activation", "npx.relu", "np.clip")},
    # Seen in one run of five in plain MXNet.
    frozenset({"contrib.foreach", "static_shape"}):
        "loops in graphs with static_shape read memory that was never written, as in plain MXNet",
    **{frozenset({op, "grad_req()"}):
       "plain MXNet gives no gradient to a dense layer's bias where its weight has none"
       for op in ("FullyConnected", "npx.fully_connected")},
    frozenset({"BatchNorm", "broadcast_sub"}):
        "BatchNorm amplifies the rounding error of a difference of equal arrays",
    frozenset({"BatchNorm", "reshape()"}):
        "plain MXNet leaves parameters unwritten that partial_shaping=True has enlarged",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A shrunk program that fails with mixed precision, or the features of a known difference."""

    kind: str
    text: str
    features: FrozenSet[str]
    policy: str = "float32"  #: float32: programs of any policy fail alike
    program: Optional[Program] = None
    number: int = 0  #: of the program that was shrunk

    def is_like(self, program: Program) -> bool:
        """Return whether a failing program is likely to fail for the same reason."""
        same = self.policy in ("float32", program.precision)
        return same and self.features <= program.features


def explained() -> List[Finding]:
    """Return `EXPLAINED` as findings."""
    return [Finding("different", reason, features) for features, reason in EXPLAINED.items()]


@dataclass
class Harvest:
    """Counts and findings of all threads."""

    counts: "Counter[str]" = field(default_factory=Counter)
    findings: List[Finding] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)


def _serve(pipe: Any, planted: str) -> None:
    """Serve programs in a worker process."""
    from .running import serve

    serve(pipe, planted)


class Runner:
    """Runs programs in a worker process, which is replaced after a crash, a hang or an error."""

    def __init__(self, planted: str = "") -> None:
        os.environ["PYTHONPATH"] = str(FOLDER) + os.pathsep + os.environ.get("PYTHONPATH", "")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The fork server has imported everything and run nothing.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fuzzing.running"])
        self._planted = planted
        self._process: Any = None
        self._pipe: Any = None
        self._count, self._clean = 0, True

    def run(self, program: Program) -> Tuple[str, str]:
        """Return the kind and the text of a program's result.

        The kind is "unstable" if the program fails only after other programs.
        """
        kind, text = self._run_once(program)
        if kind == "invalid" and self._process is None:  # loops crash plain MXNet now and then
            kind, text = self._run_once(program)
        if kind in FAILURES and self._count != 1 and not (kind == "different" and self._clean):
            # An earlier program may have corrupted memory, as errors in MXNet do.
            self.close()
            again, said = self._run_once(program)
            kind, text = (again, said) if again in FAILURES else ("unstable", text)
        # After an operator's error, MXNet may compute wrong values or crash.
        self._clean = self._clean and kind in ("equal", "imprecise", "different", "refused")
        if kind in FAILURES and kind != "different":
            self.close()
        return kind, text

    def _run_once(self, program: Program) -> Tuple[str, str]:
        """Return the kind and the text of a program's result in the current worker."""
        if self._process is None or self._count >= LIFE:
            self._start()
        self._count += 1
        # The result if the worker falls silent: plain MXNet runs first, and may crash too.
        end = {"dies": "invalid", "hangs": "invalid"}
        try:
            self._pipe.send(program.to_json())
            while self._pipe.poll(LIMIT):
                kind, text = self._pipe.recv()
                if kind == "plain":
                    end = {"dies": "died", "hangs": "hung"}
                elif kind == "suspect":
                    unsure = "different" if program.precision == "float32" else "imprecise"
                    end = {"dies": unsure, "hangs": unsure}
                else:
                    return str(kind), str(text)
            self.close()
            return end["hangs"], f"took over {LIMIT:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            status = self._process.exitcode
            self.close()
            return end["dies"], f"the process died, status {status}"

    def _start(self) -> None:
        """Replace the worker by a new process."""
        self.close()
        self._pipe, other = self._context.Pipe()
        arguments = (other, self._planted)
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError("the worker does not start: its error is above") from None
        self._count, self._clean = 0, True

    def close(self) -> None:
        """End the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process, self._count = None, 0


def hunt(
    runner: Runner, numbers: Iterator[int], harvest: Harvest, known: Sequence[Finding]
) -> None:
    """Run the random programs of some numbers; shrink failing ones, and add them to `harvest`.

    Programs that fail like a finding in `known` are counted alone.
    """

    def is_known(program: Program) -> bool:
        return any(one.is_like(program) for one in (*known, *harvest.findings))

    def fails(kind: str, program: Program) -> bool:
        return runner.run(program)[0] == kind and not is_known(program)

    for number in numbers:
        program = random_program(number)
        if not program.nodes:
            continue
        kind, text = runner.run(program)
        if kind in FAILURES and not is_known(program):
            program = shrunk(program, partial(fails, kind), TRIALS)
            runner.close()
            first, (kind, text) = kind, runner.run(program)
            kind = kind if kind == first else "unstable"
        with harvest.lock:
            if kind in FAILURES and is_known(program):
                kind = "again"
            elif kind in FAILURES:
                harvest.findings.append(
                    Finding(kind, text, program.features, program.precision, program, number)
                )
            names = ("programs", kind, f"way {program.way}", f"policy {program.policy}")
            harvest.counts.update(names)
