"""Models of the zoo, and the tools, with arrays on a GPU."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn, rnn

import mxamp as amp
from helpers import backpropagate, sequential, stacked
from nets import Attention

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Cannot decide type")]


def images(device, size=32):
    values = np.random.RandomState(0).randn(4, 3, size, size).astype("float32")
    return mx.nd.array(values, ctx=device)


class Encoder(Attention):
    """A layer of BERT's: attention by `batch_dot`, GELU, LayerNorm, additions behind them."""

    def __init__(self, units=16, heads=2):
        super().__init__(units, heads)
        with self.name_scope():
            self.up = nn.Dense(4 * units, flatten=False, in_units=units)
            self.down = nn.Dense(units, flatten=False, in_units=4 * units)
            self.last = nn.LayerNorm(in_channels=units)

    def hybrid_forward(self, F, x):
        x = super().hybrid_forward(F, x, F.ones((1, 1)))
        return self.last(x + self.down(F.LeakyReLU(self.up(x), act_type="gelu")))


def resnet(device):
    return gluon.model_zoo.vision.get_resnet(1, 18, classes=10, thumbnail=True), images(device)


def mobilenet(device):
    return gluon.model_zoo.vision.mobilenet_v2_0_5(classes=10), images(device, 64)


def bert(device):
    net = stacked(Encoder(), Encoder(), nn.Dense(3, flatten=False, in_units=16))
    return net, mx.nd.array(np.random.RandomState(0).randn(2, 7, 16), ctx=device)


def recurrent(layer, device):
    net = stacked(layer, nn.Dense(3, flatten=False))
    return net, mx.nd.array(np.random.RandomState(0).randn(5, 2, 4), ctx=device)


def lstm(device):
    return recurrent(rnn.LSTM(8, 2, bidirectional=True, input_size=4), device)


def gru(device):
    return recurrent(rnn.GRU(8, 1, input_size=4), device)


MODELS = [resnet, mobilenet, bert, lstm, gru]


def values_of(make, device, training, hybrid, low):
    """Return a model's outputs and, in training, the norm of its gradients, in float32."""
    np.random.seed(1)
    mx.random.seed(1)
    net, x = make(mx.cpu())
    net.initialize(mx.init.Xavier(rnd_type="gaussian", magnitude=4), ctx=mx.cpu())
    net(x)
    net.collect_params().reset_ctx(device)
    x = x.as_in_context(device)
    if hybrid:
        net.hybridize(static_alloc=True)
    policy = amp.Policy.default("float16", device.device_type)
    with amp.autocast(policy=policy, enabled=low):
        if not training:
            return [net(x).astype("float32").asnumpy()]
        loss = backpropagate(lambda: (net(x).astype("float32") ** 2).mean())
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    norm = np.sqrt(sum(float((p.grad(device) ** 2).sum().asscalar()) for p in params))
    return [loss.asnumpy(), np.array(norm)]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_models(make, training, hybrid, device, fusion):
    found = values_of(make, device, training, hybrid, low=True)
    # Small batches amplify rounding in training: CPUs round products as GPUs do.
    wanted = values_of(make, mx.cpu(), training, hybrid, low=training)
    for mine, theirs in zip(found, wanted):
        scale = float(np.abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=4e-2 * scale)


# ---------------------------------------------------------------------- tools


@pytest.fixture
def net(device):
    layers = nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(), nn.Activation("relu")
    layers = *layers, nn.GlobalAvgPool2D(), nn.Dense(4)
    made = sequential(*layers, init=mx.init.Xavier(), ctx=device, hybridize=True)
    made(images(device))
    return made


def test_check_numerics(device, policy):
    a = mx.nd.ones((4, 64), ctx=device) * 300
    with amp.autocast(policy=policy), amp.debugging.check_numerics(on="collect") as check:
        mx.nd.FullyConnected(a, a, num_hidden=4, no_bias=True)
    assert check.first.operator == "FullyConnected"


def test_compare(net, device, policy):
    with amp.autocast(policy=policy):
        found = amp.debugging.compare(net, images(device))
    assert "float16" in str(found)


def test_models_are_converted_and_compared(net, device, policy, tmp_path):
    net.export(str(tmp_path / "net"))
    model = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
    low = amp.convert_model(*model, policy=policy)
    [error] = amp.compare_models(model, low, {"data": images(device)}, ctx=device)
    assert 0 < error.relative < 1e-2


def test_benchmark_and_tune(net, device):
    x = images(device)
    table = str(amp.benchmark(net, x, budget=2))
    assert "autocast" in table
    assert "float16" in table
    tuned = amp.tune(net, x, budget=5)
    assert tuned.policy is not None
