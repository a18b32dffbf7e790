"""Passes that replace operators of a graph with faster equivalents, before casts.

A pass is two functions. `match` returns the detail of a call that the equivalent fits, else None.
The detail is the numbers that `apply` needs to add the equivalent's operators, so that graphs with
equal details are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..graph.edit import Edit
from ..graph.ir import Graph, Node, Output, Shape
from ..policy.decision import CASTABLE
from ..policy.policy import Policy
from ..policy.rules import Reason

Attributes = Mapping[str, str]
Detail = Tuple[int, ...]
#: An output of an operator: in a graph a node's, in an eager call an array.
Tensor = object
#: Shapes of an operator's inputs; None where unknown.
Shapes = Sequence[Optional[Shape]]
#: The phases in which a pass may apply: graphs that run with or without gradients.
TRAINING, INFERENCE = "training", "inference"

#: The kind of the reasons that equivalents give.
SUBSTITUTION = "substitution"
#: The reason of operators of an equivalent that compute in float32.
FLOAT32_PART = "the substitution {name!r} computes this part in float32"


@dataclass
class Call:
    """An operator call that a faster equivalent may replace, with its policy and shapes."""

    node: Node
    policy: Policy  #: in the call's region
    training: bool  #: gradients will be computed
    shapes: Shapes = ()  #: of its inputs
    feeds_products: bool = True  #: leads only to layers with weights, not to a graph output
    behind_concat: bool = False  #: its first input has the layout of a Concat of channels

    @property
    def operator(self) -> str:
        """The canonical name of the called operator."""
        return self.node.operator

    @property
    def attrs(self) -> Attributes:
        """The attributes of the called operator."""
        return self.node.attrs

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the call's first input; None if unknown."""
        return self.shapes[0] if self.shapes else None

    @property
    def weight(self) -> tuple[int, ...] | None:
        """The shape of the call's second input; None if unknown."""
        return self.shapes[1] if self.shapes[1:] else None

    def lowers(self, operator: str) -> bool:
        """Return whether `operator`, in place of the called one, would run in the target dtype."""
        rule = self.policy.rule(operator)
        low = rule.op_class == "low" and not rule.no_kernel
        return low and not self.policy.keeps_layer(self.node.name)


class Parts:
    """Builder of the operators that replace a graph's node with a faster equivalent."""

    def __init__(
        self, edit: Edit, i: int, one: Pass, inputs: Sequence[Output], training: bool
    ) -> None:
        self.inputs: Sequence[Tensor] = inputs  #: the values that the replaced operator reads
        self._edit, self._i = edit, i
        self._why = one.float32 if training or not one.wide_in_training else None
        self._node = edit.node(i)
        self.attrs: Attributes = self._node.attrs  #: of the replaced operator
        self.float32 = FLOAT32_PART.format(name=one.name)  #: why some operators stay in float32

    def add(self, op: str, suffix: str, *inputs: Tensor, keep: str = "", **attrs: str) -> Tensor:
        """Add an operator of the faster equivalent; return its output.

        Without a suffix it takes the name and the outputs of the replaced operator. `keep` is the
        reason to compute in float32, whatever the operator's class.
        """
        return self.add_all(op, suffix, 1, *inputs, keep=keep, **attrs)[0]

    def add_all(
        self, op: str, suffix: str, count: int, *inputs: Tensor, keep: str = "", **attrs: str
    ) -> Sequence[Tensor]:
        """Add an operator with `count` outputs to the faster equivalent; return the outputs."""
        node, why = self._node, self._why or keep
        kept = Reason(SUBSTITUTION, why) if why else None
        fields: dict[str, Any] = {"op": op, "attrs": {**node.hidden_attrs, **attrs}}
        fields.update(inputs=list(inputs), stands_for=node)
        if not suffix:
            self._edit.change(self._i, kept_float32=kept or node.kept_float32, **fields)
            return [(self._i, k) for k in range(node.num_outputs)]
        name = self._edit.unique_name(f"{node.name}_{suffix}")
        made, _ = self._edit.add_node(
            Node(name=name, num_outputs=count, kept_float32=kept, **fields)
        )
        return [(made, k) for k in range(count)]

    def add_float32(self, op: str, suffix: str, *inputs: Tensor, **attrs: str) -> Tensor:
        """Add an operator that always computes in float32; return its output."""
        return self.add(op, suffix, *inputs, keep=self.float32, **attrs)


def are_float32(dtypes: Sequence[str]) -> bool:
    """Return whether all dtypes in a list are float32."""
    return set(dtypes) == {"float32"}


def has_elements(call: Call) -> bool:
    """Return whether a call's first input is neither empty nor a scalar; True if unknown.

    oneDNN fails on empty arrays and on arrays without axes, both of which `mx.np` allows.
    """
    return call.shape is None or (bool(call.shape) and all(call.shape))


class Pass(NamedTuple):
    """A graph pass: it replaces the operators `ops` with a faster equivalent, or prepares fusion.

    `apply(parts, detail)` adds the equivalent to the graph. The operator without a suffix takes the
    place of the call, or `apply` returns the values in place of the call's outputs. In fusion it is
    `apply(view, edit)`.
    """

    name: str | None  #: in operator lists, which hold its measured gain; None: it always applies
    apply: Callable[[Any, Any], Sequence[Any] | None]
    ops: frozenset[str] = frozenset()
    match: Callable[[Call], Detail | None] = lambda _call: ()
    phase: str | None = None  #: the only one in which it applies; None: in both
    float32: str | None = None  #: why all its operators compute in float32
    wide_in_training: bool = False  #: they do so in training alone
    #: The elements of the largest input from which it gains under float32 policies, twice as many
    #: in training: with fewer, starting its operators takes longer (measured on AVX2).
    least_float32: int = 2**13
    fits: Callable[[Sequence[str]], bool] = CASTABLE.issuperset  #: the dtypes of the call's inputs
    #: The tensors that it reads in place of the call's inputs.
    inputs: Callable[[Graph, Node], Sequence[Output]] = lambda _graph, node: node.inputs
