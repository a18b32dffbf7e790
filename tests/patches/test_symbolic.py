"""Bound symbols and modules follow the policy, bit for bit like eager calls."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import as_float32, randn, same, values, with_avx512
from nets import (
    attention,
    convolutional,
    decoder,
    embedded,
    made,
)


@pytest.fixture(autouse=True)
def unfused(monkeypatch):
    # Executors fuse operators by default; what is compared here are the operators.
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")


@pytest.mark.parametrize("make", [convolutional, attention, embedded, decoder])
def test_symbols_agree_bit_for_bit(on, make):
    net, data = made(make)
    names = ["data"] if len(data) == 1 else [f"data{i}" for i in range(len(data))]
    with autograd.predict_mode():
        expected = values(net(*data))
    symbol = net(*(mx.sym.var(name) for name in names))
    arrays = {p.name: p.data() for p in net.collect_params().values()}
    args = {n: arrays[n] for n in symbol.list_arguments() if n in arrays}
    args.update(zip(names, data))
    auxs = {n: arrays[n] for n in symbol.list_auxiliary_states()}
    bound = symbol.bind(mx.cpu(), args, aux_states=auxs)
    assert same(bound.forward()[0], as_float32(expected))
    shapes = {name: array.shape for name, array in zip(names, data)}
    types = {name: array.dtype for name, array in zip(names, data)}
    simple = symbol.simple_bind(mx.cpu(), grad_req="null", type_dict=types, **shapes)
    simple.copy_params_from(args, auxs)
    assert same(simple.forward()[0], as_float32(expected))
    assert simple.arg_dict[symbol.list_arguments()[1]].dtype == np.float32
    assert set(bound.output_dict) == set(symbol.list_outputs())


def test_bound_gradients_add_up(on):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    executor = symbol.simple_bind(mx.cpu(), grad_req="add", data=(2, 4))
    executor.arg_dict["data"][:] = randn(2, 4)
    executor.arg_dict["fc_weight"][:] = randn(3, 4)
    totals = []
    for _ in range(2):
        executor.forward(is_train=True)
        executor.backward(nd.ones((2, 3)))
        totals.append(executor.grad_dict["fc_weight"].asnumpy())
    assert abs(totals[0]).max() > 0
    np.testing.assert_array_equal(totals[1], 2 * totals[0])


def test_module_trains(on):
    data = mx.sym.var("data")
    net = mx.sym.FullyConnected(data, num_hidden=16, name="fc1")
    net = mx.sym.Activation(net, act_type="relu")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=2, name="fc2"), name="softmax")
    x = np.random.RandomState(0).randn(64, 8).astype("float32")
    y = (x[:, 0] > 0).astype("float32")
    iterator = mx.io.NDArrayIter(x, y, batch_size=16)
    module = mx.mod.Module(net, context=mx.cpu())
    module.fit(
        iterator, num_epoch=8, optimizer_params={"learning_rate": 0.5},
        initializer=mx.init.Xavier(), eval_metric="acc",
    )  # fmt: skip
    assert module.score(iterator, "acc")[0][1] > 0.9
    assert all(array.dtype == np.float32 for array in module.get_params()[0].values())
    assert module._symbol is net


@with_avx512
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_modules_of_stored_bfloat16_bind_under_init(dtype, fuse):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="fc")
    params, data = {"fc_weight": randn(16, 8), "fc_bias": randn(16)}, randn(4, 8)
    low = amp.convert_model(symbol, params, {}, "bfloat16", cast_optional_params=True, fuse=fuse)
    amp.init(dtype, ctx=mx.cpu())
    module = mx.mod.Module(low[0], label_names=None)
    module.bind([("data", data.shape)], for_training=False)
    module.set_params(*low[1:])
    module.forward(mx.io.DataBatch([data]), is_train=False)
    found = module.get_outputs()[0].asnumpy()
    amp.shutdown()
    exact = nd.FullyConnected(data, *params.values(), num_hidden=16).asnumpy()
    assert abs(found - exact).max() < 0.02 * abs(exact).max()
