"""Functions of the user's own: which precision they run in.

Built-in operators follow the policy's lists. Python functions of arrays are in no list; here their
author says what they want. `register_custom_operator` does the same for `mx.operator.CustomOp`.
"""

import functools
import itertools
from typing import Any, Callable, Set, TypeVar

import mxnet as mx
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError, unknown
from ..framework.arrays import cast, map_arrays
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Patch
from ..framework.wording import one_of, shown
from ..patches.autocast import autocast, check_runs_at_once
from ..policy.active import current_policy, is_enabled, suspended
from ..policy.decision import CASTABLE
from ..policy.regions import CAST, FLOAT32_INSIDE, TARGET_INSIDE, WIDEST_INSIDE
from ..policy.rules import register_class, registered_classes

__all__ = [
    "float_function",
    "half_function",
    "promote_function",
    "register_custom_operator",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

Function = TypeVar("Function", bound=Callable[..., Any])

NO_MODULE = "the first argument must be a module, not {given}"

_MARK = "_amp_registered_as"
#: Numbers the calls of promote_functions that are traced: what one is given is cast together.
_calls = itertools.count()


def half_function(function: Function) -> Function:
    """Cast a function's float arrays to the target dtype, while mixed precision is on.

    ::

        @amp.half_function
        def attention(query, key, value): ...

    Arrays may stand in lists, tuples and dicts. Operators inside follow the policy. While mixed
    precision is off, the function runs as it is.
    """
    _check_function(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _makes_nodes((args, kwargs)):
            args, kwargs = _marked_all((args, kwargs), TARGET_INSIDE)
            return function(*args, **kwargs)
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

    Inside, mixed precision is off. Arrays may stand in lists, tuples and dicts.
    """
    _check_function(function)
    check_runs_at_once(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _makes_nodes((args, kwargs)):
            args, kwargs = _marked_all((args, kwargs), FLOAT32_INSIDE)
            with autocast(enabled=False):
                return function(*args, **kwargs)
        if current_policy() is None:
            return function(*args, **kwargs)
        args, kwargs = _cast_all((args, kwargs), "float32")
        with suspended():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def promote_function(function: Function) -> Function:
    """Cast a function's float arrays to the widest dtype among them, while mixed precision is on.

    ::

        @amp.promote_function
        def mix(a, b, ratio): ...

    With a float16 and a float32 array, both are float32 inside. Arrays may stand in lists, tuples
    and dicts.
    """
    _check_function(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _makes_nodes((args, kwargs)):
            args, kwargs = _marked_all((args, kwargs), f"{WIDEST_INSIDE} {next(_calls)}")
            return function(*args, **kwargs)
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

    The module is changed: whoever calls `my_layers.attention` gets the new one, and code that has
    imported the function by name before keeps the old one.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` a `float_function`, until `shutdown`.

    ::

        amp.register_float_function(my_layers, "focal_loss")
    """
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` a `promote_function`, until `shutdown`.

    ::

        amp.register_promote_function(my_layers, "mix")
    """
    _register(module, name, promote_function)


def _register(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    here = getattr(module, "__dict__", None)
    if here is None:
        raise ArgumentError(NO_MODULE.format(given=shown(module)))
    functions = [one for one, value in here.items() if callable(value)]
    if name not in functions:
        raise unknown(f"function of {shown(module)}", name, functions)
    if getattr(vars(module)[name], _MARK, None) is not wrap:
        FrontEnd([Patch(module, name, functools.partial(_marked, wrap))]).open()


def _check_function(function: Any) -> None:
    if not callable(function):
        raise ArgumentError(f"the decorator takes a function, not {shown(function)}")


def _makes_nodes(value: Any) -> bool:
    """Return whether a symbol is among the arguments: a graph is made, and runs later."""
    if isinstance(value, (list, tuple)):
        return any(map(_makes_nodes, value))
    if isinstance(value, dict):
        return any(map(_makes_nodes, value.values()))
    return isinstance(value, Symbol)


def _marked_all(value: Any, cast: str) -> Any:
    """Return symbols as copies that are cast where their graph runs in mixed precision."""

    def marked(one: Any) -> Any:
        if not isinstance(one, Symbol):
            return one
        copy = mx.sym.identity(one.as_nd_ndarray(), attr={CAST: cast})
        return copy.as_np_ndarray() if isinstance(one, mx.sym.np._Symbol) else copy

    return map_arrays(value, lambda array: array, marked)


def _marked(wrap: Callable[[Any], Any], function: Any) -> Any:
    """Return the function wrapped, and marked: a second registration does nothing."""
    wrapped = wrap(function)
    setattr(wrapped, _MARK, wrap)
    return wrapped


def _dtypes(value: Any) -> Set[str]:
    dtypes: Set[str] = set()
    map_arrays(value, lambda array: dtypes.add(dtype_name(array.dtype)), lambda other: None)
    return dtypes


def _cast_all(value: Any, dtype: str) -> Any:
    def cast_one(array: NDArray) -> NDArray:
        if dtype_name(array.dtype) not in CASTABLE:
            return array
        return cast(array, dtype, isinstance(array, mx.np.ndarray))

    return map_arrays(value, cast_one, lambda other: other)


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
