"""Counts of operators are exact: eager, hybridized and in modules, without side effects."""

from collections import Counter

import mxnet as mx
import pytest
from mxnet import nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import initialized, randn, sequential, untuned, with_avx512
from mxamp.debugging import operator_stats
from nets import Control, convolutional, made, masked


def dense(hidden=4):
    return sequential(nn.Dense(hidden, activation="relu", in_units=3), nn.Dense(2, in_units=hidden))


def calls(stats):
    return {(row.operator, row.dtype): row.calls for row in stats.operators}


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_dense_net_in_float32(hybridize):
    net, x = dense(), randn(5, 3)
    net.hybridize(hybridize)
    with pytest.raises(RuntimeError, match="mine"), operator_stats() as stats:
        for _ in range(3):
            net(x)
        raise RuntimeError("mine")
    net(x)
    assert calls(stats) == {("FullyConnected", "float32"): 6, ("Activation", "float32"): 3}
    assert stats.casts == ()


@with_avx512
def test_eager_calls_in_low_precision():
    net, x = dense(), randn(5, 3)
    with operator_stats() as stats:
        amp.init(policy=untuned("bfloat16"))
        net(x)
    assert calls(stats) == {("FullyConnected", "bfloat16"): 2, ("Activation", "bfloat16"): 1}
    # x, two weights and two biases; the activations between them are bfloat16 already.
    sizes = 5 * 3 + 4 * 3 + 4 + 2 * 4 + 2
    (cast,) = stats.casts
    assert tuple(cast) == ("float32", "bfloat16", 5, 6 * sizes)


def test_a_hybridized_net_counts_what_explain_says():
    net, data = made(convolutional)
    net.hybridize()
    policy = untuned("bfloat16")
    with amp.autocast(policy=policy), operator_stats() as stats:
        net(*data)
        net(*data)
    shapes = {"data": data[0].shape}
    plan = amp.explain(net, policy=policy, mode="inference", input_shapes=shapes)
    assert plan.casts
    counted = {key: n for key, n in calls(stats).items() if key[0] != "_copy"}  # mxamp's own
    planned = Counter((node.operator, node.precision) for node in plan.nodes)
    assert counted == {key: 2 * calls for key, calls in planned.items()}
    assert sum(cast.casts for cast in stats.casts) == 2 * len(plan.casts)


def test_a_loop_counts_each_step():
    net = nn.HybridLambda(
        lambda F, x: F.contrib.foreach(lambda row, s: (F.tanh(row + s), row), x, F.sum(x, 0))[0]
    )
    net.hybridize()
    with operator_stats() as stats:
        net(randn(7, 3))
    assert stats["tanh"] == {"float32": 7}
    assert stats["_foreach"] == {"float32": 1}


@pytest.mark.parametrize("name", ["while_loop", "cond"])
def test_loops_and_branches_count_without_their_bodies(name):
    net = initialized(Control(name), hybridize=True)
    with amp.autocast("bfloat16"), operator_stats() as stats:
        net(randn(3, 2, 4))
    assert stats[f"_{name}"] == {"float32": 1}


def test_shapes_that_depend_on_values():
    net, data = made(masked)
    net.hybridize()
    with amp.autocast(policy=amp.Policy.default("float16", "cpu")), operator_stats() as stats:
        net(*data)
    assert sum(stats["FullyConnected"].values()) == 2
    assert sum(stats["_contrib_boolean_mask"].values()) == 1
    assert [cast.bytes for cast in stats.casts] == [1032, 840]  # 0 where the shape is unknown


def test_executors_are_counted():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2)
    executor = net.simple_bind(mx.cpu(), data=(4, 3))
    with operator_stats() as stats:
        executor.forward(is_train=True)
        executor.backward(nd.ones((4, 2)))
    assert stats["FullyConnected"] == {"float32": 1}


def test_the_users_own_casts_count_as_casts():
    with operator_stats() as stats:
        randn(2, 3).astype("float16").astype("float32").astype("int32").astype("float32")
    found = {(c.source, c.target): (c.casts, c.bytes) for c in stats.casts}
    assert found == {("float32", "float16"): (1, 36), ("float16", "float32"): (1, 36)}


def test_what_it_shows():
    with operator_stats() as stats:
        nd.relu(nd.relu(randn(2)))
        nd.exp(randn(2)).astype("float16")
    text = str(stats)
    assert text.splitlines()[:2] == ["operator  dtype    calls", "relu      float32      2"]
    assert "float32 to float16" in text
    with pytest.raises(amp.UnknownNameError, match="relu"):
        stats["relo"]
