"""Precision of the user's own operators (`mx.operator.Custom`): by the name they register."""

from typing import Dict, Tuple

from ..errors import ArgumentError
from ..framework.wording import one_of, shown

__all__ = ["CustomClasses", "registered_classes", "register_custom_operator"]

#: (registered name, class) of each.
CustomClasses = Tuple[Tuple[str, str], ...]

#: What the user calls a precision, and the class it means.
_CLASSES = {"half": "low", "float": "fp32", "promote": "widest"}

#: Class by registered name. One a process, as MXNet's registry of custom operators is.
_registered: Dict[str, str] = {}


def register_custom_operator(op_type: str, kind: str = "half") -> None:
    """Say what precision a custom operator (`mx.operator.Custom`) runs in; by default float32.

    ::

        amp.register_custom_operator("my_activation", "half")

    Parameters
    ----------
    op_type : str
        The name it was registered under with `mx.operator.register`.
    kind : str
        "half" (the target dtype), "float" (float32) or "promote" (the widest of its inputs).

    Policies made after this call follow it: call it before `init`.

    Raises
    ------
    ArgumentError
        `op_type` is no name, or `kind` is none of the three.
    """
    if not isinstance(op_type, str) or not op_type:
        raise ArgumentError(f"op_type must be the name of a custom operator, not {shown(op_type)}")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ArgumentError(f"kind must be {one_of(_CLASSES)}, not {shown(kind)}")
    _registered[op_type] = _CLASSES[kind]


def registered_classes() -> CustomClasses:
    """Return the class of each custom operator, sorted by name."""
    return tuple(sorted(_registered.items()))
