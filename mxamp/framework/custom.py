"""The user's own operators (`mx.operator.Custom`), by the classes that they registered."""

import gc
import inspect
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

import mxnet as mx

__all__ = ["auxiliary_states", "needs_head_gradient", "prop_class"]

# Attributes of a call that the constructor does not get; those that begin with `__` are others.
_OURS = ("op_type",)

#: Answers by class and attributes: eager code asks at every call.
_answers: Dict[Tuple[type, Tuple[Tuple[str, str], ...]], "Described"] = {}
_KEPT = 1024


class _Registered:
    """The classes that are registered, by op_type; what is new is looked at when it is asked for.

    MXNet keeps a class only in the closure of the function that it calls back, and that only
    behind a ctypes callback (in `mx.operator._registry`): the garbage collector knows what it
    refers to. Its registry numbers what it holds, and gets an entry for each call of a custom
    operator too: each is looked at once.
    """

    def __init__(self) -> None:
        self._classes: Dict[str, type] = {}
        self._seen = 0

    def get(self, op_type: str) -> Optional[type]:
        registry = getattr(mx.operator, "_registry", None)
        count = getattr(registry, "counter", 0)
        held = getattr(registry, "ref_holder", {})
        for number in range(self._seen, count):
            found = _class_of(held.get(number))
            if found is not None:
                self._classes[found[0]] = found[1]
        self._seen = count
        return self._classes.get(op_type)


#: One a process, as MXNet's registry is.
_registered = _Registered()


def prop_class(op_type: str) -> Optional[type]:
    """Return the `CustomOpProp` registered as `op_type`, None where there is none to be found."""
    return _registered.get(op_type)


def _class_of(callback: Any) -> Optional[Tuple[str, type]]:
    """Return the name and the class that a callback creates, None for any other object."""
    objects = getattr(callback, "_objects", None)
    if not callable(callback) or objects is None:
        return None
    # Python 3.8 to 3.13 hold the function in the callback's thunk, some in the callback as well.
    near = [*gc.get_referents(callback), *objects.values()]
    for holder in near:
        for function in (holder, *gc.get_referents(holder)):
            if not inspect.isfunction(function) or function.__name__ != "creator":
                continue
            names = function.__code__.co_freevars
            cells = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ())))
            name, cls = cells.get("reg_name"), cells.get("prop_cls")
            if isinstance(name, str) and isinstance(cls, type):
                return name, cls
    return None


class Described(NamedTuple):
    """The properties that a custom operator's class declares."""

    needs_head_gradient: bool = True
    auxiliary_states: int = 0


def needs_head_gradient(op_type: str, attributes: Mapping[str, Any]) -> bool:
    """Return whether a custom operator uses the gradient that comes to it.

    It does not where its `CustomOpProp` was made with `need_top_grad=False`: it starts the
    backward pass. True where that can't be told: an unknown name, or a constructor that fails.
    """
    return _described(op_type, attributes).needs_head_gradient


def auxiliary_states(attributes: Mapping[str, Any]) -> int:
    """Return how many of the arrays that `Custom` is called with, the last ones, it writes to."""
    return _described(str(attributes.get("op_type", "")), attributes).auxiliary_states


def _described(op_type: str, attributes: Mapping[str, Any]) -> Described:
    """Ask the class, made once for each set of attributes, as MXNet makes it for each call."""
    cls = prop_class(op_type)
    if cls is None:
        return Described()
    arguments = {
        key: str(value)
        for key, value in attributes.items()
        if key not in _OURS and not key.startswith("__")
    }
    key = cls, tuple(sorted(arguments.items()))
    if key not in _answers:
        if len(_answers) >= _KEPT:
            _answers.clear()
        try:
            prop = cls(**arguments)
            needed = bool(getattr(prop, "need_top_grad_", True))
            _answers[key] = Described(needed, len(prop.list_auxiliary_states()))
        except Exception:  # the user's code; MXNet reports it when it makes the operator
            _answers[key] = Described()
    return _answers[key]
