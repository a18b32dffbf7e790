"""mxnet.contrib.amp: its names in mxamp, and the module itself while mxamp stands in for it."""

import importlib
import inspect

import mxnet as mx
import numpy as np
import pytest
from mxnet.contrib import amp as stock

import mxamp as amp
from helpers import BF16

#: Every way in that public scripts use, and what each is called in them.
WAYS_IN = [
    ("from mxnet.contrib import amp", "amp"), ("import mxnet.contrib.amp as amp", "amp"),
    ("import mxnet.contrib.amp", "mxnet.contrib.amp"), ("import mxnet as mx", "mx.contrib.amp"),
    ("from mxnet.contrib.amp import amp", "amp"), ("import mxnet as mx", "mx.contrib.amp.amp"),
]  # fmt: skip


def evaluated(line, name):
    namespace = {}
    exec(line, namespace)  # noqa: S102
    return eval(name, namespace)  # noqa: S307


def test_it_lasts_until_shutdown():
    before = [(type(module), dict(vars(module))) for module in (stock, stock.amp)]
    amp.patch_contrib()
    assert stock.init is amp.init
    amp.shutdown()
    assert [(type(module), dict(vars(module))) for module in (stock, stock.amp)] == before
    with pytest.raises(AttributeError):
        _ = stock.autocast


@pytest.mark.parametrize("line, name", WAYS_IN)
def test_every_way_in_is_there(line, name):
    amp.patch_contrib()
    found = evaluated(line, name)
    for function in stock.amp.__all__:
        assert getattr(found, function) is getattr(amp, function)
    assert found.amp is stock.amp if found is stock else True
    assert "Convolution" in found.lists.symbol_fp16.FP16_FUNCS
    assert found.autocast is amp.autocast  # mxamp's own names too
    assert importlib.import_module("mxnet.contrib.amp.lists.symbol_bf16").BF16_FUNCS
    with pytest.raises(AttributeError, match=r"mxnet\.contrib\.amp.* has no attribute 'none'"):
        found.none  # noqa: B018


def test_it_says_whether_mixed_precision_is_on():
    amp.patch_contrib()
    assert stock.amp._amp_initialized is False
    with amp.autocast("float16"):
        assert stock.amp._amp_initialized is True


# ------------------------------------------------- `import mxamp as amp` in place of contrib's

NAMES = [*stock.amp.__all__, "convert_bucketing_module"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_arguments_exist(name):
    theirs = inspect.signature(getattr(stock.amp, name))
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
            # None is False, but for a policy that was tuned: then it is as was measured.
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
    assert not conditional & both.union(low, wide)
    assert len(set(low) | set(wide) | both | conditional) >= 870
    assert "SoftmaxOutput" in amp.list_loss_output_functions(dtype)
