"""Checks on what conversion and its kin are given: layers, inputs, dtypes."""

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

from ..errors import ArgumentError, UnknownNameError, located, unknown
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.wording import counted, shown
from ..graph.ir import Graph, argument_dtypes
from ..policy.layers import Layers, layer_patterns
from ..policy.policy import Policy
from ..policy.targets import check_truth

__all__ = [
    "Conversion",
    "Names",
    "as_tuned",
    "checked_policy",
    "known_dtype",
    "known_dtypes",
    "known_names",
    "known_shapes",
    "names_of",
]

logger = logging.getLogger("mxamp")

LAYER_NAMES = "* and ? stand for any characters; Gluon's layers end in _fwd"

NO_OPERATORS = "`excluded_sym_names`: one of the blocks has no operators, and no children"

SHAPE = "the shape of input {name!r} must be sizes above 0, such as (1, 3, 224, 224), not {given}"
TOO_LARGE = (
    "input {name!r} of shape {given} has {elements}, and this MXNet takes arrays of up to "
    "{limit:,}: give a smaller shape"
)
_LIMITS = {True: 2**63 - 1, False: 2**31 - 1}  # by whether MXNet is built for large arrays

Names = Optional[Iterable[str]]


@dataclass(frozen=True)
class Conversion:
    """What a conversion is told: the arguments of the `convert_*` functions, by those names.

    `policy` is made of the operator lists. `not_offline` names inputs that are not cast offline,
    whatever else is said.
    """

    policy: Policy
    excluded_sym_names: Layers = None
    data_names: Names = None
    cast_optional_params: bool = False
    keep_io_types: bool = True
    input_dtypes: Optional[Mapping[str, Any]] = None
    fuse: bool = False
    not_offline: FrozenSet[str] = frozenset()


def as_tuned(
    policy: Policy, cast_optional_params: Optional[bool], fuse: Optional[bool]
) -> Tuple[bool, bool]:
    """Return whether to cast parameters and to fuse: as was measured, where that is not said."""
    for name, given in (("cast_optional_params", cast_optional_params), ("fuse", fuse)):
        if given is not None:
            check_truth(name, given)
    way = policy.evidence.way if policy.evidence is not None else ""
    cast = way in ("converted", "fused") if cast_optional_params is None else cast_optional_params
    return bool(cast), way == "fused" if fuse is None else bool(fuse)


def checked_policy(policy: Policy, excluded: Layers, graph: Graph) -> Policy:
    """Return the policy with layers of `graph` kept in float32, by names or by blocks.

    A policy is for several models: of its own names, those that this one lacks are logged.
    """
    layers = list(_layer_names(graph))
    kept: List[str] = []
    for patterns in layer_patterns("excluded_sym_names", excluded):
        # A block's children may not all be called.
        unknown_ones = list(_unknown_layers(patterns, layers))
        if len(unknown_ones) == len(patterns):
            raise unknown_ones[0] if patterns else ArgumentError(NO_OPERATORS)
        kept += patterns
    for error in _unknown_layers(policy.fp32_layers, layers):
        logger.warning("fp32_layers of the policy: %s", error)
    return policy.override(fp32_layers=kept) if kept else policy


def known_dtypes(
    sym: Symbol, held: Mapping[str, Any], given: Optional[Mapping[str, Any]] = None
) -> Dict[str, str]:
    """Return the dtype of every input of a symbol: a parameter's, given, inferred, or float32."""
    inputs = sym.list_inputs()
    read = set(inputs)
    known = {name: dtype_name(dtype) for name, dtype in held.items() if name in read}
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"input_dtypes must map names of inputs to dtypes, not {shown(given)}")
    with located("`input_dtypes`"):
        for name, dtype in (given or {}).items():
            known_names([name], inputs, "input")
            known[name] = known_dtype(name, dtype)
    arguments = set(sym.list_arguments())
    inferred = argument_dtypes(sym, {k: v for k, v in known.items() if k in arguments})
    return {**inferred, **known}


def known_dtype(name: str, dtype: Any) -> str:
    """Return the name of the dtype that input `name` is given, one of MXNet's."""
    found = dtype_name(dtype)
    if found not in DTYPE_CODES:
        raise ArgumentError(
            f"the dtype of input {name!r} must be one of {', '.join(DTYPE_CODES)}, "
            f"not {shown(dtype)}"
        )
    return found


def known_shapes(argument: str, given: Any) -> Dict[str, Tuple[int, ...]]:
    """Return the shapes by names of inputs that an argument gives; none where it gives None."""
    if not isinstance(given, (Mapping, type(None))):
        raise ArgumentError(f"{argument} must map names to shapes, not be {shown(given)}")
    limit = _LIMITS[mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE")]
    shapes = {}
    for name, shape in (given or {}).items():
        sizes = shape if isinstance(shape, (tuple, list)) else [None]
        if not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
            raise ArgumentError(SHAPE.format(name=name, given=shown(shape)))
        shapes[name] = tuple(map(int, sizes))
        count = math.prod(shapes[name])
        if count > limit:
            said = {
                "name": name,
                "given": shapes[name],
                "elements": counted(count, "element"),
                "limit": limit,
            }
            raise ArgumentError(TOO_LARGE.format(**said))
    return shapes


def names_of(argument: str, names: Names) -> Sequence[str]:
    """Return a list of names that an argument gives; none where it gives None."""
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError(f"{argument} must be a list of names, not {shown(names)}")
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise ArgumentError(f"{argument} must be a list of strings, not {shown(listed)}")
    return listed


def known_names(names: Sequence[str], there: Sequence[str], what: str) -> Sequence[str]:
    """Return `names`, all of which are `there`; `what` says what they name."""
    for name in names:
        if name not in there:
            raise unknown(what, name, there)
    return names


def _unknown_layers(patterns: Sequence[str], layers: Sequence[str]) -> Iterator[UnknownNameError]:
    for pattern in patterns:
        if not fnmatch.filter(layers, pattern):
            yield unknown("layer", pattern, layers, LAYER_NAMES)


def _layer_names(graph: Graph) -> Iterable[str]:
    for node in graph.nodes:
        if not node.is_variable:
            yield node.name
        for inner in node.subgraphs:
            yield from _layer_names(inner)
