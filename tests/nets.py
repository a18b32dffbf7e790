"""Nets of many kinds, each with inputs to call it on."""

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.gluon import nn, rnn

from helpers import randn, stacked


class Residual(nn.HybridBlock):
    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.first = nn.Conv2D(channels, 3, padding=1, use_bias=False)
            self.norm = nn.BatchNorm()
            self.second = nn.Conv2D(channels, 1)

    def hybrid_forward(self, F, x):
        return F.Activation(self.norm(self.first(x)), act_type="relu") + self.second(x)


class Attention(nn.HybridBlock):
    def __init__(self, units, heads):
        super().__init__()
        self.units, self.heads = units, heads
        with self.name_scope():
            self.qkv = nn.Dense(3 * units, flatten=False)
            self.out = nn.Dense(units, flatten=False)
            self.norm = nn.LayerNorm()

    def hybrid_forward(self, F, x, mask):
        def split(t):
            t = F.reshape(t, shape=(0, 0, self.heads, -1))
            return F.reshape(F.transpose(t, axes=(0, 2, 1, 3)), shape=(-3, 0, 0))

        q, k, v = (split(t) for t in F.split(self.qkv(x), num_outputs=3, axis=-1))
        scores = F.batch_dot(q, k, transpose_b=True) / (self.units / self.heads) ** 0.5
        scores = F.broadcast_add(scores, (1 - F.expand_dims(mask, 0)) * -1e9)
        mixed = F.batch_dot(F.softmax(scores, axis=-1), v)
        mixed = F.reshape(mixed, shape=(-4, -1, self.heads, 0, 0))
        mixed = F.reshape(F.transpose(mixed, axes=(0, 2, 1, 3)), shape=(0, 0, -3))
        return self.norm(x + self.out(mixed))


def convolutional():
    layers = nn.MaxPool2D(2), Residual(4), nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(3)
    return stacked(Residual(4), *layers), [randn(2, 4, 8, 8)]


def separable():
    layers = (
        nn.Conv2D(8, 1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"),
        nn.Conv2D(8, 3, groups=8, padding=1), nn.BatchNorm(), nn.LeakyReLU(0.1), nn.ELU(), nn.GELU(),
        nn.Dense(3),
    )  # fmt: skip
    return stacked(*layers), [randn(2, 4, 8, 8)]


def attention():
    return Attention(8, 2), [randn(2, 3, 8), nd.array(np.tril(np.ones((3, 3))))]


def perceptron():
    layers = nn.Dense(16, activation="relu"), nn.Dropout(0.0), nn.LayerNorm(), nn.Dense(3)
    return stacked(*layers), [randn(4, 8)]


class Embedded(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embedding = nn.Embedding(10, 8)
            self.dense = nn.Dense(4, flatten=False)

    def hybrid_forward(self, F, index):
        return F.mean(self.dense(self.embedding(index)), axis=1) + F.zeros((2, 4))


def embedded():
    return Embedded(), [nd.array([[1, 2, 3], [4, 5, 6]], dtype="int64")]


class Decoder(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.up = nn.Conv2DTranspose(4, 2, strides=2)
            self.conv = nn.Conv2D(4, 1)

    def hybrid_forward(self, F, x):
        up = self.up(x)
        return F.concat(self.conv(up), up, F.relu(up), dim=1)


def decoder():
    return Decoder(), [randn(2, 3, 4, 4)]


class Unrolled(nn.HybridBlock):
    def __init__(self, cell):
        super().__init__()
        with self.name_scope():
            self.cell = cell(6, input_size=5)

    def hybrid_forward(self, F, x):
        outputs, _ = self.cell.unroll(3, x, layout="NTC", merge_outputs=True)
        return outputs


def unrolled():
    return Unrolled(rnn.LSTMCell), [randn(2, 3, 5)]


class Masked(nn.HybridBlock):
    """Its rows after the mask are as many as there are ones in it."""

    def __init__(self, dropout):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(8, in_units=8)
            self.norm = nn.BatchNorm(in_channels=8)
            self.dropout = nn.Dropout(dropout)
            self.second = nn.Dense(4, in_units=8)

    def hybrid_forward(self, F, x, mask):
        kept = F.contrib.boolean_mask(self.first(x), mask)
        return self.second(self.dropout(self.norm(kept)))


def masked(dropout=0.0):
    return Masked(dropout), [randn(4, 8), nd.array([1, 0, 1, 1])]


NETS = [
    convolutional, separable, attention, perceptron, embedded, decoder, unrolled,
]  # fmt: skip


def made(make):
    mx.random.seed(0)
    net, data = make()
    net.initialize(mx.init.Xavier(rnd_type="gaussian"))
    net(*data)
    return net, data


class Control(nn.HybridBlock):
    """A net of one control-flow operator."""

    def __init__(self, name):
        super().__init__()
        self.operator = name
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(4, 4))

    def hybrid_forward(self, F, x, weight):
        def product(data):
            return F.FullyConnected(data, weight, num_hidden=4, no_bias=True)

        def step(data, states):
            out = product(data + states[0])
            return out, [out]

        if self.operator == "foreach":
            return F.contrib.foreach(step, x, [F.zeros((2, 4))])[0]
        state = F.sum(x, axis=0)
        if self.operator == "while_loop":
            functions = (lambda i, h: i < 2), (lambda i, h: ([], [i + 1, product(h)]))
            first = [F.zeros((1,)), state]
            return F.contrib.while_loop(*functions, first, max_iterations=3)[1][1]
        return F.contrib.cond(F.sum(state) < 1e9, lambda: product(state), lambda: state)
