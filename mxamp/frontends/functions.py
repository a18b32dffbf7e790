"""Decorators and registration that set the precision of your functions and custom operators.

The policy's lists hold built-in operators only. Authors of Python functions of arrays and of
`mx.operator.CustomOp` set the precision here.
"""

import functools
import itertools
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Callable, Iterable, List, Optional, TypeVar, Union

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
from ..policy.policy import Policy
from ..policy.regions import CAST, FLOAT32_INSIDE, TARGET_INSIDE, WIDEST_INSIDE
from ..policy.rules import custom_classes, custom_operators

Function = TypeVar("Function", bound=Callable[..., Any])

#: Class by the user's name for a precision.
_CLASSES = {"half": "low", "float": "fp32", "promote": "widest"}

#: Numbers the traced calls of promote_functions: the arguments of one call are cast together.
_calls = itertools.count()


def half_function(function: Function) -> Function:
    """Decorate a function: while mixed precision is on, cast its float arrays to 16 bits.

    ::

        @amp.half_function
        def scores(query, key):
            return mx.nd.dot(query, key, transpose_b=True)  # both are bfloat16 here

        with amp.autocast("bfloat16"):
            scores(data, data)

    Arrays in lists, tuples and dicts are cast too. Operators inside the function follow the policy.
    While mixed precision is off, nothing is cast.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """
    return _with_casts(function, TARGET_INSIDE)


def float_function(function: Function) -> Function:
    """Decorate a function: cast its 16-bit arrays to float32, and run it without mixed precision.

    ::

        @amp.float_function
        def squared_error(prediction, target):
            return (prediction - target) ** 2  # both are float32 here

        with amp.autocast("bfloat16"):
            squared_error(net(data), target)

    Mixed precision is off inside the function. Arrays in lists, tuples and dicts are cast too.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """
    return _with_casts(function, FLOAT32_INSIDE)


def promote_function(function: Function) -> Function:
    """Decorate a function: cast its float arrays to the widest dtype among them.

    ::

        @amp.promote_function
        def mix(a, b):
            return 0.9 * a + 0.1 * b  # both are float32 here

        with amp.autocast("bfloat16"):
            mix(data, data.astype(amp.bfloat16))

    If one argument is a float16 array and one a float32 array, both are float32 arrays inside the
    function. Arrays in lists, tuples and dicts are cast too.

    Parameters
    ----------
    function : callable
        The function or method to decorate.
    """
    return _with_casts(function, WIDEST_INSIDE)


def _with_casts(function: Function, inside: str) -> Function:
    """Wrap a function so that its array and symbol arguments are cast; `inside` selects the dtype.

    `inside` is TARGET_INSIDE, WIDEST_INSIDE, or FLOAT32_INSIDE, which turns mixed precision off.
    """
    if not callable(function):
        raise ArgumentError(f"the decorator takes a function, not {shown(function)}")
    if inside is FLOAT32_INSIDE:
        check_runs_at_once(function)

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        leaves: List[Any] = []
        map_arrays((args, kwargs), leaves.append, leaves.append)
        # A call with symbols builds a graph, which runs later, maybe with mixed precision on.
        policy, is_graph = current_policy(), any(isinstance(one, Symbol) for one in leaves)
        if policy is None and not is_graph:
            return function(*args, **kwargs)
        region = f"{inside} {next(_calls)}" if inside is WIDEST_INSIDE else inside
        dtype = _dtype_inside(inside, leaves, policy) if policy and not is_graph else None
        change = functools.partial(_cast_argument, dtype=dtype, region=region)
        args, kwargs = map_arrays((args, kwargs), change, change)
        off = autocast(enabled=False) if is_graph else suspended()
        with off if inside is FLOAT32_INSIDE else nullcontext():
            return function(*args, **kwargs)

    wrapper._amp_inside = inside  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def _dtype_inside(inside: str, leaves: Iterable[Any], policy: Policy) -> str:
    """Return the dtype to which a decorated function casts its float arrays in a call."""
    dtypes = {dtype_name(one.dtype) for one in leaves if isinstance(one, NDArray)} & CASTABLE
    if inside is WIDEST_INSIDE and len(dtypes) == 1:
        return dtypes.pop()
    return policy.precision if inside is TARGET_INSIDE else "float32"


def _cast_argument(value: object, dtype: Optional[str], region: str) -> object:
    """Cast an array to `dtype`; mark a symbol by an identity node, cast when the graph runs.

    Other values are unchanged.
    """
    if isinstance(value, Symbol):
        copy = mx.sym.identity(value.as_nd_ndarray(), attr={CAST: region})
        return copy.as_np_ndarray() if isinstance(value, mx.sym.np._Symbol) else copy
    if dtype is None or not isinstance(value, NDArray) or dtype_name(value.dtype) not in CASTABLE:
        return value
    return cast(value, dtype, isinstance(value, mx.np.ndarray))


@checked_call
def register_half_function(module: Union[ModuleType, type], name: str) -> None:
    """Decorate `module.name` with `half_function`, until `shutdown`.

    ::

        amp.register_half_function(my_layers, "attention")
        with amp.autocast("bfloat16"):
            my_layers.attention(query, key, value)  # its arguments are cast to bfloat16

    Calls of `my_layers.attention` run the new function. Code that has imported `attention` by name
    before runs the old function.

    Parameters
    ----------
    module : module or object
        The module, or another object, that has the function as an attribute.
    name : str
        The name of the attribute.
    """
    _register(module, name, TARGET_INSIDE)


@checked_call
def register_float_function(module: Union[ModuleType, type], name: str) -> None:
    """Decorate `module.name` with `float_function`, until `shutdown`.

    ::

        amp.register_float_function(my_layers, "focal_loss")
        with amp.autocast("bfloat16"):
            my_layers.focal_loss(prediction, label)  # computes in float32

    Parameters
    ----------
    module : module or object
        The module, or another object, that has the function as an attribute.
    name : str
        The name of the attribute.
    """
    _register(module, name, FLOAT32_INSIDE)


@checked_call
def register_promote_function(module: Union[ModuleType, type], name: str) -> None:
    """Decorate `module.name` with `promote_function`, until `shutdown`.

    ::

        amp.register_promote_function(my_layers, "mix")
        with amp.autocast("bfloat16"):
            my_layers.mix(a, b)  # in float32 if `a` or `b` is in float32

    Parameters
    ----------
    module : module or object
        The module, or another object, that has the function as an attribute.
    name : str
        The name of the attribute.
    """
    _register(module, name, WIDEST_INSIDE)


def _register(module: Union[ModuleType, type], name: str, inside: str) -> None:
    """Replace `module.name` with a function that casts its arguments, until `shutdown`."""
    if not hasattr(module, "__dict__"):
        raise ArgumentError(f"the first argument must be a module, not {shown(module)}")
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        raise unknown(f"function of {shown(module)}", name, functions)
    if getattr(functions[name], "_amp_inside", None) != inside:
        FrontEnd([Patch(module, name, lambda function: _with_casts(function, inside))]).open()


@checked_call
def register_custom_operator(op_type: str, kind: str = "half") -> None:
    """Set the precision of a custom operator (`mx.operator.Custom`); unregistered ones use float32.

    ::

        amp.register_custom_operator("my_activation", "half")

    Parameters
    ----------
    op_type : str
        The operator's name in `mx.operator.register`.
    kind : str
        "half" (the target dtype), "float" (float32) or "promote" (the widest dtype of the inputs).

    Call `register_custom_operator` before `init`: a policy knows only the operators that were
    registered before you created the policy.

    Raises
    ------
    ArgumentError
        `kind` is not one of the three.
    StateError
        Mixed precision is on already, with a policy that does not know the operator.
    """
    if not isinstance(op_type, str):
        raise ArgumentError(f"op_type must be a name, not {shown(op_type)}")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ArgumentError(f"kind must be {one_of(_CLASSES)}, not {shown(kind)}")
    if is_enabled() and (op_type, _CLASSES[kind]) not in custom_classes():
        raise StateError(f"the policy in force does not know {op_type!r}: register it before init")
    custom_operators[op_type] = _CLASSES[kind]
