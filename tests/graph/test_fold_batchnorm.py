"""BatchNorm folded in float32 into the product before it."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

import mxamp as amp
from helpers import operators_of, same
from mxamp.graph.fold_batchnorm import fold_into_consumers, fold_into_producers
from mxamp.graph.fuse import FusionPass, fused, rewritten
from mxamp.graph.graph import Graph

B = amp.Policy.default("bfloat16")
INTO_PRODUCERS = FusionPass(fold_into_producers)
INTO_CONSUMERS = FusionPass(fold_into_consumers, "folded_norm")
FLOAT32 = B.override(low=[], replace_lists=True)


def params_of(symbol, shape):
    random = np.random.RandomState(0)
    found = {}
    shapes, _, aux = symbol.infer_shape(data=shape)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    for name, size in zip(names, [*shapes, *aux]):
        array = random.rand(*size) + 0.5 if "var" in name else random.randn(*size)
        found[name] = nd.array(array.astype("float32"))
    data = found.pop("data")
    return found, data


def run(symbol, params, data):
    names = symbol.list_arguments()
    args = {name: data if name == "data" else params[name] for name in names}
    auxs = {name: params[name] for name in symbol.list_auxiliary_states()}
    return symbol.bind(mx.cpu(), args, aux_states=auxs).forward()[0].asnumpy()


def conv(data, name="conv", **more):
    options = {"kernel": (3, 3), "num_filter": 6, **more}
    return mx.sym.Convolution(data, name=name, **options)


X = mx.sym.var("data")
FOLDED = {
    "bias": lambda: mx.sym.BatchNorm(conv(X), fix_gamma=False),
    "no bias": lambda: mx.sym.BatchNorm(conv(X, no_bias=True), fix_gamma=False, eps=1e-5),
    "fixed gamma": lambda: mx.sym.BatchNorm(conv(X, no_bias=True)),
    "groups": lambda: mx.sym.BatchNorm(conv(X, num_group=2), fix_gamma=False),
    "dense": lambda: mx.sym.BatchNorm(mx.sym.FullyConnected(X, num_hidden=5), fix_gamma=False),
    "two": lambda: mx.sym.BatchNorm(
        conv(mx.sym.relu(mx.sym.BatchNorm(conv(X, "a"), name="na")), "b"), name="nb"
    ),
}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", FOLDED)
def test_folding_in_float32_keeps_values(name):
    symbol = FOLDED[name]()
    params, data = params_of(symbol, (2, 4, 8, 8))
    kept = {key: value.copy() for key, value in params.items()}
    graph, values = rewritten(INTO_PRODUCERS, Graph.from_symbol(symbol), params, B)
    new = graph.to_symbol()
    assert "BatchNorm" not in operators_of(new)
    assert set(values) == set(new.list_inputs()) - {"data"}
    assert graph.input_names == new.list_inputs()
    expected = run(symbol, params, data)
    np.testing.assert_allclose(run(new, values, data), expected, rtol=1e-4, atol=1e-4)
    assert all(same(params[key], kept[key]) for key in kept)


def shared_weight():
    weight = mx.sym.var("weight")
    first = mx.sym.BatchNorm(conv(X, "a", weight=weight, pad=(1, 1), num_filter=4), name="n")
    return conv(first, "b", weight=weight, pad=(1, 1), num_filter=4)


def read_twice(join):
    product = conv(X)
    return join(mx.sym.BatchNorm(product, name="n"), product)


LEFT = {
    "read twice": lambda: read_twice(mx.sym.elemwise_add),
    "shared weight": shared_weight,
    "an output": lambda: read_twice(lambda *outputs: mx.sym.Group(outputs)),
    "first": lambda: conv(mx.sym.BatchNorm(X, name="n")),
    "channels last": lambda: mx.sym.BatchNorm(conv(X), axis=-1),
    "rows": lambda: mx.sym.BatchNorm(mx.sym.FullyConnected(X, num_hidden=5, flatten=False)),
    "statistics": lambda: mx.sym.BatchNorm(conv(X), output_mean_var=True),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_can_not_be_folded_stays(name):
    symbol = LEFT[name]()
    params, _ = params_of(symbol, (2, 4, 8, 8))
    graph, values = rewritten(INTO_PRODUCERS, Graph.from_symbol(symbol), params, B)
    assert operators_of(graph.to_symbol()) == operators_of(symbol)
    assert all(same(values[key], params[key]) for key in values)


def norm(data, **more):
    return mx.sym.BatchNorm(data, **{"fix_gamma": False, "eps": 1e-5, **more})


def dense(data, **more):
    return mx.sym.FullyConnected(data, **{"num_hidden": 5, **more})


def both(data):
    return conv(data, "a", num_filter=3) + conv(data, "b", num_filter=3, no_bias=True)


def returned(data):
    return mx.sym.Group([conv(data), data])


def joint(data):
    return mx.sym.concat(conv(data), conv(data, "b", kernel=(5, 5), pad=(1, 1)), dim=1)


W = mx.sym.var("w")
#: BatchNorms that what reads them takes in.
FORWARD = {
    "bias": lambda: conv(norm(X)),
    "no bias": lambda: conv(norm(X), no_bias=True),
    "fixed gamma": lambda: conv(norm(X, fix_gamma=True), no_bias=True),
    "1x1": lambda: conv(norm(mx.sym.exp(X)), kernel=(1, 1), stride=(2, 2)),
    "dilated": lambda: conv(norm(X), dilate=(2, 2)),
    "dense": lambda: dense(norm(X)),
    "dense without bias": lambda: dense(norm(X), no_bias=True),
    "two readers": lambda: both(norm(X)),
    "one of several outputs": lambda: conv(norm(mx.sym.split(X, num_outputs=2, axis=1)[1])),
}
#: And those that stay.
BEHIND = {
    "border": lambda: conv(norm(X), pad=(1, 1)),
    "border on one side": lambda: conv(norm(X), pad=(0, 1)),
    "groups": lambda: conv(norm(X), num_group=2),
    "relu": lambda: conv(mx.sym.relu(norm(X))),
    "an output": lambda: returned(norm(X)),
    "one reader of two": lambda: joint(norm(X)),
    "channels last": lambda: conv(norm(X, axis=3)),
    "rows": lambda: dense(norm(X), flatten=False),
    "another": lambda: norm(norm(X)),
    "statistics": lambda: mx.sym.Group(list(norm(X, output_mean_var=True))),
    "shared": lambda: conv(norm(X), weight=W) + conv(X, "b", weight=W),
}  # fmt: skip


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", [*FORWARD, *BEHIND])
def test_folding_into_what_reads_it(name):
    symbol = {**FORWARD, **BEHIND}[name]()
    params, data = params_of(symbol, (2, 4, 8, 8))
    kept = {key: value.copy() for key, value in params.items()}
    graph, values = rewritten(INTO_CONSUMERS, Graph.from_symbol(symbol), params, FLOAT32)
    new = graph.to_symbol()
    assert ("BatchNorm" in operators_of(new)) == (name in BEHIND)
    assert set(values) == set(new.list_inputs()) - {"data"}
    expected = run(symbol, params, data)
    close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(expected).max()}
    np.testing.assert_allclose(run(new, values, data), expected, **close)
    assert all(same(params[key], kept[key]) for key in kept)


@pytest.mark.parametrize(
    "changes",
    [{"substitutions": []}, {"fp32": ["BatchNorm"]}, {"fp32_layers": ["batchnorm*"]}],
)
def test_no_folding_into_what_reads_it(changes):
    symbol = conv(norm(X, name="batchnorm0"))
    params, _ = params_of(symbol, (2, 4, 8, 8))
    graph, _, _ = fused(Graph.from_symbol(symbol), params, FLOAT32.override(**changes))
    assert "BatchNorm" in operators_of(graph.to_symbol())


@pytest.mark.parametrize("mean, stays", [(5.0, False), (100.0, True)])
def test_data_far_from_zero_keeps_its_norm(mean, stays):
    symbol = conv(norm(X, name="n"))
    params, _ = params_of(symbol, (2, 4, 8, 8))
    params["n_moving_mean"] = nd.full((4,), mean)
    params["n_moving_var"] = nd.ones((4,))
    graph, _ = rewritten(INTO_CONSUMERS, Graph.from_symbol(symbol), params, FLOAT32)
    assert ("BatchNorm" in operators_of(graph.to_symbol())) == stays


def test_a_product_in_bfloat16_reads_what_a_norm_gives():
    symbol = conv(norm(X))
    params, _ = params_of(symbol, (2, 4, 8, 8))
    graph, _ = rewritten(INTO_CONSUMERS, Graph.from_symbol(symbol), params, B)
    assert "BatchNorm" in operators_of(graph.to_symbol())


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "true, false", [("True", "False"), ("true", "false"), ("TRUE", "FALSE"), ("1", "0")]
)
def test_other_languages_write_true_otherwise(true, false):
    fixed = mx.sym.BatchNorm(conv(X, no_bias=true), fix_gamma=true)
    free = mx.sym.BatchNorm(conv(fixed, name="second", no_bias=false), fix_gamma=false)
    symbol = dense(mx.sym.relu(dense(free, flatten=true)), name="rows", flatten=false)
    params, data = params_of(symbol, (2, 16, 5, 5))
    graph, new = rewritten(INTO_PRODUCERS, Graph.from_symbol(symbol), params, B)
    made = graph.to_symbol()
    assert "BatchNorm" not in operators_of(made)
    same_values = zip(run(symbol, params, data), run(made, new, data))
    assert all(np.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in same_values)
