"""Differences that are known, and no defect of mxamp's: what their programs have, and why."""

from typing import Dict, FrozenSet

NAN = "oneDNN's relu makes 0 of NaN: docs/bfloat16-on-cpus.md"
_RELU = ("Activation", "relu", "clip", "npx.activation", "npx.relu", "np.clip")
#: Seen in one run of five in plain MXNet.
FOREACH = "loops in graphs with static_shape read memory that was never written, in plain MXNet too"

FROZEN = "plain MXNet gives no gradient to a dense layer's bias where its weight has none"
CANCELED = "what is normalized is the rounding error of a difference of equal arrays"

ENLARGED = "plain MXNet leaves parameters unwritten that partial_shaping=True has enlarged"

EXPLAINED: Dict[FrozenSet[str], str] = {
    **{frozenset({op, "not finite"}): NAN for op in _RELU},
    frozenset({"contrib.foreach", "static_shape"}): FOREACH,
    frozenset({"FullyConnected", "grad_req()"}): FROZEN,
    frozenset({"npx.fully_connected", "grad_req()"}): FROZEN,
    frozenset({"BatchNorm", "broadcast_sub"}): CANCELED,
    frozenset({"BatchNorm", "reshape()"}): ENLARGED,
}
