"""Classes of the user's own operators (`mx.operator.Custom`): by the name they register."""

from typing import Dict, Tuple

__all__ = ["CustomClasses", "register_class", "registered_classes"]

#: (registered name, class) of each.
CustomClasses = Tuple[Tuple[str, str], ...]

#: Class by registered name. One a process, as MXNet's registry of custom operators is.
_registered: Dict[str, str] = {}


def register_class(op_type: str, op_class: str) -> None:
    """Give a custom operator a class, for the policies that are made after this."""
    _registered[op_type] = op_class


def registered_classes() -> CustomClasses:
    """Return the class of each custom operator, sorted by name."""
    return tuple(sorted(_registered.items()))
