"""The precision of the user's own functions and custom operators.

The policy's lists hold built-in operators only. Authors of Python functions of arrays and of
`mx.operator.CustomOp` set the precision here.
"""

import functools
import itertools
from contextlib import nullcontext
from typing import Any, Callable, Optional, Set, TypeVar

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
#: Numbers the traced calls of promote_functions: the arguments of one call are cast together.
_calls = itertools.count()


def half_function(function: Function) -> Function:
    """Cast a function's float arrays to the target dtype, while mixed precision is on.

    ::

        @amp.half_function
        def attention(query, key, value): ...

    Arrays may stand in lists, tuples and dicts. Operators inside follow the policy. While mixed
    precision is off, the function runs as it is.
    """
    return _casting(function, lambda: TARGET_INSIDE, lambda _, target: target)


def float_function(function: Function) -> Function:
    """Cast a function's half-precision arrays to float32, and run it as without mxamp.

    ::

        @amp.float_function
        def focal_loss(prediction, label): ...

    Inside, mixed precision is off. Arrays may stand in lists, tuples and dicts.
    """
    _check_function(function)
    check_runs_at_once(function)
    return _casting(function, lambda: FLOAT32_INSIDE, lambda *_: "float32", off_inside=True)


def promote_function(function: Function) -> Function:
    """Cast a function's float arrays to the widest dtype among them, while mixed precision is on.

    ::

        @amp.promote_function
        def mix(a, b, ratio): ...

    With a float16 and a float32 array, both are float32 inside. Arrays may stand in lists, tuples
    and dicts.
    """

    def widest(dtypes: Set[str], _target: str) -> Optional[str]:
        return "float32" if len(dtypes & CASTABLE) > 1 else None

    return _casting(function, lambda: f"{WIDEST_INSIDE} {next(_calls)}", widest)


def _casting(
    function: Function,
    region: Callable[[], str],
    dtype_for: Callable[[Set[str], str], Optional[str]],
    off_inside: bool = False,
) -> Function:
    """Return the function with its arrays cast, in eager calls and in graphs.

    `region` marks the symbols of one call. `dtype_for` takes the dtypes of the arrays and the
    target dtype, and returns the dtype to cast to. `off_inside` turns mixed precision off inside.
    """
    _check_function(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given, policy = (args, kwargs), current_policy()
        if _makes_nodes(given):
            args, kwargs = _marked_all(given, region())
            with autocast(enabled=False) if off_inside else nullcontext():
                return function(*args, **kwargs)
        if policy is None:
            return function(*args, **kwargs)
        dtype = dtype_for(_dtypes(given), policy.target_dtype)
        if dtype is not None:
            args, kwargs = _cast_all(given, dtype)
        with suspended() if off_inside else nullcontext():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` a `half_function`, until `shutdown`.

    ::

        amp.register_half_function(my_layers, "attention")

    Calls of `my_layers.attention` get the new function. Code that has imported it by name before
    keeps the old one.
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
    """Return whether a symbol is among the arguments: the call builds a graph that runs later."""
    if isinstance(value, (list, tuple)):
        return any(map(_makes_nodes, value))
    if isinstance(value, dict):
        return any(map(_makes_nodes, value.values()))
    return isinstance(value, Symbol)


def _marked_all(value: Any, cast: str) -> Any:
    """Return copies of symbols that are cast when their graph runs in mixed precision."""

    def marked(one: Any) -> Any:
        if not isinstance(one, Symbol):
            return one
        copy = mx.sym.identity(one.as_nd_ndarray(), attr={CAST: cast})
        return copy.as_np_ndarray() if isinstance(one, mx.sym.np._Symbol) else copy

    return map_arrays(value, lambda array: array, marked)


def _marked(wrap: Callable[[Any], Any], function: Any) -> Any:
    """Return the wrapped function, marked so that a second registration does nothing."""
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

#: Class by the user's name for a precision.
_CLASSES = {"half": "low", "float": "fp32", "promote": "widest"}


def register_custom_operator(op_type: str, kind: str = "half") -> None:
    """Set the precision of a custom operator (`mx.operator.Custom`), which is float32 by default.

    ::

        amp.register_custom_operator("my_activation", "half")

    Parameters
    ----------
    op_type : str
        Its name in `mx.operator.register`.
    kind : str
        "half" (the target dtype), "float" (float32) or "promote" (the widest of its inputs).

    Call it before `init`: policies made earlier do not know it.

    Raises
    ------
    ArgumentError
        `op_type` is not a name, or `kind` is not one of the three.
    StateError
        Mixed precision is on by a policy that does not know the operator.
    """
    if not isinstance(op_type, str) or not op_type:
        raise ArgumentError(f"op_type must be the name of a custom operator, not {shown(op_type)}")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ArgumentError(f"kind must be {one_of(_CLASSES)}, not {shown(kind)}")
    if is_enabled() and (op_type, _CLASSES[kind]) not in registered_classes():
        raise StateError(TOO_LATE.format(name=op_type))
    register_class(op_type, _CLASSES[kind])
