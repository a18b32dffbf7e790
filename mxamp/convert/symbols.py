"""Conversion of one symbol: casts inserted, parameters cast offline, dtypes recorded."""

import functools
import logging
from typing import Any, Collection, Dict, Mapping, NamedTuple, Optional, Sequence, Set, Type

import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError
from ..framework.arrays import cast, copy, float32_parts
from ..framework.machine import dtype_name
from ..framework.wording import counted, shortened, shown
from ..graph.casts.builder import HALVES
from ..graph.casts.insert import rewrite
from ..graph.casts.offline import (
    cast_offline,
    count_range_errors,
    with_copies_before_casts,
    with_merged_variables,
    with_recorded_dtypes,
    without_copies_before_casts,
)
from ..graph.casts.widen import Widened, has_halves, widened, without_lowering_regions
from ..graph.ir import CASTS, Graph, Usage, collector_paused
from ..graph.speed.fuse import fused
from ..graph.speed.fusible import check_fused_dtype
from ..graph.speed.shape_rules import choose
from ..patches.announcements import warn_of_model_in_float16
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..policy.policy import Policy
from ..policy.values import INFINITE_FROM
from .options import Options, check_names, name_list, resolved_dtypes, with_excluded_layers

logger = logging.getLogger("mxamp")

Params = Dict[str, NDArray]

LOSSY = (
    "casting parameter %r to %s turns %s into infinity and %s into zero: keep "
    "what reads it in float32 with `excluded_sym_names`, or leave `cast_optional_params` off"
)
OVERFLOWS = (
    "parameter %r holds %s that would be infinity in %s, in which it is read: keep what "
    "reads it in float32 with `excluded_sym_names`"
)
NOT_FINITE = "parameter %r of the model holds %s of NaN or infinity, among %d"
NO_SYMBOL = (
    "a model's graph must be a Symbol, not {given}; convert_hybrid_block takes blocks, and "
    "convert_files the names of saved models"
)
ROUNDINGS = "casts to half precision that only round are kept, as no operator computes in it: %s"
NO_DATA_NAMES = (
    "`keep_io_types=False` changes the dtype of inputs that are no parameters: name them in "
    "data_names, of {inputs}"
)


class _KeepsCasts:
    """A symbol that keeps its casts when it is saved.

    By default MXNet's `Symbol.save` and `tojson`, and so `export` and `save_checkpoint`, strip
    `amp_cast`. A converted model saved that way is float32 again, and can't be loaded where
    parameters were cast.
    """

    __slots__ = ()

    def save(self, fname: str, remove_amp_cast: bool = False) -> None:
        """Save the symbol with its casts; `remove_amp_cast` is ignored."""
        super().save(fname, remove_amp_cast=False)  # type: ignore[misc]

    def tojson(self, remove_amp_cast: bool = False) -> str:
        """Return the symbol as JSON with its casts; `remove_amp_cast` is ignored."""
        return str(super().tojson(remove_amp_cast=False))  # type: ignore[misc]


@functools.lru_cache(maxsize=None)
def _cast_keeping_class(cls: Type[Any]) -> Type[Any]:
    """Return the subclass of a symbol class whose symbols keep their casts when saved."""
    if issubclass(cls, _KeepsCasts):
        return cls
    return type("Converted" + cls.__name__, (_KeepsCasts, cls), {"__slots__": ()})


class Converted(NamedTuple):
    """A converted symbol with its new dtypes, and the graph, parameters and policy it came from."""

    symbol: Symbol
    inputs: Dict[str, str]  #: new dtypes of the inputs that were cast offline
    data: Dict[str, str]  #: dtypes of the inputs that are no parameters
    params: Params  #: values for `source`, including those of fused operators; not cast yet
    source: Graph  #: the graph without casts
    policy: Policy


@collector_paused()
def convert(
    symbol: Symbol, options: Options, params: Optional[Mapping[str, NDArray]] = None
) -> Converted:
    """Return a symbol converted as `options` say; with `params`, as part of a model.

    With `params`, all other inputs are data, and the shapes of parameters decide precisions too.
    The values of parameters aren't cast yet: see `cast_params`.
    """
    if not isinstance(symbol, Symbol):
        raise ArgumentError(NO_SYMBOL.format(given=shown(symbol)))
    read = Graph.from_symbol(symbol)
    graph = without_copies_before_casts(with_merged_variables(read))
    policy = with_excluded_layers(options.policy, options.excluded_sym_names, graph)
    data = _data_names(graph, options, params)
    held = dict(params or {})
    dtypes = resolved_dtypes(
        symbol, {name: array.dtype for name, array in held.items()}, options.input_dtypes
    )
    wide = widened_for(graph, policy, dtypes, params, options.keep_io_types)
    graph = wide.graph
    held.update(_params_in_float32(held, wide.variables))
    dtypes.update(dict.fromkeys(wide.variables, "float32"))
    if wide.roundings:
        logger.info(ROUNDINGS, shortened(wide.roundings))
    if options.fuse:
        graph, held, policy = fused(graph, held, policy)
    shapes = {name: array.shape for name, array in held.items()}
    kept = _inputs_not_cast_offline(graph, data, options)
    usage = Usage(
        dtypes,
        shapes,
        offline=frozenset(graph.input_names) - kept,
        restore=options.keep_io_types,
        converting=True,
    )
    new = rewrite(graph, policy, usage, choose(graph, policy, usage)).graph
    unchanged = new == graph == read and not options.fuse
    new, inputs = cast_offline(with_recorded_dtypes(new, dtypes), kept, policy.target_dtype)
    taken = {name: dtype for name, dtype in {**dtypes, **inputs}.items() if name in data}
    _warn_of_bad_values(new, held, policy.target_dtype)
    warn_of_model_in_float16(policy)
    if unchanged and not inputs and "amp_cast" not in read.operators:
        return Converted(symbol, {}, taken, held, graph, policy)
    if not options.fuse:
        new = with_copies_before_casts(new, {**dtypes, **inputs})
    written = new.to_symbol(_cast_keeping_class(type(symbol)))  # type: ignore[arg-type]
    return Converted(written, inputs, taken, held, graph, policy)


def widened_for(
    graph: Graph,
    policy: Policy,
    dtypes: Mapping[str, str],
    params: Optional[Mapping[str, NDArray]],
    keep_io_types: bool,
) -> Widened:
    """Return a model's graph without half precision, from which every conversion starts.

    With `keep_io_types` the inputs that are no parameters and the outputs keep their dtypes; where
    `params` is None, all inputs do. Parameters that nothing reads become float32 too.
    """
    if not policy.lowers:
        graph = without_lowering_regions(graph)
    elif graph.has_fused_operators:
        # They have no class in a policy: they keep the precision that they were fused in.
        held = {name: dtype_name(array.dtype) for name, array in (params or {}).items()}
        check_fused_dtype(graph, {**held, **dtypes}, policy)
        return Widened(graph, frozenset(), ())
    held = {name: dtype_name(array.dtype) for name, array in (params or {}).items()}
    dtypes = {**held, **dtypes}
    if not has_halves(graph, dtypes):
        return Widened(graph, frozenset(), ())
    kept = {name for name in graph.input_names if params is None or name not in params}
    wide = widened(graph, dtypes, kept if keep_io_types else frozenset(), restore=keep_io_types)
    unread = {name for name in held if held[name] in HALVES} - set(graph.input_names)
    return wide._replace(variables=wide.variables | unread)


def _params_in_float32(params: Mapping[str, NDArray], names: Collection[str]) -> Params:
    """Return the parameters among `names` in float32."""
    with suspended():
        # A copy has the plain layout, which casts read.
        return {name: cast(copy(params[name]), "float32") for name in params.keys() & set(names)}


def _data_names(
    graph: Graph, options: Options, params: Optional[Mapping[str, NDArray]]
) -> Sequence[str]:
    """Return the names of a graph's inputs that are no parameters."""
    if params is not None:
        return [name for name in graph.input_names if name not in params]
    names = name_list("data_names", options.data_names)
    if options.policy.lowers and not options.keep_io_types and options.data_names is None:
        raise ArgumentError(NO_DATA_NAMES.format(inputs=", ".join(graph.input_names)))
    check_names(names, graph.input_names, "input")
    return names


def _inputs_not_cast_offline(graph: Graph, data: Sequence[str], options: Options) -> Set[str]:
    """Return the names of a graph's inputs that `options` don't let `convert` cast offline."""
    kept = set(options.not_offline)
    if options.keep_io_types:
        kept.update(data)
    if not options.casts_offline:
        kept.update(name for name in graph.input_names if name not in data)
    return kept


def cast_params(params: Mapping[str, NDArray], dtypes: Mapping[str, str]) -> Params:
    """Return the parameters, those named in `dtypes` cast; warn of values that become Inf or 0."""
    result = dict(params)
    with suspended():
        for name in params.keys() & dtypes.keys():
            # oneDNN may hold a weight in a layout that it can't cast from: a copy is plain.
            result[name] = cast(copy(params[name]), dtypes[name])
            overflown, vanished = count_range_errors(params[name], result[name])
            if overflown or vanished:
                lost = counted(overflown, "finite value"), counted(vanished, "value")
                logger.warning(LOSSY, name, dtypes[name], *lost)
    return result


def _warn_of_bad_values(graph: Graph, params: Mapping[str, NDArray], dtype: str) -> None:
    """Log the parameters with NaN or Inf, and those whose cast to `dtype` in `graph` gives Inf."""
    read = _variables_cast_to(graph, dtype)
    with suspended():
        for name, array in params.items():
            if dtype_name(array.dtype) not in CASTABLE or array.stype != "default":
                continue
            bad = over = 0
            for values in float32_parts(array):
                finite = np.isfinite(values)
                bad += int((~finite).sum())
                over += int((finite & (np.abs(values) >= INFINITE_FROM[dtype])).sum())
            if bad:
                logger.warning(NOT_FINITE, name, counted(bad, "value"), array.size)
            if over and name in read:
                logger.warning(OVERFLOWS, name, counted(over, "finite value"), dtype)


def _variables_cast_to(graph: Graph, dtype: str) -> Set[str]:
    """Return the names of the variables that a graph casts to `dtype`, directly or by `_copy`."""
    found = set()
    for node in graph.nodes:
        if node.op in CASTS and node.attrs.get("dtype") == dtype:
            source = graph.nodes[node.inputs[0][0]]
            if source.op == "_copy":
                source = graph.nodes[source.inputs[0][0]]
            if source.is_variable:
                found.add(source.name)
    return found
