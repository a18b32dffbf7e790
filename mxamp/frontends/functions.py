"""The precision of the user's own functions and custom operators.

The policy's lists hold built-in operators only. Authors of Python functions of arrays and of
`mx.operator.CustomOp` set the precision here.
"""

import functools
import itertools
from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Set, TypeVar

import mxnet as mx
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError, unknown
from ..framework.arrays import cast, map_arrays
from ..framework.keywords import checked_call
from ..framework.machine import dtype_name
from ..framework.patching import FrontEnd, Patch
from ..framework.wording import one_of, shown
from ..patches.autocast import autocast, check_runs_at_once
from ..policy.active import current_policy, is_enabled, suspended
from ..policy.decision import CASTABLE
from ..policy.policy import custom_classes, set_custom_class
from ..policy.regions import CAST, FLOAT32_INSIDE, TARGET_INSIDE, WIDEST_INSIDE

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

#: For the decorators, which take the function itself.
_WITHOUT_PARENTHESES = checked_call(function="decorate it by the name alone, without ()")

TOO_LATE = (
    "mixed precision is on, by a policy that does not know the custom operator {name!r}: call "
    "register_custom_operator before init, or shutdown, register it, and init again"
)

#: Class by the user's name for a precision.
_CLASSES = {"half": "low", "float": "fp32", "promote": "widest"}

#: On a registered function: the decorator, so that a second registration does nothing.
_MARK = "_amp_registered_as"
#: Numbers the traced calls of promote_functions: the arguments of one call are cast together.
_calls = itertools.count()


@_WITHOUT_PARENTHESES
def half_function(function: Function) -> Function:
    """Cast a function's float arrays to the target dtype, while mixed precision is on.

    ::

        @amp.half_function
        def scores(query, key):
            return mx.nd.dot(query, key, transpose_b=True)  # both are bfloat16 here

        with amp.autocast("bfloat16"):
            scores(data, data)

    Arrays may stand in lists, tuples and dicts. Operators inside follow the policy. While mixed
    precision is off, the function runs as it is.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """
    return _with_casts(function, lambda: TARGET_INSIDE, lambda _, target: target)


@_WITHOUT_PARENTHESES
def float_function(function: Function) -> Function:
    """Cast a function's half-precision arrays to float32, and run it as without mxamp.

    ::

        @amp.float_function
        def squared_error(prediction, target):
            return (prediction - target) ** 2  # both are float32 here

        with amp.autocast("bfloat16"):
            squared_error(net(data), target)

    Inside, mixed precision is off. Arrays may stand in lists, tuples and dicts.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """
    _check_callable(function)
    check_runs_at_once(function)
    return _with_casts(function, lambda: FLOAT32_INSIDE, lambda *_: "float32", off_inside=True)


@_WITHOUT_PARENTHESES
def promote_function(function: Function) -> Function:
    """Cast a function's float arrays to the widest dtype among them, while mixed precision is on.

    ::

        @amp.promote_function
        def mix(a, b):
            return 0.9 * a + 0.1 * b  # both are float32 here

        with amp.autocast("bfloat16"):
            mix(data, data.astype(amp.bfloat16))

    With a float16 and a float32 array, both are float32 inside. Arrays may stand in lists, tuples
    and dicts.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """

    def widest_dtype(dtypes: Set[str], _target: str) -> Optional[str]:
        return "float32" if len(dtypes & CASTABLE) > 1 else None

    return _with_casts(function, lambda: f"{WIDEST_INSIDE} {next(_calls)}", widest_dtype)


def _with_casts(
    function: Function,
    region: Callable[[], str],
    dtype_for: Callable[[Set[str], str], Optional[str]],
    off_inside: bool = False,
) -> Function:
    """Return `function` with its array arguments cast, in eager calls and in graphs.

    `region` marks the symbols of one call. `dtype_for` takes the dtypes of the arrays and the
    target dtype, and returns the dtype to cast to. `off_inside` turns mixed precision off inside.
    """
    _check_callable(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given, policy = (args, kwargs), current_policy()
        arrays: List[NDArray] = []
        others: List[Any] = []
        map_arrays(given, arrays.append, others.append)
        # A call with symbols builds a graph, which runs later.
        if any(isinstance(one, Symbol) for one in others):
            mark = region()
            args, kwargs = map_arrays(
                given, lambda array: array, lambda one: _with_cast_mark(one, mark)
            )
            with autocast(enabled=False) if off_inside else nullcontext():
                return function(*args, **kwargs)
        if policy is None:
            return function(*args, **kwargs)
        target = policy.target_dtype if policy.lowers else "float32"
        dtype = dtype_for({dtype_name(array.dtype) for array in arrays}, target)
        if dtype is not None:
            args, kwargs = map_arrays(
                given, lambda one: _cast_float(one, dtype), lambda other: other
            )
        with suspended() if off_inside else nullcontext():
            return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _with_cast_mark(value: Any, region: str) -> Any:
    """Return a copy of a symbol that is cast when its graph runs; any other value as it is."""
    if not isinstance(value, Symbol):
        return value
    copy = mx.sym.identity(value.as_nd_ndarray(), attr={CAST: region})
    return copy.as_np_ndarray() if isinstance(value, mx.sym.np._Symbol) else copy


def _cast_float(array: NDArray, dtype: str) -> NDArray:
    """Return a float array cast to a dtype, and any other array as it is."""
    if dtype_name(array.dtype) not in CASTABLE:
        return array
    return cast(array, dtype, isinstance(array, mx.np.ndarray))


@checked_call()
def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` a `half_function`, until `shutdown`.

    ::

        amp.register_half_function(my_layers, "attention")
        with amp.autocast("bfloat16"):
            my_layers.attention(query, key, value)  # its arguments are cast to bfloat16

    Calls of `my_layers.attention` get the new function. Code that has imported it by name before
    keeps the old one.

    Parameters
    ----------
    module : module or object
        The owner of the function.
    name : str
        The name of the function there.
    """
    _register_function(module, name, half_function)


@checked_call()
def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` a `float_function`, until `shutdown`.

    ::

        amp.register_float_function(my_layers, "focal_loss")
        with amp.autocast("bfloat16"):
            my_layers.focal_loss(prediction, label)  # computes in float32

    Parameters
    ----------
    module : module or object
        The owner of the function.
    name : str
        The name of the function there.
    """
    _register_function(module, name, float_function)


@checked_call()
def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` a `promote_function`, until `shutdown`.

    ::

        amp.register_promote_function(my_layers, "mix")
        with amp.autocast("bfloat16"):
            my_layers.mix(a, b)  # in float32 if one of them is

    Parameters
    ----------
    module : module or object
        The owner of the function.
    name : str
        The name of the function there.
    """
    _register_function(module, name, promote_function)


def _register_function(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace `module.name` by `wrap(module.name)` until `shutdown`, once per decorator."""
    attributes = getattr(module, "__dict__", None)
    if attributes is None:
        raise ArgumentError(f"the first argument must be a module, not {shown(module)}")
    functions = [one for one, value in attributes.items() if callable(value)]
    if name not in functions:
        raise unknown(f"function of {shown(module)}", name, functions)
    if getattr(attributes[name], _MARK, None) is wrap:
        return

    def wrap_and_mark(function: Any) -> Any:
        wrapped = wrap(function)
        setattr(wrapped, _MARK, wrap)
        return wrapped

    FrontEnd([Patch(module, name, wrap_and_mark)]).open()


def _check_callable(function: Any) -> None:
    if not callable(function):
        raise ArgumentError(f"the decorator takes a function, not {shown(function)}")


@checked_call(name="write op_type=", precision="write kind=", dtype="write kind='half'")
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

    Call it before `init`: a policy knows the operators that were registered before it was made.

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
    if is_enabled() and (op_type, _CLASSES[kind]) not in custom_classes():
        raise StateError(TOO_LATE.format(name=op_type))
    set_custom_class(op_type, _CLASSES[kind])
