"""The protocol of passes: faster equivalents of operators, put into a graph before its casts.

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
#: The phases in which a pass applies: graphs that run with or without gradients, and fusion.
TRAINING, INFERENCE, FUSION = "training", "inference", "fusion"
_RUNNING = frozenset({TRAINING, INFERENCE})

#: The kind of the reasons that equivalents give.
SUBSTITUTION = "substitution"
#: The reason of operators of an equivalent that compute in float32.
FLOAT32_PART = "the substitution {name!r} computes this part in float32"


@dataclass
class Call:
    """A call that may be replaced, and its surroundings."""

    node: Node
    policy: Policy  #: in the call's region
    training: bool  #: gradients will be computed
    shapes: Shapes = ()  #: of its inputs
    feeds_products: bool = True  #: leads only to layers with weights, not to a graph output
    behind_concat: bool = False  #: its first input has the layout of a Concat of channels

    @property
    def operator(self) -> str:
        """The operator's canonical name."""
        return self.node.operator

    @property
    def attrs(self) -> Attributes:
        """The operator's attributes."""
        return self.node.attrs

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its first input, None where unknown."""
        return self.shapes[0] if self.shapes else None

    @property
    def weight(self) -> tuple[int, ...] | None:
        """The shape of its second input, None where unknown."""
        return self.shapes[1] if self.shapes[1:] else None

    def lowers(self, operator: str) -> bool:
        """Return whether `operator` would compute in the target dtype in place of this call."""
        rule = self.policy.rule(operator)
        low = rule.op_class == "low" and not rule.no_kernel
        return low and not self.policy.keeps_layer(self.node.name)


class Parts:
    """The operators of one equivalent, as nodes that an edit adds in place of node i."""

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
        """Add an operator; return its output.

        Without a suffix it takes the name and the outputs of the replaced operator. `keep` is the
        reason to compute in float32, whatever the operator's class.
        """
        return self.add_all(op, suffix, 1, *inputs, keep=keep, **attrs)[0]

    def add_all(
        self, op: str, suffix: str, count: int, *inputs: Tensor, keep: str = "", **attrs: str
    ) -> Sequence[Tensor]:
        """Add an operator with `count` outputs; return them."""
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
        """Add an operator that computes in float32, whatever its class; return its output."""
        return self.add(op, suffix, *inputs, keep=self.float32, **attrs)


def are_float32(dtypes: Sequence[str]) -> bool:
    """Return whether inputs of these dtypes fit an equivalent that adds float32 constants."""
    return set(dtypes) == {"float32"}


def has_elements(call: Call) -> bool:
    """Return whether the first input has elements and axes, or an unknown shape.

    oneDNN fails on empty arrays and on arrays without axes, both of which `mx.np` allows.
    """
    return call.shape is None or (bool(call.shape) and all(call.shape))


def own_inputs(_graph: Graph, node: Node) -> Sequence[Output]:
    """Return the inputs of a node."""
    return node.inputs


class Pass(NamedTuple):
    """A faster equivalent for calls of `ops`, or a pass of fusion over the whole graph.

    `apply(parts, detail)` adds the equivalent to the graph. The operator without a suffix takes the
    place of the call, or `apply` returns the values in place of the call's outputs. In fusion it is
    `apply(view, edit)`.
    """

    name: str | None  #: in operator lists, which hold its measured gain; None: it always applies
    apply: Callable[[Any, Any], Sequence[Any] | None]
    ops: frozenset[str] = frozenset()
    match: Callable[[Call], Detail | None] = lambda _call: ()
    phases: frozenset[str] = _RUNNING
    float32: str | None = None  #: why all its operators compute in float32
    wide_in_training: bool = False  #: they do so in training alone
    fits: Callable[[Sequence[str]], bool] = CASTABLE.issuperset  #: the dtypes of the call's inputs
    #: The tensors that it reads in place of the call's inputs.
    inputs: Callable[[Graph, Node], Sequence[Output]] = own_inputs
