"""How a policy was tuned: what was measured of a model, as values that go with the policy."""

import html
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ..framework.tables import html_table, text_table
from ..framework.wording import counted

__all__ = ["MODES", "WAYS", "Evidence", "LayerCost", "Trial", "of_changed"]

MODES = ("inference", "training")
WAYS = ("plain", "autocast", "converted", "fused")

CHANGED = "The policy was changed after it was tuned: it keeps the layers, and nothing else holds."

#: How many layers a report lists.
_LISTED = 20

_TRIAL_HEADINGS = (
    "way", "precision", "substitutions", "kept", "ms", "spread", "speedup", "error", "within",
)  # fmt: skip
_LAYER_HEADINGS = ("layer", "operator", "float32", "error", "gain ms")


class _Measured:
    """Values that compare with NaN as equal to NaN, in every process and after a copy."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value is not None and field.type in (float, Optional[float]):
                # One NaN for all: tuples compare and hash what is in them by identity first.
                number = math.nan if math.isnan(value) else float(value)
                object.__setattr__(self, field.name, number)

    def _values(self) -> Tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), self._values()


@dataclass(frozen=True, eq=False)
class Trial(_Measured):
    """One way to run the model, measured.

    Parameters
    ----------
    way : str
        "plain" (hybridized, nothing on), "autocast" (hybridized under the policy), "converted" or
        "fused".
    precision : str
        "float32", "bfloat16" or "float16".
    substitutions : tuple of str
        The faster equivalents that it used.
    kept : int
        How many layers stayed in float32.
    milliseconds : float
        The median of one run.
    spread : float
        The interquartile range of a run, in milliseconds.
    speedup : float
        Plain float32's time over this one's, the median over rounds.
    error : float
        The largest relative error of an output; infinite where elements that are finite in float32
        were lost.
    within : bool
        Whether that is within the tolerance.
    """

    way: str
    precision: str
    substitutions: Tuple[str, ...]
    kept: int
    milliseconds: float
    spread: float
    speedup: float
    error: float
    within: bool


@dataclass(frozen=True, eq=False)
class LayerCost(_Measured):
    """What low precision costs and saves in one layer.

    Parameters
    ----------
    name : str
        The graph node's name.
    operator : str
        Its operator.
    position : int
        Its index in the model's plain graph; those inside loops come after all others. A layer of
        several nodes, of one name, is listed once for each where it is kept.
    kept : bool
        Whether it stays in float32.
    error : float
        What low precision there costs in accuracy: a relative error.
    gain : float, optional
        The milliseconds that low precision saves there; None where that was not measured.
    """

    name: str
    operator: str
    position: int
    kept: bool
    error: float
    gain: Optional[float] = None


@dataclass(frozen=True, eq=False)
class Evidence(_Measured):
    """How a policy was tuned, and on what.

    Parameters
    ----------
    mode : str
        "inference" or "training".
    way : str
        How the trial that was chosen runs the model: see `Trial`.
    model : str
        The model's fingerprint, in hexadecimal digits.
    operators : int
        How many operators the model has.
    inputs : tuple of (str, str, tuple of int)
        The inputs' names, dtypes and shapes.
    machine : tuple of (str, str)
        What it was measured on, such as ("cpu", "...") and ("threads", "2").
    tolerance : float, optional
        The largest relative error of an output that was allowed.
    error : float
        The largest relative error of an output of what was chosen, in any batch.
    gradient_error : float, optional
        The same of the gradients.
    metric, min_metric : float, optional
        The user's own metric under what was chosen, and the least that was allowed.
    evaluations : int
        Of how many candidates the accuracy was measured.
    seconds : float
        How long that took.
    seed : int
        The seed of the random numbers.
    complete : bool
        False where the time budget or Ctrl-C ended the search.
    notes : tuple of str
        What else there is to know, in sentences.
    trials : tuple of Trial
        What was measured.
    layers : tuple of LayerCost
        The layers, in the order of the graph.
    """

    mode: str
    way: str
    model: str
    operators: int
    inputs: Tuple[Tuple[str, str, Tuple[int, ...]], ...]
    machine: Tuple[Tuple[str, str], ...]
    tolerance: Optional[float]
    error: float
    gradient_error: Optional[float]
    metric: Optional[float]
    min_metric: Optional[float]
    evaluations: int
    seconds: float
    seed: int
    complete: bool
    notes: Tuple[str, ...] = ()
    trials: Tuple[Trial, ...] = ()
    layers: Tuple[LayerCost, ...] = ()

    @property
    def ranking(self) -> Tuple[LayerCost, ...]:
        """The layers, largest error first (NaN is the largest), then largest gain."""
        return tuple(sorted(self.layers, key=_rank))

    @property
    def chosen(self) -> Optional[Trial]:
        """The trial that was chosen: the fastest of its way with the error that is stated here."""
        alike = [trial for trial in self.trials if trial.way == self.way]
        return max(alike, key=self._likeness) if alike else None

    def _likeness(self, trial: Trial) -> Tuple[Any, ...]:
        # As tuples, for NaN.
        return (trial.error,) == (self.error,), trial.within, trial.speedup

    def __str__(self) -> str:
        blocks: List[str] = ["\n".join(self.sentences())]
        blocks += [f"{title}\n{text_table(head, rows)}" for title, head, rows in self.tables()]
        blocks += ["\n".join(["Notes", *self.notes])] if self.notes else []
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.sentences())
        tables = "".join(html_table(head, rows, title) for title, head, rows in self.tables())
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return said + tables + (f"<ul>{notes}</ul>" if notes else "")

    def sentences(self) -> Sequence[str]:
        """Return the report's sentences; the notes follow its tables."""
        limit = "without a tolerance"
        if self.tolerance is not None:
            limit = f"within a relative error of {self.tolerance:.4g}"
        said = [f"Tuned for {self.mode}, {limit}.", self._said_of_choice()]
        chosen = self.chosen
        kept = sum(layer.kept for layer in self.layers) if chosen is None else chosen.kept
        stay = f"{counted(kept, 'layer')} {'stays' if kept == 1 else 'stay'} in float32"
        if chosen is not None and chosen.precision == "float32":
            stay = "All layers compute in float32"
        said.append(f"{stay}, of a model with {counted(self.operators, 'operator')}.")
        gradients = ""
        if self.gradient_error is not None:
            gradients = f", and of a gradient {self.gradient_error:.4g}"
        said.append(f"The largest relative error of an output is {self.error:.4g}{gradients}.")
        if self.metric is not None:
            least = "" if self.min_metric is None else f", of at least {self.min_metric:.4g}"
            said.append(f"The metric is {self.metric:.4g}{least}.")
        tried = counted(self.evaluations, "accuracy test")
        said.append(f"{tried}; {self.seconds:.4g} seconds in all, with seed {self.seed}.")
        if not self.complete:
            said.append("The search ended early: there may be a better policy.")
        return said

    def _said_of_choice(self) -> str:
        trial = self.chosen
        if trial is None:
            return f"Chosen: {self.way}."
        if trial.way == "plain":
            return f"Chosen: float32 as it is, {trial.milliseconds:.4g} ms a run."
        using = f" with {', '.join(trial.substitutions)}" if trial.substitutions else ""
        times = f"{trial.milliseconds:.4g} ms a run, interquartile range {trial.spread:.4g} ms"
        speed = f"{trial.speedup:.4g} times as fast as plain float32 ({times})"
        return f"Chosen: {self.way} in {trial.precision}{using}, {speed}."

    def tables(self) -> Sequence[Tuple[str, Sequence[str], Sequence[Sequence[Any]]]]:
        """Return the tables of the report that have lines: titles, headings, lines."""
        listed, left = self.ranking[:_LISTED], len(self.layers) - _LISTED
        title = "Layers" if left <= 0 else f"Layers: the first {_LISTED} of {len(self.layers):,}"
        inputs = [(name, dtype, "x".join(map(str, shape))) for name, dtype, shape in self.inputs]
        tables = (
            ("Trials", _TRIAL_HEADINGS, list(map(_trial_row, self.trials))),
            (f"{title}, largest error first", *_layer_table(listed)),
            ("Machine", ("what", "value"), self.machine),
            ("Inputs", ("name", "dtype", "shape"), inputs),
        )
        return [table for table in tables if table[2]]


def of_changed(evidence: Optional[Evidence]) -> Optional[Evidence]:
    """Return what still holds when a policy was changed: where the layers are that it keeps.

    They are known by the model that was tuned, whatever they are called elsewhere.
    """
    kept = tuple(layer for layer in evidence.layers if layer.kept) if evidence is not None else ()
    if evidence is None or not kept:
        return None
    unknown: Dict[str, Any] = dict.fromkeys(("gradient_error", "metric", "min_metric"))
    known = replace(evidence, way="plain", machine=(), notes=(CHANGED,), trials=(), layers=kept)
    return replace(known, error=math.nan, **unknown)


def _rank(layer: LayerCost) -> Tuple[float, float]:
    error = math.inf if math.isnan(layer.error) else layer.error
    gain = -math.inf if layer.gain is None or math.isnan(layer.gain) else layer.gain
    return -error, -gain


Cell = Union[str, float, None]


def _trial_row(trial: Trial) -> Sequence[Cell]:
    return (
        trial.way,
        trial.precision,
        ", ".join(trial.substitutions),
        trial.kept,
        trial.milliseconds,
        trial.spread or "",  # of one turn alone there is none
        trial.speedup,
        trial.error,
        "yes" if trial.within else "no",
    )


def _layer_table(layers: Sequence[LayerCost]) -> Tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    rows = [(one.name, one.operator, "kept" if one.kept else "", one.error) for one in layers]
    if all(one.gain is None for one in layers):
        return _LAYER_HEADINGS[:-1], rows
    return _LAYER_HEADINGS, [(*row, one.gain) for row, one in zip(rows, layers)]
