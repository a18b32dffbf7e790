"""Checks on what conversion and its kin are given: layers, inputs, dtypes."""

import fnmatch
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, Iterable, Mapping, Optional, Sequence

from mxnet.symbol import Symbol

from ..errors import ArgumentError, unknown
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.wording import shown
from ..graph.graph import Graph, argument_dtypes
from ..policy.policy import Policy

__all__ = [
    "Conversion",
    "Names",
    "checked_policy",
    "known_dtype",
    "known_dtypes",
    "known_names",
    "names_of",
]

LAYER_NAMES = "* and ? stand for any characters; Gluon's layers end in _fwd"

Names = Optional[Iterable[str]]


@dataclass(frozen=True)
class Conversion:
    """What a conversion is told: the arguments of the `convert_*` functions, by those names.

    `policy` is made of the operator lists. `not_offline` names inputs that are not cast offline,
    whatever else is said.
    """

    policy: Policy
    excluded_sym_names: Names = None
    data_names: Names = None
    cast_optional_params: bool = False
    keep_io_types: bool = True
    input_dtypes: Optional[Mapping[str, Any]] = None
    fuse: bool = False
    not_offline: FrozenSet[str] = frozenset()


def checked_policy(policy: Policy, excluded: Names, graph: Graph) -> Policy:
    """Return the policy with layers of `graph` kept in float32 by name."""
    patterns = names_of("excluded_sym_names", excluded)
    _check_layers(patterns, graph)
    return policy.override(fp32_layers=patterns) if patterns else policy


def known_dtypes(
    sym: Symbol, held: Mapping[str, Any], given: Optional[Mapping[str, Any]] = None
) -> Dict[str, str]:
    """Return the dtype of every input of a symbol: a parameter's, given, inferred, or float32."""
    inputs = sym.list_inputs()
    known = {name: dtype_name(dtype) for name, dtype in held.items() if name in inputs}
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentError(f"input_dtypes must map names of inputs to dtypes, not {shown(given)}")
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


def _check_layers(patterns: Sequence[str], graph: Graph) -> None:
    layers = list(_layer_names(graph))
    for pattern in patterns:
        if not fnmatch.filter(layers, pattern):
            raise unknown("layer", pattern, layers, LAYER_NAMES)


def _layer_names(graph: Graph) -> Iterable[str]:
    for node in graph.nodes:
        if not node.is_variable:
            yield node.name
        for inner in node.subgraphs:
            yield from _layer_names(inner)
