"""Differences that are known, and no defect of mxamp's: what their programs have, and why."""

from typing import Dict, FrozenSet

NAN = "oneDNN's relu makes 0 of NaN: docs/bfloat16-on-cpus.md"
_RELU = ("Activation", "relu", "clip", "npx.activation", "npx.relu", "np.clip")

EXPLAINED: Dict[FrozenSet[str], str] = {
    **{frozenset({op, "not finite"}): NAN for op in _RELU},
}
