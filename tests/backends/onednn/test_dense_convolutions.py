"""Dense layers as convolutions in fused models: the same answers, for any number of rows."""

import mxnet as mx
import pytest
from fusion import model, same_after

import mxamp as amp
from helpers import operators_of
from mxamp.backends.onednn.dense_convolutions import make_dense_convolutions
from mxamp.backends.passes import Pass

pytestmark = pytest.mark.usefixtures("unfused")

B = amp.Policy.default("bfloat16")
DENSE = Pass("dense_convolution", make_dense_convolutions)
LAYERS = B.override(fp32_layers=["kept"])
S = mx.sym
X = S.var("data")


def dense(data, units=7, **more):
    return S.FullyConnected(data, num_hidden=units, **more)


def two_heads(data):
    return S.Group([dense(data), S.softmax(dense(data, 3)), data])


def read_and_returned(data):
    return S.Group([dense(S.relu(data)), data, data * 2])


def shared(weight):
    options = {"weight": weight, "no_bias": True}
    return dense(X, **options) + dense(X, **options)


#: A graph, how many convolutions it has then, and how many transpositions.
GRAPHS = {
    "one": (lambda: dense(X), 1, 2),
    "no bias": (lambda: dense(X, no_bias=True), 1, 2),
    "a chain": (lambda: dense(S.relu(dense(S.Activation(dense(X), act_type="tanh"), 5)), 3), 3, 2),
    "gelu": (lambda: dense(S.LeakyReLU(dense(X), act_type="gelu")), 2, 2),
    "prelu": (lambda: dense(S.LeakyReLU(dense(X), act_type="prelu")), 2, 4),
    "softmax": (lambda: dense(S.softmax(dense(X))), 2, 4),
    "residual": (lambda: dense(S.relu(dense(X)) + dense(X)), 3, 5),
    "two heads": (lambda: two_heads(dense(X)), 3, 4),
    "read and returned": (lambda: read_and_returned(dense(X)), 2, 3),
    "flattened": (lambda: dense(S.Pooling(X, kernel=(2, 2), pool_type="avg")), 1, 2),
    "an activation is no dense layer": (lambda: dense(S.relu(X)), 1, 2),
}
#: Graphs that stay as they are.
LEFT = {
    "axes kept": lambda: dense(X, flatten=False),
    "a shared weight": lambda: shared(S.var("w")),
    "a computed weight": lambda: dense(X, weight=S.var("w") * 2),
    "kept by name": lambda: dense(X, name="kept"),
}


def check(symbol, shape):
    params, data = model(symbol, shape)
    return operators_of(same_after(DENSE, symbol, params, LAYERS, data)[0])


@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_same_answers(name, rows):
    make, convolutions, transposed = GRAPHS[name]
    shape = (rows, 3, 4, 4) if name == "flattened" else (rows, 12)
    operators = check(make(), shape)
    assert "FullyConnected" not in operators
    found = operators.count("Convolution"), operators.count("transpose")
    assert found == (convolutions, transposed)


@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name):
    assert "Convolution" not in check(LEFT[name](), (5, 12))


@pytest.mark.parametrize("units, inputs", [(8, 12), (200, 6000), (6000, 200)])
def test_small_weights_and_narrow_ones_stay(units, inputs):
    assert "Convolution" not in check(dense(X, units), (2, inputs))
