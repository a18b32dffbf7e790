"""Finding the first operator whose values go wrong, forward and backward.

Eager calls are looked at one by one. A hybridized block's graph is run node by node while it is
checked, with the casts that are in it, so that the operator that is named is the one at fault. A
bound symbol is run once more, node by node.
"""

import contextlib
import fnmatch
import functools
import inspect
import json
import logging
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.module import Module
from mxnet.ndarray.ndarray import NDArray

from ....convert.arguments import names_of
from ....errors import ArgumentError, StateError
from ....framework.operators import resolve
from ....framework.patching import Patch
from ....framework.tables import html_table, text_table
from ....framework.wording import one_of, shown
from ....policy.policy import Policy
from ....policy.targets import check_target
from .findings import Finding, NumericsError
from .gradient_watch import GradientWatch
from .inspection import Inspection, Site
from .node_by_node import NodeByNode

__all__ = ["NumericsCheck", "check_numerics"]

logger = logging.getLogger("mxamp")

_ON = ("raise", "log", "collect")
_MOST = 1000
HIGHER_ORDER = (
    "check_numerics watches gradients by functions that can't be differentiated again: use "
    "check_numerics(backward=False) around autograd.grad(create_graph=True)"
)


class NumericsCheck(NodeByNode):
    """What a check has found: `findings`, the first one of each pass through the program.

    `str(check)` is a table. Falsy where nothing was found.
    """

    def __init__(
        self,
        on: str,
        operators: Optional[Sequence[str]],
        skip: Sequence[str],
        steps: Optional[int],
        would_be: Optional[Policy],
        backward: bool,
    ) -> None:
        super().__init__(Inspection(would_be), GradientWatch() if backward else None)
        self.findings: List[Finding] = []
        self._on, self._operators, self._skip, self._steps = on, operators, skip, steps

    @property
    def first(self) -> Optional[Finding]:
        """The first finding, None where there is none."""
        return self.findings[0] if self.findings else None

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def to_json(self) -> str:
        """Return the findings as JSON."""
        return json.dumps([finding.to_dict() for finding in self.findings], indent=2)

    def __str__(self) -> str:
        return text_table(*self._rows()) if self.findings else "no findings"

    def _repr_html_(self) -> str:
        return html_table(*self._rows()) if self.findings else "<p>no findings</p>"

    def __repr__(self) -> str:
        return f"<NumericsCheck: {self.first or 'no findings'}>"

    def _rows(self) -> Tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = [
            (f.step, f.phase, f.kind, f.block, f.node, f.operator, f.tensor, str(f.statistics))
            for f in self.findings
        ]
        return ("step", "phase", "kind", "block", "node", "operator", "tensor", "values"), rows

    # ------------------------------------------------------------------ while it checks

    def patches(self) -> Sequence[Patch]:
        """Return the patches: those that see what runs, backward passes and updates."""
        places: List[Tuple[Any, str, Callable[..., Any]]] = [
            (NDArray, "backward", self._build_backward_pass),
            (autograd, "backward", self._build_backward_pass),
            (autograd, "grad", self._build_backward_pass),
            (Trainer, "_update", self._build_update),
            (Module, "update", self._build_update),
        ]
        return [*super().patches(), *(Patch(*place, on_top=True) for place in places)]

    def looks_at(self, site: Site) -> bool:
        """Tell whether an operator is to be checked."""
        return self._operators is None or site.operator.name in self._operators

    def skips(self, site: Site) -> bool:
        """Tell whether an operator, or the block or node that it is in, is left out by name."""
        names = (site.operator.name, site.node, site.block)
        return any(fnmatch.fnmatchcase(one, pattern) for pattern in self._skip for one in names)

    def report(self, finding: Finding) -> None:
        """Do with a finding what the user wants done."""
        if len(self.findings) < _MOST:
            self.findings.append(finding)
        if self._on == "log":
            logger.warning("%s", finding)
        if self._on == "raise":
            raise NumericsError(finding)

    def _build_backward_pass(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **options: Any) -> Any:
            if self.watch is not None and _differentiable(original, args, options):
                raise StateError(HIGHER_ORDER)
            results = original(*args, **options)
            self.after_backward()
            return results

        return backward

    def _build_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(*args: Any, **options: Any) -> Any:
            results = original(*args, **options)
            self.inspection.step += 1
            if self._steps is not None and self.inspection.step >= self._steps:
                self.close()
            return results

        return update


@contextlib.contextmanager
def check_numerics(
    on: str = "raise",
    operators: Optional[Iterable[str]] = None,
    skip: Optional[Iterable[str]] = None,
    steps: Optional[int] = None,
    *,
    dtype: Any = None,
    backward: bool = True,
) -> Iterator[NumericsCheck]:
    """Find the first operator whose values go wrong inside: Inf, NaN, or lost in the low dtype.

    >>> import mxnet as mx, mxamp as amp
    >>> with amp.debugging.check_numerics(on="collect") as check:
    ...     _ = mx.nd.log(mx.nd.array([-1.0, 1.0])) * 2
    >>> check.first.operator, check.first.statistics.nan
    ('log', 1)

    An operator is named where its inputs are fine and its output is not; what only passes on
    values that are not finite is not named. So the first finding is the cause, not a symptom.

    Parameters
    ----------
    on : str, default "raise"
        "raise" a `NumericsError` at the first finding, "log" a warning for each, or "collect"
        them in what the context gives.
    operators : list of str, optional
        Check these operators only, by any of their names.
    skip : list of str, optional
        Operators, blocks or nodes whose values are meant to be as they are, by name; * and ? stand
        for any characters.
    steps : int, optional
        Stop after so many updates of a trainer or module.
    dtype : str or dtype, optional
        Also find float32 values that would overflow, or mostly vanish, in this dtype: of the
        operators that its default policy does not keep in float32. Use it on a float32 run.
    backward : bool, default True
        Watch gradients too: those of parameters, and those between operators.

    What is found: values that are not finite; inputs and parameters that are not finite to begin
    with; casts that make infinities, or zeros of most values; layers that give nothing but zeros.
    Infinities that are written on purpose, as `-inf` into masks, are followed and not found until
    they make NaN.

    A hybridized block runs node by node inside, with the casts that its graph has; hooks of
    `register_op_hook` are called for its forward pass. A module's graph is run once more, with
    nothing dropped. A loop's body is one node. In training, results may differ in the
    last bits: what is watched has the plain memory layout.

    Cost: each value is read back and looked at; training steps take a few times as long
    (`scripts/bench/debugging`). Nothing when it is off.
    """
    if on not in _ON:
        raise ArgumentError(f"on must be {one_of(_ON)}, not {shown(on)}")
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ArgumentError(f"steps must be a number of updates, at least 1, not {shown(steps)}")
    would_be = Policy.default(check_target(dtype)) if dtype is not None else None
    named = _listed("operators", operators)
    known = None if operators is None else [resolve(name).name for name in named]
    check = NumericsCheck(on, known, _listed("skip", skip), steps, would_be, backward)
    check.open()
    try:
        yield check
    finally:
        check.close()


def _listed(argument: str, names: Optional[Iterable[str]]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names_of(argument, names)


def _differentiable(function: Callable[..., Any], args: Any, options: Any) -> bool:
    """Tell whether a call of `autograd.grad` asks for gradients that can be differentiated."""
    try:
        given = inspect.signature(function).bind(*args, **options).arguments
    except TypeError:
        return False  # MXNet says what is wrong with the call
    return bool(given.get("create_graph"))
