"""Find programs that fail with mixed precision, and shrink them."""

import multiprocessing
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

from .generating import random_program
from .programs import Program
from .shrinking import shrunk
from .sources import source

__all__ = ["FAILURES", "Finding", "Harvest", "Runner", "explained", "hunt"]

#: What makes a program a finding.
FAILURES = ("different", "error", "died", "hung")
LIMIT = 60.0  #: seconds for a program
LIFE = 300  #: programs of one worker
TRIALS = 250  #: programs run to shrink one
FOLDER = Path(__file__).resolve().parents[1]

#: Reasons of known differences that are no defects of mxamp.
NAN = "oneDNN's relu makes 0 of NaN: docs/bfloat16-on-cpus.md"
_RELU = ("Activation", "relu", "clip", "npx.activation", "npx.relu", "np.clip")
# Seen in one run of five in plain MXNet.
FOREACH = "loops in graphs with static_shape read memory that was never written, in plain MXNet too"

FROZEN = "plain MXNet gives no gradient to a dense layer's bias where its weight has none"
CANCELED = "BatchNorm amplifies the rounding error of a difference of equal arrays"

ENLARGED = "plain MXNet leaves parameters unwritten that partial_shaping=True has enlarged"

#: By the features of a program.
EXPLAINED: Dict[FrozenSet[str], str] = {
    **{frozenset({op, "not finite"}): NAN for op in _RELU},
    frozenset({"contrib.foreach", "static_shape"}): FOREACH,
    frozenset({"FullyConnected", "grad_req()"}): FROZEN,
    frozenset({"npx.fully_connected", "grad_req()"}): FROZEN,
    frozenset({"BatchNorm", "broadcast_sub"}): CANCELED,
    frozenset({"BatchNorm", "reshape()"}): ENLARGED,
}


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

    def count(self, program: Program, kind: str) -> None:
        """Count a program and the kind of its result."""
        with self.lock:
            names = ["programs", kind, f"way {program.way}", f"policy {program.policy}"]
            self.counts.update(names)
            self.counts["events"] += len(program.steps) - 1
            self.counts["operators"] += len(program.nodes)


def _serve(pipe: Any, planted: str) -> None:
    """Serve programs in a worker process; this process does not import MXNet."""
    from .worker import serve

    serve(pipe, planted)


class Runner:
    """Runs programs in a worker process, which is replaced after a crash, a hang or an error."""

    def __init__(self, limit: float = LIMIT, planted: str = "") -> None:
        os.environ["PYTHONPATH"] = str(FOLDER) + os.pathsep + os.environ.get("PYTHONPATH", "")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The fork server has imported everything and run nothing.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fuzzing.worker"])
        self._limit, self._planted = limit, planted
        self._process: Any = None
        self._pipe: Any = None
        self._count = 0
        self._used = False
        self._clean = True

    def run(self, program: Program) -> Tuple[str, str]:
        """Return the kind and the text of a program's result.

        The kind is "unstable" if the program fails only after other programs.
        """
        kind, text = self._run_once(program)
        if kind in FAILURES and self._used and not (kind == "different" and self._clean):
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
        self._used = self._count > 1
        # The result if the worker falls silent: plain MXNet runs first, and may crash too.
        end = {"dies": "invalid", "hangs": "invalid"}
        try:
            self._pipe.send({
                "source": source(program), "noisy": source(program, noisy=True),
                "policy": program.precision, "special": bool(program.special),
                "dtypes": program.keeps_dtypes,
            })  # fmt: skip
            while self._pipe.poll(self._limit):
                kind, text = self._pipe.recv()
                if kind == "plain":
                    end = {"dies": "died", "hangs": "hung"}
                elif kind == "suspect":
                    unsure = "different" if program.precision == "float32" else "imprecise"
                    end = {"dies": unsure, "hangs": unsure}
                else:
                    return str(kind), str(text)
            self.close()
            return end["hangs"], f"took over {self._limit:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            status = self._process.exitcode
            self.close()
            return end["dies"], f"the process died, status {status}"

    def _start(self) -> None:
        """Replace the worker by a new process."""
        self.close()
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve, args=(other, self._planted), daemon=True
        )
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
        self._process = None


def hunt(
    runner: Runner,
    numbers: Iterator[int],
    harvest: Harvest,
    known: Sequence[Finding],
) -> None:
    """Run the random programs of some numbers; shrink failing ones, and add them to `harvest`.

    Programs that fail like a finding in `known` are counted alone.
    """
    for number in numbers:
        program = random_program(number)
        if not program.nodes:
            continue
        kind, text = runner.run(program)
        if kind in FAILURES:
            kind, text, program = _shrink(runner, kind, text, program, [*known, *harvest.findings])
        if kind in FAILURES:
            found = Finding(kind, text, program.features, program.precision, program, number)
            kind = _add_finding(harvest, found, known)
        harvest.count(program, kind)


def _add_finding(harvest: Harvest, finding: Finding, known: Sequence[Finding]) -> str:
    """Add a finding unless a similar one is known; return the kind to count."""
    assert finding.program is not None
    with harvest.lock:
        if any(one.is_like(finding.program) for one in (*known, *harvest.findings)):
            return "again"
        harvest.findings.append(finding)
        return finding.kind


def _shrink(
    runner: Runner, kind: str, text: str, program: Program, known: Sequence[Finding]
) -> Tuple[str, str, Program]:
    """Return the kind, the text and the program after shrinking; "again" if it is known."""

    def fails(smaller: Program) -> bool:
        return runner.run(smaller)[0] == kind and not like_known(smaller)

    def like_known(one: Program) -> bool:
        return any(finding.is_like(one) for finding in known)

    if like_known(program):
        return "again", text, program
    program = shrunk(program, fails, TRIALS)
    runner.close()
    found, said = runner.run(program)
    return ("unstable", text, program) if found != kind else (kind, said, program)
