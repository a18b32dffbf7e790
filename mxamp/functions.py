"""Functions and custom operators of the user's own: which precision they run in.

Built-in operators follow the policy's lists. What a user writes himself, Python functions of arrays
or `mx.operator.CustomOp`, is in no list; here is where its author says what it wants.
"""

import functools
from typing import Any, Callable, Set, TypeVar

from mxnet.ndarray.ndarray import NDArray

from .autocast import autocast, current_policy
from .casting import CASTABLE
from .containers import map_arrays
from .doors import open_door
from .eager import cast
from .errors import ArgumentError
from .machine import dtype_name
from .patching import Patch
from .policy import custom_operators

__all__ = [
    "float_function", "half_function", "promote_function", "register_custom_operator",
    "register_float_function", "register_half_function", "register_promote_function",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_KINDS = {"half": "low", "float": "fp32", "promote": "widest"}


def half_function(function: Function) -> Function:
    """Cast a function's float arrays to the target dtype, while mixed precision is on.

    ::

        @amp.half_function
        def attention(query, key, value): ...

    Arrays may stand in lists, tuples and dicts. Operators inside follow the policy.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        policy = current_policy()
        if policy is None:
            return function(*args, **kwargs)
        args, kwargs = _cast_all((args, kwargs), policy.target_dtype)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def float_function(function: Function) -> Function:
    """Cast a function's half-precision arrays to float32, and run it as without mxamp.

    ::

        @amp.float_function
        def focal_loss(prediction, label): ...
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if current_policy() is None:
            return function(*args, **kwargs)
        args, kwargs = _cast_all((args, kwargs), "float32")
        with autocast(enabled=False):
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def promote_function(function: Function) -> Function:
    """Cast a function's float arrays to the widest dtype among them, while mixed precision is on.

    ::

        @amp.promote_function
        def mix(a, b, ratio): ...
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if current_policy() is None:
            return function(*args, **kwargs)
        if len(_dtypes((args, kwargs)) & CASTABLE) > 1:
            args, kwargs = _cast_all((args, kwargs), "float32")
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` a `half_function`, until `shutdown`.

    ::

        amp.register_half_function(my_layers, "attention")
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` a `float_function`, until `shutdown`."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` a `promote_function`, until `shutdown`."""
    _register(module, name, promote_function)


def _register(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    if not callable(vars(module).get(name)):
        where = getattr(module, "__name__", repr(module))
        raise ArgumentError(f"there is no function {name!r} in {where}")
    owner = getattr(module, "__name__", repr(module))
    open_door(f"{wrap.__name__} {owner}.{name}", [Patch(module, name, wrap)])


def register_custom_operator(op_type: str, kind: str = "half") -> None:
    """Say what a custom operator (`mx.operator.Custom`) runs in; float32 where nothing is said.

    ::

        amp.register_custom_operator("my_activation", "half")

    Parameters
    ----------
    op_type : str
        The name it was registered under with `mx.operator.register`.
    kind : str
        "half" (the target dtype), "float" (float32) or "promote" (the widest of its inputs).

    Holds for policies made afterwards: call it before `init`.
    """
    if not isinstance(op_type, str) or not op_type:
        raise ArgumentError(f"op_type is the name of a custom operator, not {op_type!r}")
    if kind not in _KINDS:
        raise ArgumentError(f"kind is one of {', '.join(_KINDS)}, not {kind!r}")
    custom_operators[op_type] = _KINDS[kind]


def _dtypes(value: Any) -> Set[str]:
    found: Set[str] = set()
    map_arrays(value, lambda array: found.add(dtype_name(array.dtype)), lambda other: None)
    return found


def _cast_all(value: Any, dtype: str) -> Any:
    def cast_one(array: NDArray) -> NDArray:
        return cast(array, dtype) if dtype_name(array.dtype) in CASTABLE else array

    return map_arrays(value, cast_one, lambda other: other)
