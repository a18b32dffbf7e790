"""Conversion of one symbol: insert casts, cast parameters offline, and record dtypes."""

import functools
import logging
from typing import Any, Collection, Dict, Mapping, NamedTuple, Optional, Set, Type

import numpy as np
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..backends import backend_of
from ..errors import ArgumentError
from ..framework.arrays import cast, copy, float32_parts
from ..framework.machine import dtype_name
from ..framework.wording import counted, shortened, shown
from ..graph.casts.insert import rewrite
from ..graph.casts.offline import (
    cast_offline,
    names_cast_to,
    with_copies_before_casts,
    with_merged_variables,
    with_recorded_dtypes,
    without_copies_before_casts,
)
from ..graph.casts.widen import Widened, has_halves, widened, without_lowering_regions
from ..graph.ir import HALVES, Graph, Usage, collector_paused
from ..patches.announcements import warn_of_speed
from ..policy.active import suspended
from ..policy.decision import CASTABLE
from ..policy.policy import Policy
from .options import Options, check_names, name_list, resolved_dtypes, with_excluded_layers
from .outputs import Distance

logger = logging.getLogger("mxamp")

Params = Dict[str, NDArray]

LOSSY = "in %s, values of %s become infinity or too inexact: name %s in `excluded_sym_names`"
#: The relative error of an array's cast that is worth a warning: rounding gives 0.0005.
_LOSS = 0.01
UNCHANGED = "the model is in float32 already, and stays as it is: `fuse=True` fuses it for CPUs"
AGAIN = "the model was converted before, and may hold rounded parameters: convert the float32 model"
FUSED_FLOAT16 = "a fused model can't become float16: convert the model as it was before `fuse`"
NOT_FINITE = "parameter %r of the model holds %s of NaN or infinity, among %d"


class _KeepsCasts:
    """Mixin for symbols whose `save` and `tojson` keep `amp_cast` nodes, which MXNet's strip.

    By default MXNet's `Symbol.save` and `tojson`, and so `export` and `save_checkpoint`, strip
    `amp_cast`. A converted model saved that way is float32 again, and can't be loaded where
    parameters were cast.
    """

    __slots__ = ()

    def save(self, fname: str, remove_amp_cast: bool = False) -> None:
        """Save the symbol with its `amp_cast` nodes; `remove_amp_cast` is ignored."""
        super().save(fname, remove_amp_cast=False)  # type: ignore[misc]

    def tojson(self, remove_amp_cast: bool = False) -> str:
        """Return the symbol as JSON with its `amp_cast` nodes; `remove_amp_cast` is ignored."""
        return str(super().tojson(remove_amp_cast=False))  # type: ignore[misc]


@functools.lru_cache(maxsize=None)
def _cast_keeping_class(cls: Type[Any]) -> Type[Any]:
    """Return a subclass of a symbol class whose symbols keep `amp_cast` nodes when saved."""
    if issubclass(cls, _KeepsCasts):
        return cls
    return type("Converted" + cls.__name__, (_KeepsCasts, cls), {"__slots__": ()})


class Converted(NamedTuple):
    """The result of a conversion: symbol, parameters and new dtypes, and the original graph."""

    symbol: Symbol
    offline: Dict[str, str]  #: new dtypes of the inputs that were cast offline
    data: Dict[str, str]  #: dtypes of the inputs that are no parameters
    params: Params  #: all values, cast, including those of fused operators
    graph: Graph  #: without casts
    policy: Policy


@collector_paused()
def convert(symbol: Symbol, options: Options, params: Optional[Params] = None) -> Converted:
    """Convert a symbol, or with `params` the symbol and parameters of a model.

    With `params`, all other inputs are data, and the shapes of parameters decide precisions too.
    """
    if not isinstance(symbol, Symbol):
        raise ArgumentError(f"a model's graph must be a Symbol, not {shown(symbol)}")
    graph = without_copies_before_casts(with_merged_variables(Graph.from_symbol(symbol)))
    policy = with_excluded_layers(options.policy, options.excluded_sym_names, graph)
    if policy.lowers and graph.is_converted:
        logger.warning(AGAIN)
    data: Collection[str] = set(graph.input_names).difference(params or ())
    if params is None:
        data = name_list("data_names", options.data_names)
        check_names(data, graph.input_names, "input")
    # The graph without casts: half precision is widened, and operators are fused if asked for.
    values = dict(params or {})
    dtypes = resolved_dtypes(symbol, values, options.input_dtypes)
    graph, variables = widened_graph(graph, policy, dtypes, params, options.keep_io_types)
    values.update(cast_params(values, dict.fromkeys(variables & values.keys(), "float32")))
    dtypes.update(dict.fromkeys(variables, "float32"))
    if options.fuse:
        graph, values, policy = backend_of(policy.device).fuse(graph, values, policy)
    elif policy.lowers and not has_halves(graph, dtypes):
        backend_of(policy.device).check_fused(graph, policy)
    shapes = {name: array.shape for name, array in values.items()}
    kept = _kept_inputs(graph, data, options)
    offline = frozenset(graph.input_names) - kept
    usage = Usage(dtypes, shapes, offline=offline, restore=options.keep_io_types, converting=True)
    new = rewrite(graph, policy, usage).graph
    lowered = names_cast_to(new, policy.target_dtype)
    new, new_dtypes = cast_offline(with_recorded_dtypes(new, dtypes), kept, policy.target_dtype)
    dtypes = {**dtypes, **new_dtypes}
    noted = values if options.notes else {}
    _warn_of_bad_values(noted, graph, lowered | new_dtypes.keys(), policy.target_dtype)
    warn_of_speed(policy, of_model=True)
    if not options.fuse:
        new = with_copies_before_casts(new, dtypes)
    result = new.to_symbol(_cast_keeping_class(type(symbol)))  # type: ignore[arg-type]
    # Not of a policy without substitutions, such as that of a plain form that `tune` chose.
    may_fuse = all((options.notes, policy.substitutions, not options.fuse, not policy.lowers))
    if may_fuse and new.to_json() == Graph.from_symbol(symbol).to_json():
        logger.warning(UNCHANGED)
    taken = {name: dtypes[name] for name in dtypes.keys() & set(data)}
    return Converted(result, new_dtypes, taken, cast_params(values, new_dtypes), graph, policy)


def _kept_inputs(graph: Graph, data: Collection[str], options: Options) -> Set[str]:
    """Return the names of inputs that a conversion must not cast offline."""
    params = () if options.cast_optional_params or options.fuse else {*graph.input_names} - {*data}
    return {*options.not_offline, *params, *(data if options.keep_io_types else ())}


def widened_graph(
    graph: Graph,
    policy: Policy,
    dtypes: Mapping[str, str],
    params: Optional[Mapping[str, NDArray]],
    keep_io_types: bool,
) -> Widened:
    """Convert a model's graph from half precision to float32, before casts are inserted.

    With `keep_io_types` the inputs that are no parameters and the outputs keep their dtypes; where
    `params` is None, all inputs do. Parameters that nothing reads become float32 too.
    """
    known = {name: dtype_name(array.dtype) for name, array in (params or {}).items()}
    dtypes = {**known, **dtypes}
    # Fused operators have no class in a policy: they keep the precision that they were fused in.
    stays = policy.lowers and graph.has_fused_operators
    if stays and policy.target_dtype == "float16":
        raise ArgumentError(FUSED_FLOAT16)
    if not policy.lowers:
        graph = without_lowering_regions(graph)
    if stays or not has_halves(graph, dtypes):
        return Widened(graph, frozenset())
    kept = {name for name in graph.input_names if params is None or name not in params}
    wide = widened(graph, dtypes, kept if keep_io_types else frozenset(), restore=keep_io_types)
    unread = {name for name in known if known[name] in HALVES} - set(graph.input_names)
    return wide._replace(variables=wide.variables | unread)


def cast_params(params: Mapping[str, NDArray], dtypes: Mapping[str, str]) -> Params:
    """Return the parameters by name; cast each one named in `dtypes` to the dtype given there."""
    with suspended():
        # oneDNN may hold a weight in a layout that it can't cast from: a copy is plain.
        lowered = {n: cast(copy(params[n]), dtypes[n]) for n in params.keys() & dtypes.keys()}
    return {**params, **lowered}


def _warn_of_bad_values(params: Params, graph: Graph, lowered: Collection[str], dtype: str) -> None:
    """Warn of parameters with NaN or Inf, and of those too large or small for `dtype`."""
    readers = {graph.nodes[i].name: node.name for node in graph.nodes for i, _ in node.inputs}
    lossy = []
    with suspended():
        for name, array in params.items():
            if dtype_name(array.dtype) not in CASTABLE or array.stype != "default":
                continue
            bad = sum(int((~np.isfinite(values)).sum()) for values in float32_parts(array))
            if bad:
                logger.warning(NOT_FINITE, name, counted(bad, "value"), array.size)
            if name in lowered:
                error = Distance()
                for pair in zip(float32_parts(array), float32_parts(cast(copy(array), dtype))):
                    error.add(name, *pair)
                # Small biases matter less than the sums that they are added to.
                is_inexact = error.relative > _LOSS and len(array.shape) > 1
                lossy += [name] if error.lost or is_inexact else []
    if lossy:
        layers = dict.fromkeys(repr(readers.get(name, name)) for name in lossy)
        logger.warning(LOSSY, dtype, shortened(lossy), ", ".join(layers))
