"""The table of operators that graphs on CPUs replace with faster equivalents.

Some of MXNet's kernels are slow where oneDNN or BLAS has a fast one: `relu` against `Activation`,
`clip(0, 6)`, LayerNorm in training, the mean over an axis. A graph gets the fast equivalents when
it runs; symbols and saved models keep their operators. The operator list of a policy names its
substitutions, with their measured gains.
"""

from __future__ import annotations

from ..choices import Passes
from ..passes import INFERENCE, TRAINING, Call, Detail, Parts, Pass, are_float32, has_elements
from . import convolutions, equivalents, recurrent, reductions

#: The reasons for which all operators of an equivalent compute in float32.
SUMS, NO_KERNEL = "float32 sums", "MXNet has no bfloat16 kernel for recurrent layers"
#: The same, in training only.
IN_TRAINING = "its gradient is faster in float32"

#: The operators of `mx.nd` and `mx.np` for each kind of `Activation`.
ACTIVATIONS = {
    "relu": ("relu", "_npx_relu"),
    "sigmoid": ("sigmoid", "_npx_sigmoid"),
    "tanh": ("tanh", "_npi_tanh"),
}


# The least elements in float32 of equivalents that take as many operators as they replace.
_ONE_TO_ONE = 2**11


def _activation(act_type: str) -> Pass:
    """Return the pass that replaces relu, sigmoid or tanh with the faster operator `Activation`."""

    def match(call: Call) -> Detail | None:
        # Only arrays of mx.np may be empty.
        known = call.shape is not None or call.operator == act_type
        return () if known and has_elements(call) else None

    def apply(parts: Parts, _detail: Detail) -> None:
        """Replace relu, sigmoid or tanh with `Activation`."""
        parts.add("Activation", "", *parts.inputs, act_type=act_type)

    operators = frozenset(ACTIVATIONS[act_type])
    return Pass(act_type, apply, operators, match, least_float32=_ONE_TO_ONE)


#: The substitutions of graphs that run.
PASSES = Passes([
    _activation("relu"), _activation("sigmoid"), _activation("tanh"),
    Pass("broadcast", reductions.broadcast, frozenset(reductions.OPERATORS),
         reductions.match_broadcast, TRAINING, SUMS, fits=are_float32),
    Pass("relu6", equivalents.relu6, frozenset({"clip"}), equivalents.match_relu6),
    Pass("layer_norm", equivalents.layer_norm, frozenset({"LayerNorm"}),
         equivalents.match_layer_norm, TRAINING, SUMS),
    Pass("mean", reductions.mean, frozenset({"mean", "_npi_mean"}), reductions.match_sum,
         float32=SUMS),
    Pass("sum", reductions.total, frozenset({"sum", "_np_sum"}), reductions.match_sum,
         float32=SUMS),
    Pass("pool_in_parts", reductions.pool_in_parts,
         frozenset({"Pooling", "_contrib_AdaptiveAvgPooling2D"}), reductions.match_pool),
    Pass("image_convolution", convolutions.image_convolution, frozenset({"Convolution"}),
         convolutions.match_image_convolution),
    Pass("merged_groups", convolutions.merged_groups, frozenset({"Convolution"}),
         convolutions.match_narrow_groups, fits=are_float32),
    Pass("rnn", recurrent.rnn, frozenset({"RNN"}), recurrent.match_rnn, INFERENCE,
         inputs=recurrent.opened_inputs),
    Pass("rnn_layers", recurrent.layers, frozenset({"RNN"}), recurrent.match_layers,
         float32=NO_KERNEL, inputs=recurrent.opened_inputs),
    Pass("batch_dot", equivalents.dense_products, frozenset({"batch_dot"}),
         equivalents.match_large_products, TRAINING),
    Pass("masked_softmax", equivalents.masked_softmax, frozenset({"softmax"}),
         equivalents.match_masked_softmax, INFERENCE, SUMS, fits=equivalents.has_integer_lengths),
    Pass("split", equivalents.split, frozenset({"SliceChannel", "_split_v2"}),
         equivalents.match_split, float32=IN_TRAINING, wide_in_training=True,
         least_float32=_ONE_TO_ONE),
])  # fmt: skip

#: Convolutions that have a blocked kernel after these, whatever their numbers of channels.
BLOCKED = frozenset({"image_convolution", "merged_groups"})
#: The substitutions whose output may be in a blocked layout where the replaced operator's is not.
WRITES_BLOCKS = frozenset({"merged_groups", *ACTIVATIONS})
