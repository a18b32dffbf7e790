"""Converting saved models: symbols and parameters in, mixed-precision ones out.

What comes out holds stock operators only and runs in plain MXNet, without mxamp. It takes and
returns the dtypes of the original. The caller's symbol, block and dictionaries stay as they are.
"""

import logging
import warnings
from typing import (
    AbstractSet,
    Any,
    Dict,
    Iterable,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
)  # fmt: skip

from mxnet.context import Context, current_context
from mxnet.gluon import HybridBlock, SymbolBlock
from mxnet.module import BucketingModule
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from .arguments import Names, checked_policy, known_dtypes, known_names, names_of
from .autocast import autocast, make_policy
from .eager import cast
from .errors import ArgumentError, StateError
from .graph import Graph
from .offline import cast_offline, losses, with_dtypes
from .policy import Conditional, Policy
from .rewrite import rewrite

__all__ = ["convert_bucketing_module", "convert_hybrid_block", "convert_model", "convert_symbol"]

logger = logging.getLogger("mxamp")

LOSSY = (
    "casting parameter %r to %s turns %d finite values into infinity and %d values into zero: keep "
    "what reads it in float32 with excluded_sym_names, or leave cast_optional_params off"
)

Params = Dict[str, NDArray]

NOT_RUN = (
    "block {name!r} has no graph yet: call block.hybridize() and run it once on an example input "
    "before convert_hybrid_block"
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


class _Converted(NamedTuple):
    symbol: Symbol
    params: Dict[str, str]  #: the parameters to cast offline, with their dtype


def convert_symbol(
    sym: Symbol,
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Names = None,
    data_names: Names = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> Symbol:
    """Return a float32 symbol with casts inserted.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    >>> policy = amp.Policy.default("float16", device="gpu")
    >>> amp.convert_symbol(net, policy=policy).get_internals().list_outputs()[1]
    'data_amp_cast_float16_output'

    Parameters
    ----------
    sym : Symbol
        Stays as it is.
    target_dtype : str or dtype, default "float16"
        "float16" or "bfloat16".
    target_dtype_ops, fp32_ops, widest_dtype_ops : list of str, optional
        Operators to run in the target dtype, in float32, in the widest dtype of their inputs;
        each replaces the default list, as in `mxnet.contrib.amp`.
    conditional_fp32_ops : list of (str, str, list of str), optional
        (operator, attribute, values): float32 where the attribute has one of the values.
    excluded_sym_names : list of str, optional
        Nodes to keep in float32, by name; * and ? stand for any characters.
    data_names : list of str, optional
        The inputs that are no parameters. Never cast offline.
    cast_optional_params : bool, default False
        Give parameters that are only read in the target dtype that dtype, with no cast in the
        graph; their values must then be cast too, which `convert_model` does.
    policy : Policy, optional
        In place of `target_dtype` and the operator lists. The default one is for the kind of
        device this machine has: to convert for GPUs on a machine without one, give
        `Policy.default("float16", device="gpu")`.
    input_dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32 and can't be inferred.

    Raises
    ------
    UnknownNameError
        An operator, node or input that is not there, with the closest match.
    ArgumentError
        Arguments of wrong types, or an operator in two lists.
    """
    chosen = make_policy(
        target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops, widest_dtype_ops, policy
    )
    return _convert(
        sym, chosen, excluded_sym_names, data_names, cast_optional_params, input_dtypes
    ).symbol


def convert_model(
    sym: Symbol,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Names = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> Tuple[Symbol, Params, Params]:
    """Return a float32 model's symbol and parameters, converted as by `convert_symbol`.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        sym, args, auxs = amp.convert_model(*model, target_dtype="bfloat16")
        mx.model.save_checkpoint("resnet-bf16", 0, sym, args, auxs)

    The parameters come back in new dictionaries; with `cast_optional_params` those that are read
    in the target dtype alone are cast to it.
    """
    for name, params in (("arg_params", arg_params), ("aux_params", aux_params)):
        if not isinstance(params, Mapping):
            raise ArgumentError(f"{name} maps names to NDArrays, and is not {params!r}")
    chosen = make_policy(
        target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops, widest_dtype_ops, policy
    )
    held = {**arg_params, **aux_params}
    data = None
    if isinstance(sym, Symbol):
        data = [name for name in sym.list_inputs() if name not in held]
    dtypes = {name: array.dtype for name, array in held.items()}
    converted = _convert(
        sym, chosen, excluded_sym_names, data, cast_optional_params,
        {**dtypes, **(input_dtypes or {})},
    )  # fmt: skip
    args, auxs = _cast_params(arg_params, converted), _cast_params(aux_params, converted)
    return converted.symbol, args, auxs


def convert_hybrid_block(
    block: HybridBlock,
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Names = None,
    ctx: Optional[Context] = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> SymbolBlock:
    """Return a hybridized block that was run once as a mixed-precision block.

    ::

        net.hybridize()
        net(example)
        fast = amp.convert_hybrid_block(net, "bfloat16")
        fast(data)

    The new block is called as the old one was, nested inputs and outputs included, and holds
    copies of its parameters, under the same names, on `ctx` (by default the current context).
    The other parameters are those of `convert_symbol`.

    Raises `StateError` where the block was not hybridized and run before.
    """
    if not isinstance(block, HybridBlock):
        raise ArgumentError(f"convert_hybrid_block takes a HybridBlock, not {type(block).__name__}")
    if not block._cached_graph:
        raise StateError(NOT_RUN.format(name=block.name))
    chosen = make_policy(
        target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops, widest_dtype_ops, policy
    )
    inputs, symbol = block._cached_graph
    used = set(symbol.list_inputs())
    params = {name: param for name, param in block.collect_params().items() if name in used}
    for name, param in params.items():
        if param._data is None:
            raise StateError(f"parameter {name!r} has no value yet: initialize and run the block")
    dtypes = {name: param.dtype for name, param in params.items()}
    converted = _convert(
        symbol, chosen, excluded_sym_names, [i.name for i in inputs], cast_optional_params,
        {**dtypes, **(input_dtypes or {})},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SymbolBlock's type inference is of no use here
        result = SymbolBlock(converted.symbol, inputs)
    # MXNet flattens the inputs and outputs of a SymbolBlock; these two give them their shape back.
    result._in_format, result._out_format = block._in_format, block._out_format
    values = _cast_params({name: param._reduce() for name, param in params.items()}, converted)
    contexts = [ctx] if isinstance(ctx, Context) else ctx or [current_context()]
    for name, param in result.collect_params().items():
        param.cast(values[name].dtype)
        param._load_init(values[name], contexts)
        if name not in converted.params:
            param.grad_req = params[name].grad_req
        param.lr_mult, param.wd_mult = params[name].lr_mult, params[name].wd_mult
    result.hybridize(**dict(block._flags[:2]) if block._flags else {})
    return result


def convert_bucketing_module(
    bucketing_mod: BucketingModule,
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Names = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
) -> BucketingModule:
    """Return a bound and initialized `BucketingModule` with the symbol of each bucket converted.

    The parameters are those of `convert_model`. A parameter is cast offline only if every bucket
    reads it in the target dtype alone.
    """
    if not isinstance(bucketing_mod, BucketingModule):
        raise ArgumentError(
            f"convert_bucketing_module takes a BucketingModule, not {type(bucketing_mod).__name__}"
        )
    if not bucketing_mod.params_initialized or not bucketing_mod._buckets:
        raise StateError("bind the BucketingModule and initialize its parameters before converting")
    chosen = make_policy(
        target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops, widest_dtype_ops, policy
    )
    args, auxs = bucketing_mod.get_params()
    held = {**args, **auxs}
    dtypes = {name: array.dtype for name, array in held.items()}
    plain = {key: module._symbol for key, module in bucketing_mod._buckets.items()}

    def converted(keep: AbstractSet[str]) -> Dict[Any, _Converted]:
        return {
            key: _convert(
                symbol, chosen, excluded_sym_names,
                [n for n in symbol.list_inputs() if n not in held or n in keep],
                cast_optional_params, dtypes,
            )
            for key, symbol in plain.items()
        }  # fmt: skip

    found = converted(frozenset())
    common = set.intersection(*(set(one.params) for one in found.values()))
    keep = {name for one in found.values() for name in one.params} - common
    if keep:
        found = converted(keep)
    first = next(iter(found.values()))
    return BucketingModule.load_dict(
        {key: one.symbol for key, one in found.items()},
        sym_gen=bucketing_mod._sym_gen,
        arg_params=_cast_params(args, first),
        aux_params=_cast_params(auxs, first),
        default_bucket_key=bucketing_mod._default_bucket_key,
        logger=bucketing_mod.logger,
        context=bucketing_mod._context,
        work_load_list=bucketing_mod._work_load_list,
        fixed_param_names=bucketing_mod._fixed_param_names,
        state_names=bucketing_mod._state_names,
        group2ctxs=bucketing_mod._group2ctxs,
        compression_params=bucketing_mod._compression_params,
    )


# ---------------------------------------------------------------------- one symbol


def _convert(
    sym: Symbol,
    policy: Policy,
    excluded: Names,
    data_names: Names,
    offline: bool,
    dtypes: Optional[Mapping[str, Any]],
) -> _Converted:
    if not isinstance(sym, Symbol):
        raise ArgumentError(f"a model's graph is a Symbol, not {type(sym).__name__}")
    graph = Graph.from_symbol(sym)
    policy = checked_policy(policy, excluded, graph)
    data = known_names(names_of("data_names", data_names), sym.list_inputs(), "input")
    found = known_dtypes(sym, dtypes)
    result = rewrite(graph, policy, found)
    if result.graph == graph:
        return _Converted(sym, {})
    new = with_dtypes(result.graph, found)
    cast_params: Dict[str, str] = {}
    if offline:
        new, cast_params = cast_offline(new, frozenset(data), policy.target_dtype)
    return _Converted(new.to_symbol(_keeping_casts(type(sym))), cast_params)


def _cast_params(params: Mapping[str, NDArray], converted: _Converted) -> Params:
    with autocast(enabled=False):
        result = {
            name: cast(array, converted.params[name]) if name in converted.params else array
            for name, array in params.items()
        }
    for name in result.keys() & converted.params.keys():
        overflown, vanished = losses(params[name], result[name])
        if overflown or vanished:
            logger.warning(LOSSY, name, converted.params[name], overflown, vanished)
    return result
