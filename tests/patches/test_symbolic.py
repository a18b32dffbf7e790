"""Bound symbols and modules follow the policy, bit for bit like eager calls."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import as_float32, casting_small_layers, randn, same, values, with_avx512
from nets import attention, convolutional, decoder, embedded, made

# Executors fuse operators by default; what is compared here are the operators.
pytestmark = pytest.mark.usefixtures("unfused")


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


def bound_sum(grad_req="write", shape=(4, 3, 8, 8), **more):
    """An executor of a graph whose sum is substituted, with a fixed shape in it."""
    data = mx.sym.var("data")
    data = mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), name="c")
    symbol = mx.sym.sum(data, axis=(2, 3))
    policy = amp.Policy.default("bfloat16").override(low=[], replace_lists=True)
    with amp.autocast(policy=policy):
        executor = symbol.simple_bind(mx.cpu(), grad_req=grad_req, data=shape, **more)
    for array in executor.arg_arrays:
        array[:] = randn(*array.shape)
    return symbol, executor


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (4, 3, 16, 16), (1, 3, 5, 7)])
def test_a_reshaped_executor_computes_for_its_shapes_whatever_is_on(shape):
    symbol, executor = bound_sum()
    executor = executor.reshape(allow_up_sizing=True, data=shape)
    assert_unpatched()
    executor.arg_dict["data"][:] = randn(*shape)
    [out] = executor.forward(is_train=True)
    executor.backward([mx.nd.ones(out.shape)])
    args = executor.arg_dict
    plain = symbol.bind(mx.cpu(), args, {k: mx.nd.zeros(v.shape) for k, v in args.items()})
    [wanted] = plain.forward(is_train=True)
    plain.backward([mx.nd.ones(wanted.shape)])
    np.testing.assert_allclose(values(out), values(wanted), rtol=1e-4, atol=1e-4)
    for name, grad in plain.grad_dict.items():
        found = values(executor.grad_dict[name])
        np.testing.assert_allclose(found, values(grad), rtol=1e-3, atol=1e-3)


def test_a_reshaped_executor_shares_memory_as_mxnets():
    _, executor = bound_sum("add")
    executor.grad_dict["data"][:] = 5
    smaller = executor.reshape(data=(2, 3, 8, 8))
    assert same(smaller.arg_dict["data"], executor.arg_dict["data"][:2])
    assert (values(smaller.grad_dict["data"]) == 5).all()
    assert smaller.arg_dict["c_weight"] is not None
    smaller.arg_dict["c_weight"][:] = 3
    assert (values(executor.arg_dict["c_weight"]) == 3).all()
    larger = executor.reshape(allow_up_sizing=True, data=(8, 3, 8, 8), nobody=(1,))
    assert larger.arg_dict["data"].shape == (8, 3, 8, 8)
    _, executor = bound_sum("null")
    assert not (executor._binding.has_loops or executor._binding._usage.training)
    assert set(executor.reshape(data=(2, 3, 8, 8)).grad_dict.values()) == {None}


def test_what_reshape_refuses():
    _, executor = bound_sum()
    with pytest.raises(amp.ArgumentError, match=r"'data'.*allow_up_sizing=True"):
        executor.reshape(data=(8, 3, 8, 8))
    with pytest.raises(amp.ArgumentError, match=r"'c_weight'.*partial_shaping=True"):
        executor.reshape(data=(4, 5, 4, 4))
    with pytest.warns(UserWarning), pytest.raises(amp.ArgumentError, match="can't infer"):
        executor.reshape()
    changed = executor.reshape(partial_shaping=True, allow_up_sizing=True, data=(4, 5, 4, 4))
    assert changed.arg_dict["c_weight"].shape == (8, 5, 3, 3)


@with_avx512
def test_products_with_several_consumers_are_not_fused(monkeypatch):
    """MXNet's executors take one that reads a product for the only one, in inference."""
    monkeypatch.delenv("MXNET_SUBGRAPH_BACKEND", raising=False)
    data = mx.sym.var("data")
    conv = mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), name="c")
    symbol = mx.sym.Group([mx.sym.relu(conv), conv, mx.sym.broadcast_add(conv, conv)])
    x = randn(2, 3, 6, 6)
    with amp.autocast(policy=casting_small_layers()):
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=x.shape)
    for name in ("c_weight", "c_bias"):
        executor.arg_dict[name][:] = randn(*executor.arg_dict[name].shape)
    relu, features, twice = executor.forward(data=x)
    assert (values(features) < 0).any()
    assert same(relu, mx.nd.relu(features))
    np.testing.assert_allclose(values(twice), 2 * values(features), rtol=0.02, atol=0.02)
