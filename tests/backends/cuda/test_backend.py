"""What the float16 list decides on GPUs, in graphs and in eager calls; no GPU is needed."""

import mxnet as mx
import pytest

import mxamp as amp
from mxamp.backends import Site, backend_of

GPU = amp.Policy.default("float16", "gpu")


def precisions(symbol, mode="inference", **shapes):
    plan = amp.explain(symbol, policy=GPU, mode=mode, input_shapes=shapes)
    return {node.name: node.precision for node in plan.nodes}


def scores(**attributes):
    return mx.sym.batch_dot(mx.sym.var("a"), mx.sym.var("b"), name="scores", **attributes)


@pytest.mark.parametrize(
    "attributes, a, b, inference, training",
    [
        ({}, (2, 7, 128), (2, 128, 9), "float16", "float16"),
        ({}, (2, 7, 129), (2, 129, 9), "float32", "float32"),
        ({}, (2, 129, 7), (2, 7, 9), "float16", "float32"),
        ({}, (2, 9, 7), (2, 7, 129), "float16", "float32"),
        ({"transpose_a": True}, (2, 64, 300), (2, 64, 9), "float16", "float32"),
        ({"transpose_a": True}, (2, 300, 64), (2, 300, 9), "float32", "float32"),
        ({"transpose_b": True}, (2, 300, 64), (2, 300, 64), "float16", "float32"),
        ({"transpose_b": True}, (2, 128, 64), (2, 128, 64), "float16", "float16"),
    ],
)
def test_sums_of_products_and_their_gradients_are_short(attributes, a, b, inference, training):
    symbol = scores(**attributes)
    texts = {name: str(value) for name, value in attributes.items()}
    for mode, wanted in (("inference", inference), ("training", training)):
        assert precisions(symbol, mode, a=a, b=b)["scores"] == wanted
        rule, training = GPU.rule("batch_dot"), mode == "training"
        kept = backend_of("gpu").reason_by_shapes(rule, Site("batch_dot", texts, (a, b), training))
        assert (kept is None) == (wanted == "float16")


def test_sums_whose_length_is_not_known_are_float32():
    assert precisions(scores())["scores"] == "float32"
    converted = amp.explain(scores(), policy=GPU)
    assert converted["scores"].precision == "float32"
    assert "in float16" in converted["scores"].reason
    on_cpu = amp.explain(scores(), policy=amp.Policy.default("float16", "cpu"))
    assert on_cpu["scores"].precision == "float16"


def test_what_is_float32_for_its_sums_widens_what_it_meets():
    # As it does in eager calls; what is float32 for speed alone would be lowered instead.
    low = mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=9, flatten=False, name="fc")
    net = mx.sym.broadcast_add(scores(), low, name="sum")
    long = precisions(net, a=(2, 7, 200), b=(2, 200, 9), x=(2, 7, 3))
    assert long == {"scores": "float32", "fc": "float16", "sum": "float32"}
    assert precisions(net, a=(2, 7, 20), b=(2, 20, 9), x=(2, 7, 3))["sum"] == "float16"


def test_prelu_follows_its_data():
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    net = mx.sym.LeakyReLU(net, mx.sym.var("gamma"), act_type="prelu", name="prelu")
    assert precisions(net, data=(2, 5))["prelu"] == "float16"
