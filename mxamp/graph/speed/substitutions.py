"""The table of substitutions: operators with faster equivalents on CPUs.

Some of MXNet's kernels are slow where oneDNN or BLAS has a fast one: `relu` against `Activation`,
`clip(0, 6)`, LayerNorm in training, the mean over an axis. A graph gets the fast equivalents when
it runs; symbols and saved models keep their operators. The operator list of a policy names its
substitutions, with their measured gains.
"""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence, Tuple

from ...policy.rules import Reason
from ..edit import Edit
from ..ir import Graph
from . import batched_products, convolutions, equivalents, passes, recurrent, reductions
from .passes import Call, Detail, Parts, Pass

Match = Tuple[str, Detail]  #: the name of a substitution, and the detail of the call


class Choices(NamedTuple):
    """The choices for a graph, by node index: reasons to keep nodes in float32, and substitutions.

    `bodies` hold the choices for bodies of loops, by (index of the loop, position of the body).
    Graphs with equal choices share a compiled graph.
    """

    kept: frozenset[tuple[int, Reason]] = frozenset()
    substituted: frozenset[tuple[int, Match]] = frozenset()
    bodies: frozenset[tuple[tuple[int, int], Choices]] = frozenset()


NONE = Choices()

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
_SPLITS = frozenset({"SliceChannel", "_split_v2"})


def _activation(act_type: str) -> Pass:
    """Return the substitution of an operator of `mx.nd` and of `mx.np` by an `Activation`."""

    def match(call: Call) -> Detail | None:
        # Only arrays of mx.np may be empty.
        known = call.shape is not None or call.operator == act_type
        return () if known and passes.has_elements(call) else None

    def build(parts: Parts, _detail: Detail) -> None:
        """Before: relu, sigmoid or tanh. After: Activation. Conditions: elements."""
        parts.add("Activation", "", *parts.inputs, act_type=act_type)

    return Pass(act_type, frozenset(ACTIVATIONS[act_type]), match, build)


#: All substitutions, by name. Of those that fit a call, the first one applies.
ALL: Mapping[str, Pass] = {one.name: one for one in (
    _activation("relu"), _activation("sigmoid"), _activation("tanh"),
    Pass("broadcast", frozenset(reductions.OPERATORS), reductions.match_broadcast,
         reductions.broadcast, passes.in_training, SUMS, passes.are_float32),
    Pass("relu6", frozenset({"clip"}), equivalents.match_relu6, equivalents.relu6,
         lambda call: not call.training or call.feeds_products),
    Pass("layer_norm", frozenset({"LayerNorm"}), equivalents.match_layer_norm,
         equivalents.layer_norm, passes.in_training, SUMS),
    Pass("mean", frozenset({"mean", "_npi_mean"}), reductions.match_sum, reductions.mean,
         float32=SUMS),
    Pass("sum", frozenset({"sum", "_np_sum"}), reductions.match_sum, reductions.total,
         float32=SUMS),
    Pass("pool_in_parts", frozenset({"Pooling"}), reductions.match_pool,
         reductions.pool_in_parts, passes.in_training),
    Pass("image_convolution", frozenset({"Convolution"}), convolutions.match_image_convolution,
         convolutions.image_convolution, lambda call: call.lowers("Convolution")),
    Pass("merged_groups", frozenset({"Convolution"}), convolutions.match_narrow_groups,
         convolutions.merged_groups, lambda call: not (call.training and call.behind_concat),
         fits=passes.are_float32),
    Pass("rnn", frozenset({"RNN"}), recurrent.match_rnn, recurrent.rnn,
         lambda call: not call.training and call.lowers("FullyConnected")),
    Pass("rnn_layers", frozenset({"RNN"}), recurrent.match_layers, recurrent.layers,
         float32=NO_KERNEL),
    Pass("rnn_params", frozenset({"_rnn_param_concat"}), recurrent.match_parameters,
         recurrent.joined_parameters, float32=NO_KERNEL),
    Pass("batch_dot", frozenset({"batch_dot"}), batched_products.match_large_products,
         batched_products.dense_products,
         lambda call: call.training and call.lowers("FullyConnected")),
    Pass("gemm2", frozenset({"batch_dot"}), batched_products.match_long_products,
         batched_products.gemm2, float32=SUMS),
    Pass("masked_softmax", frozenset({"softmax"}), equivalents.match_masked_softmax,
         equivalents.masked_softmax, lambda call: not call.training, SUMS,
         passes.has_integer_lengths),
    Pass("split", _SPLITS, equivalents.match_split, equivalents.split, float32=IN_TRAINING),
)}  # fmt: skip

#: Convolutions that have a blocked kernel after these, whatever their numbers of channels.
BLOCKED = frozenset({"image_convolution", "merged_groups"})

_BY_OPERATOR: dict[str, Sequence[Pass]] = {
    name: [one for one in ALL.values() if name in one.ops]
    for name in sorted({name for one in ALL.values() for name in one.ops})
}
#: The operators that have a substitution.
OPERATORS = frozenset(_BY_OPERATOR)


def match_call(call: Call) -> Match | None:
    """Return the match of a call's substitution; None without one that its policy allows.

    A user who sets the class of an operator turns its substitutions off.
    """
    if call.operator not in OPERATORS or call.policy.rule(call.operator).given:
        return None
    for one in _BY_OPERATOR[call.operator]:
        if one.name in call.policy.substitutions and one.when(call):
            detail = one.match(call)
            if detail is not None:
                return one.name, detail
    return None


def with_choices(graph: Graph, choices: Choices, training: bool) -> Graph:
    """Return the graph with the chosen equivalents and with the reasons of kept nodes."""
    edit = Edit(graph, {})
    for i, reason in choices.kept:
        edit.change(i, kept=reason)
    for (i, k), body in choices.bodies:
        bodies = list(edit.node(i).subgraphs)
        bodies[k] = with_choices(bodies[k], body, training)
        edit.change(i, subgraphs=bodies)
    for i, (name, detail) in sorted(choices.substituted):
        one = ALL[name]
        if one.float32 == IN_TRAINING and not training:
            one = one._replace(float32=None)
        parts = Parts(edit, i, one, recurrent.opened_inputs(graph, graph.nodes[i]))
        for k, output in enumerate(one.build(parts, detail) or ()):
            if output != (i, k):
                edit.redirect((i, k), output)
    return edit.applied()
