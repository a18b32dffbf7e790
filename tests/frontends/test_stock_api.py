"""`import mxamp as amp` in place of `from mxnet.contrib import amp`."""

import inspect

import mxnet as mx
import numpy as np
import pytest
from mxnet.contrib import amp as stock
from mxnet.contrib.amp import amp as stock_module

import mxamp as amp
from helpers import BF16

NAMES = [n for n in stock_module.__all__] + ["convert_bucketing_module"]  # noqa: C416


@pytest.mark.parametrize("name", NAMES)
def test_names_and_arguments_exist(name):
    theirs = inspect.signature(getattr(stock_module, name))
    ours = inspect.signature(getattr(amp, name))
    positional = [p for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    stock_positional = list(theirs.parameters.values())
    assert [p.name for p in positional][: len(stock_positional)] == [
        p.name for p in stock_positional
    ]
    for mine, their in zip(positional, stock_positional):
        if isinstance(their.default, mx.Context):
            assert mine.default is None, "the current context, not gpu(0)"
        else:
            assert mine.default == their.default, mine.name
    for extra in positional[len(stock_positional) :]:
        assert extra.default is None


@pytest.mark.parametrize("dtype", ["float16", np.float16, "bfloat16", BF16])
def test_lists(dtype):
    low, wide = amp.list_lp16_ops(dtype), amp.list_fp32_ops(dtype)
    assert "Convolution" in low
    assert "softmax" in wide
    assert not set(low) & set(wide)
    both = set(amp.list_lp16_fp32_ops(dtype)) | set(amp.list_widest_type_cast(dtype))
    conditional = {name for name, _, _ in amp.list_conditional_fp32_ops(dtype)}
    assert "Activation" in conditional
    assert len(set(low) | set(wide) | both | conditional) >= 870
    assert "SoftmaxOutput" in amp.list_loss_output_functions(dtype)


def test_list_of_float32_parameters():
    assert amp.list_lp16_use_fp32_params("float16") is None
    assert amp.list_lp16_use_fp32_params("bfloat16")["BatchNorm"] == [False, True, True, True, True]


def test_lists_go_into_init_and_back():
    amp.init(
        "float16", amp.list_lp16_ops("float16"), amp.list_conditional_fp32_ops("float16"),
        amp.list_fp32_ops("float16"), ctx=mx.cpu(),
    )  # fmt: skip
    policy, default = amp.current_policy(), amp.Policy.default("float16", "cpu")
    assert policy.operators("low") == default.operators("low")
    assert policy.operators("fp32") == default.operators("fp32")


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("list_")])
def test_unknown_dtypes(name):
    with pytest.raises(amp.ArgumentError, match="int8"):
        getattr(amp, name)("int8")


def test_stock_lists_of_names_are_understood():
    for name in stock.list_fp32_ops("float16"):
        if name not in ("CuDNNBatchNorm", "_TensorRT"):
            assert amp.Policy.default("float16", "cpu").override(fp32=[name])
