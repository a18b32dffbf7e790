"""The table of substitutions: operators with faster equivalents on CPUs.

Some of MXNet's kernels are slow where oneDNN or BLAS has a fast one: `relu` against `Activation`,
`clip(0, 6)`, LayerNorm in training, the mean over an axis. A graph gets the fast equivalents when
it runs; symbols and saved models keep their operators. The operator list of a policy names its
substitutions, with their measured gains.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Callable, FrozenSet, List, Mapping, Optional, Sequence, Set, Tuple

from ..ir import Graph, Node, Output
from . import batched_products, convolutions, equivalents, recurrent, reductions
from .equivalents import Attributes, Call, Detail, Part, Shapes

__all__ = [
    "ALL",
    "BY_SHAPE",
    "Match",
    "Substitution",
    "match_call",
    "opened_inputs",
    "opened_nodes",
]

Match = Tuple[str, Detail]  #: the name of a substitution, and the detail that its parts depend on


#: The reasons for which all parts of an equivalent compute in float32: always, or in training.
SUMS, NO_KERNEL = "float32 sums", "MXNet has no bfloat16 kernel for recurrent layers"
IN_TRAINING = "its gradient is faster in float32"


@dataclass(frozen=True)
class Substitution:
    """A faster equivalent for the calls of `operators` that `match` accepts.

    `match` returns the detail of a call, None if the equivalent doesn't fit. `build` gets the
    attributes and the detail, its only knowledge of shapes: calls with the same detail share a
    graph. The last part has the operator's outputs if it has no suffix; else each part is an
    output.
    """

    name: str
    operators: FrozenSet[str]
    match: Callable[[Call], Optional[Detail]]
    build: Callable[[Attributes, Detail], Sequence[Part]]
    #: Why all parts compute in float32: `SUMS`, `NO_KERNEL`, or `IN_TRAINING`, only then; or None.
    float32: Optional[str] = None
    #: The inputs whose shapes `match` reads, by operator; None for all inputs.
    by_shape: Mapping[str, Optional[Tuple[int, ...]]] = field(default_factory=dict)
    #: Applies to unknown shapes too, since it fits all arrays with elements.
    guesses_shapes: bool = False
    #: Its parts hold float32 constants, so only float32 calls fit.
    constants: bool = False
    #: The positions of inputs that are integers, such as lengths.
    integers: FrozenSet[int] = frozenset()
    #: Applies only where this operator computes in the target dtype, by its class.
    lowered: Optional[str] = None
    #: The gradient of its first input is in blocks of 16 channels, and MXNet's operator has plain
    #: gradients: in training the substitution doesn't apply behind a Concat of channels.
    blocks_gradients: bool = False
    #: It multiplies infinite gradients by 0, where MXNet's operator returns 0: in training the
    #: substitution applies only where an infinite gradient reaches the weights anyway.
    multiplies_gradients: bool = False
    #: The operator of a substitution by a single operator, for the memory layout.
    single: Optional[str] = None
    #: The operator of each input that the parts don't read, by position: they read its inputs.
    opens: Mapping[int, str] = field(default_factory=dict)
    #: Names of shape rules that don't keep a replaced operator in float32.
    lifted_rules: FrozenSet[str] = frozenset()

    def why_float32(self, training: bool) -> Optional[str]:
        """Return the reason for which all parts compute in float32; None without one."""
        return None if self.float32 == IN_TRAINING and not training else self.float32


def _activation(act_type: str, operator: str, numpy: str) -> Substitution:
    """Return the substitution of an operator of `mx.nd` and of `mx.np` by an `Activation`."""
    parts = [Part("Activation", "", (0,), {"act_type": act_type})]
    names = frozenset({operator, numpy})
    return Substitution(
        name=act_type,
        operators=names,
        match=lambda call: () if equivalents.has_elements(call) else None,
        build=lambda *_: parts,
        by_shape={numpy: (0,)},
        single="Activation",
    )


def _reduction(name: str, build: Callable[..., Sequence[Part]], *operators: str) -> Substitution:
    """Return the substitution of sums or means over axes by products."""
    return Substitution(
        name=name,
        operators=frozenset(operators),
        match=reductions.match_sum,
        build=build,
        float32=SUMS,
        by_shape=dict.fromkeys(operators, (0,)),
    )


SPLITS = frozenset({"SliceChannel", "_split_v2"})

_SUBSTITUTIONS = (
    _activation("relu", "relu", "_npx_relu"),
    _activation("sigmoid", "sigmoid", "_npx_sigmoid"),
    _activation("tanh", "tanh", "_npi_tanh"),
    Substitution(
        name="broadcast",
        operators=frozenset(reductions.OPERATORS),
        match=reductions.match_broadcast,
        build=reductions.broadcast,
        float32=SUMS,
        by_shape=dict.fromkeys(reductions.OPERATORS, (0, 1)),
        constants=True,
    ),
    Substitution(
        name="relu6",
        operators=frozenset({"clip"}),
        match=equivalents.match_relu6,
        build=equivalents.relu6,
        by_shape={"clip": (0,)},
        guesses_shapes=True,
        multiplies_gradients=True,
    ),
    Substitution(
        name="layer_norm",
        operators=frozenset({"LayerNorm"}),
        match=equivalents.match_layer_norm,
        build=equivalents.layer_norm,
        float32=SUMS,
    ),
    _reduction("mean", reductions.mean, "mean", "_npi_mean"),
    _reduction("sum", reductions.total, "sum", "_np_sum"),
    Substitution(
        name="global_pool",
        operators=frozenset({"_contrib_AdaptiveAvgPooling2D"}),
        match=reductions.match_adaptive_pool,
        build=reductions.global_pool,
        by_shape={"_contrib_AdaptiveAvgPooling2D": (0,)},
        single="Pooling",
    ),
    Substitution(
        name="pool_in_parts",
        operators=frozenset({"Pooling"}),
        match=reductions.match_pool,
        build=reductions.global_pool,
        by_shape={"Pooling": (0,)},
        single="Pooling",
    ),
    Substitution(
        name="image_convolution",
        operators=frozenset({"Convolution"}),
        match=convolutions.match_image_convolution,
        build=convolutions.image_convolution,
        by_shape={"Convolution": (1,)},
        lowered="Convolution",
        lifted_rules=frozenset({"odd_channels"}),
    ),
    Substitution(
        name="merged_groups",
        operators=frozenset({"Convolution"}),
        match=convolutions.match_narrow_groups,
        build=convolutions.merged_groups,
        by_shape={"Convolution": (1,)},
        lifted_rules=frozenset({"odd_channels"}),
        constants=True,
        blocks_gradients=True,
    ),
    Substitution(
        name="rnn",
        operators=frozenset({"RNN"}),
        match=recurrent.match_rnn,
        build=recurrent.rnn,
        by_shape={"RNN": (0,)},
        lowered="FullyConnected",
        opens={1: "_rnn_param_concat"},
    ),
    Substitution(
        name="rnn_layers",
        operators=frozenset({"RNN"}),
        match=recurrent.match_layers,
        build=recurrent.layers,
        float32=NO_KERNEL,
        by_shape={"RNN": (0,)},
        opens={1: "_rnn_param_concat"},
    ),
    Substitution(
        name="rnn_params",
        operators=frozenset({"_rnn_param_concat"}),
        match=recurrent.match_parameters,
        build=recurrent.joined_parameters,
        float32=NO_KERNEL,
        by_shape={"_rnn_param_concat": None},
    ),
    Substitution(
        name="batch_dot",
        operators=frozenset({"batch_dot"}),
        match=batched_products.match_large_products,
        build=batched_products.dense_products,
        by_shape={"batch_dot": (0, 1)},
        lowered="FullyConnected",
    ),
    Substitution(
        name="masked_softmax",
        operators=frozenset({"softmax"}),
        match=equivalents.match_masked_softmax,
        build=equivalents.masked_softmax,
        float32=SUMS,
        integers=frozenset({1}),
    ),
    Substitution(
        name="split",
        operators=SPLITS,
        match=equivalents.match_split,
        build=equivalents.split,
        float32=IN_TRAINING,
        by_shape=dict.fromkeys(SPLITS, (0,)),
    ),
)

#: All substitutions, by name.
ALL: Mapping[str, Substitution] = MappingProxyType({one.name: one for one in _SUBSTITUTIONS})

#: The inputs whose shapes substitutions read, by operator.
BY_SHAPE = {name: which for one in ALL.values() for name, which in one.by_shape.items()}

# Reshapes keep the order of elements: what opens one reads the same elements in another shape.
_RESHAPES = frozenset({"Reshape", "_np_reshape", "_npx_reshape"})

_BY_OPERATOR = {
    name: tuple(one for one in _SUBSTITUTIONS if name in one.operators)
    for name in sorted({name for one in _SUBSTITUTIONS for name in one.operators})
}


def opened_inputs(graph: Graph, node: Node) -> List[Output]:
    """Return a node's inputs, with those of each operator that its substitution opens.

    An opened operator's input that is only reshaped for it is opened too.
    """
    found: List[Output] = []
    offered = _BY_OPERATOR.get(node.operator, ())
    for k, output in enumerate(node.inputs):
        source = graph.nodes[output[0]]
        opened = any(one.opens.get(k) == source.operator for one in offered)
        found += [_before_reshape(graph, one) for one in source.inputs] if opened else [output]
    return found


def opened_nodes(graph: Graph, node: Node) -> Set[int]:
    """Return the indexes of the nodes that `opened_inputs` opens: they may end without readers."""
    opened: Set[int] = set()
    read, found = set(node.inputs), set(opened_inputs(graph, node))
    for i, _ in read - found:
        opened.add(i)
        opened.update(source for source, _ in set(graph.nodes[i].inputs) - found)
    return opened


def _before_reshape(graph: Graph, output: Output) -> Output:
    """Return the input of the reshape that an output comes from; the output without one."""
    node = graph.nodes[output[0]]
    return node.inputs[0] if node.operator in _RESHAPES else output


def match_call(
    operator: str,
    attrs: Attributes,
    training: bool,
    shapes: Shapes = (),
    allows: Callable[[Substitution], bool] = lambda _: True,
) -> Optional[Match]:
    """Return the match of the first allowed substitution that fits a call; None without one.

    `shapes` are the shapes of the call's inputs, None where unknown.
    """
    offered = [one for one in _BY_OPERATOR.get(operator, ()) if allows(one)]
    if not offered:
        return None
    wanted = BY_SHAPE.get(operator, ())
    needed = shapes if wanted is None else [(*shapes, None, None)[k] for k in wanted]
    guessed = all(one.guesses_shapes for one in offered)
    if (None in needed and not guessed) or (wanted is None and not shapes):
        return None
    call = Call(operator, attrs, shapes, training)
    for one in offered:
        detail = one.match(call)
        if detail is not None:
            return one.name, detail
    return None
