"""Counts of operators are exact: eager, hybridized and in modules, without side effects."""

from collections import Counter

import mxnet as mx
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import randn
from mxamp.patches import optimizers
from mxamp.tools.debugging import operator_stats
from nets import Control, convolutional, made, masked


def dense(hidden=4):
    net = nn.HybridSequential()
    net.add(nn.Dense(hidden, activation="relu", in_units=3), nn.Dense(2, in_units=hidden))
    net.initialize()
    return net


def calls(stats):
    return {(row.operator, row.dtype): row.calls for row in stats.operators}


@pytest.mark.parametrize("hybridize", [False, True])
def test_a_dense_net_in_float32(hybridize):
    net, x = dense(), randn(5, 3)
    if hybridize:
        net.hybridize()
    with operator_stats() as stats:
        for _ in range(3):
            net(x)
    assert calls(stats) == {("FullyConnected", "float32"): 6, ("Activation", "float32"): 3}
    assert stats.casts == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ["init first", "stats first"])
def test_eager_calls_in_low_precision(dtype, order):
    net, x = dense(), randn(5, 3)
    if order == "init first":
        amp.init(dtype)
    with operator_stats() as stats:
        if order == "stats first":
            amp.init(dtype)
        net(x)
    amp.shutdown()
    assert calls(stats) == {("FullyConnected", dtype): 2, ("Activation", dtype): 1}
    if dtype == "bfloat16":
        # x, two weights and two biases; the activations between them are bfloat16 already.
        sizes = 5 * 3 + 4 * 3 + 4 + 2 * 4 + 2
        assert [(c.source, c.target, c.casts, c.bytes) for c in stats.casts] == [
            ("float32", "bfloat16", 5, 6 * sizes)
        ]


def test_a_hybridized_net_counts_what_explain_says():
    net, data = made(convolutional)
    net.hybridize()
    with amp.autocast("bfloat16"), operator_stats() as stats:
        net(*data)
        net(*data)
    shapes = {"data": data[0].shape}
    plan = amp.explain(net, "bfloat16", mode="inference", input_shapes=shapes)
    counted = {key: n for key, n in calls(stats).items() if key[0] != "_copy"}  # mxamp's own
    assert counted == {
        key: 2 * n for key, n in Counter((n.operator, n.precision) for n in plan.nodes).items()
    }
    assert sum(cast.casts for cast in stats.casts) == 2 * len(plan.casts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_eager_and_hybridized_count_the_same_operators(dtype):
    net, data = made(convolutional)
    net(*data)
    counts = []
    policy = amp.Policy.default(dtype).untuned()
    for hybridize in (False, True):
        net.hybridize(hybridize)
        with amp.autocast(policy=policy), operator_stats() as stats:
            net(*data)
        seen = calls(stats)
        names = {"broadcast_add": "elemwise_add"}
        merged = {}
        for (operator, precision), n in seen.items():
            key = (names.get(operator, operator), precision)
            merged[key] = merged.get(key, 0) + n
        merged = {key: n for key, n in merged.items() if key[0] != "_copy"}
        counts.append(merged)
    assert counts[0] == counts[1]


def test_a_loop_counts_each_step():
    class Loop(nn.HybridBlock):
        def hybrid_forward(self, F, x, state):
            def step(row, held):
                out = F.tanh(row + held)
                return out, out

            return F.contrib.foreach(step, x, state)[0]

    net = Loop()
    net.hybridize()
    with operator_stats() as stats:
        net(randn(7, 3), randn(3))
    assert stats["tanh"] == {"float32": 7}
    assert stats["_foreach"] == {"float32": 1}


@pytest.mark.parametrize("name", ["while_loop", "cond"])
def test_loops_and_branches_count_without_their_bodies(name):
    net = Control(name)
    net.initialize()
    net.hybridize()
    with amp.autocast("bfloat16"), operator_stats() as stats:
        net(randn(3, 2, 4))
    assert stats[f"_{name}"] == {"float32": 1}


def test_shapes_that_depend_on_values():
    net, data = made(masked)
    net.hybridize()
    with amp.autocast("bfloat16"), operator_stats() as stats:
        net(*data)
    assert sum(stats["FullyConnected"].values()) == 2
    assert sum(stats["_contrib_boolean_mask"].values()) == 1
    assert stats.casts


def test_modules_are_counted():
    data = mx.sym.var("data")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=2, name="fc"), name="softmax")
    executor = net.simple_bind(mx.cpu(), data=(4, 3))
    with operator_stats() as stats:
        executor.forward(is_train=True)
        executor.backward()
    assert stats["FullyConnected"] == {"float32": 1}
    assert stats["SoftmaxOutput"] == {"float32": 1}


def test_the_users_own_casts_count_as_casts():
    with operator_stats() as stats:
        randn(2, 3).astype("float16").astype("float32")
    assert {(c.source, c.target): (c.casts, c.bytes) for c in stats.casts} == {
        ("float32", "float16"): (1, 36),
        ("float16", "float32"): (1, 36),
    }


def test_it_is_off_after_it_also_after_an_error():
    net, x = dense(), randn(5, 3)
    net.hybridize()
    before = nd.dot(randn(2, 2), randn(2, 2))
    with pytest.raises(RuntimeError, match="mine"), operator_stats() as stats:
        net(x)
        raise RuntimeError("mine")
    net(x)
    assert sum(row.calls for row in stats.operators) == 3
    assert before.shape == (2, 2)


def test_what_it_shows():
    with operator_stats() as stats:
        nd.relu(nd.relu(randn(2)))
        nd.exp(randn(2)).astype("float16")
    text = str(stats)
    assert text.splitlines()[:2] == [
        "operator  dtype    calls",
        "relu      float32      2",
    ]
    assert "float32 to float16" in text
    assert [row.operator for row in stats.filter(operator="exp").operators] == ["exp"]
    assert len(stats.filter(dtype="float16")) == 0
    assert repr(stats).startswith("<OperatorStats: ")
    with pytest.raises(amp.UnknownNameError, match="relu"):
        stats["relo"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_updates_count_by_their_own_names(optimizer, momentum, monkeypatch):
    # SGD's steps in bfloat16 are NumPy's, and parse their numbers by calls of MXNet's.
    monkeypatch.setattr(optimizers.machine, "threads", lambda: 1)
    monkeypatch.setattr(optimizers, "_LEAST", 1)
    optimizers._parse_by_mxnet.cache_clear()
    net = nn.Dense(256, in_units=256, use_bias=False)
    net.initialize()
    net.hybridize()
    options = {"momentum": momentum} if optimizer == "sgd" else {}
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, options)
    amp.init("bfloat16")
    amp.init_trainer(trainer)
    for _ in range(2):
        with operator_stats() as stats:
            with autograd.record(), amp.scale_loss(net(randn(32, 256)).sum(), trainer) as scaled:
                autograd.backward(scaled)
            trainer.step(32)
        update = (
            "adam_update" if optimizer == "adam" else "sgd_mom_update" if momentum else "sgd_update"
        )
        assert set(calls(stats)) - {("_zeros", "float32")} == {
            ("FullyConnected", stats.filter("FullyConnected").operators[0].dtype),
            ("sum", "float32"),
            (update, "float32"),
        }  # fmt: skip
        assert stats[update] == {"float32": 1}
