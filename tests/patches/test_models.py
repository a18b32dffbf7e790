"""Real networks train two steps in both dtypes, hybridized, close to float32."""

import math

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision

import mxamp as amp
from helpers import randn, run_forked, values
from nets import Attention

# One rounding, relatively.
UNIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class LanguageModel(nn.HybridBlock):
    def __init__(self, vocabulary=50, units=32):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(vocabulary, units)
            self.lstm = rnn.LSTM(units, num_layers=2, layout="NTC", input_size=units)
            self.decoder = nn.Dense(vocabulary, flatten=False, in_units=units)

    def hybrid_forward(self, F, tokens):
        return self.decoder(self.lstm(self.embedding(tokens)))


class Layer(nn.HybridBlock):
    def __init__(self, units, heads):
        super().__init__()
        with self.name_scope():
            self.attention = Attention(units, heads)
            self.first = nn.Dense(4 * units, flatten=False, in_units=units)
            self.second = nn.Dense(units, flatten=False, in_units=4 * units)
            self.norm = nn.LayerNorm(in_channels=units)

    def hybrid_forward(self, F, x, mask):
        x = self.attention(x, mask)
        return self.norm(x + self.second(F.LeakyReLU(self.first(x), act_type="gelu")))


class Encoder(nn.HybridBlock):
    """BERT in small: embeddings, post-norm layers, a pooled classifier."""

    def __init__(self, vocabulary=100, units=48, heads=4, layers=2):
        super().__init__()
        with self.name_scope():
            self.tokens = nn.Embedding(vocabulary, units)
            self.positions = self.params.get("positions", shape=(1, 16, units))
            self.norm = nn.LayerNorm(in_channels=units)
            self.dropout = nn.Dropout(0.0)
            self.layers = nn.HybridSequential()
            for _ in range(layers):
                self.layers.add(Layer(units, heads))
            self.classifier = nn.Dense(4, in_units=units)

    def hybrid_forward(self, F, tokens, mask, positions):
        x = self.dropout(self.norm(F.broadcast_add(self.tokens(tokens), positions)))
        for layer in self.layers._children.values():
            x = layer(x, mask)
        return self.classifier(F.mean(x, axis=1))


class NumpyNet(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.conv = nn.Conv2D(8, 3, padding=1, in_channels=3)
            self.norm = nn.BatchNorm(in_channels=8)
            self.dense = nn.Dense(5, in_units=8)

    def hybrid_forward(self, F, x):
        x = F.npx.relu(self.norm(self.conv(x)))
        x = F.np.concatenate([x, x * 0.5], axis=1)
        x = F.np.mean(x, axis=(2, 3))
        return self.dense(F.np.tanh(x[:, :8]))


def tokens(rows, columns, high):
    return nd.array(np.random.RandomState(1).randint(0, high, (rows, columns)))


def calm(block):
    """Make residual branches small: at random weights a deep network is chaotic otherwise."""
    norms = [c for c in block._children.values() if isinstance(c, nn.BatchNorm)]
    if isinstance(block, nn.HybridSequential) and len(norms) > 1:
        norms[-1].gamma.set_data(nd.full(norms[-1].gamma.shape, 0.1))


def zoo(name, size, batch):
    def make():
        return getattr(vision, name)(classes=10), [randn(batch, 3, size, size)]

    make.__name__ = name
    return make


def language_model():
    return LanguageModel(), [tokens(4, 7, 50)]


def encoder():
    return Encoder(), [tokens(4, 16, 100), nd.ones((16, 16))]


def numpy_net():
    return NumpyNet(), [randn(4, 3, 8, 8)]


MODELS = [
    pytest.param(zoo("resnet50_v1", 64, 4), marks=[pytest.mark.slow, pytest.mark.proof]),
    pytest.param(zoo("mobilenet_v2_1_0", 64, 8), marks=pytest.mark.slow),
    language_model,
    encoder,
    numpy_net,
]


def norm(arrays):
    return math.sqrt(sum(float((a.astype("float64") ** 2).sum()) for a in arrays))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_two_steps(dtype, make):
    if make is numpy_net:
        mx.npx.set_np()
    mx.random.seed(0)
    net, data = make()
    if make is numpy_net:
        data = [x.as_np_ndarray() for x in data]
    net.initialize(mx.init.Xavier())
    with autograd.pause():
        out = net(*data)
    net.apply(calm)
    net.hybridize(static_alloc=True)
    classes = out.shape[-1]
    label = tokens(out.shape[0], 1, classes).reshape(-1)
    if len(out.shape) == 3:
        label = tokens(out.shape[0], out.shape[1], classes)
    if make is numpy_net:
        label = label.as_np_ndarray()
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    params = {k: p for k, p in net.collect_params().items() if p.grad_req != "null"}
    start = {k: p.data().copy() for k, p in net.collect_params().items()}

    def steps(scaler, noise=0.0):
        for name, value in start.items():
            factor = nd.random.normal(1, noise, value.shape) if noise else nd.ones(value.shape)
            factor = factor.as_np_ndarray() if make is numpy_net else factor
            net.collect_params()[name].set_data(value * factor)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
        amp.init_trainer(trainer, scaler)
        losses, first = [], None
        for _ in range(2):
            with autograd.record():
                loss = loss_function(net(*data), label).mean()
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            amp.unscale(trainer)
            first = first or {k: p.grad().asnumpy() for k, p in params.items()}
            trainer.step(1)
            assert trainer.amp_last_step.stepped
            losses.append(loss.asnumpy().item())
        return losses, first

    def distance(grads):
        return norm([grads[k] - plain[k] for k in plain]) / norm(list(plain.values()))

    plain_losses, plain = steps(amp.NoScaler())
    _, disturbed = steps(amp.NoScaler(), UNIT[dtype])
    amp.init(dtype, ctx=mx.cpu())
    losses, low = steps(amp.StaticLossScaler(128) if dtype == "float16" else None)
    assert np.isfinite(losses).all()
    assert all(np.isfinite(grad).all() for grad in low.values())
    np.testing.assert_allclose(losses[0], plain_losses[0], rtol=0.05)
    # As close to float32 as float32 is to itself with weights disturbed by one rounding.
    assert 0 < distance(low) < 1.5 * distance(disturbed), (distance(low), distance(disturbed))


TRANSPOSED = """
import mxamp as amp, mxnet as mx, numpy as np
from mxnet import autograd

net = mx.gluon.nn.Conv2DTranspose(8, 3, in_channels=4)
net.initialize(mx.init.Uniform(0.5))
x = mx.nd.random.normal(shape=(2, 4, 6, 6))

def gradients():
    with autograd.record():
        loss = (net(x).astype("float32") ** 2).mean()
    loss.backward()
    return [mx.nd.Cast(p.grad(), dtype="float32").asnumpy() for p in net.collect_params().values()]

plain = gradients()
for p in net.collect_params().values():
    p.cast({dtype})
net.hybridize({hybridized})
amp.init({policy!r}, ctx=mx.cpu())
for mine, theirs in zip(gradients(), plain):
    assert np.linalg.norm(mine - theirs) < 0.02 * np.linalg.norm(theirs)
"""


class Merged(mx.gluon.HybridBlock):
    """Adds feature maps of two sizes, as HRNet does."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.fine = mx.gluon.nn.Conv2D(16, 1, in_channels=3)
            self.coarse = mx.gluon.nn.Conv2D(16, 1, 2, in_channels=3)
            self.out = mx.gluon.nn.Conv2D(16, 1, in_channels=16)

    def hybrid_forward(self, F, x):
        fine, coarse = self.fine(x), self.coarse(x)
        resized = F.contrib.BilinearResize2D(coarse, fine, mode="like")
        return self.out(F.relu(resized + fine))


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("hybridized", [False, True])
def test_a_map_resized_like_one_in_half_precision(hybridized, policy):
    net, x = Merged(), mx.nd.random.normal(shape=(1, 3, 8, 8))
    net.initialize()
    net.hybridize(hybridized)
    plain = net(x)
    with amp.autocast(policy):
        with autograd.record():
            out = net(x)
        out.backward()
        assert float((net.fine.weight.grad() ** 2).sum().asscalar()) > 0
    assert np.linalg.norm(values(out) - values(plain)) < 0.02 * np.linalg.norm(values(plain))
    net.hybridize()
    net(x)
    low = amp.convert_hybrid_block(net, policy, cast_optional_params=True)(x)
    assert float((low - plain).norm().asscalar()) < 0.02 * float(plain.norm().asscalar())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize(
    "dtype", ["'float16'", "np.dtype([('bfloat16', np.uint16)])"], ids=["float16", "bfloat16"]
)
def test_transposed_convolutions_train_with_half_precision_weights(
    tmp_path, dtype, hybridized, policy
):
    code = TRANSPOSED.format(dtype=dtype, hybridized=hybridized, policy=policy)
    done = run_forked(code, tmp_path)  # oneDNN's kernel may end the process
    assert done.returncode == 0, done.stderr
