"""Precision of the user's own operators (`mx.operator.Custom`): said by whoever registers them."""

from ..errors import ArgumentError, StateError
from ..framework.wording import one_of, shown
from ..policy.active import is_enabled
from ..policy.rules import register_class, registered_classes

__all__ = ["register_custom_operator"]

TOO_LATE = (
    "mixed precision is on, by a policy that does not know the custom operator {name!r}: call "
    "register_custom_operator before init, or shutdown, register it, and init again"
)

#: What the user calls a precision, and the class it means.
_CLASSES = {"half": "low", "float": "fp32", "promote": "widest"}


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
    StateError
        Mixed precision is on, and would go on without it.
    """
    if not isinstance(op_type, str) or not op_type:
        raise ArgumentError(f"op_type must be the name of a custom operator, not {shown(op_type)}")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ArgumentError(f"kind must be {one_of(_CLASSES)}, not {shown(kind)}")
    if is_enabled() and (op_type, _CLASSES[kind]) not in registered_classes():
        raise StateError(TOO_LATE.format(name=op_type))
    register_class(op_type, _CLASSES[kind])
