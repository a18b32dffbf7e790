"""One symbol converted: the rewrite, dtypes recorded, casts made offline, casts kept on save."""

from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..framework.arrays import cast, copy
from ..framework.collector import collector_paused
from ..framework.machine import DTYPE_CODES, dtype_name
from ..framework.wording import shown
from ..graph.casts.builder import HALVES, is_converted
from ..graph.casts.insert import rewrite
from ..graph.casts.offline import (
    cast_offline,
    widened,
    with_copies,
    with_dtypes,
    with_single_variables,
    without_copies,
)
from ..graph.ir import Graph, Usage
from ..graph.recognise import recognised
from ..graph.speed.fuse import fused
from ..graph.speed.shape_rules import choose
from ..policy.active import suspended
from ..policy.policy import Policy
from .arguments import Conversion, checked_policy, known_dtypes, known_names, names_of
from .lossy import warn_of_losses, warn_of_values

__all__ = ["Converted", "Params", "cast_params", "convert"]

Params = Dict[str, NDArray]

NO_DATA_NAMES = (
    "`keep_io_types=False` changes the dtype of inputs that are no parameters: name them in "
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


#: Made once each, so that equal symbols have one class.
_classes: Dict[type, type] = {}


def _keeping_casts(cls: type) -> type:
    """Return the symbol class `cls` as one that keeps casts."""
    if issubclass(cls, _KeepsCasts):
        return cls
    if cls not in _classes:
        _classes[cls] = type("Converted" + cls.__name__, (_KeepsCasts, cls), {"__slots__": ()})
    return _classes[cls]


class Converted(NamedTuple):
    """A converted model, and how it was made."""

    symbol: Symbol
    inputs: Dict[str, str]  #: those it now takes in another dtype
    data: Dict[str, str]  #: the dtypes of inputs that are no parameters
    params: Params  #: of `source`: the values given, those of fused operators among them
    source: Graph  #: the graph without casts
    policy: Policy  #: what decided


@collector_paused()
def convert(
    symbol: Symbol, conversion: Conversion, params: Optional[Mapping[str, NDArray]] = None
) -> Converted:
    """Convert a symbol, or with `params` a model, as `convert_symbol` and `convert_model` say.

    Where parameters are known, inputs that are none are its data, and precisions are chosen by
    the parameters' shapes too.
    """
    if not isinstance(symbol, Symbol):
        raise ArgumentError(f"a model's graph must be a Symbol, not {shown(symbol)}")
    read = Graph.from_symbol(symbol)
    graph = without_copies(with_single_variables(read))
    policy = recognised(conversion.policy, read)
    policy = checked_policy(policy, conversion.excluded_sym_names, graph)
    data = _data_names(graph, conversion, params)
    held = dict(params or {})
    dtypes = known_dtypes(
        symbol, {name: array.dtype for name, array in held.items()}, conversion.input_dtypes
    )
    if is_converted(graph):
        wide = _wide_params(graph, held, policy)
        graph = widened(graph, wide.keys())
        held.update(wide)
        dtypes.update(dict.fromkeys(wide, "float32"))
    if conversion.fuse:
        graph, held, policy = fused(graph, held, policy)
    shapes = {name: array.shape for name, array in held.items()}
    kept = _not_offline(graph, data, conversion)
    usage = Usage(
        dtypes,
        shapes,
        offline=frozenset(graph.input_names) - kept,
        restore=conversion.keep_io_types,
        converting=True,
    )
    new = rewrite(graph, policy, usage, choose(graph, policy, usage)).graph
    unchanged = new == graph == read and not conversion.fuse
    new, inputs = _with_inputs_cast(with_dtypes(new, dtypes), kept, policy)
    taken = {name: dtype for name, dtype in {**dtypes, **inputs}.items() if name in data}
    warn_of_values(new, held, policy.target_dtype)
    if unchanged and not inputs and "amp_cast" not in read.operators:
        return Converted(symbol, {}, taken, held, graph, policy)
    if not conversion.fuse:
        new = with_copies(new, {**dtypes, **inputs})
    written = new.to_symbol(_keeping_casts(type(symbol)))
    return Converted(written, inputs, taken, held, graph, policy)


def _wide_params(graph: Graph, params: Mapping[str, NDArray], policy: Policy) -> Params:
    """Return in float32 what an earlier conversion has cast to the other half precision."""
    other = HALVES - {policy.target_dtype}
    codes = {str(DTYPE_CODES[dtype]) for dtype in other}
    names = {node.name for node in graph.variables if node.attrs.get("__dtype__") in codes}
    with suspended():
        return {
            name: cast(array, "float32")
            for name, array in params.items()
            if name in names and dtype_name(array.dtype) in other
        }


def _data_names(
    graph: Graph, conversion: Conversion, params: Optional[Mapping[str, NDArray]]
) -> Sequence[str]:
    """Return the inputs that are no parameters."""
    if params is not None:
        return [name for name in graph.input_names if name not in params]
    names = names_of("data_names", conversion.data_names)
    if not conversion.keep_io_types and conversion.data_names is None:
        raise ArgumentError(NO_DATA_NAMES.format(inputs=", ".join(graph.input_names)))
    return known_names(names, graph.input_names, "input")


def _not_offline(graph: Graph, data: Sequence[str], conversion: Conversion) -> Set[str]:
    """Return the inputs that keep their dtype, whatever reads them."""
    kept = set(conversion.not_offline)
    if conversion.keep_io_types:
        kept.update(data)
    if not (conversion.cast_optional_params or conversion.fuse):
        kept.update(name for name in graph.input_names if name not in data)
    return kept


def _with_inputs_cast(graph: Graph, kept: Set[str], policy: Policy) -> Tuple[Graph, Dict[str, str]]:
    """Drop the casts of inputs that are to be given in the target dtype; return their dtypes."""
    if kept.issuperset(graph.input_names):
        return graph, {}
    return cast_offline(graph, kept, policy.target_dtype)


def cast_params(params: Mapping[str, NDArray], dtypes: Mapping[str, str]) -> Params:
    """Return the parameters cast to `dtypes`; those that lose values are named in the log."""
    result = dict(params)
    with suspended():
        for name in params.keys() & dtypes.keys():
            # oneDNN may hold a weight in a layout that it can't cast from: a copy is plain.
            result[name] = cast(copy(params[name]), dtypes[name])
            warn_of_losses(name, params[name], result[name])
    return result
