"""What the float16 list decides on GPUs, in graphs and in eager calls; no GPU is needed."""

import mxnet as mx
import pytest
from mxnet import nd

import mxamp as amp
from helpers import kind
from mxamp.policy.rules import long_sum_reason

GPU = amp.Policy.default("float16", "gpu")


def precisions(symbol, **shapes):
    plan = amp.explain(symbol, policy=GPU, mode="inference", input_shapes=shapes)
    return {node.name: node.precision for node in plan.nodes}


def scores(**attributes):
    return mx.sym.batch_dot(mx.sym.var("a"), mx.sym.var("b"), name="scores", **attributes)


@pytest.mark.parametrize(
    "attributes, a, b, wanted",
    [
        ({}, (2, 7, 128), (2, 128, 9), "float16"), ({}, (2, 7, 129), (2, 129, 9), "float32"),
        ({"transpose_a": True}, (2, 64, 300), (2, 64, 9), "float16"),
        ({"transpose_a": True}, (2, 300, 64), (2, 300, 9), "float32"),
        ({"transpose_b": True}, (2, 300, 64), (2, 300, 64), "float16"),
    ],
)  # fmt: skip
def test_sums_of_batched_products_are_short_in_float16(attributes, a, b, wanted):
    symbol = scores(**attributes)
    assert precisions(symbol, a=a, b=b)["scores"] == wanted
    texts = {name: str(value) for name, value in attributes.items()}
    kept = long_sum_reason(GPU.rule("batch_dot"), texts, a)
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


def test_operands_of_which_only_the_shape_counts_do_not_widen():
    low = nd.ones((2, 3)).astype("float16")
    with amp.autocast("float16"):
        assert kind(nd.reshape_like(low, nd.ones((3, 2)))) == "float16"
        assert kind(nd.slice_like(low, nd.ones((1, 2)))) == "float16"
        assert kind(nd.broadcast_like(low[:1], nd.ones((2, 3)))) == "float16"


def test_prelu_follows_its_data(tmp_path):
    with amp.autocast("float16"):
        low = nd.ones((2, 3)).astype("float16") * -2
        gamma = nd.array([0.25, 0.5, 1])
        gamma.attach_grad()
        with mx.autograd.record():
            out = nd.LeakyReLU(low, gamma, act_type="prelu")
        out.backward()
    assert kind(out) == "float16"
    assert out.asnumpy().tolist() == [[-0.5, -1, -2]] * 2
    assert kind(gamma.grad) == "float32"
    assert gamma.grad.asnumpy().tolist() == [-4, -4, -4]
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    net = mx.sym.LeakyReLU(net, mx.sym.var("gamma"), act_type="prelu", name="prelu")
    assert precisions(net, data=(2, 5))["prelu"] == "float16"
