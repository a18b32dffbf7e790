"""Reading traces: steps and records as values, and a warning for unreadable lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple, Union

from ...errors import ArgumentError
from ...framework.tables import html_table, text_table
from ...framework.wording import counted
from .charts import charts_of, runs_of, style_element
from .trace_lines import (
    TraceRecord,
    TraceStep,
    checked_header,
    decode_line,
    duration_text,
    is_header,
    parse_entry,
    path_text,
)

__all__ = ["CULPRIT_HEADINGS", "TraceFile", "last_step_numbers", "read_trace"]

CULPRIT_HEADINGS = ("not finite", "skipped steps", "first", "last")
CUT = "the last line is cut: the run was killed while it wrote it, or is writing it now"
UNREADABLE = "line {first} can't be read and is left out{more}"


@dataclass(frozen=True)
class TraceFile:
    """A trace that was read: `steps`, `records`, and the headers of its runs.

    ::

        run = amp.debugging.read_trace("trace.jsonl")
        print(len(run.steps), len(run.skipped), run.culprits())

    Parameters
    ----------
    path : str
        The file.
    headers : tuple of dict
        Versions, machine, precision and trainers: of the first run, and of each resume.
    steps : tuple of TraceStep
        The steps of all trainers.
    records : tuple of TraceRecord
        Data written by `Trace.record`.
    warnings : tuple of str
        Sentences on unreadable lines.
    """

    path: str
    headers: Tuple[Mapping[str, Any], ...]
    steps: Tuple[TraceStep, ...]
    records: Tuple[TraceRecord, ...]
    warnings: Tuple[str, ...] = ()

    @property
    def header(self) -> Mapping[str, Any]:
        """The header of the first run: versions, machine, precision, trainers."""
        return self.headers[0]

    @property
    def skipped(self) -> Tuple[TraceStep, ...]:
        """The steps whose update was skipped."""
        return tuple(step for step in self.steps if not step.stepped)

    def culprits(self) -> List[Tuple[str, int, int, int]]:
        """Return (parameter, skipped steps, first, last) of each gradient that was not finite.

        The most frequent parameter comes first.
        """
        found: Dict[str, List[int]] = {}
        for step in self.steps:
            for name in step.nonfinite:
                found.setdefault(name, []).append(step.step)
        rows = [(name, len(steps), steps[0], steps[-1]) for name, steps in found.items()]
        return sorted(rows, key=lambda row: (-row[1], row[2], row[0]))

    def of_kind(self, kind: str) -> Tuple[TraceRecord, ...]:
        """Return the records of one kind, such as "operators"."""
        return tuple(record for record in self.records if record.kind == kind)

    def summary(self) -> List[Tuple[str, str]]:
        """Return (name, value) pairs that sum the run up."""
        if not self.steps:
            return [("steps", "0")]
        seconds = sorted(step.seconds for step in self.steps if step.seconds is not None)
        memory = [step.memory for step in self.steps if step.memory is not None]
        losses = [step.loss for step in self.steps if step.loss is not None]
        skips = len(self.skipped)
        rows = [
            ("steps", f"{len(self.steps):,}"),
            ("skipped", f"{skips:,} ({skips / len(self.steps):.2%})"),
            ("last loss scale", f"{self.steps[-1].next_loss_scale:g}"),
        ]
        if losses:
            rows.append(("last loss", f"{losses[-1]:.4g}"))
        if seconds:
            rows.append(("median step", duration_text(seconds[len(seconds) // 2])))
        if memory:
            rows.append(("most memory", f"{max(memory) / 2**20:,.0f} MiB"))
        return rows

    def __str__(self) -> str:
        lines = [text_table(("", self.path), self.summary())]
        if self.skipped:
            lines += ["", text_table(CULPRIT_HEADINGS, self.culprits())]
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        steps = counted(len(self.steps), "step")
        return f"<TraceFile: {self.path!r}, {steps}, {len(self.skipped):,} skipped>"

    def _repr_html_(self) -> str:
        tables = html_table(("", ""), self.summary(), self.path)
        if self.skipped:
            tables += html_table(CULPRIT_HEADINGS, self.culprits())
        charts = charts_of(runs_of(self.path, self.steps))
        return f'{style_element()}<div class="mxamp">{tables}{charts}</div>'


def read_trace(path: Union[str, Path]) -> TraceFile:
    """Read a trace file, of a finished, running or crashed run.

    ::

        run = amp.debugging.read_trace("trace.jsonl")
        print(run)
        scales = [step.loss_scale for step in run.steps]

    Unreadable lines are left out, with a warning in `warnings`.

    Parameters
    ----------
    path : str or Path
        The file that `trace` has written.

    Raises
    ------
    ArgumentError
        There is no such file, it is no trace, or a newer mxamp has written it.
    """
    file = Path(path_text(path))
    headers: List[Mapping[str, Any]] = []
    steps: List[TraceStep] = []
    records: List[TraceRecord] = []
    bad: List[int] = []
    warnings = []
    for number, line in _numbered_lines(file):
        entry = decode_line(line)
        found = parse_entry(entry)
        if number == 1 or is_header(entry):
            advice = "Give a file that amp.debugging.trace has written"
            headers.append(checked_header(entry, file, advice))
        elif isinstance(found, TraceStep):
            steps.append(found)
        elif found is not None:
            records.append(found)
        elif line.endswith("\n"):
            bad.append(number)
        else:
            warnings.append(CUT)
    if bad:
        more = f", and {counted(len(bad) - 1, 'other')}" if len(bad) > 1 else ""
        warnings.insert(0, UNREADABLE.format(first=bad[0], more=more))
    return TraceFile(str(file), tuple(headers), tuple(steps), tuple(records), tuple(warnings))


def last_step_numbers(path: Path) -> Dict[int, int]:
    """Return the number of the last step in a trace, by trainer; {} for a new file."""
    if not path.stat().st_size:
        return {}
    return {step.trainer: step.step for step in read_trace(path).steps}


def _numbered_lines(path: Path) -> Iterator[Tuple[int, str]]:
    """Yield (number, line) of a trace without empty lines; raise if there is no trace to read."""
    if path.is_dir():
        raise ArgumentError(f"a trace is a file, and {str(path)!r} is a folder")
    if not path.exists():
        raise ArgumentError(f"there is no trace {str(path)!r}")
    if not path.stat().st_size:
        raise ArgumentError(f"{str(path)!r} is empty: no trace was written to it")
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip() or number == 1:
                yield number, line
