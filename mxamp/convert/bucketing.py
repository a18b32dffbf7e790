"""Bucketing modules converted: the symbol of each bucket, and the parameters that they share."""

from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, Optional

from mxnet.module import BucketingModule
from mxnet.ndarray.ndarray import NDArray

from ..errors import ArgumentError, StateError
from ..framework.wording import shown
from ..policy.overrides import Conditional, Layers
from ..policy.policy import Policy
from ..policy.targets import DEFAULT_TARGET
from .arguments import Conversion, Names
from .symbols import Converted, cast_params, convert

__all__ = ["convert_bucketing_module"]


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
