"""The fused RNN operator written out: the same values in float32, and where it is done."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import randn, values, with_avx512
from mxamp.graph.casts.insert import rewrite
from mxamp.graph.ir import Graph, Usage
from mxamp.graph.speed.shape_rules import Choices

MODES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
STEPS, ROWS, WIDTH, SIZE = 5, 3, 4, 6
#: The smallest state of an LSTM that is large, and the data of two steps.
LARGE = {"state_size": 363, "num_layers": 1}
DATA = (2, 16, 8)


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
        substituted=frozenset({(len(graph.nodes) - 1, ("rnn", (STEPS, ROWS, WIDTH, 1, 0)))})
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


def operators(symbol, policy=None, shape=DATA, mode="inference", **shapes):
    policy = policy or amp.Policy.default("bfloat16")
    options = {"mode": mode, "input_shapes": {"data": shape, **shapes}}
    return {node.operator for node in amp.explain(symbol, policy=policy, **options)}


@with_avx512
def test_where_it_is_done():
    assert "RNN" not in operators(symbol_of("lstm", **LARGE))
    assert "RNN" not in operators(symbol_of("gru", **{**LARGE, "state_size": 419}))
    vanilla = symbol_of("rnn_tanh", **{**LARGE, "state_size": 512})
    assert "RNN" not in operators(vanilla, shape=(2, 32, 8))


@pytest.mark.parametrize("attrs, call", [
    ({}, {"mode": "training"}), ({}, {"mode": "converted"}),
    ({}, {"shape": (2, 15, 8)}), ({}, {"shape": (257, 16, 8)}),
    ({"state_size": 362}, {}), ({"state_size": 362}, {"shape": (2, 4096, 8)}),
    ({"state_size": 1024}, {"shape": (2, 1, 8)}),
    ({"num_layers": 2, "bidirectional": True}, {"shape": (65, 16, 8)}),
    ({"lstm_state_clip_min": -1.0, "lstm_state_clip_max": 1.0}, {}), ({"projection_size": 16}, {}),
])  # fmt: skip
def test_where_it_is_not_done(attrs, call):
    assert "RNN" in operators(symbol_of("lstm", **{**LARGE, **attrs}), **call)


# ---------------------------------------------------------------------- a layer at a time


def stacked(mode, layers, directions, width, size, batch=ROWS, **attrs):
    """Return a symbol of an RNN with matrices as Gluon has them, and the shapes of its inputs."""
    rows, widths = MODES[mode] * size, [width] + [size * directions] * (layers - 1)
    shapes = [(rows, one) for below in widths for _ in range(directions) for one in (below, size)]
    shapes += [(rows,)] * len(shapes)
    names = [f"p{k}" for k in range(len(shapes))]
    vectors = [mx.sym.reshape(mx.sym.var(name), shape=(-1,)) for name in names]
    joined = mx.sym._internal._rnn_param_concat(*vectors, dim=0, num_args=len(vectors))
    states = ["state", "cell"] if mode == "lstm" else ["state"]
    symbol = mx.sym.RNN(
        mx.sym.var("data"), joined, *map(mx.sym.var, states), mode=mode, num_layers=layers,
        state_size=size, bidirectional=directions == 2, name="rnn", **attrs,
    )  # fmt: skip
    begin = (layers * directions, batch, size)
    return symbol, {**dict(zip(names, shapes)), **dict.fromkeys(states, begin)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("state_outputs", [False, True])
@pytest.mark.parametrize("layers, directions", [(1, 1), (1, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("width", [16, 7])
@pytest.mark.parametrize("mode", MODES)
def test_each_layer_computes_what_all_layers_do(
    mode, width, layers, directions, state_outputs, training
):
    symbol, shapes = stacked(mode, layers, directions, width, 16, state_outputs=state_outputs)
    shapes["data"] = (STEPS, ROWS, width)
    arrays = {name: randn(*shape, seed=k) * 0.5 for k, (name, shape) in enumerate(shapes.items())}
    policy = amp.Policy.default("bfloat16").in_float32()
    plan = amp.explain(symbol, policy=policy, input_shapes=shapes, mode="training")
    runs = [node for node in plan.nodes if node.operator == "RNN"]
    assert len(runs) == layers * directions
    assert not any(node.operator == "_rnn_param_concat" for node in plan.nodes)
    results = []
    for enabled in (False, True):
        with amp.autocast(enabled=enabled, policy=policy):
            grads = {name: mx.nd.zeros(shape) for name, shape in shapes.items()}
            grad_req = "write" if training else "null"
            executor = symbol.bind(mx.cpu(), arrays, args_grad=grads, grad_req=grad_req)
            outputs = executor.forward(is_train=training)
            if training:
                executor.backward([randn(*out.shape, seed=9) for out in outputs])
            results.append([values(one) for one in (*outputs, *grads.values())])
    for mine, theirs in zip(*results):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def count_rnns(symbol, shapes, policy=None, mode="training"):
    """Return how many RNNs a symbol's graph runs."""
    policy = policy or amp.Policy.default("bfloat16")
    plan = amp.explain(symbol, policy=policy, input_shapes=shapes, mode=mode)
    return sum(node.operator == "RNN" for node in plan.nodes)


def test_where_each_layer_runs_alone():
    def count(width=16, **attrs):
        symbol, shapes = stacked("lstm", 2, 1, width, 16, **attrs)
        return count_rnns(symbol, {**shapes, "data": (2, ROWS, width)})

    assert count() == count(width=7) == 2
    assert count(p=0.5) == 1
    assert count(lstm_state_clip_min=-1.0, lstm_state_clip_max=1.0) == 1
    symbol, shapes = stacked("lstm", 2, 1, 16, 16)
    assert count_rnns(symbol, shapes) == 1, "without the data's shape"
    vector = symbol_of("gru", state_size=16, num_layers=2)
    assert count_rnns(vector, {"data": DATA}) == 1
    projected = symbol_of("lstm", state_size=16, num_layers=2, projection_size=8)
    assert count_rnns(projected, {"data": DATA}) == 1
    symbol, shapes = stacked("rnn_tanh", 2, 1, 15, 15)
    assert count_rnns(symbol, {**shapes, "data": (2, ROWS, 15)}) == 1, "rows too narrow"
