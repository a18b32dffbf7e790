"""mxnet.contrib.amp: its names in mxamp, and the module itself while mxamp stands in for it."""

import importlib
import inspect
import sys
import types

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.contrib import amp as stock
from mxnet.contrib.amp import scale_loss as stock_scale_loss

import digits
import mxamp as amp
from helpers import BF16
from training import batches, setup

#: Every way in that public scripts use, and what each is called in them.
WAYS_IN = [
    ("from mxnet.contrib import amp", "amp"), ("import mxnet.contrib.amp as amp", "amp"),
    ("import mxnet.contrib.amp", "mxnet.contrib.amp"), ("import mxnet as mx", "mx.contrib.amp"),
    ("from mxnet.contrib.amp import amp", "amp"), ("from mxnet.contrib import amp", "amp.amp"),
    ("import mxnet.contrib.amp.amp as amp", "amp"), ("import mxnet as mx", "mx.contrib.amp.amp"),
]  # fmt: skip


def evaluated(line, name):
    namespace = {}
    exec(line, namespace)  # noqa: S102
    return eval(name, namespace)  # noqa: S307


def state():
    modules = (stock, stock.amp)
    names = [n for n in sys.modules if n.startswith("mxnet.contrib.amp")]
    return (
        [(type(m), dict(vars(m))) for m in modules],
        [(n, sys.modules[n]) for n in names],
        mx.contrib.amp,
    )


def test_it_lasts_until_shutdown():
    before = state()
    amp.patch_contrib()
    amp.patch_contrib()
    assert stock.init is amp.init
    amp.shutdown()
    amp.shutdown()
    assert state() == before
    assert stock.init is not amp.init
    with pytest.raises(AttributeError):
        _ = stock.autocast


@pytest.mark.parametrize("line, name", WAYS_IN)
def test_every_way_in_is_there(line, name):
    amp.patch_contrib()
    found = evaluated(line, name)
    for function in stock.amp.__all__:
        assert getattr(found, function) is getattr(amp, function)
    assert found.convert_bucketing_module is amp.convert_bucketing_module
    assert found.LossScaler is amp.LossScaler
    assert found.amp is stock.amp if found is stock else True
    assert "Convolution" in found.lists.symbol_fp16.FP16_FUNCS
    assert found.autocast is amp.autocast  # mxamp's own names too
    assert importlib.import_module("mxnet.contrib.amp.lists.symbol_bf16").BF16_FUNCS
    with pytest.raises(AttributeError, match=r"mxnet\.contrib\.amp.* has no attribute 'none'"):
        found.none  # noqa: B018


@pytest.mark.parametrize(
    "names", ["init, init_trainer, scale_loss", "*", "lists", "_amp_initialized", "bfloat16"]
)
def test_names_imported_from_it(names):
    amp.patch_contrib()
    namespace = {}
    exec(f"from mxnet.contrib.amp.amp import {names}", namespace)  # noqa: S102
    if "init" in namespace:
        assert namespace["init"] is amp.init
        assert namespace["scale_loss"] is amp.scale_loss


@pytest.mark.parametrize("patched_first", [True, False])
def test_it_says_whether_mixed_precision_is_on(patched_first):
    if patched_first:
        amp.patch_contrib()
    from mxnet.contrib.amp import amp as inner

    amp.patch_contrib()
    assert inner._amp_initialized is False
    with amp.autocast("float16"):
        assert inner._amp_initialized is True
    inner.init("float16", ctx=mx.cpu())
    assert stock.amp._amp_initialized is True
    with amp.autocast(enabled=False):
        assert inner._amp_initialized is False
    amp.shutdown()
    assert inner._amp_initialized is False


#: As GluonNLP's attention cells use it.
MASKING = """
import numpy as np
from mxnet.contrib.amp import amp

def masked_softmax(F, scores, mask, dtype=np.float32):
    lowest = -1e18
    if np.dtype(dtype) == np.float16 or amp._amp_initialized:
        lowest = -1e4
    scores = F.where(mask, scores, lowest * F.ones_like(scores))
    return F.softmax(scores, axis=-1) * mask, lowest
"""


def test_a_package_that_asks_masks_for_half_precision():
    amp.patch_contrib()
    package = types.ModuleType("attention")
    exec(MASKING, vars(package))  # noqa: S102
    scores, mask = nd.ones((2, 3)), nd.array([[1, 1, 0], [1, 0, 0]])
    assert package.masked_softmax(nd, scores, mask)[1] == -1e18
    amp.init("float16", ctx=mx.cpu())
    weights, lowest = package.masked_softmax(nd, scores, mask)
    assert lowest == -1e4
    assert weights.asnumpy().tolist() == [[0.5, 0.5, 0], [1, 0, 0]]
    amp.shutdown()
    assert package.masked_softmax(nd, scores, mask)[1] == -1e18


@pytest.mark.slow
def test_a_script_for_contrib_trains():
    amp.patch_contrib()
    from mxnet.contrib import amp as contrib_amp

    contrib_amp.init("float16", ctx=mx.cpu())
    net = digits.network()
    net.hybridize()
    trainer = digits.trainer_of(net)
    contrib_amp.init_trainer(trainer)

    def backward(loss):
        with contrib_amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)

    assert digits.train(net, trainer, backward)
    assert digits.accuracy(net) > digits.ACCURACY


@pytest.fixture
def stock_is_on(monkeypatch):
    """`mxnet.contrib.amp` after its `init`, without what that does to MXNet's operators."""
    monkeypatch.setattr(stock.amp, "_amp_initialized", True)
    monkeypatch.setattr(stock.amp, "_amp_loss_scale_initialized", False)
    monkeypatch.setattr(stock.amp, "_loss_scaler", stock.loss_scaler.LossScaler())


def backward_by_stock(net, trainer, data):
    with autograd.record():
        loss = (net(nd.array(data)) ** 2).sum()
        with stock_scale_loss(loss, trainer) as scaled:
            scaled.backward()


def test_a_trainer_of_stock_amp_is_refused(stock_is_on):
    _, trainer = setup()
    stock.init_trainer(trainer)
    with pytest.raises(amp.StateError, match=r"patch_contrib\(\)"):
        amp.init_trainer(trainer, amp.NoScaler())


@pytest.mark.parametrize("way", ["before the patch", "after shutdown"])
def test_a_stock_scale_loss_on_a_trainer_of_mxamp_is_an_error(way):
    amp.patch_contrib()
    stock.init("float16", ctx=mx.cpu())
    net, trainer = setup()
    stock.init_trainer(trainer)
    if way == "after shutdown":
        amp.shutdown()
        assert stock.scale_loss is stock_scale_loss
    with pytest.raises(AttributeError, match="_amp_original_scale"):
        backward_by_stock(net, trainer, batches(1)[0])
    assert trainer._scale == 1.0


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


@pytest.mark.slow
def test_stock_lists_of_names_are_understood():
    for name in stock.list_fp32_ops("float16"):
        if name not in ("CuDNNBatchNorm", "_TensorRT"):
            assert amp.Policy.default("float16", "cpu").override(fp32=[name])
