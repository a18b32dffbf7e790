"""Biases beside frozen weights: MXNet's dense layer computes no gradient for them."""

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import mxamp as amp
from mxamp.scaling.frozen import biases_without_gradients


def frozen(net, *data):
    """Let a net's weights have no gradients; return its parameters."""
    net.initialize()
    net(*data)
    params = net.collect_params()
    for param in params.values():
        if param.name.endswith("weight"):
            param.grad_req = "null"
    return list(params.values())


@pytest.mark.parametrize("hybrid", [False, True])
def test_mxnet_leaves_their_gradients_as_they_were(hybrid):
    data = mx.nd.ones((4, 3))
    net = nn.Dense(2)
    (bias,) = (p for p in frozen(net, data) if p.name.endswith("bias"))
    net.hybridize(hybrid)
    bias.grad()[:] = 7
    with autograd.record():
        net(data).sum().backward()
    assert bias.grad().asnumpy().tolist() == [7, 7]  # 4, were it computed


@pytest.mark.parametrize("layer", [lambda: nn.Conv2D(2, 3), lambda: nn.Conv2DTranspose(2, 3)])
def test_convolutions_compute_theirs(layer):
    net = layer()
    params = frozen(net, mx.nd.ones((1, 1, 5, 5)))
    (bias,) = (p for p in params if p.name.endswith("bias"))
    with autograd.record():
        out = net(mx.nd.ones((1, 1, 5, 5)))
        out.sum().backward()
    assert bias.grad().asnumpy().tolist() == [out.size / 2] * 2
    assert not biases_without_gradients(params)


def test_fused_recurrent_layers_compute_theirs():
    net = rnn.LSTM(3, input_size=2)
    params = frozen(net, mx.nd.ones((2, 1, 2)))
    with autograd.record():
        net(mx.nd.ones((2, 1, 2))).sum().backward()
    assert all(p.grad().norm().asscalar() > 0 for p in params if p.name.endswith("bias"))
    assert not biases_without_gradients(params)


def test_init_trainer_says_so(on, caplog):
    net = nn.HybridSequential()
    net.add(nn.Dense(3), nn.Dense(2))
    params = frozen(net, mx.nd.ones((4, 3)))
    amp.init_trainer(gluon.Trainer(params, "sgd"))
    (said,) = (r.getMessage() for r in caplog.records if "bias" in r.getMessage())
    assert f"{net[0].bias.name}, {net[1].bias.name} would be trained on whatever" in said
    caplog.clear()
    for layer in net:
        layer.weight.grad_req = "write"
    amp.init_trainer(gluon.Trainer([layer.bias for layer in net], "sgd"))
    assert not [r for r in caplog.records if "bias" in r.getMessage()]
