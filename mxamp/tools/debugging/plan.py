"""A plan: what mixed precision does to a graph, as values that people read, filter and compare."""

import fnmatch
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from ...errors import ArgumentError, UnknownNameError, unknown
from ...framework.operators import resolve
from ...framework.wording import counted, one_of, shortened, shown
from ...policy.targets import TARGETS
from ..tables import html_table, text_table

__all__ = ["PRECISIONS", "Cast", "NodePlan", "OfflineCast", "Plan"]

#: What an operator of a plan may compute in; "as is" where its inputs are not touched.
PRECISIONS = (*TARGETS, "float32", "as is")

_GLUON = "_fwd"  # what Gluon adds to a layer's name for its operator


@dataclass(frozen=True)
class NodePlan:
    """One operator of the graph: the dtype it computes in ("as is": untouched), and why."""

    name: str
    operator: str
    precision: str
    reason: str
    inputs: Tuple[Tuple[str, Optional[str]], ...] = ()  #: (name, the dtype it is cast to or None)
    error: Optional[float] = None  #: what low precision costs here, as `tune` has measured it
    gain: Optional[float] = None  #: and the milliseconds that it saves


@dataclass(frozen=True)
class Cast:
    """One cast that is inserted: after which node, to which dtype."""

    name: str
    source: str
    dtype: str


@dataclass(frozen=True)
class OfflineCast:
    """A parameter that `cast_optional_params` casts, and what that does to its values."""

    name: str
    dtype: str
    size: int
    overflown: int  #: finite values that become infinite
    vanished: int  #: values that become zero


@dataclass(frozen=True, repr=False)
class Plan:
    """What mixed precision does to a graph, operator by operator; `explain` makes one.

    ::

        plan = amp.explain(net, "bfloat16")
        print(plan)  # a table, and a summary
        plan["dense0_fwd"].reason  # Gluon adds _fwd to the name of a layer
        plan.filter(precision="float32")

    Plans count and iterate over their operators. In a plan that `Tuning.annotated` returns,
    operators have an `error` and a `gain`, and the table has columns for them.

    `inputs` are the model's inputs without the parameters that were given.
    `bytes_before` and `bytes_after` are those of the parameters, the latter with
    `cast_optional_params`, and `offline` are the parameters that it casts; nothing where no
    parameters were given.
    """

    target_dtype: str
    device: str
    nodes: Tuple[NodePlan, ...]
    casts: Tuple[Cast, ...]
    inputs: Tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    offline: Tuple[OfflineCast, ...] = ()

    @property
    def lossy(self) -> Tuple[OfflineCast, ...]:
        """The parameters that lose values when they are cast offline."""
        return tuple(cast for cast in self.offline if cast.overflown or cast.vanished)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodePlan]:
        return iter(self.nodes)

    def __contains__(self, name: object) -> bool:
        return any(node.name == name for node in self.nodes)

    def __getitem__(self, name: str) -> NodePlan:
        """Return the first operator of that name: a block called twice gives two of one name.

        Raises `UnknownNameError`, which is a `LookupError`, with the closest names.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise self.unknown(name)

    def unknown(self, name: object) -> UnknownNameError:
        """Return the error for a name, or a pattern, that no operator of the plan has."""
        hint = f"The plan has {counted(len(self), 'operator')}"
        if f"{name}{_GLUON}" in self:
            hint += f". Gluon adds {_GLUON} to the name of a layer"
        return unknown("operator name", name, [node.name for node in self.nodes], hint)

    def filter(
        self,
        name: str = "*",
        operator: Optional[str] = None,
        precision: Optional[str] = None,
    ) -> "Plan":
        """Return the plan with some of its operators; `name` may hold * and ?.

        `operator` is any name of an MXNet operator, `precision` one of "float16", "bfloat16",
        "float32" and "as is".
        """
        if operator is not None:
            operator = resolve(operator).name
        if precision is not None and precision not in PRECISIONS:
            raise ArgumentError(f"precision must be {one_of(PRECISIONS)}, not {shown(precision)}")
        kept = tuple(
            node
            for node in self.nodes
            if fnmatch.fnmatchcase(node.name, name)
            and operator in (None, node.operator)
            and precision in (None, node.precision)
        )
        return replace(self, nodes=kept)

    def compare(self, other: "Plan") -> List[Tuple[str, Optional[str], Optional[str]]]:
        """Return (name, precision here, precision there) of operators that differ.

        None stands for an operator that the other graph does not have.
        """
        here = {node.name: node.precision for node in self.nodes}
        there = {node.name: node.precision for node in other.nodes}
        names = dict.fromkeys((*here, *there))
        return [(n, here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)]

    def counts(self) -> Dict[str, int]:
        """Return how many operators compute in each precision."""
        return dict(Counter(node.precision for node in self.nodes))

    def to_dict(self) -> Dict[str, Any]:
        """Return it all as a dict; errors and gains only where the plan has some."""
        data = asdict(self)
        for node in data["nodes"]:
            costs = {key: node.pop(key) for key in ("error", "gain")}
            if self.is_tuned:
                # JSON has no infinity.
                finite = {k: "inf" if v == math.inf else v for k, v in costs.items()}
                node.update(finite)
        return data

    def to_json(self) -> str:
        """Return it all as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join([text_table(*self.rows()), self.summary()])

    def _repr_html_(self) -> str:
        return html_table(*self.rows(), caption=self.summary())

    @property
    def is_tuned(self) -> bool:
        """Whether there are errors and gains that `tune` has measured."""
        return any(node.error is not None or node.gain is not None for node in self.nodes)

    def rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return headings and rows of the table."""
        costs = ("error", "gain ms") if self.is_tuned else ()
        measured = [(n.error, n.gain)[: len(costs)] for n in self.nodes]
        rows = [
            (n.name, n.operator, n.precision, *some, n.reason)
            for n, some in zip(self.nodes, measured)
        ]
        return ("name", "operator", "precision", *costs, "reason"), rows

    def __repr__(self) -> str:
        numbers = f"{self._counted()}; {counted(len(self.casts), 'cast')}"
        return f"<Plan {self.target_dtype} on {self.device}: {numbers}>"

    def _counted(self) -> str:
        counts = ", ".join(f"{n} in {precision}" for precision, n in self.counts().items())
        return counted(len(self), "operator") + (f": {counts}" if counts else "")

    def summary(self) -> str:
        """Return one line: operators a precision, casts, parameter bytes."""
        size = ""
        if self.bytes_before:
            sizes = f"{counted(self.bytes_before, 'byte')}, {self.bytes_after:,}"
            size = f"; parameters {sizes} with cast_optional_params"
        if self.lossy:
            names = shortened([cast.name for cast in self.lossy])
            lossy = counted(len(self.lossy), "parameter")
            size += f"; which would lose values of {lossy}: {names}"
        casts = counted(len(self.casts), "cast")
        return f"{self._counted()}; {casts}{size}"
