"""Reading traces: steps and records as values, and a word on every line that can't be read."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from ...errors import ArgumentError
from ...framework.tables import html_table, text_table
from ...framework.wording import counted
from .charts import charts_of, runs_of, style
from .trace_lines import (
    TraceRecord,
    TraceStep,
    add_line,
    checked_header,
    checked_path,
    decoded,
    duration,
    is_header,
)

__all__ = ["TraceFile", "last_steps", "read_trace"]

CUT = "the last line is cut: the run was killed while it wrote it, or is writing it now"
UNREADABLE = "line {first} can't be read and is left out{more}"


@dataclass(frozen=True)
class TraceFile:
    """A trace that was read: `steps`, `records`, and the headers of its runs."""

    path: str
    headers: Tuple[Mapping[str, Any], ...]  #: one, and one more for each time it was resumed
    steps: Tuple[TraceStep, ...]
    records: Tuple[TraceRecord, ...]
    warnings: Tuple[str, ...] = ()  #: lines that could not be read

    @property
    def header(self) -> Mapping[str, Any]:
        """The header of the first run: versions, machine, precision, trainers."""
        return self.headers[0]

    @property
    def skipped(self) -> Tuple[TraceStep, ...]:
        """The steps that were skipped."""
        return tuple(step for step in self.steps if not step.stepped)

    def culprits(self) -> List[Tuple[str, int, int, int]]:
        """Return (parameter, skipped steps, first, last) of gradients that were not finite.

        Those of most skipped steps come first.
        """
        counts: Dict[str, int] = Counter()
        first: Dict[str, int] = {}
        last: Dict[str, int] = {}
        for step in self.steps:
            for name in step.nonfinite:
                counts[name] += 1
                first.setdefault(name, step.step)
                last[name] = step.step
        ordered = sorted(counts, key=lambda name: (-counts[name], first[name], name))
        return [(name, counts[name], first[name], last[name]) for name in ordered]

    def of_kind(self, kind: str) -> Tuple[TraceRecord, ...]:
        """Return the records of a kind, such as "operators"."""
        return tuple(record for record in self.records if record.kind == kind)

    def summary(self) -> List[Tuple[str, str]]:
        """Return the run in a few lines: what, and how much."""
        if not self.steps:
            return [("steps", "0")]
        last = self.steps[-1]
        seconds = sorted(step.seconds for step in self.steps if step.seconds is not None)
        memory = [step.memory for step in self.steps if step.memory is not None]
        losses = [step.loss for step in self.steps if step.loss is not None]
        skips = len(self.skipped)
        rows = [
            ("steps", f"{len(self.steps):,}"),
            ("skipped", f"{skips:,} ({skips / len(self.steps):.2%})"),
            ("last loss scale", f"{last.next_loss_scale:g}"),
        ]
        if losses:
            rows.append(("last loss", f"{losses[-1]:.4g}"))
        if seconds:
            rows.append(("median step", duration(seconds[len(seconds) // 2])))
        if memory:
            rows.append(("most memory", f"{max(memory) / 2**20:,.0f} MiB"))
        return rows

    def __str__(self) -> str:
        lines = [text_table(("", self.path), self.summary())]
        if self.skipped:
            headings = ("not finite", "skipped steps", "first", "last")
            lines += ["", text_table(headings, self.culprits())]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        steps = counted(len(self.steps), "step")
        return f"<TraceFile: {self.path!r}, {steps}, {len(self.skipped):,} skipped>"

    def _repr_html_(self) -> str:
        tables = html_table(("", ""), self.summary(), self.path)
        if self.skipped:
            headings = ("not finite", "skipped steps", "first", "last")
            tables += html_table(headings, self.culprits())
        charts = charts_of(runs_of(self.path, self.steps))
        return f'{style()}<div class="mxamp">{tables}{charts}</div>'


def read_trace(path: Union[str, Path]) -> TraceFile:
    """Read what `trace` has written, of a run that goes on or has crashed too.

    ::

        run = amp.debugging.read_trace("trace.jsonl")
        print(run)
        scales = [step.loss_scale for step in run.steps]

    A line that can't be read is left out, with a word in `warnings`. Raises `ArgumentError` where
    there is no such file, where it is no trace, and where a newer mxamp has written it.
    """
    file = Path(checked_path(path))
    headers: List[Mapping[str, Any]] = []
    steps: List[TraceStep] = []
    records: List[TraceRecord] = []
    bad: List[int] = []
    cut = False
    for number, line, whole in _lines(file):
        entry = decoded(line)
        if number == 1 or is_header(entry):
            headers.append(checked_header(entry, file))
        elif isinstance(entry, dict) and add_line(entry, steps, records):
            continue
        elif whole:
            bad.append(number)
        else:
            cut = True
    return TraceFile(
        str(file), tuple(headers), tuple(steps), tuple(records), tuple(_warnings(bad, cut))
    )


def last_steps(path: Path) -> Dict[int, int]:
    """Return the number of the last step of each trainer, by its place; none for a new file."""
    if not path.stat().st_size:
        return {}
    return {step.trainer: step.step for step in read_trace(path).steps}


def _lines(path: Path) -> Iterator[Tuple[int, str, bool]]:
    """Yield (number, line, whether it has its end)."""
    if path.is_dir():
        raise ArgumentError(f"a trace is a file, and {str(path)!r} is a folder")
    if not path.exists():
        raise ArgumentError(f"there is no trace {str(path)!r}")
    if not path.stat().st_size:
        raise ArgumentError(f"{str(path)!r} is empty: no trace was written to it")
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip() or number == 1:
                yield number, line, line.endswith("\n")


def _warnings(bad: Sequence[int], cut: bool) -> Iterator[str]:
    if bad:
        more = f", and {counted(len(bad) - 1, 'other')}" if len(bad) > 1 else ""
        yield UNREADABLE.format(first=bad[0], more=more)
    if cut:
        yield CUT
