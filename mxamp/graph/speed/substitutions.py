"""The table of substitutions: operators with faster equivalents on CPUs.

Some of MXNet's kernels are slow where oneDNN or BLAS has a fast one: `relu` against `Activation`,
`clip(0, 6)`, LayerNorm in training, the mean over an axis. A graph gets the fast equivalents when
it runs; symbols and saved models keep their operators. The operator list of a policy names its
substitutions, with their measured gains.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Callable, FrozenSet, Mapping, Optional, Sequence, Tuple

from . import convolutions, equivalents, recurrent, reductions
from .equivalents import Attributes, Call, Detail, Part, Shapes

__all__ = ["ALL", "BY_SHAPE", "Substitution", "find"]


@dataclass(frozen=True)
class Substitution:
    """A faster equivalent for the calls of `operators` that `applies` accepts.

    `build` gets the attributes and the result of `detail`, its only knowledge of shapes: calls with
    the same detail share a graph. The last part has the operator's outputs if it has no suffix;
    else each part is an output.
    """

    name: str
    operators: FrozenSet[str]
    build: Callable[[Attributes, Detail], Sequence[Part]]
    applies: Callable[[Call], bool] = lambda _call: True
    detail: Callable[[Call], Detail] = lambda _call: ()
    #: Whether all parts compute in float32: (in training, always).
    float32: Tuple[bool, bool] = (False, False)
    #: The inputs whose shapes `applies` reads, by operator; None for all inputs.
    by_shape: Mapping[str, Optional[Tuple[int, ...]]] = field(default_factory=dict)
    #: Applies to unknown shapes too, since it fits all arrays with elements.
    guesses_shapes: bool = False
    #: Its parts hold float32 constants, so only float32 calls fit.
    constants: bool = False
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
    #: Shape rules that no longer keep the operator in float32.
    answers: FrozenSet[str] = frozenset()

    def why_float32(self, training: bool) -> Optional[str]:
        """Return the reason for which all parts compute in float32; None without one."""
        when_training, always = self.float32
        if always:
            return "float32 sums"
        return "its gradient is faster in float32" if when_training and training else None


def _activation(act_type: str, operator: str, numpy: str) -> Substitution:
    parts = [Part("Activation", "", (0,), {"act_type": act_type})]
    names = frozenset({operator, numpy})
    return Substitution(
        name=act_type,
        operators=names,
        build=lambda *_: parts,
        applies=equivalents.has_elements,
        by_shape={numpy: (0,)},
        single="Activation",
    )


def _reduction(name: str, build: Callable[..., Sequence[Part]], *operators: str) -> Substitution:
    return Substitution(
        name=name,
        operators=frozenset(operators),
        build=build,
        applies=reductions.is_long_sum,
        detail=reductions.span_and_shape,
        float32=(True, True),
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
        build=reductions.broadcast,
        applies=reductions.is_long_broadcast,
        detail=reductions.repeats,
        float32=(True, True),
        by_shape=dict.fromkeys(reductions.OPERATORS, (0, 1)),
        constants=True,
    ),
    Substitution(
        name="relu6",
        operators=frozenset({"clip"}),
        build=equivalents.relu6,
        applies=equivalents.is_relu6,
        by_shape={"clip": (0,)},
        guesses_shapes=True,
        multiplies_gradients=True,
    ),
    Substitution(
        name="layer_norm",
        operators=frozenset({"LayerNorm"}),
        build=equivalents.layer_norm,
        applies=equivalents.is_trained_layer_norm,
        float32=(True, True),
    ),
    _reduction("mean", reductions.mean, "mean", "_npi_mean"),
    _reduction("sum", reductions.total, "sum", "_np_sum"),
    Substitution(
        name="global_pool",
        operators=frozenset({"_contrib_AdaptiveAvgPooling2D"}),
        build=reductions.global_pool,
        applies=reductions.is_global_pool,
        detail=reductions.parts_of_map,
        by_shape={"_contrib_AdaptiveAvgPooling2D": (0,)},
        single="Pooling",
    ),
    Substitution(
        name="pool_in_parts",
        operators=frozenset({"Pooling"}),
        build=reductions.global_pool,
        applies=reductions.is_slow_pool,
        detail=reductions.parts_of_map,
        by_shape={"Pooling": (0,)},
        single="Pooling",
    ),
    Substitution(
        name="image_convolution",
        operators=frozenset({"Convolution"}),
        build=convolutions.image_convolution,
        applies=convolutions.is_image_convolution,
        by_shape={"Convolution": (1,)},
        lowered="Convolution",
        answers=frozenset({"odd_channels"}),
    ),
    Substitution(
        name="merged_groups",
        operators=frozenset({"Convolution"}),
        build=convolutions.merged_groups,
        applies=convolutions.is_narrow_grouped,
        detail=convolutions.weight_shape,
        by_shape={"Convolution": (1,)},
        answers=frozenset({"odd_channels"}),
        constants=True,
        blocks_gradients=True,
    ),
    Substitution(
        name="rnn",
        operators=frozenset({"RNN"}),
        build=recurrent.rnn,
        applies=recurrent.is_large_rnn,
        detail=recurrent.data_shape,
        by_shape={"RNN": (0,)},
        lowered="FullyConnected",
    ),
    Substitution(
        name="rnn_params",
        operators=frozenset({"_rnn_param_concat"}),
        build=recurrent.joined_parameters,
        applies=recurrent.have_common_width,
        detail=recurrent.common_width,
        float32=(True, True),
        by_shape={"_rnn_param_concat": None},
    ),
    Substitution(
        name="split",
        operators=SPLITS,
        build=equivalents.split,
        applies=equivalents.is_split_of_rows,
        detail=equivalents.split_bounds,
        float32=(True, False),
        by_shape=dict.fromkeys(SPLITS, (0,)),
    ),
)

#: All substitutions, by name.
ALL: Mapping[str, Substitution] = MappingProxyType({one.name: one for one in _SUBSTITUTIONS})

#: The inputs whose shapes substitutions read, by operator.
BY_SHAPE = {name: which for one in ALL.values() for name, which in one.by_shape.items()}

_BY_OPERATOR = {
    name: tuple(one for one in _SUBSTITUTIONS if name in one.operators)
    for name in sorted({name for one in _SUBSTITUTIONS for name in one.operators})
}


def find(
    operator: str,
    attrs: Attributes,
    training: bool,
    shapes: Shapes = (),
) -> Optional[Tuple[str, Detail]]:
    """Return the name and the detail of the substitution for a call; None without one."""
    offered = _BY_OPERATOR.get(operator)
    if offered is None:
        return None
    wanted = BY_SHAPE.get(operator, ())
    needed = shapes if wanted is None else [(*shapes, None, None)[k] for k in wanted]
    guessed = all(one.guesses_shapes for one in offered)
    if (None in needed and not guessed) or (wanted is None and not shapes):
        return None
    call = Call(operator, attrs, shapes, training)
    fitting = next((one for one in offered if one.applies(call)), None)
    return (fitting.name, fitting.detail(call)) if fitting is not None else None
