"""One symbol converted: the rewrite, dtypes recorded, casts made offline, casts kept on save."""

import logging
from typing import Any, Dict, FrozenSet, Iterable, Mapping, NamedTuple, Optional

from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..framework.arrays import cast
from ..graph.cast_params import cast_offline, count_losses, with_dtypes
from ..graph.graph import Graph
from ..graph.insert_casts import rewrite
from ..graph.shape_rules import choose
from ..policy.active import suspended
from ..policy.policy import Policy
from .arguments import Names, checked_policy, known_dtypes, known_names, names_of

__all__ = ["Converted", "Params", "cast_params", "convert_graph"]

logger = logging.getLogger("mxamp")

Params = Dict[str, NDArray]

LOSSY = (
    "casting parameter %r to %s turns %d finite values into infinity and %d values into zero: keep "
    "what reads it in float32 with excluded_sym_names, or leave cast_optional_params off"
)
NO_DATA_NAMES = (
    "keep_io_types=False changes the dtype of inputs that are no parameters: name them in "
    "data_names, of {inputs}"
)


class _KeepsCasts:
    """A symbol that keeps its casts when it is saved.

    MXNet's `Symbol.save`, `tojson` and with them `export` and `save_checkpoint` strip `amp_cast`
    unless told otherwise; a converted model saved so is the float32 one again, and can't be loaded
    where parameters were cast.
    """

    __slots__ = ()

    def save(self, fname: str, remove_amp_cast: bool = False) -> None:
        """Save it with its casts, whatever `remove_amp_cast` says."""
        super().save(fname, remove_amp_cast=False)  # type: ignore[misc]

    def tojson(self, remove_amp_cast: bool = False) -> str:
        """Return it as JSON with its casts, whatever `remove_amp_cast` says."""
        return str(super().tojson(remove_amp_cast=False))  # type: ignore[misc]


_kinds: Dict[type, type] = {}


def _keeping_casts(kind: type) -> type:
    """Return the symbol class `kind` as one that keeps casts."""
    if issubclass(kind, _KeepsCasts):
        return kind
    if kind not in _kinds:
        _kinds[kind] = type("Converted" + kind.__name__, (_KeepsCasts, kind), {"__slots__": ()})
    return _kinds[kind]


class Converted(NamedTuple):
    """A converted symbol, the inputs that it now takes in another dtype, and what decided it."""

    symbol: Symbol
    inputs: Dict[str, str]
    policy: Policy


def convert_graph(
    sym: Symbol,
    policy: Policy,
    excluded: Names = None,
    data_names: Names = None,
    offline: bool = False,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    params: Optional[Mapping[str, NDArray]] = None,
    keep: Iterable[str] = (),
) -> Converted:
    """Convert a symbol as `convert_symbol` says; inputs in `keep` are not cast offline.

    Where parameters are known, precisions are chosen by their shapes too.
    """
    if not isinstance(sym, Symbol):
        raise ArgumentError(f"a model's graph is a Symbol, not {type(sym).__name__}")
    graph = Graph.from_symbol(sym)
    policy = checked_policy(policy, excluded, graph)
    data = known_names(names_of("data_names", data_names), sym.list_inputs(), "input")
    if not keep_io_types and data_names is None:
        raise ArgumentError(NO_DATA_NAMES.format(inputs=", ".join(sym.list_inputs())))
    held = params or {}
    found = known_dtypes(sym, {name: p.dtype for name, p in held.items()}, input_dtypes)
    shapes = {name: p.shape for name, p in held.items()}
    choices = choose(sym, policy, shapes, training=False, converting=True)
    result = rewrite(graph, policy, found, restore=keep_io_types, choices=choices)
    if result.graph == graph:
        return Converted(sym, {}, policy)
    new = with_dtypes(result.graph, found)
    kept = _kept_inputs(sym, data, offline, keep_io_types) | frozenset(keep)
    cast_inputs: Dict[str, str] = {}
    if not kept.issuperset(sym.list_inputs()):
        new, cast_inputs = cast_offline(new, kept, policy.target_dtype)
    return Converted(new.to_symbol(_keeping_casts(type(sym))), cast_inputs, policy)


def _kept_inputs(
    sym: Symbol, data: Iterable[str], offline: bool, keep_io_types: bool
) -> FrozenSet[str]:
    """Return the inputs whose casts stay in the graph."""
    data = frozenset(data)
    params = frozenset(sym.list_inputs()) - data
    return (frozenset() if offline else params) | (data if keep_io_types else frozenset())


def cast_params(params: Mapping[str, NDArray], converted: Converted) -> Params:
    """Return new parameters for a converted symbol; those that lose values are named in the log."""
    result = dict(params)
    with suspended():
        for name in params.keys() & converted.inputs.keys():
            result[name] = cast(params[name], converted.inputs[name])
            overflown, vanished = count_losses(params[name], result[name])
            if overflown or vanished:
                logger.warning(LOSSY, name, converted.inputs[name], overflown, vanished)
    return result
