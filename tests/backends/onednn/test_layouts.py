"""Blocked layouts that MXNet can't read: arrays of substitutions, views of 3-D convolutions."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import mxamp as amp
from helpers import (
    backpropagate,
    casting_small_layers,
    exported,
    initialized,
    kept,
    randn,
    same,
    values,
    with_avx512,
)

B = casting_small_layers()
UNTUNED = B.untuned()
VOLUMES = [nn.Conv3D, nn.Conv3DTranspose]
POOL = {"kernel": (1, 1, 1), "global_pool": True, "pool_type": "avg"}

VIEWS = {
    "flatten": lambda F, x: F.flatten(x),
    "reshape_like": lambda F, x: F.reshape_like(x, F.reshape(F.ones_like(x), shape=(0, -1))),
    "twice": lambda F, x: F.flatten(F.expand_dims(x, axis=1)),
    "pooled": lambda F, x: F.flatten(F.Pooling(x, **POOL)),
    "joined": lambda F, x: F.flatten(F.concat(x, x, dim=1)),
    "sliced": lambda F, x: F.flatten(F.slice_axis(x, axis=2, begin=0, end=2)),
    "squeezed": lambda F, x: F.squeeze(F.Pooling(x, **POOL)),
    "sum of views": lambda F, x: F.elemwise_add(
        F.flatten(x), F.flatten(F.Activation(x, act_type="relu"))
    ),
    "transposed view": lambda F, x: F.transpose(F.reshape(x, shape=(0, 0, -1)), axes=(0, 2, 1)),
    "none": lambda F, x: F.Pooling(x, kernel=(2, 2, 2), pool_type="max"),
}
READERS = {
    "mean": lambda F, x: F.mean(x, axis=2),
    "sum": lambda F, x: F.sum(x, axis=2),
    "split": lambda F, x: F.split(x, num_outputs=2, axis=2)[0],
}


class Read(nn.HybridBlock):
    """A 3-D convolution, and a reader of rows that are a view of its output."""

    def __init__(self, layer, reader):
        super().__init__()
        with self.name_scope():
            self.volume = layer(16, 3, padding=1, in_channels=16)
            self.reader = reader

    def hybrid_forward(self, F, x):
        rows = F.reshape(self.volume(x), shape=(0, 0, -1))
        return READERS[self.reader](F, rows) if self.reader in READERS else self.reader(rows)


def trained(net, data, **options):
    """Return the output and the gradient of the volume's weight."""
    with amp.autocast(**options):
        out = backpropagate(lambda: net(data))
    return values(out), values(net.volume.weight.grad())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layer", VOLUMES)
def test_what_begins_with_a_view_stands_in_for_no_reader_of_views(layer, reader, train):
    """MXNet reads a view of a 3-D convolution in float32, but no view of that view."""
    net = initialized(Read(layer, reader), hybridize=True)
    data = randn(2, 16, 4, 6, 6)
    expected = net(data).asnumpy()
    policy = B.override(fp32=["Convolution", "Deconvolution"])
    if train:
        out, _ = trained(net, data, policy=policy)
    else:
        with amp.autocast(policy=policy):
            out = net(data).asnumpy()
    np.testing.assert_allclose(out, expected, atol=1e-4)


@with_avx512
@pytest.mark.parametrize("low", [True, False])
@pytest.mark.parametrize("layer", VOLUMES)
def test_casts_read_views_of_volumes_in_float32(layer, low):
    """A transposed convolution is float32 in training, and its reader is not."""
    net = initialized(Read(layer, nn.Conv1D(16, 1, in_channels=16)), hybridize=True)
    data = randn(2, 16, 4, 6, 6)
    fp32 = ["Convolution" if layer is nn.Conv3D else "Deconvolution"]
    _, plain = trained(net, data, enabled=False)
    _, found = trained(net, data, policy=B if low else B.override(fp32=fp32))
    assert np.linalg.norm(found - plain) < 0.03 * np.linalg.norm(plain)


class Viewed(nn.HybridBlock):
    """A 3-D convolution in blocks of channels, a view of its output, and a dense layer."""

    def __init__(self, view):
        super().__init__()
        self.view = view
        with self.name_scope():
            self.conv = nn.Conv3D(16, 3, padding=1, in_channels=16)
            self.dense = nn.Dense(4)

    def hybrid_forward(self, F, x):
        # oneDNN's dense layer reads any view; a cast, which goes in front of the sine, does not.
        return self.dense(F.sin(self.view(F, self.conv(x))))


def made(view):
    mx.random.seed(3)
    np.random.seed(3)
    net = initialized(Viewed(VIEWS[view]), init=mx.init.Xavier())
    net(DATA)
    return net


DATA = randn(2, 16, 2, 4, 4)


def gradients(net):
    backpropagate(lambda: (net(DATA) ** 2).sum())
    return [p.grad().copy() for p in net.collect_params().values()]


def view_symbol(make=lambda conv: mx.sym.flatten(conv, name="view"), axes=3, **options):
    conv = mx.sym.Convolution(
        mx.sym.var("data"), kernel=(3,) * axes, num_filter=16, name="conv", **options
    )
    return make(conv)


def kept_views(symbol, policy=B, **usage):
    """The names of the views that are computed in float32 for what they read."""
    return kept(symbol, policy, {"volume_views"}, **usage)


# ---------------------------------------------------------------------- graphs that run


@with_avx512
@pytest.mark.parametrize("view", VIEWS)
def test_graphs_give_what_eager_calls_give(view):
    net = made(view)
    with amp.autocast(policy=UNTUNED):
        out, grads = net(DATA), gradients(net)
        net.hybridize()
        assert same(net(DATA), out)
        assert all(same(a, b) for a, b in zip(gradients(net), grads))
    net.hybridize(False)
    error = values(net(DATA)) - values(out)
    assert 0 < np.abs(error).max() < 0.03 * np.abs(values(out)).max()


@with_avx512
@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("view", ["flatten", "sum of views", "pooled"])
def test_converted_models_run_and_load(view, tmp_path):
    net = made(view)
    plain = values(net(DATA))
    for options in ({}, {"cast_optional_params": True}, {"fuse": True}):
        low = amp.convert_hybrid_block(net, "bfloat16", example_inputs=DATA, **options)
        out = values(low(DATA))
        assert 0 < np.abs(out - plain).max() < 0.03 * np.abs(plain).max()
        # mxamp is off: it runs as in plain MXNet, and once more under a policy.
        loaded = exported(low, tmp_path)
        assert np.abs(values(loaded(DATA)) - plain).max() < 0.03 * np.abs(plain).max()
        with amp.autocast("bfloat16"):
            assert np.abs(values(loaded(DATA)) - plain).max() < 0.03 * np.abs(plain).max()


# ---------------------------------------------------------------------- readers of plain layouts

#: What plain MXNet runs on the output of a sigmoid, in a graph or on the graph's output.
PLAIN_READERS = {
    "rnn": lambda F, x: F.RNN(
        x, F.ones((4 * 8 * 16 + 64,)), *[F.zeros((1, 32, 8))] * 2,
        state_size=8, num_layers=1, mode="lstm",
    ),
    "softmax": lambda F, x: F.softmax(x),
    "log_softmax": lambda F, x: F.log_softmax(x),
    "slice": lambda F, x: F.slice(x, begin=(0, 1), end=(2, 5)),
}  # fmt: skip
MAKERS = {
    "sigmoid": lambda F, x: F.sigmoid(x),
    "in place": lambda F, x: F.tanh(F.sigmoid(x)),
    "added": lambda F, x: F.elemwise_add(F.tanh(x), F.sigmoid(x)),
    "relu": lambda F, x: F.relu(x),
    "groups": None,
}


class BesideConvolution(nn.HybridBlock):
    """A convolution that is an output too, what replaces operators behind it, and a reader."""

    def __init__(self, reader, maker):
        super().__init__()
        self.reader, self.maker = PLAIN_READERS.get(reader, lambda _F, x: x), MAKERS[maker]
        layer = nn.Conv1D if reader == "rnn" else nn.Conv2D
        groups = {"groups": 8} if self.maker is None else {}
        with self.name_scope():
            self.conv = layer(32, 3, padding=1, in_channels=32, **groups)

    def hybrid_forward(self, F, x):
        x = self.conv(x)
        return x, self.reader(F, x if self.maker is None else self.maker(F, x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("reader", [*PLAIN_READERS, "the program"])
def test_arrays_that_must_have_a_plain_layout_are_in_no_other(reader, maker, training):
    net = initialized(BesideConvolution(reader, maker), hybridize=True)
    data, found = randn(*((2, 32, 8) if reader == "rnn" else (2, 32, 56, 56))), []
    for policy in (None, B.in_float32()):
        with amp.autocast(enabled=policy is not None, policy=policy):
            with autograd.record() if training else autograd.pause():
                out = net(data)[1]
            found.append(out[:, 1:5].asnumpy())
    np.testing.assert_allclose(*found, atol=2e-6)


# ---------------------------------------------------------------------- what is decided


@with_avx512
@pytest.mark.parametrize("symbol, found", [
    (view_symbol(), ["view"]),
    (view_symbol(axes=2), []),
    (view_symbol(axes=1), []),
    (view_symbol(num_group=2), ["view"]),
    (mx.sym.flatten(mx.sym.Deconvolution(mx.sym.var("x"), kernel=(2, 2, 2), num_filter=16), name="view"), ["view"]),
    (view_symbol(lambda conv: mx.sym.flatten(mx.sym.exp(conv), name="view")), []),
    (view_symbol(lambda conv: mx.sym.flatten(mx.sym.BlockGrad(conv), name="view")), ["view"]),
    (view_symbol(lambda conv: mx.sym.Dropout(mx.sym.squeeze(conv))), []),
    (view_symbol(lambda conv: mx.sym.flatten(mx.sym.FullyConnected(conv, num_hidden=4), name="view")), []),
    (mx.sym.flatten(mx.sym.Pooling(mx.sym.var("data"), **POOL), name="view"), []),
])  # fmt: skip
def test_views_behind_3d_convolutions_are_found(symbol, found):
    assert kept_views(symbol) == kept_views(symbol, UNTUNED) == found
    assert kept_views(amp.convert_symbol(symbol, "bfloat16")) == found


@with_avx512
def test_views_of_inputs_that_may_be_volumes_are_found():
    symbol, shapes = mx.sym.flatten(mx.sym.var("data"), name="view"), {"data": (2,) * 5}
    for dtype, found in ("bfloat16", ["view"]), ("float32", []):
        assert kept_views(symbol, dtypes={"data": dtype}, shapes=shapes) == found
