"""Nets compared in two precisions: the errors, where they jump, and no side effects."""

import random

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn
from planted import chain, doubled

import mxamp as amp
from helpers import backpropagate, initialized, operators_of, randn, sequential, untuned, values
from models import model
from nets import NETS, attention, convolutional, decoder, made, perceptron

compare = amp.debugging.compare


def state(net):
    mx.nd.waitall()  # MXNet permutes a deconvolution's weight while that runs
    params = net.collect_params().values()
    arrays = [p.data() for p in params] + [p.grad() for p in params if p.grad_req != "null"]
    return [values(array).tobytes() for array in arrays], random.getstate(), len(net._forward_hooks)


@pytest.mark.parametrize("make", NETS[:7:2], ids=lambda make: make.__name__)
def test_a_clean_net_has_no_jump_and_eager_and_hybrid_agree(make, dtype):
    net, data = made(make)
    eager = compare(net, tuple(data), train_mode=True, policy=untuned(dtype))
    net.hybridize()
    net(*data)
    assert str(compare(net, tuple(data), train_mode=True, policy=untuned(dtype))) == str(eager)
    assert eager.first_jump is None
    bound = {"float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert max(error.relative for error in eager.outputs) < bound
    assert not any(error.lost for error in eager.outputs)


def test_float32_with_equivalents_is_compared_too():
    net, data = made(perceptron)
    result = compare(net, tuple(data), dtype="float32")
    assert result.first_jump is None and max(error.relative for error in result.outputs) < 1e-5


def test_normalization_is_that_of_the_mode():
    net = sequential(nn.Dense(3, in_units=4), nn.BatchNorm(in_channels=3))
    net[0].bias.set_data(nd.full((3,), 1000))  # float16 rounds 1000 + x: large against x alone
    inference, training = (
        compare(net, randn(64, 4), train_mode=mode, dtype="float16").outputs[-1].relative
        for mode in (False, True)
    )
    assert training > 100 * inference > 0


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


def test_an_overflow_is_found():
    net, data, bad = chain(4, [1], "overflow")
    result = compare(net, data, dtype="float16")
    assert result.first_jump.name in bad
    assert result.first_jump.lost > 0
    assert "jumps first at" in str(result)
    assert repr(result.first_jump).startswith("<TensorError: net_layer1_fwd (FullyConnected, float")
    assert "4 outputs: no layer" in str(compare(net, data, policy=untuned("bfloat16")))
    # float16 has no 4097: the error of layer 0 jumps, but loses no element.
    net[0].weight.set_data(nd.array(doubled(np.eye(8), 4097, -4096)))
    assert compare(net, data, dtype="float16").first_jump.lost > 0


def test_cancellation_is_found():
    net, data, bad = chain(4, [2], "cancellation")
    first = compare(net, data, policy=untuned("bfloat16")).first_jump
    assert {first.name} == bad
    assert first.relative > 0.1
    assert first.lost == 0


@pytest.mark.parametrize("make", [convolutional, decoder])
def test_a_net_is_left_bitwise_as_it_was(make):
    net, data = made(make)
    net.hybridize()
    backpropagate(lambda: (net(*data) ** 2).sum())
    next(iter(net.collect_params().values())).grad_req = "add"
    before = state(net)
    compare(net, [tuple(data)] * 2, train_mode=True, dtype="float16")
    assert state(net) == before


def test_both_runs_drop_the_same_elements():
    net = sequential(nn.Dense(8, in_units=4), nn.Dropout(0.5), nn.Dense(3, in_units=8))
    drawn = []
    for _ in range(2):
        mx.random.seed(5)
        result = compare(net, randn(64, 4), train_mode=True, dtype="float16")
        drawn.append(values(nd.random.uniform(shape=(3,))).tolist())
    assert max(error.relative for error in result.outputs) < 0.01
    assert drawn[0] == drawn[1]


def test_a_batch_that_is_all_wrong_is_not_hidden_by_larger_ones():
    net = initialized(nn.Dense(1, in_units=2, use_bias=False))
    net.weight.set_data(nd.array([[1, -1]]))
    # float16 takes the second batch's 1.0002 for 1: an output of 0.
    batches = [nd.array([row]) for row in ([100, 0], [1.0002, 1], [200, 0])]
    result = compare(net, batches, dtype="float16")
    assert result.outputs[0].relative == 1
    assert result.outputs[0].maximum == pytest.approx(2e-4, rel=1e-2)


@pytest.mark.parametrize("make", [nn.HybridSequential, nn.Sequential])
def test_nets_that_were_not_run_or_not_initialized(make):
    net = make()
    net.add(nn.Dense(4), nn.BatchNorm())
    with pytest.raises(amp.StateError, match="does not run"):
        compare(net, nd.ones((2, 3)))
    net.initialize()
    result = compare(net, randn(6, 3), train_mode=True, dtype="float16")
    assert result.outputs[-1].relative < 0.01
    assert net[1].running_mean._data is None


def test_inside_init_and_numpy_arrays():
    net, data = made(attention)
    alone = str(compare(net, tuple(data), dtype="float16"))
    amp.init("bfloat16")
    assert str(compare(net, tuple(data), dtype="float16")) == alone
    assert compare(net, tuple(data)).dtype == "bfloat16"
    amp.shutdown()
    mx.npx.set_np()
    dense = initialized(nn.Dense(3, in_units=4))
    assert len(compare(dense, mx.np.ones((2, 4)), dtype="float16").outputs) == 1


def test_converted_and_cast_nets_are_refused():
    net, data = made(convolutional)
    policy = amp.Policy.default("bfloat16").untuned()  # with tiny layers
    converted = amp.convert_hybrid_block(net, policy=policy, example_inputs=data)
    net.cast("float16")
    for other, batch in ((converted, data[0]), (net, data[0].astype("float16"))):
        with pytest.raises(amp.ArgumentError, match="give the float32 model"):
            compare(other, batch, dtype="bfloat16")


class Rows(gluon.Block):
    """Computes with NumPy's shapes itself: none of it can be traced."""

    def forward(self, x):
        return nd.dot(x * float(x.shape[0]) * 1e4, nd.ones((8, 8))) * 1e-7


def test_blocks_that_compute_eagerly(dtype):
    net = nn.Sequential()
    net.add(nn.Dense(8, in_units=4, activation="sigmoid"), Rows(), nn.Dense(3, in_units=8))
    result = compare(initialized(net), randn(500, 4), dtype=dtype)
    kinds = [error.operator for error in result.outputs]
    assert kinds[:3] == ["FullyConnected", "Activation", "_mul_scalar"]
    assert kinds[-3:] == ["dot", "_mul_scalar", "FullyConnected"]
    jump = result.first_jump and result.first_jump.operator
    assert jump in (("_mul_scalar", "dot") if dtype == "float16" else (None,))
