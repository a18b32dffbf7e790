"""Converting models: symbols, parameters and blocks in, mixed-precision ones out.

What comes out holds stock operators only and runs in plain MXNet, without mxamp. It takes and
returns the dtypes of the original. The caller's symbol, block and dictionaries stay as they are.
"""

from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

from mxnet.context import Context
from mxnet.gluon import HybridBlock, SymbolBlock
from mxnet.module import BucketingModule
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError
from ..framework.wording import shown
from ..patches.cached_op import Source
from ..policy.layers import Layers
from ..policy.overrides import Conditional
from ..policy.policy import Policy
from ..policy.targets import DEFAULT_TARGET
from .blocks import Examples, contexts_of, rebuilt, trace
from .options import Conversion, Names, as_tuned
from .symbols import Converted, Params, cast_params, convert

__all__ = [
    "convert_bucketing_module",
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
]


def convert_symbol(
    sym: Symbol,
    target_dtype: Any = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Layers = None,
    data_names: Names = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
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
    excluded_sym_names : list of str or Block, optional
        Layers to keep in float32: names of nodes, where * and ? stand for any characters, or the
        Gluon blocks that the symbol was made of.
    data_names : list of str, optional
        The inputs that are no parameters. Never cast offline.
    cast_optional_params : bool, default False
        Give parameters that are only read in the target dtype that dtype, with no cast in the
        graph; their values must then be cast too, which `convert_model` does.
    policy : Policy, optional
        In place of `target_dtype` and the operator lists. The default one is for the kind of
        device this machine has: to convert for GPUs on a machine without one, give
        `Policy.default("float16", device="gpu")`.
    keep_io_types : bool, default True
        Take and return the dtypes of the original. Otherwise outputs stay in the dtype that they
        are computed in, and data that is only read in the target dtype must be given in it.
    input_dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32 and can't be inferred.

    Raises
    ------
    UnknownNameError
        An operator, node or input that is not there, with the closest match.
    ArgumentError
        Arguments of wrong types, or an operator in two lists.
    """
    policy = Policy.from_lists(
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        widest_dtype_ops,
        conditional_fp32_ops,
        policy=policy,
    )
    conversion = Conversion(
        policy, excluded_sym_names, data_names, cast_optional_params, keep_io_types, input_dtypes
    )
    return convert(sym, conversion).symbol


def convert_model(
    sym: Symbol,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
    target_dtype: Any = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Layers = None,
    cast_optional_params: Optional[bool] = None,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    fuse: Optional[bool] = None,
) -> Tuple[Symbol, Params, Params]:
    """Return a float32 model's symbol and parameters, converted as by `convert_symbol`.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        sym, args, auxs = amp.convert_model(*model, target_dtype="bfloat16")
        mx.model.save_checkpoint("resnet-bf16", 0, sym, args, auxs)

    The parameters come back in new dictionaries; with `cast_optional_params` those that are read
    in the target dtype alone are cast to it.

    `fuse=True` is for inference on CPUs, in bfloat16 or float32: BatchNorms are folded, in float32,
    into the products before them, and oneDNN's fused operators take the place of products with
    activations and sums behind them. The model runs on MXNet's CPU builds only then, and does not
    train; parameters are cast as with `cast_optional_params`. Both are off by default, but for a
    policy that `tune` has found: with that the model is converted as it was measured.
    """
    for name, params in (("arg_params", arg_params), ("aux_params", aux_params)):
        if not isinstance(params, Mapping):
            raise ArgumentError(f"{name} must map names to NDArrays, not {shown(params)}")
    policy = Policy.from_lists(
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        widest_dtype_ops,
        conditional_fp32_ops,
        policy=policy,
    )
    cast_optional_params, fuse = as_tuned(policy, cast_optional_params, fuse)
    conversion = Conversion(
        policy,
        excluded_sym_names,
        cast_optional_params=cast_optional_params,
        keep_io_types=keep_io_types,
        input_dtypes=input_dtypes,
        fuse=fuse,
    )
    converted = convert(sym, conversion, {**arg_params, **aux_params})
    values = cast_params(converted.params, converted.inputs)
    auxs = {name: value for name, value in values.items() if name in aux_params}
    return converted.symbol, {n: v for n, v in values.items() if n not in auxs}, auxs


def convert_hybrid_block(
    block: HybridBlock,
    target_dtype: Any = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Layers = None,
    ctx: Optional[Context] = None,
    cast_optional_params: Optional[bool] = None,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    example_inputs: Examples = None,
    fuse: Optional[bool] = None,
) -> SymbolBlock:
    """Return a mixed-precision block that is called as `block` is.

    ::

        net.hybridize()
        net(example)
        fast = amp.convert_hybrid_block(net, "bfloat16")
        fast(data)

    or, of a block that was not hybridized and run::

        fast = amp.convert_hybrid_block(net, "bfloat16", example_inputs=example)

    Nested inputs and outputs and the states of recurrent layers are as the block's own. The new
    block holds copies of the parameters that its graph reads, under the same names, and trains;
    what `cast_optional_params` has cast is frozen: for inference, where it saves the casts.

    In bfloat16 the block runs tuned to the shapes that it is given, as blocks do after `init`;
    what it exports is the converted graph. Without `policy.untuned()` the two may differ by
    rounding.

    Parameters
    ----------
    block : HybridBlock
        Stays as it is.
    ctx : Context or list of Context, optional
        Where the new block's parameters are; by default on the current context.
    example_inputs : NDArray or sequence, optional
        The arguments of one call, to trace a block that has no graph yet.
    fuse : bool, optional
        As of `convert_model`. The new block's parameters are all frozen then.

    The other parameters are those of `convert_symbol`. With `keep_io_types=False` the block casts
    data of another half precision or float32 that is given to it.

    Raises
    ------
    StateError
        The block has no graph yet and no example was given, or a parameter has no value.
    """
    policy = Policy.from_lists(
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        widest_dtype_ops,
        conditional_fp32_ops,
        policy=policy,
    )
    contexts = contexts_of(ctx)
    traced = trace(block, example_inputs)
    cast_optional_params, fuse = as_tuned(policy, cast_optional_params, fuse)
    conversion = Conversion(
        policy,
        excluded_sym_names,
        cast_optional_params=cast_optional_params,
        keep_io_types=keep_io_types,
        input_dtypes=traced.dtypes_with(input_dtypes),
        fuse=fuse,
    )
    converted = convert(traced.symbol, conversion, traced.values())
    values = cast_params(converted.params, converted.inputs)
    frozen = values if fuse else converted.inputs
    # With other dtypes of inputs and outputs than its own, the source is another model.
    source = None
    if keep_io_types:
        source = Source(converted.source, converted.policy, frozenset(converted.inputs))
    taken = {} if keep_io_types else converted.data
    return rebuilt(block, traced, converted.symbol, values, contexts, frozen, source, taken, fuse)


def convert_bucketing_module(
    bucketing_mod: BucketingModule,
    target_dtype: Any = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: Layers = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: bool = True,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> BucketingModule:
    """Return a bound and initialized `BucketingModule` with the symbol of each bucket converted.

    ::

        converted = amp.convert_bucketing_module(module, "bfloat16", fp32_ops=["softmax"])

    Parameters
    ----------
    bucketing_mod : BucketingModule
        A float32 one, bound and with parameters. It is left as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops, widest_dtype_ops
        The dtype and the operator lists, as of `convert_symbol`, for every bucket.
    excluded_sym_names, policy, keep_io_types, input_dtypes
        As of `convert_symbol`, too.
    cast_optional_params : bool, default False
        Cast the parameters that are only read in the target dtype: by every bucket, as they share
        their parameters.

    Raises
    ------
    ArgumentError
        What is given is no `BucketingModule`, and what `convert_symbol` raises.
    StateError
        The module is not bound, or has no parameters yet.
    """
    if not isinstance(bucketing_mod, BucketingModule):
        raise ArgumentError(
            f"convert_bucketing_module takes a BucketingModule, not {shown(bucketing_mod)}"
        )
    if not bucketing_mod.params_initialized or not bucketing_mod._buckets:
        raise StateError("bind the BucketingModule and initialize its parameters before converting")
    policy = Policy.from_lists(
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        widest_dtype_ops,
        conditional_fp32_ops,
        policy=policy,
    )
    conversion = Conversion(
        policy,
        excluded_sym_names,
        cast_optional_params=cast_optional_params,
        keep_io_types=keep_io_types,
        input_dtypes=input_dtypes,
    )
    args, auxs = bucketing_mod.get_params()
    buckets = _converted_buckets(bucketing_mod, conversion, {**args, **auxs})
    first = next(iter(buckets.values()))
    # Those that a bucket's graph does not read are as they were given.
    held = {
        name: one.params[name]
        for one in buckets.values()
        for name in one.source.input_names
        if name in one.params
    }
    values = cast_params({**args, **auxs, **held}, first.inputs)
    return BucketingModule.load_dict(
        {key: one.symbol for key, one in buckets.items()},
        sym_gen=bucketing_mod._sym_gen,
        arg_params={name: values[name] for name in args},
        aux_params={name: values[name] for name in auxs},
        default_bucket_key=bucketing_mod._default_bucket_key,
        logger=bucketing_mod.logger,
        context=bucketing_mod._context,
        work_load_list=bucketing_mod._work_load_list,
        fixed_param_names=bucketing_mod._fixed_param_names,
        state_names=bucketing_mod._state_names,
        group2ctxs=bucketing_mod._group2ctxs,
        compression_params=bucketing_mod._compression_params,
    )


def _converted_buckets(
    module: BucketingModule, conversion: Conversion, params: Mapping[str, NDArray]
) -> Dict[Any, Converted]:
    """Convert each bucket's symbol, so that all take the same parameters in the same dtypes."""
    symbols = {key: bucket._symbol for key, bucket in module._buckets.items()}
    buckets = {key: convert(symbol, conversion, params) for key, symbol in symbols.items()}
    common = set.intersection(*(set(one.inputs) for one in buckets.values()))
    apart = frozenset(name for one in buckets.values() for name in one.inputs) - common
    if not apart:
        return buckets
    again = replace(conversion, not_offline=apart)
    return {key: convert(symbol, again, params) for key, symbol in symbols.items()}
