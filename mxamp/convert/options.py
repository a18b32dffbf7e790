"""The arguments that all `convert_*` functions share, and checks of arguments."""

import logging
from dataclasses import dataclass, fields
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, prefix_errors, unknown
from ..framework.machine import DTYPE_CODES, Dtype, dtype_name
from ..framework.wording import shown
from ..graph.ir import Graph, argument_dtypes
from ..policy.overrides import LayerArgument, Names, layer_patterns, unknown_layers
from ..policy.policy import Policy, requested_policy
from ..policy.targets import check_bool

logger = logging.getLogger("mxamp")

NOTHING_TO_LOWER = "a float32 model lowers no operator: leave out `policy` and the operator lists"

_LISTS = ("target_dtype_ops", "fp32_ops", "widest_dtype_ops", "conditional_fp32_ops")


@dataclass(frozen=True)
class Options:
    """The arguments of a `convert_*` function, with its operator lists merged into one policy.

    Inputs named in `not_offline` are never cast offline. Without `notes`, nothing is logged about
    the model's values, or that it stays as it is.
    """

    policy: Policy
    excluded_sym_names: LayerArgument = None
    cast_optional_params: bool = False
    keep_io_types: bool = True
    input_dtypes: Optional[Mapping[str, Any]] = None
    fuse: bool = False
    data_names: Names = None
    not_offline: FrozenSet[str] = frozenset()
    notes: bool = True

    @classmethod
    def of(cls, target_dtype: Dtype, **arguments: Any) -> "Options":
        """Return the arguments of a `convert_*` call as `Options`, checked and with defaults.

        `keep_io_types` is True by default, but False for float32 models, whose policy lowers no
        operator.
        """
        given = {one.name: arguments[one.name] for one in fields(cls) if one.name in arguments}
        lists, policy = [arguments.get(name) for name in _LISTS], given.get("policy")
        is_float32 = dtype_name(target_dtype) == "float32"
        if given.get("keep_io_types") is None:
            given["keep_io_types"] = not is_float32
        if not is_float32:
            given["policy"] = requested_policy(target_dtype, *lists, policy=policy)
        elif policy is not None or any(one is not None for one in lists):
            raise ArgumentError(NOTHING_TO_LOWER)
        else:
            # Nothing is lowered, so any dtype would do; substitutions and `fuse` are for CPUs.
            given["policy"] = Policy.default("bfloat16", "cpu").in_float32()
        check_mapping("input_dtypes", given.get("input_dtypes"), "dtypes")
        for name in ("cast_optional_params", "fuse", "keep_io_types"):
            check_bool(name, given.get(name, False))
        return cls(**given)


def with_excluded_layers(policy: Policy, excluded: LayerArgument, graph: Graph) -> Policy:
    """Return the policy with layers named in `excluded_sym_names` kept in float32.

    Raise for excluded layers that `graph` lacks. A policy may serve several models: its own
    `fp32_layers` that `graph` lacks are logged.
    """
    kept: List[str] = []
    for patterns in layer_patterns("excluded_sym_names", excluded):
        # A block may have children that its graph never calls.
        errors = unknown_layers(patterns, graph.layer_names)
        if patterns and len(errors) == len(patterns):
            raise errors[0]
        kept += patterns
    for error in unknown_layers(policy.fp32_layers, graph.layer_names):
        logger.warning("fp32_layers of the policy: %s", error)
    return policy.override(fp32_layers=kept) if kept else policy


def resolved_dtypes(
    symbol: Symbol, params: Mapping[str, NDArray], input_dtypes: Optional[Mapping[str, Any]] = None
) -> Dict[str, str]:
    """Return the dtypes of a symbol's inputs by name, inferred where not known.

    The last resort is float32. Raises for a parameter whose dtype in `input_dtypes` is another.
    """
    inputs = set(symbol.list_inputs())
    known = {name: dtype_name(array.dtype) for name, array in params.items() if name in inputs}
    with prefix_errors("`input_dtypes`"):
        given = [name for name in input_dtypes or () if name not in known]
        check_names(given, [one for one in symbol.list_inputs() if one not in known], "input")
        for name, dtype in (input_dtypes or {}).items():
            found = checked_dtype(name, dtype)
            if known.get(name, found) != found:
                raise ArgumentError(f"{name!r} is a parameter in {known[name]}, not in {found}")
            known[name] = found
    arguments = set(symbol.list_arguments())
    inferred = argument_dtypes(symbol, {k: v for k, v in known.items() if k in arguments})
    return {**inferred, **known}


def checked_dtype(name: str, dtype: object) -> str:
    """Return the name of an input's dtype; raise if MXNet has no such dtype."""
    found = dtype_name(dtype)
    if dtype is None or found not in DTYPE_CODES:  # None is float64 to NumPy
        allowed = ", ".join(DTYPE_CODES)
        raise ArgumentError(f"the dtype of input {name!r} must be in {allowed}, not {shown(dtype)}")
    return found


def check_mapping(argument: str, value: object, what: str, kind: type = object) -> None:
    """Raise unless an argument is None or a mapping from names to values of type `kind`."""
    if not isinstance(value, (Mapping, type(None))):
        raise ArgumentError(f"{argument} must map names to {what}, not {shown(value)}")
    for name, one in (value or {}).items():
        if not isinstance(one, kind):
            raise ArgumentError(f"{argument} must map to {what}, but {name!r} is {shown(one)}")


def checked_shapes(argument: str, shapes: Any) -> Dict[str, Tuple[int, ...]]:
    """Check an argument that maps inputs to shapes; return it with shapes as tuples of int.

    `argument` is the name of the public argument, for messages. None gives an empty dictionary.
    """
    check_mapping(argument, shapes, "shapes")
    checked = {}
    for name, shape in (shapes or {}).items():
        sizes = shape if isinstance(shape, (tuple, list)) else [None]
        if not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
            raise ArgumentError(f"the shape of {name!r} must be sizes above 0, not {shown(shape)}")
        checked[name] = tuple(map(int, sizes))
    return checked


def name_list(argument: str, names: Names) -> Sequence[str]:
    """Return an argument as a list of names, empty for None; raise unless all are strings.

    `argument` is the name of the public argument, for messages.
    """
    if names is None:
        return ()
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    listed: List[Any] = list(names) if is_list else [None]
    if not all(isinstance(name, str) for name in listed):
        raise ArgumentError(f"{argument} must be a list of names, not {shown(names)}")
    return listed


def check_names(names: Iterable[str], allowed: Sequence[str], noun: str) -> None:
    """Raise `UnknownNameError` if a name is not in `allowed`; `noun` says what it names."""
    for name in names:
        if name not in allowed:
            raise unknown(noun, name, allowed)
