"""Nets compared in two precisions: the errors, where they jump, and no side effects."""

import random

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from planted import chain

import mxamp as amp
from helpers import operators_of, randn, values
from models import model
from nets import (
    NETS,
    attention,
    convolutional,
    decoder,
    made,
    perceptron,
)

compare = amp.debugging.compare


def square(output, _label):
    return (output * output).sum()


class Plain(gluon.Block):
    """Computes with NumPy's shapes between its children: it can't be traced."""

    def __init__(self, dropout=0.0):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(8, in_units=4)
            self.norm = nn.BatchNorm(in_channels=8)
            self.dropout = nn.Dropout(dropout)
            self.second = nn.Dense(3, in_units=8)

    def forward(self, x):
        hidden = self.dropout(self.norm(self.first(x)))
        return self.second(hidden * float(hidden.shape[0]))


def state(net):
    params = net.collect_params().values()
    arrays = [p.data() for p in params] + [p.grad() for p in params if p.grad_req != "null"]
    return [values(array).tobytes() for array in arrays], random.getstate(), len(net._forward_hooks)


@pytest.mark.parametrize("make", NETS[:7:2], ids=lambda make: make.__name__)
def test_a_clean_net_has_no_jump_and_eager_and_hybrid_agree(make, dtype):
    net, data = made(make)
    batch = (*data, nd.zeros(1))
    eager = compare(net, batch, square, dtype=dtype)
    net.hybridize()
    net(*data)
    assert str(compare(net, batch, square, dtype=dtype)) == str(eager)
    assert eager.first_jump is None
    bound = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert max(error.relative for error in eager.outputs) < bound
    assert not any(error.lost for error in (*eager.outputs, *eager.gradients))
    trained = [p.name for p in net.collect_params().values() if p.grad_req != "null"]
    assert sorted(error.name for error in eager.gradients) == sorted(trained)
    assert compare(net, tuple(data), dtype=dtype).gradients == ()


def test_layers_are_the_nodes_of_the_graph_and_errors_what_the_policy_rounds():
    net, data, (symbol, _, _), expected, _ = model(perceptron)
    result = compare(net, tuple(data), dtype="float16")
    assert [error.operator for error in result.outputs] == operators_of(symbol)
    with amp.autocast("float16"):
        difference = (values(net(*data)) - values(expected)).astype("float64")
    last = result.outputs[-1]
    assert (last.precision, last.block) == ("float16", net[-1].name)
    assert last.maximum == np.abs(difference).max() > 0
    norms = [np.linalg.norm(one.astype("float64")) for one in (difference, values(expected))]
    assert last.relative == pytest.approx(norms[0] / norms[1], rel=1e-6)


def test_gradients_are_those_of_training_with_the_scale_taken_out():
    net, data = made(perceptron)
    result = compare(net, (*data, None), square, dtype="float16")
    gradients = []
    for scale in (1, result.loss_scale):
        with amp.autocast("float16", enabled=scale > 1), autograd.record():
            loss = square(net(*data), None) * scale
        loss.backward()
        gradients.append({p.name: values(p.grad()) / scale for p in net.collect_params().values()})
    for error in result.gradients:
        plain, mixed = (one[error.name] for one in gradients)
        assert error.maximum == np.abs(plain - mixed).max(), error.name


def test_an_overflow_is_found():
    net, data, bad = chain(4, [1], "overflow")
    result = compare(net, data, dtype="float16")
    assert result.first_jump.name in bad
    assert result.first_jump.lost > 0
    assert "jumps first at" in str(result)
    assert compare(net, data, dtype="bfloat16").first_jump is None


def test_cancellation_is_found():
    net, data, bad = chain(4, [2], "cancellation")
    first = compare(net, (data, None), square, dtype="bfloat16").first_jump
    assert {first.name} == bad
    assert first.relative > 0.1
    assert first.lost == 0


@pytest.mark.parametrize("make", [convolutional, decoder])
def test_a_net_is_left_bitwise_as_it_was(make):
    net, data = made(make)
    net.hybridize()
    with autograd.record():
        loss = square(net(*data), None)
    loss.backward()
    next(iter(net.collect_params().values())).grad_req = "add"
    before = state(net)
    with pytest.raises(ZeroDivisionError):
        compare(net, (*data, None), lambda output, _: 1 / 0, dtype="float16")
    compare(net, [(*data, None)] * 2, square, dtype="float16")
    assert state(net) == before


def test_both_runs_drop_the_same_elements():
    net = Plain(dropout=0.5)
    net.initialize()
    drawn = []
    for _ in range(2):
        mx.random.seed(5)
        result = compare(net, (randn(64, 4), None), square, dtype="float16")
        drawn.append(values(nd.random.uniform(shape=(3,))).tolist())
    assert max(error.relative for error in result.outputs) < 0.01
    assert drawn[0] == drawn[1]


def test_the_loss_scale_is_lowered_until_nothing_overflows():
    net, data = made(perceptron)
    result = compare(net, (*data, None), lambda o, _: (o * 1000).sum(), dtype="float16")
    assert 1 < result.loss_scale < 2.0**16
    assert not any(error.lost for error in result.gradients)
    assert compare(net, (*data, None), square, dtype="bfloat16").loss_scale == 1


def test_a_batch_that_is_all_wrong_is_not_hidden_by_larger_ones():
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize()
    net.weight.set_data(nd.array([[1, -1]]))
    # float16 takes the second batch's 1.0002 for 1: an output of 0.
    batches = [(nd.array([row]), nd.zeros(1)) for row in ([100, 0], [1.0002, 1], [200, 0])]
    result = compare(net, batches, square, dtype="float16")
    assert result.outputs[0].relative == result.gradients[0].relative == 1
    assert result.outputs[0].maximum == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.parametrize("make", [nn.HybridSequential, nn.Sequential])
def test_nets_that_were_not_run_or_not_initialized(make):
    net = make()
    net.add(nn.Dense(4), nn.BatchNorm())
    with pytest.raises(amp.StateError, match="does not run"):
        compare(net, nd.ones((2, 3)))
    net.initialize()
    result = compare(net, (randn(6, 3), None), square, dtype="float16")
    assert result.outputs[-1].relative < 0.01
    assert net[1].running_mean._data is None


def test_sparse_gradients():
    results = []
    for sparse in (True, False):
        mx.random.seed(3)
        net = nn.HybridSequential()
        net.add(nn.Embedding(10, 3, sparse_grad=sparse), nn.Dense(2, in_units=6))
        net.initialize(mx.init.Normal(1))
        found = compare(net, (nd.array([[1, 2], [2, 4]]), None), square, dtype="float16")
        results.append([error.relative for error in found.gradients])
    assert results[0] == results[1]


def test_inside_init_and_numpy_arrays():
    net, data = made(attention)
    alone = str(compare(net, tuple(data), dtype="float16"))
    amp.init("bfloat16")
    assert str(compare(net, tuple(data), dtype="float16")) == alone
    assert compare(net, tuple(data)).dtype == "bfloat16"
    amp.shutdown()
    mx.npx.set_np()
    dense = nn.Dense(3, in_units=4)
    dense.initialize()
    result = compare(dense, (mx.np.ones((2, 4)), None), lambda o, _: o.sum(), dtype="float16")
    assert len(result.outputs) == 1 and len(result.gradients) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda net, x: ((mx.sym.var("x") * 2, {}, {}), x), "takes a Block.*SymbolBlock"),
        (lambda net, x: (net, [3]), "a batch is an NDArray"),
        (lambda net, x: (net, []), "no batch"),
        (lambda net, x: (net, (x, x), "sce"), "loss must be a function of .*, not 'sce'"),
        (lambda net, x: (net, (x, x), lambda o, y: 0.5), "the loss must return .*, not 0.5"),
        (lambda net, x: (net, x, square), r"\(data, label\)"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(amp.ArgumentError, match=message):
        compare(*arguments(made(perceptron)[0], nd.ones((2, 8))))


def test_converted_and_cast_nets_are_refused():
    net, data = made(convolutional)
    converted = amp.convert_hybrid_block(net, "bfloat16", example_inputs=data)
    net.cast("float16")
    for other, batch in ((converted, data[0]), (net, data[0].astype("float16"))):
        with pytest.raises(amp.ArgumentError, match="takes a float32 net"):
            compare(other, batch, dtype="bfloat16")


class Rows(gluon.Block):
    """Computes with NumPy's shapes itself: none of it can be traced."""

    def forward(self, x):
        return nd.dot(x * float(x.shape[0]) * 1e4, nd.ones((8, 8))) * 1e-7


def test_blocks_that_compute_eagerly(dtype):
    net = nn.Sequential()
    net.add(nn.Dense(8, in_units=4, activation="sigmoid"), Rows(), nn.Dense(3, in_units=8))
    net.initialize()
    result = compare(net, (randn(500, 4), None), square, dtype=dtype)
    kinds = [error.operator for error in result.outputs]
    assert kinds[:3] == ["FullyConnected", "Activation", "_mul_scalar"]
    assert kinds[-3:] == ["dot", "_mul_scalar", "FullyConnected"]
    jump = result.first_jump and result.first_jump.operator
    assert jump in (("_mul_scalar", "dot") if dtype == "float16" else (None,))
