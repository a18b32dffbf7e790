"""Models that MXNet has fused: converted, or refused where oneDNN lacks the kernel."""

import logging

import mxnet as mx
import pytest
from mxnet import nd

import mxamp as amp
from helpers import randn, with_avx512

S = mx.sym


B = amp.Policy.default("bfloat16")


def fused_by_mxnet(norm=True, quantized=False):
    """A model that MXNet has fused, and quantized, and its input."""
    net = S.Convolution(S.var("data"), num_filter=16, kernel=(3, 3), name="c")
    args = {"c_weight": randn(16, 16, 3, 3, scale=0.1), "c_bias": randn(16)}
    auxs = {}
    if norm:
        net = S.BatchNorm(net, fix_gamma=False, name="b")
        args.update(b_gamma=nd.ones(16), b_beta=nd.zeros(16))
        auxs = {"b_moving_mean": nd.zeros(16), "b_moving_var": nd.ones(16)}
    net = S.Activation(net, act_type="relu", name="r")
    inputs = {"data": randn(2, 16, 8, 8)}
    if not quantized:
        return (net.get_backend_symbol("MKLDNN"), args, auxs), inputs
    model = mx.contrib.quantization.quantize_model(
        net.get_backend_symbol("MKLDNN_QUANTIZE"), args, auxs,
        calib_mode="none", quantized_dtype="auto", ctx=mx.cpu(), logger=logging.getLogger("q"),
    )  # fmt: skip
    return (model[0].get_backend_symbol("MKLDNN_QUANTIZE"), *model[1:]), inputs


@with_avx512
@pytest.mark.parametrize("how", [{}, {"quantized": True}, {"norm": False, "quantized": True}])
def test_what_mxnet_has_fused_without_a_bfloat16_kernel_is_refused(how):
    model, inputs = fused_by_mxnet(**how)
    kept = {"excluded_sym_names": ["*sg_mkldnn_conv*"]}
    for options in ({}, {"cast_optional_params": True}, {"fuse": True}):
        with pytest.raises(amp.ArgumentError, match="can't become bfloat16: .*sg_mkldnn_conv"):
            amp.convert_model(*model, "bfloat16", **options)
        converted = amp.convert_model(*model, "bfloat16", **options, **kept)
        assert amp.compare_models(model, converted, inputs)[0].relative == 0
    plain = amp.convert_model(*model, policy=B.in_float32(), fuse=True)
    assert amp.compare_models(model, plain, inputs)[0].relative == 0


@with_avx512
def test_what_mxnet_or_fuse_has_fused_otherwise_is_lowered():
    model, inputs = fused_by_mxnet(norm=False)
    once = amp.convert_model(*model, "bfloat16", fuse=True)
    assert 0 < amp.compare_models(model, once, inputs)[0].relative < 0.01
    again = amp.convert_model(*once, "bfloat16", fuse=True)
    assert amp.compare_models(once, again, inputs)[0].relative == 0
