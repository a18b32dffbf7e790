"""Public functions that convert symbols, models, blocks and bucketing modules.

A converted model holds stock operators only, so it runs in plain MXNet without mxamp. It takes and
returns the dtypes of the original. The symbol, block and dictionaries that were given don't change.
"""

from dataclasses import replace
from inspect import signature
from typing import Any, Iterable, Mapping, Optional, Tuple

from mxnet.context import Context, current_context
from mxnet.gluon import HybridBlock, SymbolBlock
from mxnet.module import BucketingModule
from mxnet.ndarray.ndarray import NDArray
from mxnet.symbol import Symbol

from ..errors import ArgumentError, StateError
from ..framework.keywords import checked_call
from ..framework.machine import Dtype
from ..framework.wording import shown
from ..policy.overrides import Conditional, LayerArgument, Names
from ..policy.policy import Policy
from ..policy.targets import DEFAULT_TARGET
from .blocks import ConvertedBlock, Examples, trace
from .options import Options
from .outputs import Model, checked_model, inferred_shapes
from .symbols import Params, convert

#: The arguments of a BucketingModule that its attributes hold.
_MODULE_OPTIONS = signature(BucketingModule).parameters.keys() - {"logger"}
NOT_BOUND = "bind bucketing_mod and give it parameters, by init_params or set_params, to convert it"


@checked_call
def convert_symbol(
    sym: Symbol,
    target_dtype: Dtype = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: LayerArgument = None,
    data_names: Names = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: Optional[bool] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> Symbol:
    """Return a copy of a symbol, with casts inserted to compute in another precision.

    >>> import mxnet as mx, mxamp as amp
    >>> net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    >>> policy = amp.Policy.default("float16", device="gpu")
    >>> amp.convert_symbol(net, policy=policy).get_internals().list_outputs()[1]
    'data_amp_cast_float16_output'

    Parameters
    ----------
    sym : Symbol
        The symbol to convert. It is not changed.
    target_dtype : str or dtype, default "float16"
        "float16", "bfloat16", or "float32" for a float32 model. Casts in the
        symbol, inserted or written by hand, are removed first: see
        [16-bit models](converting.md#16-bit-models).
    target_dtype_ops : list of str, optional
        Operators to run in the target dtype. As in `mxnet.contrib.amp`, the list replaces the whole
        default list. To change single operators, pass a `policy` from `Policy.override`.
    fp32_ops : list of str, optional
        Operators to run in float32, in place of the whole default list.
    conditional_fp32_ops : list of (str, str, list of str), optional
        (operator, attribute, values): the operator runs in float32 if its attribute has one of the
        values.
    excluded_sym_names : list of str or Block, optional
        Layers to keep in float32: the Gluon blocks of which the symbol was made, or names of nodes.
        In a name, * and ? stand for any characters.
    data_names : list of str, optional
        The inputs that are not parameters, which `cast_optional_params` leaves as they are.
    cast_optional_params : bool, default False
        Change the dtype of each parameter that the graph reads only in the target dtype, and leave
        out the cast. You must then cast the values of these parameters, as `convert_model` does.
    widest_dtype_ops : list of str, optional
        Operators to run in the widest dtype of their inputs, in place of the whole default list.
    policy : Policy, optional
        A policy in place of `target_dtype` and the operator lists. The default policy is for this
        machine's kind of device. To convert for GPUs on a machine without one, pass
        `Policy.default("float16", device="gpu")`.
    keep_io_types : bool, optional
        True keeps the dtypes of the original's inputs and outputs. False keeps outputs in the dtype
        in which they are computed; if the graph reads an input only in the target dtype, you must
        then pass the input in this dtype. The default is True for a 16-bit target, and False for
        the target float32, so that the model takes and returns float32.
    input_dtypes : dict of str to dtype, optional
        Dtypes of inputs that are not float32 and can't be inferred.

    Raises
    ------
    UnknownNameError
        There is no such operator, node or input; the message has the closest match.
    ArgumentError
        An argument has the wrong type, or an operator is in two lists.
    """
    options = Options.of(**locals())
    return convert(sym, options).symbol


@checked_call
def convert_model(
    sym: Symbol,
    arg_params: Mapping[str, NDArray],
    aux_params: Mapping[str, NDArray],
    target_dtype: Dtype = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: LayerArgument = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: Optional[bool] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    fuse: bool = False,
) -> Tuple[Symbol, Params, Params]:
    """Return the symbol and parameters of a model, converted to another precision.

    ::

        model = mx.model.load_checkpoint("resnet", 0)
        sym, args, auxs = amp.convert_model(*model, target_dtype="bfloat16")
        mx.model.save_checkpoint("resnet-bf16", 0, sym, args, auxs)

    The parameters come back in new dictionaries.

    Parameters
    ----------
    sym : Symbol
        The symbol of the model to convert. It is not changed.
    arg_params : dict of str to NDArray
        The model's parameters. They are not changed.
    aux_params : dict of str to NDArray
        The model's auxiliary states, such as BatchNorm's running means. They are not changed.
    target_dtype : str or dtype, default "float16"
        "float16", "bfloat16", or "float32" for a float32 model.
    cast_optional_params : bool, default False
        Cast to the target dtype each parameter that the graph reads only in the target dtype.
    fuse : bool, default False
        Fuse operators, for inference on CPUs in bfloat16 or float32. Each BatchNorm is folded, in
        float32, into the convolution or dense layer before. Each convolution and dense layer, with
        the activations and sums that follow, becomes a fused operator of oneDNN. A fused model runs
        only on CPU builds of MXNet, and can't be trained. Parameters are cast as with
        `cast_optional_params`.

    The other parameters are those of `convert_symbol`.
    """
    options = Options.of(**locals())
    return converted_model(checked_model((sym, arg_params, aux_params)), options)


def converted_model(model: Model, options: Options) -> Tuple[Symbol, Params, Params]:
    """Return the symbol, arg_params and aux_params of a model, converted with `options`."""
    converted = convert(model[0], options, {**model[1], **model[2]})
    values = dict(converted.params)
    new_auxs = {name: values.pop(name) for name in model[2] if name in values}
    return converted.symbol, values, new_auxs


@checked_call
def convert_hybrid_block(
    block: HybridBlock,
    target_dtype: Dtype = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: LayerArgument = None,
    ctx: Optional[Context] = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: Optional[bool] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
    example_inputs: Examples = None,
    fuse: bool = False,
) -> SymbolBlock:
    """Return a mixed-precision copy of a Gluon block, to be called in the same way.

    ::

        net.hybridize()
        net(data)
        fast = amp.convert_hybrid_block(net, "bfloat16")
        fast(data)

    If the block has not been hybridized and run, pass the arguments of a call::

        fast = amp.convert_hybrid_block(net, "bfloat16", example_inputs=data)

    Nested inputs, nested outputs and the states of recurrent layers keep their form. The new block
    can be trained, and has copies, with the same names, of the parameters that its graph reads. For
    inference, use `cast_optional_params`, which saves casts, but freezes the cast parameters.

    In bfloat16 the new block runs a graph tuned to the shapes of its inputs, as blocks do after
    `init`. An export of the block contains the graph without tuning. The results of the tuned graph
    and of the export may differ by rounding, except with `policy.untuned()`.

    Parameters
    ----------
    block : HybridBlock
        The block to convert. It is not changed.
    target_dtype : str or dtype, default "float16"
        "float16", "bfloat16", or "float32" for a float32 block.
    ctx : Context or list of Context, optional
        The devices of the new block's parameters; by default the current context.
    example_inputs : NDArray or sequence, optional
        The arguments of one call, to trace a block that has no graph yet.
    fuse : bool, default False
        As for `convert_model`. Freezes all parameters of the new block. Hybridizes the new block
        with `static_alloc` and `static_shape`, because fused operators would otherwise pack their
        weights anew at each call.

    The other parameters are those of `convert_model`. With `keep_io_types=False` the new block
    casts float32 data, and data in the other 16-bit dtype, to the target dtype.

    Raises
    ------
    StateError
        The block has no graph yet and there are no `example_inputs`, or a parameter has no value.
    """
    options = Options.of(**locals())
    contexts = [ctx] if isinstance(ctx, Context) else list(ctx or [current_context()])
    if not all(isinstance(one, Context) for one in contexts):
        raise ArgumentError(f"ctx must be a Context, or a list of them, not {shown(ctx)}")
    traced = trace(block, example_inputs)
    options = replace(options, input_dtypes=traced.input_dtypes(input_dtypes))
    values = traced.param_values()
    if traced.example_shapes:  # raises where they don't fit
        inferred_shapes(traced.symbol, values, traced.example_shapes)
    converted = convert(traced.symbol, options, values)
    return ConvertedBlock(traced, converted, options, contexts)


@checked_call
def convert_bucketing_module(
    bucketing_mod: BucketingModule,
    target_dtype: Dtype = DEFAULT_TARGET,
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Optional[Iterable[Conditional]] = None,
    excluded_sym_names: LayerArgument = None,
    cast_optional_params: bool = False,
    *,
    widest_dtype_ops: Names = None,
    policy: Optional[Policy] = None,
    keep_io_types: Optional[bool] = None,
    input_dtypes: Optional[Mapping[str, Any]] = None,
) -> BucketingModule:
    """Return a copy of a `BucketingModule` with the symbol of each bucket converted.

    ::

        converted = amp.convert_bucketing_module(module, "bfloat16", fp32_ops=["softmax"])
        converted.bind(module.data_shapes, module.label_shapes, for_training=False)

    The copy has parameters, but is not bound. All options apply to every bucket.

    Parameters
    ----------
    bucketing_mod : BucketingModule
        A float32 module, bound and with parameters. It is not changed.
    cast_optional_params : bool, default False
        Cast to the target dtype each parameter that all buckets read only in the target dtype, as
        buckets share their parameters.

    The other parameters are those of `convert_symbol`.

    Raises
    ------
    ArgumentError
        `bucketing_mod` is no `BucketingModule`, or `convert_symbol` refuses an argument.
    StateError
        The module is not bound, or has no parameters yet.
    """
    if not isinstance(bucketing_mod, BucketingModule):
        raise ArgumentError(f"bucketing_mod must be a BucketingModule, not {shown(bucketing_mod)}")
    if not bucketing_mod.params_initialized or not bucketing_mod._buckets:
        raise StateError(NOT_BOUND)
    options = Options.of(**locals())
    args, auxs = bucketing_mod.get_params()
    values = {**args, **auxs}
    symbols = {key: bucket._symbol for key, bucket in bucketing_mod._buckets.items()}
    buckets = {key: convert(symbol, options, values) for key, symbol in symbols.items()}
    # All buckets share their parameters in one dtype.
    offline = [frozenset(one.offline) for one in buckets.values()]
    not_common = frozenset.union(*offline) - frozenset.intersection(*offline)
    if not_common:
        options = replace(options, not_offline=not_common)
        buckets = {key: convert(symbol, options, values) for key, symbol in symbols.items()}
    for one in buckets.values():  # each has new values only for the parameters that it reads
        values.update({n: one.params[n] for n in one.graph.input_names if n in one.params})
    return BucketingModule.load_dict(
        {key: one.symbol for key, one in buckets.items()},
        arg_params={name: values[name] for name in args},
        aux_params={name: values[name] for name in auxs},
        logger=bucketing_mod.logger,
        **{name: getattr(bucketing_mod, f"_{name}") for name in _MODULE_OPTIONS},
    )
