"""The fused RNN operator written out: the same values in float32, and where it is done."""

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import rnn

import mxamp as amp
from helpers import randn, values, with_avx512
from mxamp.graph.choices import Choices
from mxamp.graph.graph import Graph
from mxamp.graph.insert_casts import rewrite
from mxamp.graph.usage import Usage

MODES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
STEPS, ROWS, WIDTH, SIZE = 5, 3, 4, 6
#: Many rows make the product of a step large although the state is small.
LARGE = {"state_size": 32, "num_layers": 1}
MANY = (2, 4096, 8)


def symbol_of(mode, name="rnn", **attrs):
    inputs = [mx.sym.var(name) for name in ("data", "parameters", "state", "cell")]
    inputs = inputs if mode == "lstm" else inputs[:3]
    return mx.sym.RNN(*inputs, mode=mode, name=name, **attrs)


def arrays_for(mode, layers, directions):
    rows, widths = MODES[mode] * SIZE, [WIDTH] + [SIZE * directions] * (layers - 1)
    length = directions * sum(rows * (width + SIZE + 2) for width in widths)
    states = (layers * directions, ROWS, SIZE)
    arrays = {"data": randn(STEPS, ROWS, WIDTH), "parameters": randn(length, seed=1) * 0.5}
    arrays["state"] = randn(*states, seed=2)
    return {**arrays, "cell": randn(*states, seed=3)} if mode == "lstm" else arrays


@pytest.mark.parametrize("state_outputs", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_it_computes_the_same_in_float32(mode, layers, bidirectional, state_outputs):
    symbol = symbol_of(
        mode,
        state_size=SIZE,
        num_layers=layers,
        bidirectional=bidirectional,
        state_outputs=state_outputs,
    )
    graph = Graph.from_symbol(symbol)
    choices = Choices(
        substituted=frozenset({(len(graph.nodes) - 1, ("rnn", (STEPS, ROWS, WIDTH)))})
    )
    float32 = amp.Policy.default("bfloat16").in_float32()
    other = rewrite(graph, float32, Usage(), choices).graph
    assert "RNN" not in other.operators
    assert "FullyConnected" in other.operators
    arrays = arrays_for(mode, layers, 1 + bidirectional)
    plain, found = (
        one.bind(mx.cpu(), arrays, grad_req="null").forward() for one in (symbol, other.to_symbol())
    )
    for mine, theirs in zip(found, plain):
        np.testing.assert_allclose(values(mine), values(theirs), rtol=2e-5, atol=2e-6)


def operators(symbol, policy=None, shape=MANY, mode="inference", **shapes):
    policy = policy or amp.Policy.default("bfloat16")
    options = {"mode": mode, "input_shapes": {"data": shape, **shapes}}
    return {node.operator for node in amp.explain(symbol, policy=policy, **options)}


@with_avx512
def test_where_it_is_done():
    assert "RNN" not in operators(symbol_of("lstm", **LARGE))
    assert "RNN" not in operators(symbol_of("gru", **{**LARGE, "state_size": 64}))


@pytest.mark.parametrize(
    "attrs, call",
    [
        ({}, {"mode": "training"}),
        ({}, {"mode": "converted"}),
        ({}, {"shape": (2, 4095, 8)}),
        ({}, {"shape": (257, 4096, 8)}),
        ({"num_layers": 2, "bidirectional": True}, {"shape": (65, 4096, 8)}),
        ({"lstm_state_clip_min": -1.0, "lstm_state_clip_max": 1.0}, {}),
        ({"projection_size": 16}, {}),
    ],
)
def test_where_it_is_not_done(attrs, call):
    assert "RNN" in operators(symbol_of("lstm", **{**LARGE, **attrs}), **call)


@with_avx512
def test_the_switches_take_it_out():
    symbol, policy = symbol_of("lstm", **LARGE), amp.Policy.default("bfloat16")
    product = replace(policy.rule("FullyConnected"), missing="made up")
    without = [name for name in policy.substitutions if name != "rnn"]
    for other in (
        policy.untuned(),
        policy.in_float32(),
        policy.override(substitutions=without),
        policy.override(fp32=["FullyConnected"]),
        policy.override(fp32=["RNN"]),
        policy.override(fp32_layers=["rnn"]),
        replace(policy, rules={**policy.rules, "FullyConnected": product}),
    ):
        assert "RNN" in operators(symbol, other)


@with_avx512
@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU])
def test_layers_of_gluon(kind):
    layer = kind(64, bidirectional=True, layout="NTC")
    layer.initialize(mx.init.Uniform(0.2))
    layer.hybridize()
    rows, state = MANY[1], mx.nd.zeros((2, MANY[1], 64))
    states = [state, state] if kind is rnn.LSTM else [state]
    x = randn(rows, 3, 8)
    plain, plain_states = layer(x, states)
    with amp.autocast("bfloat16"):
        found, found_states = layer(x, states)
    assert not np.array_equal(values(found), values(plain))
    for mine, theirs in zip((found, *found_states), (plain, *plain_states)):
        assert mine.dtype == theirs.dtype
        difference = np.linalg.norm(values(mine) - values(theirs))
        assert difference < 1e-2 * np.linalg.norm(values(theirs))


class Inside(gluon.HybridBlock):
    """A recurrent layer in a block: graphs of the whole make the zeros that it begins with."""

    def __init__(self, layer):
        super().__init__()
        with self.name_scope():
            self.layer = layer

    def hybrid_forward(self, F, x):
        return self.layer(x)


@with_avx512
@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU, rnn.RNN])
def test_layers_that_begin_with_zeros(kind):
    net = Inside(kind(128 if kind is rnn.RNN else 64, 2, bidirectional=True, layout="NTC"))
    net.initialize(mx.init.Uniform(0.2))
    net.hybridize()
    for rows, steps in ((4096, 2), (4097, 2), (4096, 3)):
        x = randn(rows, steps, 8)
        with amp.autocast("bfloat16"):
            found = values(net(x))
        with amp.autocast(enabled=False):
            plain = values(net(x))
        assert 0 < np.linalg.norm(found - plain) < 1e-2 * np.linalg.norm(plain)
    symbol = net(mx.sym.var("data"))
    with amp.autocast("bfloat16"):
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", data=(4096, 2, 8))
        for name, parameter in net.collect_params().items():
            executor.arg_dict[name][:] = parameter.data()
        found = values(executor.forward(data=x[:, :2])[0])
    plain = values(net(x[:, :2]))
    assert 0 < np.linalg.norm(found - plain) < 1e-2 * np.linalg.norm(plain)


@with_avx512
def test_executors_need_no_shape_of_the_parameters():
    symbol = symbol_of("lstm", **LARGE)
    rows, size = MANY[1], LARGE["state_size"]
    shapes = {"data": MANY, "state": (1, rows, size), "cell": (1, rows, size)}
    with amp.autocast("bfloat16"):
        executor = symbol.simple_bind(mx.cpu(), grad_req="null", **shapes)
        with amp.autocast(enabled=False):
            plain = symbol.simple_bind(mx.cpu(), grad_req="null", **shapes)
        for name, array in executor.arg_dict.items():
            array[:] = randn(*array.shape) * 0.2
            plain.arg_dict[name][:] = array
        found, expected = (values(one.forward()[0]) for one in (executor, plain))
    assert 0 < np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)
