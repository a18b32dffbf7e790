"""The result of `tune`: a policy, and the measurements that chose it."""

import math
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mxnet as mx

from ...framework import machine
from ...framework.files import write_file
from ...framework.tables import text_table
from ...framework.wording import counted
from ...policy.policy import Policy
from ..debugging.explain import NodePlan, Plan

__all__ = ["LayerCost", "Trial", "Tuning", "none_if_nan", "machine_of"]

#: How many layers a report lists.
_LISTED = 20
_HEADER = """\
# Tuned by mxamp.tune on {date}. `Policy.load` ignores these comments.
# It may be slower than float32 for another model, machine or number of threads.
#
{report}
#
"""


@dataclass(frozen=True)
class Trial:
    """One timed way to run the model.

    ::

        for trial in amp.tune(net, data).trials:
            print(trial.way, trial.precision, trial.speedup, trial.error)

    Parameters
    ----------
    way : str
        "plain" (hybridized, mixed precision off), "autocast" (hybridized under the policy),
        "converted" or "fused".
    precision : str
        "float32", "bfloat16" or "float16".
    substitutions : tuple of str
        The faster equivalents of operators that were used.
    kept : int
        The number of layers that stayed in float32.
    milliseconds : float
        The median time of a run.
    spread : float
        The interquartile range of that time, in milliseconds.
    speedup : float
        Plain float32's time divided by the trial's, the median over rounds.
    error : float
        The largest relative error of an output; infinite where finite elements were lost, NaN
        where it was not measured.
    within : bool
        Whether that error is within the tolerance.
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


@dataclass(frozen=True)
class LayerCost:
    """The error and the gain of low precision in one layer.

    ::

        for layer in amp.tune(net, data).layers:
            print(layer.name, layer.kept, layer.error, layer.gain)

    Parameters
    ----------
    name : str
        The name of the graph node.
    operator : str
        Its operator.
    kept : bool
        Whether the layer stays in float32.
    error : float
        The relative error of the outputs that low precision in this layer causes; NaN where it was
        not measured.
    gain : float, optional
        The milliseconds that low precision saves there; None where that was not measured.
    """

    name: str
    operator: str
    kept: bool
    error: float
    gain: Optional[float] = None


@dataclass(frozen=True)
class Tuning:
    """A policy tuned for one model on one machine, and the measurements behind it.

    ::

        tuning = amp.tune(net, batches, loss_function)
        print(tuning)  # the report
        fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        tuning.save("net.toml")  # Policy.load("net.toml") reads the policy

    Parameters
    ----------
    policy : Policy
        The policy that `tune` found.
    way : str
        How to run the model with it: "plain", "autocast", "converted" or "fused"; see `Trial`.
    mode : str
        "inference" or "training".
    operators : int
        The number of operators in the model.
    inputs : tuple of (str, str, tuple of int)
        Names, dtypes and shapes of the inputs.
    machine : tuple of (str, str)
        The machine that was timed, such as ("cpu", "...") and ("threads", "2").
    tolerance : float, optional
        The largest relative error of an output that was allowed.
    error : float
        The largest relative error of an output in any batch, under `policy`.
    gradient_error : float, optional
        The same for gradients.
    metric, min_metric : float, optional
        Your own metric under `policy`, and the least value that was allowed.
    evaluations : int
        The number of policies and forms whose accuracy was measured.
    seconds : float
        The time that tuning took.
    seed : int
        The seed of the random numbers.
    complete : bool
        False where the time budget or Ctrl-C ended the search.
    notes : tuple of str
        Sentences on the search and its result.
    chosen : Trial, optional
        The trial of `policy`; None where nothing was timed.
    trials : tuple of Trial
        All trials.
    layers : tuple of LayerCost
        The layers, in the order of the graph.
    """

    policy: Policy
    way: str
    mode: str
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
    chosen: Optional[Trial] = None
    trials: Tuple[Trial, ...] = ()
    layers: Tuple[LayerCost, ...] = ()

    @property
    def ranking(self) -> Tuple[LayerCost, ...]:
        """The layers, largest error first (NaN is the largest), then largest gain.

        ::

            print([layer.name for layer in tuning.ranking[:3]])
        """
        return tuple(sorted(self.layers, key=_rank))

    @property
    def convert_options(self) -> Dict[str, bool]:
        """The arguments of `convert_*` that convert the model as it was measured.

        ::

            fast = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
        """
        return {
            "cast_optional_params": self.way in ("converted", "fused"),
            "fuse": self.way == "fused",
        }

    def annotated(self, plan: Plan) -> Plan:
        """Return a plan of the tuned model with the measured error and gain on each layer's node.

        ::

            plan = tuning.annotated(amp.explain(net, policy=tuning.policy))
            print(plan)  # with the columns error and gain

        Parameters
        ----------
        plan : Plan
            A plan of the tuned model, made by `explain`.
        """
        costs = {layer.name: layer for layer in self.layers}

        def with_error_and_gain(node: NodePlan) -> NodePlan:
            layer = costs.get(node.name)
            if layer is None:
                return node
            return replace(node, error=none_if_nan(layer.error), gain=none_if_nan(layer.gain))

        return replace(plan, nodes=tuple(map(with_error_and_gain, plan.nodes)))

    def save(self, path: Union[str, Path]) -> None:
        """Write the policy to a TOML file, under comments that say how it was tuned.

        `Policy.load` reads the policy back, and ignores the comments. An existing file is replaced
        whole. Raises `ArgumentError` where `path` can't name a file, `WriteError` where writing
        fails.
        """
        lines = [*self.sentences(), *(f"{name}: {value}" for name, value in self.machine)]
        lines += [f"Input {name}: {dtype} {list(shape)}" for name, dtype, shape in self.inputs]
        report = "\n".join(f"# {_printable(line)}" for line in (*lines, *self.notes))
        date = datetime.now().astimezone().isoformat(" ", "minutes")
        write_file(
            path, (_HEADER.format(date=date, report=report) + self.policy.to_toml()).encode()
        )

    def __str__(self) -> str:
        blocks = ["\n".join(self.sentences())]
        blocks += [f"{title}\n{text_table(head, rows)}" for title, head, rows in self.tables()]
        blocks += ["\n".join(["Notes", *self.notes])] if self.notes else []
        return "\n\n".join(blocks)

    def sentences(self) -> Sequence[str]:
        """Return the report's first sentences: the choice, its errors, and the search."""
        limit = "without a tolerance"
        if self.tolerance is not None:
            limit = f"within a relative error of {self.tolerance:.4g}"
        kept = counted(sum(layer.kept for layer in self.layers), "layer")
        stay = f"Kept in float32: {kept if self.policy.lowers else 'all layers'}"
        error = f"The largest relative error of an output is {self.error:.4g}"
        if self.gradient_error is not None:
            error += f", and of a gradient {self.gradient_error:.4g}"
        said = [
            f"Tuned for {self.mode}, {limit}.",
            f"Chosen: {self._choice()}.",
            f"{stay}, of a model with {counted(self.operators, 'operator')}.",
            f"{error}.",
        ]
        if self.metric is not None:
            least = "" if self.min_metric is None else f", of at least {self.min_metric:.4g}"
            said.append(f"The metric is {self.metric:.4g}{least}.")
        tried = counted(self.evaluations, "accuracy test")
        said.append(f"{tried}; {self.seconds:.4g} seconds in all, with seed {self.seed}.")
        if not self.complete:
            said.append("The search ended early: there may be a better policy.")
        return said

    def _choice(self) -> str:
        """Return the chosen way to run the model and its speed, as part of a sentence."""
        trial = self.chosen
        if trial is None:
            return self.way
        if trial.way == "plain":
            return f"float32 as it is, {trial.milliseconds:.4g} ms a run"
        using = f" with {', '.join(trial.substitutions)}" if trial.substitutions else ""
        times = f"{trial.milliseconds:.4g} ms a run, interquartile range {trial.spread:.4g} ms"
        speed = f"{trial.speedup:.3g} times as fast as plain float32 ({times})"
        return f"{trial.way} in {trial.precision}{using}, {speed}"

    def tables(self) -> Sequence[Tuple[str, Sequence[str], Sequence[Sequence[Any]]]]:
        """Return title, headings and rows of each table of the report that has rows."""
        left = len(self.layers) - _LISTED
        title = "Layers" if left <= 0 else f"Layers: the first {_LISTED} of {len(self.layers):,}"
        trials, layers = map(_cells, self.trials), map(_cells, self.ranking[:_LISTED])
        inputs = [(name, dtype, "x".join(map(str, shape))) for name, dtype, shape in self.inputs]
        tables = (
            ("Trials", "way precision substitutions kept ms spread speedup error within", trials),
            (f"{title}, largest error first", "layer operator float32 error gain", layers),
            ("Machine", "what value", self.machine),
            ("Inputs", "name dtype shape", inputs),
        )
        found = [(name, headings.split(), list(rows)) for name, headings, rows in tables]
        return [table for table in found if table[2]]


def _cells(row: Union[Trial, LayerCost]) -> List[Any]:
    """Return the fields of a trial or layer as table cells: tuples joined, booleans as "yes"."""
    cells = [", ".join(x) if isinstance(x, tuple) else x for x in astuple(row)]
    return [("yes" if x else "") if isinstance(x, bool) else x for x in cells]


def machine_of(device: str) -> Tuple[Tuple[str, str], ...]:
    """Return names and values of what times depend on: the machine's parts, MXNet's version."""
    return (
        ("device", device),
        ("cpu", machine.cpu_name()),
        ("instructions", ", ".join(sorted(machine.onednn_features())) or "no avx512"),
        ("threads", str(machine.threads())),
        ("mxnet", mx.__version__),
    )


def _rank(layer: LayerCost) -> Tuple[float, float]:
    """Return the sort key that puts unmeasured errors, then large errors, first."""
    error, gain = none_if_nan(layer.error), none_if_nan(layer.gain)
    return -math.inf if error is None else -error, math.inf if gain is None else -gain


def none_if_nan(value: Optional[float]) -> Optional[float]:
    """Return a figure, or None instead of NaN, which stands for one that was not measured."""
    return None if value is None or math.isnan(value) else value


def _printable(line: str) -> str:
    """Return a line with a space for each character that a TOML comment can't hold."""
    return "".join(letter if letter.isprintable() else " " for letter in line)
