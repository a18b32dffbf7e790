"""The options that all `convert_*` functions share, and checks of names, dtypes and shapes."""

import fnmatch
import logging
import math
from dataclasses import dataclass
from typing import (
    Any,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet.symbol import Symbol

from ..errors import ArgumentError, located, unknown
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.wording import counted, shown
from ..graph.ir import Graph, argument_dtypes
from ..policy.overrides import Layers, layer_patterns
from ..policy.policy import Policy
from ..policy.targets import check_truth

__all__ = [
    "Names",
    "Options",
    "checked_policy",
    "known_dtype",
    "known_dtypes",
    "known_names",
    "known_shapes",
    "names_of",
]

logger = logging.getLogger("mxamp")

LAYER_NAMES = "* and ? stand for any characters; the names of Gluon layers end in _fwd"
NO_OPERATORS = "`excluded_sym_names`: one of the blocks has no operators and no children"
NO_DTYPE = "the dtype of input {name!r} must be one of {allowed}, not {given}"
NO_SHAPE = (
    "the shape of input {name!r} must be sizes above 0, such as (1, 3, 224, 224), not {given}"
)
TOO_LARGE = (
    "input {name!r} of shape {shape} has {elements}, and this MXNet takes arrays of up to "
    "{limit:,}: give a smaller shape"
)

Names = Optional[Iterable[str]]


@dataclass(frozen=True)
class Options:
    """How to convert a model: the arguments of a `convert_*` function, with one policy for lists.

    Inputs in `not_offline` are never cast offline.
    """

    policy: Policy
    excluded_sym_names: Layers = None
    cast_optional_params: bool = False
    keep_io_types: bool = True
    input_dtypes: Optional[Mapping[str, Any]] = None
    fuse: bool = False
    data_names: Names = None
    not_offline: FrozenSet[str] = frozenset()

    def __post_init__(self) -> None:
        check_truth("cast_optional_params", self.cast_optional_params)
        check_truth("fuse", self.fuse)

    @property
    def casts_offline(self) -> bool:
        """Whether parameters are cast once, when the model is converted."""
        return self.cast_optional_params or self.fuse


def checked_policy(policy: Policy, excluded: Layers, graph: Graph) -> Policy:
    """Return the policy with the `excluded` layers of `graph` kept in float32.

    Raise for excluded layers that the graph lacks. A policy may serve several models: its own
    `fp32_layers` that this graph lacks are logged.
    """
    layers = list(_layer_names(graph))

    def is_missing(pattern: str) -> bool:
        return not fnmatch.filter(layers, pattern)

    kept: List[str] = []
    for patterns in layer_patterns("excluded_sym_names", excluded):
        if not patterns:
            raise ArgumentError(NO_OPERATORS)
        # A block may have children that its graph never calls.
        if all(map(is_missing, patterns)):
            raise unknown("layer", patterns[0], layers, LAYER_NAMES)
        kept += patterns
    for pattern in filter(is_missing, policy.fp32_layers):
        error = unknown("layer", pattern, layers, LAYER_NAMES)
        logger.warning("fp32_layers of the policy: %s", error)
    return policy.override(fp32_layers=kept) if kept else policy


def _layer_names(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if not node.is_variable:
            yield node.name
        for inner in node.subgraphs:
            yield from _layer_names(inner)


def known_dtypes(
    sym: Symbol, held: Mapping[str, Any], given: Optional[Mapping[str, Any]] = None
) -> Dict[str, str]:
    """Return the dtype of each input of a symbol.

    That is the dtype `held` by its parameter, else the `given` one, else the inferred one, else
    float32.
    """
    inputs = sym.list_inputs()
    read = set(inputs)
    known = {name: dtype_name(dtype) for name, dtype in held.items() if name in read}
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"input_dtypes must map names of inputs to dtypes, not {shown(given)}")
    with located("`input_dtypes`"):
        known_names(list(given or ()), inputs, "input")
        known.update({name: known_dtype(name, dtype) for name, dtype in (given or {}).items()})
    arguments = set(sym.list_arguments())
    inferred = argument_dtypes(sym, {k: v for k, v in known.items() if k in arguments})
    return {**inferred, **known}


def known_dtype(name: str, dtype: Any) -> str:
    """Return the name of the dtype given for input `name`; raise unless MXNet has that dtype."""
    found = dtype_name(dtype)
    if found not in DTYPE_CODES:
        allowed = ", ".join(DTYPE_CODES)
        raise ArgumentError(NO_DTYPE.format(name=name, allowed=allowed, given=shown(dtype)))
    return found


def known_shapes(argument: str, given: Any) -> Dict[str, Tuple[int, ...]]:
    """Return the shapes of inputs by name; raise for sizes that MXNet can't take."""
    if not isinstance(given, (Mapping, type(None))):
        raise ArgumentError(f"{argument} must map names to shapes, not be {shown(given)}")
    is_large = mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE")
    limit = 2**63 - 1 if is_large else 2**31 - 1
    shapes = {}
    for name, shape in (given or {}).items():
        sizes = shape if isinstance(shape, (tuple, list)) else [None]
        if not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
            raise ArgumentError(NO_SHAPE.format(name=name, given=shown(shape)))
        shapes[name] = tuple(map(int, sizes))
        elements = math.prod(shapes[name])
        if elements > limit:
            size = counted(elements, "element")
            raise ArgumentError(
                TOO_LARGE.format(name=name, shape=shapes[name], elements=size, limit=limit)
            )
    return shapes


def names_of(argument: str, names: Names) -> Sequence[str]:
    """Return the names that an argument gives as a list; none where it is None."""
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"{argument} must be a list of names, not {shown(names)}")
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise ArgumentError(f"{argument} must be a list of strings, not {shown(listed)}")
    return listed


def known_names(names: Sequence[str], there: Sequence[str], what: str) -> Sequence[str]:
    """Return `names`; raise unless all are in `there`. `what` is the kind of thing named."""
    for name in names:
        if name not in there:
            raise unknown(what, name, there)
    return names
