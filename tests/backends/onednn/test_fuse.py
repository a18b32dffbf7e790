"""Fused models: oneDNN's operators, the same answers."""

import mxnet as mx
import numpy as np
import pytest
from fusion import after, model, run, same_after
from mxnet import gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from digits import arrays, batches
from helpers import backpropagate, exported, kind, operators_of, randn, sequential, with_avx512
from mxamp.backends.onednn.fuse import PASSES
from mxamp.backends.onednn.fusible import FUSED
from mxamp.graph.ir import Graph

S = mx.sym
B = amp.Policy.default("bfloat16")


def network(trained):
    """A residual network with depthwise convolutions and relu6, its test images and labels."""

    class Block(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.a = nn.Conv2D(16, 3, padding=1, groups=16, in_channels=16, use_bias=False)
                self.na = nn.BatchNorm()
                self.b = nn.Conv2D(16, 1, in_channels=16)
                self.nb = nn.BatchNorm()

        def hybrid_forward(self, F, x):
            return F.relu(x + self.nb(self.b(F.clip(self.na(self.a(x)), 0, 6))))

    mx.random.seed(4)
    net = sequential(
        nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Activation("relu"), Block(), Block(),
        nn.Conv2D(32, 3, strides=2), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(10),
        init=mx.init.Xavier(), hybridize=True,
    )  # fmt: skip
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    for _ in range(trained):
        for images, labels in batches():
            with mx.autograd.record():
                loss = loss_function(net(images), labels)
            loss.backward()
            trainer.step(len(labels))
    _, _, images, labels = arrays()
    return net, nd.array(images), labels


@with_avx512
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_a_trained_network_fused_answers_as_unfused(tmp_path):
    net, test, labels = network(trained=3)
    plain = net(test).asnumpy()
    low = amp.convert_hybrid_block(net, "bfloat16", cast_optional_params=True)
    fast = amp.convert_hybrid_block(net, "bfloat16", fuse=True)
    found = {name: block(test).asnumpy() for name, block in (("low", low), ("fast", fast))}

    def error(name):
        return np.linalg.norm(found[name] - plain) / np.linalg.norm(plain)

    def right(outputs):
        return float((outputs.argmax(1) == labels).mean())

    assert right(plain) > 0.9
    assert right(found["fast"]) >= right(plain) - 0.005
    assert 0 < error("fast") <= 1.5 * error("low")
    used = operators_of(fast._cached_graph[1])
    assert not {"BatchNorm", "Convolution", "FullyConnected", "clip", "relu"} & set(used)
    assert used.count("_sg_mkldnn_conv") == 6
    assert all(p.grad_req == "null" for p in fast.collect_params().values())
    assert all(p.grad_req == "write" for n, p in net.collect_params().items() if "weight" in n)
    assert np.array_equal(exported(fast, tmp_path)(test).asnumpy(), found["fast"])


@pytest.mark.usefixtures("unfused")
def test_arranged_parameters_become_parameters():
    arrange = next(one for one in PASSES if one.apply.__name__ == "_arrange_parameters")
    parts = [S.var(name, shape=(4, 6)) for name in "ab"]
    joined = S.reshape(S.concat(*parts, dim=0), shape=(-1, 6), name="joined")
    dense = S.FullyConnected(S.var("data"), joined, num_hidden=8, no_bias=True)
    vectors = [S.reshape(S.var(name, shape=(6, 2)), shape=(-1,)) for name in "cd"]
    vector = S._internal._rnn_param_concat(*vectors, dim=0, num_args=2)
    symbol = S.Group([dense, joined, vector])
    params, data = model(symbol, (3, 6))
    new, _ = same_after(arrange, symbol, params, B, data, tolerance=0)
    # What is an output, or a recurrent layer's, stays; the inner join has become a parameter.
    assert operators_of(new).count("Concat") == 0
    assert operators_of(new).count("Reshape") == 3


@with_avx512
def test_a_module_binds_a_fused_model_with_an_arranged_addend():
    conv = S.Convolution(S.var("data"), num_filter=16, kernel=(1, 1), no_bias=True, name="conv")
    symbol = S.broadcast_add(conv, S.reshape(S.var("b", shape=(16,)), shape=(1, 16, 1, 1)))
    params, data = model(symbol, (2, 16, 4, 4))
    fast, args, auxs = amp.convert_model(symbol, params, {}, "bfloat16", fuse=True)
    module = mx.mod.Module(fast, ["data"], None)
    module.bind([("data", data.shape)], for_training=False)
    module.set_params(args, auxs)
    module.forward(mx.io.DataBatch([data]))
    [exact] = run(symbol, params, data)
    assert abs(module.get_outputs()[0].asnumpy() - exact).max() < 0.02 * abs(exact).max()


@with_avx512
@pytest.mark.parametrize("policy, low", [
    (B.in_float32(), set()), (B.override(fp32=["FullyConnected"]), {"_sg_mkldnn_conv"}),
    (B.override(conditional=[("Convolution", "no_bias", [True, False])]), {"_sg_mkldnn_fully_connected"}),
])  # fmt: skip
def test_products_that_the_policy_keeps_in_float32_are_kept_when_they_are_fused(policy, low):
    net, test, _ = network(trained=0)
    plain = net(test[:2]).asnumpy()
    fast = amp.convert_hybrid_block(net, policy=policy, fuse=True)
    products = {name: set() for name in FUSED}
    nodes = Graph.from_symbol(fast._cached_graph[1]).nodes
    for node in nodes:
        if node.op in FUSED:
            stored = {nodes[i].attrs.get("dtype", "float32") for i, _ in node.inputs[:2]}
            products[node.op].update(stored)
    assert {name for name, dtypes in products.items() if "bfloat16" in dtypes} == low
    kinds = {kind(p.data()) for p in fast.collect_params().values()}
    assert ("bfloat16" in kinds) == bool(low)
    if not low:
        np.testing.assert_allclose(fast(test[:2]).asnumpy(), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=with_avx512)])
def test_autograd_gets_no_gradients_through_a_fused_block(dtype, caplog):
    """MXNet's are wrong, without a word. Behind it, layers train as on features that are given."""
    net, head = sequential(nn.Dense(8, activation="relu")), sequential(nn.Dense(2))
    x = randn(4, 6)
    net(x)
    policy = B if dtype == "bfloat16" else B.in_float32()
    low = amp.convert_hybrid_block(net, policy=policy, example_inputs=x, fuse=True)
    features = low(x)
    x.attach_grad()
    backpropagate(lambda: (head(low(x)) ** 2).sum() + (x * 3).sum())
    assert (x.grad.asnumpy() == 3).all()
    found = head[0].weight.grad().asnumpy()
    backpropagate(lambda: (head(features) ** 2).sum())
    assert (found == head[0].weight.grad().asnumpy()).all()
    assert "does not train" in caplog.text


def test_copies_are_no_operators_of_a_fused_model():
    [no_ops] = [one for one in PASSES if one.apply.__name__ == "_drop_no_ops"]
    assert operators_of(after(no_ops, S.relu(S.identity(S.var("data"))), {}, B)[0]) == ["relu"]


def test_float64_is_refused():
    net = sequential(nn.Dense(3, in_units=4))
    net.cast("float64")
    x = randn(2, 4).astype("float64")
    with pytest.raises(amp.ArgumentError, match="float64.*_weight"):
        amp.convert_hybrid_block(net, policy=B.in_float32(), example_inputs=x, fuse=True)
