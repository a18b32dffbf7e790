"""One search for a policy: what is measured in which order, and what comes out of it."""

import math
from typing import Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

from ...framework.wording import counted
from ...graph.ir import Graph
from ...graph.recognise import fingerprint
from ...policy.elsewhere import here
from ...policy.evidence import Evidence, LayerCost
from ...policy.layers import exactly
from ...policy.policy import Policy
from .accuracy import OUTPUTS, Accuracy, Verdict
from .choosing import Chooser
from .costs import costs_of
from .deadline import Deadline, OutOfTimeError, stoppable
from .layers import Layer, lowered_layers, substitutions_in
from .optimizers import step_speedups
from .search import Search
from .subject import MOST_BATCHES, Subject
from .trials import MARGIN, PLAIN, Form

__all__ = ["Tuner"]

#: Shares of the budget that are spent at the end of each phase.
_FIRST_RACE, _LAYERS, _SEARCH, _SECOND_RACE, _SWITCHES = 0.3, 0.4, 0.65, 0.8, 0.95
#: Rounds of a race: of the first, and of those between what is left.
_FEW, _MORE = 2, 5

ACCURACY_ONLY = (
    "float16 on a CPU is for trying and testing: the policy was tuned for accuracy alone, and "
    "nothing was timed."
)
NO_KERNELS = (
    "This CPU has no bfloat16 kernels (or DNNL_MAX_CPU_ISA hides them): only float32 was tried."
)
NOT_TIMED = "Nothing was timed: the policy was tuned for accuracy alone."
NOT_LOW = "No policy in {dtype} within the tolerance was found: this one computes in float32."
FLOAT32 = "Nothing that is accurate enough was faster than float32."
UNDECIDED = "What was measured by then was not enough to choose anything but float32."
NOT_PAID = (
    "{dtype} does not pay for this model on this machine: it had {low:.2f} times float32's speed "
    "at best; the fastest form without it, {others:.2f} times."
)
STOPPED = "The search was stopped by Ctrl-C."
OUT_OF_TIME = "The budget was spent before all was tried: a larger one may find a faster policy."
SEARCHED = "With {kept} of {layers} in float32 the model is accurate enough{proof}."
STEPS = "Optimizer steps that are faster than MXNet's here: {steps}."
MORE_DATA = f"Of the data, the first {MOST_BATCHES} batches were used."
USED = "Measured as it runs by {call}."
NOTHING = "The policy changes nothing."
_CALLS = {
    "plain": "",
    "autocast": "init(policy=policy) or autocast(policy=policy), hybridized",
    "converted": "`convert_hybrid_block(net, policy=policy)`",
    "fused": "`convert_hybrid_block(net, policy=policy)`, which fuses it",
}


class Tuner:
    """Measures a model until a policy is found, or the budget is spent."""

    def __init__(
        self, accuracy: Accuracy, base: Policy, deadline: Deadline, seed: int, timed: bool
    ) -> None:
        self.subject: Subject = accuracy.subject
        self.accuracy, self.base, self.deadline, self.seed = accuracy, base, deadline, seed
        self.traced = self.subject.trace()
        training = self.subject.training
        self.layers = lowered_layers(self.traced, base, training)
        self.applied = substitutions_in(self.traced, base, training)
        self.notes: List[str] = [MORE_DATA] if self.subject.more else []
        if base.target_dtype == "float16" and base.device == "cpu":
            self.notes.append(ACCURACY_ONLY)
            timed = False
        elif not timed:
            self.notes.append(NOT_TIMED)
        self.timed = timed
        self.chooser: Optional[Chooser] = None
        #: The layers that stay in float32; None until some are known to be enough.
        self.kept: Optional[FrozenSet[str]] = None
        #: Forms in low precision and others, where the first race was lost by the first.
        self.unpaid: Optional[Tuple[Sequence[Form], Sequence[Form]]] = None
        self.step_speedups: Dict[str, float] = {}
        self.complete = True

    def run(self) -> Policy:
        """Measure; return the policy, with all that was measured."""
        try:
            with stoppable(self.deadline):
                self._measure()
        except OutOfTimeError:
            self._ended()
        except KeyboardInterrupt:
            self.deadline.stopped = True
            self._ended()
        if self.chooser is not None:
            self.chooser.choose(self._policies())
        return self._result()

    def _policies(self) -> List[Policy]:
        """Return the policies that may be chosen."""
        low = [] if self.kept is None else [self._low(self.kept)]
        return [self.base.in_float32(), *low]

    def _ended(self) -> None:
        """Note that not all was tried."""
        self.complete = False
        why = STOPPED if self.deadline.stopped else OUT_OF_TIME
        if why not in self.notes:
            self.notes.append(why)

    def _measure(self) -> None:
        if self.timed and self.base.rule("Convolution").missing:
            self.notes.append(NO_KERNELS)
            self.chooser = Chooser(self.accuracy, self.applied, self.deadline)
            self._choose(pays=False)
            return
        self.deadline.phase(self.base.target_dtype)
        within = self.accuracy.of(self.base).within
        pays = self._first_race() if self.timed else True
        if within:
            self.kept = frozenset()
        elif pays:
            # The search needs to know what layers cost; else that is for the report alone.
            self._look_at_layers(_LAYERS)
            self._search()
        if self.timed:
            self._choose(pays)
        if within or not pays:
            self._look_at_layers(1.0)
        if self.chooser is not None:
            self.deadline.phase("accuracy of all forms")
            self.chooser.verify()

    def _look_at_layers(self, until: float) -> None:
        arguments = self.base, self.subject.training, self.seed, self.deadline, until
        self.layers = costs_of(self.traced, self.layers, *arguments)

    # ------------------------------------------------------------------ accuracy

    def _low(self, kept: Iterable[str]) -> Policy:
        """Return the policy with these layers in float32."""
        return self.base.override(fp32_layers=[exactly(name) for name in sorted(kept)])

    def _search(self) -> None:
        """Find the layers that have to stay in float32."""
        self.deadline.phase("layers to keep")
        until = _SEARCH if self.timed else 1.0

        def works(kept: FrozenSet[int]) -> bool:
            self.deadline.check(self.accuracy.seconds, until)
            return self.accuracy.of(self._low(self.layers[i].name for i in kept)).within

        # What costs most comes first; of equals, what runs first.
        numbers = range(len(self.layers))
        search = Search(works, sorted(numbers, key=lambda i: (-(self.layers[i].error or 0.0), i)))
        try:
            search.run()
        except OutOfTimeError:
            self._ended()
        finally:
            if len(search.best) < len(self.layers):
                self.kept = frozenset(self.layers[i].name for i in search.best)
                proof = "; no smaller set will do" if search.proven else ""
                layers = counted(len(self.layers), "layer")
                kept = f"{len(self.kept):,}"
                self.notes.append(SEARCHED.format(kept=kept, layers=layers, proof=proof))

    # ------------------------------------------------------------------ speed

    def _first_race(self) -> bool:
        """Time all forms a few times; tell whether low precision may be the fastest."""
        self.deadline.phase("forms of the model")
        self.chooser = chooser = Chooser(self.accuracy, self.applied, self.deadline)
        low, others = chooser.forms(self.base), chooser.forms(self.base.in_float32())
        try:
            chooser.race([*low, *others], _FEW, _FIRST_RACE)
        except OutOfTimeError:
            self._ended()
        speeds = chooser.best(low), max(chooser.best(others), 1.0)
        if speeds[0] * MARGIN >= speeds[1] or not chooser.was_timed(low):
            return True
        self.unpaid = low, others
        return False

    def _choose(self, pays: bool) -> None:
        """Choose the fastest form that is accurate enough."""
        chooser = self.chooser
        if chooser is None:
            return
        policies = self._policies()
        try:
            self.deadline.phase("the fastest forms")
            raced = [policy for policy in policies if pays or not policy.lowers]
            forms = [form for policy in raced for form in chooser.forms(policy)]
            chooser.race(forms, _MORE, _SECOND_RACE)
            chooser.choose(policies)
            self.deadline.phase("switches")
            chooser.try_switches(_MORE, _SWITCHES)
            if self.subject.training:
                self.deadline.phase("optimizer steps")
                self.step_speedups = step_speedups(self.subject, self.base, self.deadline)
        except OutOfTimeError:
            self._ended()

    # ------------------------------------------------------------------ the result

    def _result(self) -> Policy:
        way, policy, verdict = self._chosen()
        if not policy.lowers:
            self._note_unpaid()
        slower = {name for name, ratio in self.step_speedups.items() if ratio < 1}
        policy = policy.override(substitutions=sorted({*policy.substitutions} - slower))
        faster = {name: ratio for name, ratio in self.step_speedups.items() if ratio >= MARGIN}
        if faster:
            steps = ", ".join(f"{name} {ratio:.2f} times" for name, ratio in faster.items())
            self.notes.append(STEPS.format(steps=steps))
        if self.accuracy.unknown:
            self.notes.append(self.accuracy.said_of_unknown())
        if self.timed:
            call = _CALLS["autocast" if way == "plain" and faster else way]
            self.notes.append(USED.format(call=call) if call else NOTHING)
        return policy.with_evidence(self._evidence(way, policy, verdict))

    def _note_unpaid(self) -> None:
        """Note that the first race has ended the search, by all that was timed since."""
        if self.chooser is None or self.unpaid is None:
            return
        low, others = (self.chooser.best(forms) for forms in self.unpaid)
        if low < max(others, 1.0):
            dtype = self.base.target_dtype
            self.notes.append(NOT_PAID.format(dtype=dtype, low=low, others=max(others, 1.0)))

    def _chosen(self) -> "tuple[str, Policy, Verdict]":
        """Return the way, the policy and its verdict."""
        if not self.timed and self.kept is not None:
            policy = self._low(self.kept)
            return "autocast", policy, self.accuracy.of(policy)
        winner = PLAIN if self.chooser is None else self.chooser.winner
        if self.chooser is not None and winner.policy is not None:
            return winner.way, winner.policy, self.chooser.verdict(winner)
        if not self.timed:
            self.notes.append(NOT_LOW.format(dtype=self.base.target_dtype))
        else:
            self.notes.append(FLOAT32 if self.complete else UNDECIDED)
        policy = self.base.in_float32()
        rest = sorted({*policy.substitutions} - {*self.applied})
        return "plain", policy.override(substitutions=rest), self.accuracy.of_plain()

    def _evidence(self, way: str, policy: Policy, verdict: Verdict) -> Evidence:
        graph = Graph.from_symbol(self.subject.block._cached_graph[1])
        kept = self.kept or frozenset() if policy.lowers else frozenset()
        layers = tuple(
            LayerCost(
                layer.name,
                layer.operator,
                position,
                layer.name in kept,
                math.nan if layer.error is None else layer.error,
                None if layer.gain is None or not self.timed else layer.gain * 1e3,
            )
            for layer in self.layers
            if layer.error is not None or layer.name in kept
            for position in _positions(layer, graph, layer.name in kept)
        )
        by_metric = self.accuracy.metric is not None and self.accuracy.tolerance.rtol is None
        return Evidence(
            mode="training" if self.subject.training else "inference",
            way=way,
            model=fingerprint(graph),
            operators=sum(not node.is_variable for node in graph.nodes),
            inputs=self.subject.inputs(),
            # Accuracy is the same elsewhere.
            machine=here(policy.device) if self.timed else (),
            tolerance=None if by_metric else self.accuracy.tolerance.rtol or OUTPUTS,
            error=verdict.error,
            gradient_error=verdict.gradient_error,
            metric=verdict.metric,
            min_metric=self.accuracy.min_metric,
            evaluations=self.accuracy.evaluations,
            seconds=round(self.deadline.spent, 3),
            seed=self.seed,
            complete=self.complete,
            notes=tuple(self.notes),
            trials=self.chooser.evidence() if self.chooser is not None else (),
            layers=layers,
        )


def _positions(layer: Layer, graph: Graph, kept: bool) -> Sequence[int]:
    """Return where a layer is: all its nodes, where they are to be found again."""
    if not kept:
        return [layer.position]
    nodes = enumerate(graph.all_nodes)
    return [i for i, node in nodes if node.name == layer.name and not node.is_variable]
