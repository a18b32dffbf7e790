"""Self-attention by oneDNN's products in fused models: the same answers, for any batch and length."""

import mxnet as mx
import numpy as np
import pytest
from fusion import HEADS, after, attend, heads, joined, model, run

import mxamp as amp
from helpers import operators_of, with_avx512
from mxamp.backends.onednn import attention
from mxamp.backends.onednn.attention import fuse_attention
from mxamp.backends.passes import Pass

pytestmark = [pytest.mark.usefixtures("unfused"), with_avx512]

B = amp.Policy.default("bfloat16")
ATTENTION = Pass("attention", fuse_attention)
S = mx.sym
X = S.var("data")
UNITS, SIZE = 24, 8
FUSED = ["_sg_mkldnn_selfatt_qk", "_sg_mkldnn_selfatt_valatt"]


def dense(data, units=UNITS, **more):
    return S.FullyConnected(data, num_hidden=units, flatten=False, **more)


def from_one_layer(x, **more):
    return S.split(dense(x, 3 * UNITS, **more), num_outputs=3, axis=-1)


def from_three_layers(x):
    return [dense(x), dense(x, no_bias=True), dense(x)]


def masked(x):
    apart, mask = S.reshape(x, shape=(-4, -1, HEADS, 0, 0)), S.var("mask", shape=(1, 1, 1, 1))
    return S.reshape(S.softmax(S.broadcast_add(apart, mask)), shape=(-3, 0, 0))


def reversed_heads(x):
    return heads(x, (0, 0, -1, SIZE), merged=(-1, 0, 0), reverse=True)


def two_layers():
    first = attend(from_one_layer(X)) + X
    return attend(from_three_layers(first)) + first


def interleaved():
    """Self-attention as GluonNLP's BERT computes it, in MXNet's float32 operators."""
    projected = dense(X, 3 * UNITS)
    scores = S.contrib.interleaved_matmul_selfatt_qk(projected, heads=HEADS)
    shares = S.softmax(scores)
    mixed = S.contrib.interleaved_matmul_selfatt_valatt(projected, shares, heads=HEADS)
    return S.Group([mixed, projected, scores, shares])


#: Graphs and the number of attentions in them.
GRAPHS = {
    "one layer": (lambda: attend(from_one_layer(X)), 1),
    "three layers, one without bias": (lambda: attend(from_three_layers(X)), 1),
    "no bias": (lambda: attend(from_one_layer(X, no_bias=True)), 1),
    "unscaled": (lambda: attend(from_one_layer(X), scores=lambda x: x), 1),
    "divided": (lambda: attend(from_one_layer(X), scores=lambda x: x / -1.7), 1),
    "nothing is no scale": (lambda: attend(from_one_layer(X), scores=lambda x: x * 0), 1),
    "a mask with four axes": (lambda: attend(from_one_layer(X), shares=masked), 1),
    "of the last axis but one": (
        lambda: attend(from_one_layer(X), shares=lambda x: S.softmax(x, axis=1)), 1
    ),
    "reversed shapes": (lambda: attend(from_one_layer(X), heads=reversed_heads), 1),
    "two layers": (two_layers, 2),
    "interleaved": (lambda: interleaved()[0], 1),
    "all of an interleaved one are outputs": (interleaved, 1),
}  # fmt: skip


def read_twice():
    q, k, v = from_three_layers(X)
    return S.Group([attend([q, k, v]), v])


def shared_weight():
    weight, bias = S.var("w"), S.var("b")
    return attend([dense(X, weight=weight, bias=bias) for _ in range(3)])


def returned(which):
    q, k, v = (heads(one) for one in from_one_layer(X))
    mixed = S.batch_dot(S.softmax(S.batch_dot(q, k, transpose_b=True)), v)
    return S.Group([joined(mixed), {"q": q, "mixed": mixed}[which]])


def in_a_region(graph):
    with amp.autocast(enabled=False):
        return graph()


def with_other_heads():
    q, k, v = from_three_layers(X)
    other = heads(k, (0, 0, -1, HEADS), (0, 3, 1, 2))
    mixed = S.batch_dot(S.softmax(S.batch_dot(heads(q), other, transpose_b=True)), heads(v))
    return joined(mixed)


#: Graphs that stay as they are.
LEFT = {
    "two sources": lambda: attend([dense(X), dense(S.relu(X)), dense(X)]),
    "a projection is an output": read_twice,
    "a third is read twice": lambda: attend([from_one_layer(X)[k] for k in (0, 0, 2)]),
    "a shared weight": shared_weight,
    "a head is an output": lambda: returned("q"),
    "the mixed heads are an output": lambda: returned("mixed"),
    "a region": lambda: in_a_region(lambda: attend(from_one_layer(X))),
    "an interleaved one in a region": lambda: in_a_region(interleaved),
    "heads in another order": with_other_heads,
    "rows are flattened": lambda: attend(
        [S.reshape(dense(S.reshape(X, shape=(-3, 0))), shape=(-4, -1, 5, 0)) for _ in range(3)]
    ),
    "kept by name": lambda: attend([dense(X), dense(X, name="kept"), dense(X)]),
}


@pytest.fixture
def in_float32(monkeypatch):
    """The same operators in float32: the sharpest oracle."""
    monkeypatch.setattr(attention, "_add_low", lambda _edit, _name, output: output)


def check(symbol, shape, tolerance):
    params, data = model(symbol, shape, scale=0.5)
    new, new_params = after(ATTENTION, symbol, params, B)
    for one, other in zip(run(symbol, params, data), run(new, new_params, data)):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert np.linalg.norm(other - one) <= tolerance * np.linalg.norm(one)


def count_fused(symbol, policy=B):
    params, _ = model(symbol, (2, 5, UNITS))
    new, _ = after(ATTENTION, symbol, params, policy)
    counts = [operators_of(new).count(name) for name in FUSED]
    assert counts[0] == counts[1]
    return counts[0]


@pytest.mark.parametrize("shape", [(2, 5, UNITS), (3, 1, UNITS)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_equal_those_of_batch_dot(name, shape, in_float32):
    symbol = GRAPHS[name][0]()
    assert count_fused(symbol) == GRAPHS[name][1]
    check(symbol, shape, 1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_other_graphs_stay(name):
    assert count_fused(LEFT[name](), B.override(fp32_layers=["kept"])) == 0
