"""The fused RNN operator unrolled or split by layer: the same values, and where it is done."""

import mxnet as mx
import numpy as np
import pytest

import mxamp as amp
from helpers import pairwise, randn, substitutions, values, with_avx512
from mxamp.backends.choices import Choices
from mxamp.graph.casts.insert import rewrite
from mxamp.graph.ir import Graph, Usage

MODES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
STEPS, ROWS, WIDTH, SIZE = 5, 3, 4, 6
#: The smallest state of an LSTM that is large, and the data of two steps.
LARGE = {"state_size": 363, "num_layers": 1}
DATA = (2, 16, 8)


def symbol_of(mode, name="rnn", **attrs):
    inputs = [mx.sym.var(name) for name in ("data", "parameters", "state", "cell")]
    inputs = inputs if mode == "lstm" else inputs[:3]
    return mx.sym.RNN(*inputs, mode=mode, name=name, **attrs)


def arrays_for(layers, directions):
    rows, widths = MODES["lstm"] * SIZE, [WIDTH] + [SIZE * directions] * (layers - 1)
    length = directions * sum(rows * (width + SIZE + 2) for width in widths)
    states = (layers * directions, ROWS, SIZE)
    arrays = {"data": randn(STEPS, ROWS, WIDTH), "parameters": randn(length, seed=1) * 0.5}
    return {**arrays, "state": randn(*states, seed=2), "cell": randn(*states, seed=3)}


@pytest.mark.parametrize("state_outputs", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_it_computes_the_same_in_float32(layers, bidirectional, state_outputs):
    options = {"bidirectional": bidirectional, "state_outputs": state_outputs}
    symbol = symbol_of("lstm", state_size=SIZE, num_layers=layers, **options)
    graph = Graph.from_symbol(symbol)
    chosen = (len(graph.nodes) - 1, ("rnn", (STEPS, ROWS, WIDTH)))
    choices = Choices(substituted=frozenset({chosen}))
    float32 = amp.Policy.default("bfloat16").in_float32()
    other = rewrite(graph, float32, Usage(), choices).graph
    assert "RNN" not in other.operators
    assert "FullyConnected" in other.operators
    arrays = arrays_for(layers, 1 + bidirectional)
    both = symbol, other.to_symbol()
    plain, found = (one.bind(mx.cpu(), arrays, grad_req="null").forward() for one in both)
    for mine, theirs in zip(found, plain):
        np.testing.assert_allclose(values(mine), values(theirs), rtol=2e-5, atol=2e-6)


@with_avx512
@pytest.mark.parametrize("mode, attrs, shape, done", [
    ("lstm", {}, DATA, True), ("gru", {"state_size": 1024}, DATA, False),
    ("lstm", {}, (2, 15, 8), False), ("lstm", {}, (257, 16, 8), False),
    ("lstm", {"state_size": 362}, DATA, False), ("lstm", {"state_size": 362}, (2, 4096, 8), False),
    ("lstm", {"state_size": 1024}, (2, 1, 8), False),
    ("lstm", {"num_layers": 2, "bidirectional": True}, (65, 16, 8), False),
    ("lstm", {"lstm_state_clip_min": -1.0, "lstm_state_clip_max": 1.0}, DATA, False),
    ("lstm", {"projection_size": 16}, DATA, False),
])  # fmt: skip
def test_where_it_is_done(mode, attrs, shape, done):
    symbol = symbol_of(mode, **{**LARGE, **attrs})
    assert substitutions(symbol, shapes={"data": shape}) == ({"rnn"} if done else set())
    assert not substitutions(symbol, shapes={"data": shape}, training=True)
    plan = amp.explain(symbol, "bfloat16", mode="converted", input_shapes={"data": shape})
    assert [node.operator for node in plan.nodes] == ["RNN"]


# ---------------------------------------------------------------------- a layer at a time


def stacked(mode, layers, directions, width, size, steps=STEPS, **attrs):
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
    known = {**dict(zip(names, shapes)), **dict.fromkeys(states, (layers * directions, ROWS, size))}
    return symbol, {**known, "data": (steps, ROWS, width)} if steps else known


#: The state of a layer that is large enough to run alone in training, by mode.
UNITS = {"rnn_relu": 512, "rnn_tanh": 512, "lstm": 256, "gru": 304}
KINDS = pairwise(MODES, [16, 7], [(1, 1), (1, 2), (3, 1), (2, 2)], [False, True], [False, True])


@pytest.mark.parametrize("mode, width, stack, state_outputs, training", KINDS)
def test_each_layer_computes_what_all_layers_do(mode, width, stack, state_outputs, training):
    layers, directions = stack
    symbol, shapes = stacked(mode, *stack, width, UNITS[mode], state_outputs=state_outputs)
    given = enumerate(shapes.items())
    arrays = {name: randn(*shape, seed=k, scale=0.1) for k, (name, shape) in given}
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


CLIPPED = {"lstm_state_clip_min": -1.0, "lstm_state_clip_max": 1.0}

#: A symbol and its shapes, and whether each layer runs alone in training, and in inference.
ALONE = [
    (stacked("lstm", 2, 1, 256, 256), True, True), (stacked("lstm", 2, 1, 7, 256), True, True),
    (stacked("lstm", 2, 1, 256, 256, p=0.5), False, False),
    (stacked("lstm", 2, 1, 256, 256, **CLIPPED), False, False),
    (stacked("lstm", 2, 1, 256, 256, steps=None), False, False),
    ((symbol_of("gru", state_size=256, num_layers=2), {"data": DATA}), False, False),
    ((symbol_of("lstm", state_size=256, num_layers=2, projection_size=8), {"data": DATA}), False, False),
    # Rows that are too narrow, and wide enough.
    (stacked("rnn_tanh", 1, 1, 2**15, 15), False, False), (stacked("rnn_tanh", 1, 1, 2**15, 16), True, True),
    # The least layers, and the largest that are too small.
    (stacked("lstm", 1, 1, 182, 182, 2000), True, True), (stacked("lstm", 1, 1, 181, 181), False, False),
    (stacked("gru", 1, 1, 210, 209), True, True), (stacked("gru", 1, 1, 208, 209), False, False),
    (stacked("lstm", 2, 1, 91, 91), False, True), (stacked("lstm", 2, 1, 90, 90), False, False),
    (stacked("lstm", 2, 1, 640, 128), True, True), (stacked("lstm", 2, 1, 639, 128), False, True),
    (stacked("lstm", 1, 2, 256, 256, 170), True, True), (stacked("lstm", 1, 2, 256, 256, 171), False, False),
    (stacked("lstm", 1, 2, 96, 96, 64), False, True), (stacked("lstm", 1, 2, 96, 96, 65), False, False),
]  # fmt: skip


@pytest.mark.parametrize("rnn, trained, inferred", ALONE)
def test_where_each_layer_runs_alone(rnn, trained, inferred):
    symbol, shapes = rnn
    for training, alone in ((True, trained), (False, inferred)):
        found = substitutions(symbol, shapes=shapes, training=training)
        assert ("rnn_layers" in found) == alone
