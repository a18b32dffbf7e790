"""The user's own operators (`mx.operator.Custom`), by the classes that they registered."""

import gc
import inspect
from typing import Any, Dict, Mapping, Optional, Tuple

import mxnet as mx

__all__ = ["needs_head_gradient", "prop_class"]

# Attributes of a call that the constructor does not get; those that begin with `__` are others.
_OURS = ("op_type",)

#: Class by op_type, with the size of MXNet's registry when it was looked up: a name may be
#: registered again, and registering counts up.
_classes: Dict[str, Tuple[int, Optional[type]]] = {}
_needs: Dict[Tuple[type, Tuple[Tuple[str, str], ...]], bool] = {}
_KEPT = 1024


def prop_class(op_type: str) -> Optional[type]:
    """Return the `CustomOpProp` registered as `op_type`, None where there is none to be found.

    MXNet keeps the class only in the closure of the function that it calls back, and that only
    behind a ctypes callback (in `mx.operator._registry`): the garbage collector knows what it
    refers to.
    """
    registry = getattr(mx.operator, "_registry", None)
    count = getattr(registry, "counter", 0)
    known = _classes.get(op_type)
    if known is None or known[0] != count:
        # MXNet holds what each call makes here too: take a copy, last registered first.
        held = list(getattr(registry, "ref_holder", {}).items())
        found = (
            _class_of(callback, op_type) for _, callback in sorted(held, reverse=True, key=_key)
        )
        known = _classes[op_type] = count, next((cls for cls in found if cls), None)
    return known[1]


def _key(item: Tuple[int, Any]) -> int:
    return item[0]


def _class_of(callback: Any, op_type: str) -> Optional[type]:
    """Return the class that a callback creates under this name, None for any other object."""
    objects = getattr(callback, "_objects", None)
    if not callable(callback) or objects is None:
        return None
    # The function is held by the callback's thunk, and by the callback itself (seen on 3.11).
    near = [*gc.get_referents(callback), *objects.values()]
    for holder in near:
        for function in (holder, *gc.get_referents(holder)):
            if not inspect.isfunction(function) or function.__name__ != "creator":
                continue
            names = function.__code__.co_freevars
            cells = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ())))
            found = cells.get("prop_cls")
            if cells.get("reg_name") == op_type and isinstance(found, type):
                return found
    return None


def needs_head_gradient(op_type: str, attributes: Mapping[str, Any]) -> bool:
    """Say whether a custom operator uses the gradient that comes to it.

    It does not where its `CustomOpProp` was made with `need_top_grad=False`: it starts the
    backward pass. The class is made once for each set of attributes, as MXNet makes it for each
    call. True where that can't be told: an unknown name, or a constructor that fails.
    """
    cls = prop_class(op_type)
    if cls is None:
        return True
    arguments = {
        key: str(value)
        for key, value in attributes.items()
        if key not in _OURS and not key.startswith("__")
    }
    key = cls, tuple(sorted(arguments.items()))
    if key not in _needs:
        if len(_needs) >= _KEPT:
            _needs.clear()
        try:
            _needs[key] = bool(getattr(cls(**arguments), "need_top_grad_", True))
        except Exception:  # the user's code; MXNet reports it when it makes the operator
            _needs[key] = True
    return _needs[key]
