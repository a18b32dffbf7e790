"""On a GPU: casts, kernels, loss scaling and conversion. `scripts/check_gpu` runs these.

`--gpu-tests-on-cpu` runs them on CPUs, to test the tests.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from helpers import initialized, kind, leaf, same, scaled_backward
from mxamp.framework.operators import registry

pytestmark = pytest.mark.gpu


def net_of_all_kinds(device):
    """Convolutions, BatchNorm, dense layers and a softmax, with the same parameters each time."""
    mx.random.seed(3)
    np.random.seed(3)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, in_channels=8), nn.BatchNorm(in_channels=16))
        net.add(nn.Activation("relu"), nn.MaxPool2D(2), nn.Flatten())
        net.add(nn.Dense(32, activation="relu", in_units=16 * 16), nn.Dense(8, in_units=32))
    net.initialize(mx.init.Xavier(), ctx=device)
    return net


def images(device, seed=0):
    values = np.random.RandomState(seed).randn(4, 8, 8, 8).astype("float32")
    return mx.nd.array(values, ctx=device)


def relative(a, b):
    a, b = (x.astype("float32").asnumpy() for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_mxnet_sees_the_gpu(devices):
    assert all(device.device_type == devices[0].device_type for device in devices)
    for device in devices:
        assert mx.nd.ones((2, 3), ctx=device).sum().asscalar() == 6


def test_lists_class_all_operators_of_this_build(policy):
    assert set(policy.rules) == set(registry())


# ---------------------------------------------------------------------- kernels

PRODUCTS = {
    "Convolution": (lambda x, w: mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=16, no_bias=True),
                    (4, 8, 10, 10), (16, 8, 3, 3)),
    "grouped": (lambda x, w: mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=8, num_group=8, no_bias=True),
                (4, 8, 10, 10), (8, 1, 3, 3)),
    "Deconvolution": (lambda x, w: mx.nd.Deconvolution(x, w, kernel=(3, 3), num_filter=8, no_bias=True),
                      (4, 16, 6, 6), (16, 8, 3, 3)),
    "FullyConnected": (lambda x, w: mx.nd.FullyConnected(x, w, num_hidden=64, no_bias=True), (16, 128), (64, 128)),
    "long FullyConnected": (lambda x, w: mx.nd.FullyConnected(x, w, num_hidden=8, no_bias=True), (8, 8192), (8, 8192)),
    "dot": (lambda x, w: mx.nd.dot(x, w), (16, 128), (128, 24)),
    "batch_dot": (lambda x, w: mx.nd.batch_dot(x, w), (6, 16, 64), (6, 64, 24)),
    "long batch_dot": (lambda x, w: mx.nd.batch_dot(x, w), (2, 16, 4096), (2, 4096, 24)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_float16_are_near_float32(name, device, policy):
    run, *shapes = PRODUCTS[name]
    arrays = [leaf(mx.nd.random.normal(shape=shape, ctx=device)) for shape in shapes]
    found = []
    for enabled in (False, True):
        with amp.autocast(policy=policy, enabled=enabled):
            with autograd.record():
                out = run(*arrays)
                (out.astype("float32") ** 2).mean().backward()
        found.append([out, *(array.grad.copy() for array in arrays)])
    assert kind(found[0][0]) == "float32"
    assert all(kind(gradient) == "float32" for gradient in found[1][1:])
    assert [relative(low, full) < 4e-3 for full, low in zip(*found)] == [True] * 3


@pytest.mark.parametrize("run, expected", [
    (mx.nd.softmax, "float32"), (mx.nd.exp, "float32"), (mx.nd.sum, "float32"),
    (lambda x: mx.nd.LayerNorm(x, mx.nd.ones(64, ctx=x.context), mx.nd.zeros(64, ctx=x.context)), "float32"),
    (mx.nd.relu, "float16"), (lambda x: x.reshape((-1, 8)), "float16"), (mx.nd.transpose, "float16"),
])  # fmt: skip
def test_what_stays_float32_and_what_follows(run, expected, device, policy):
    x = mx.nd.random.normal(shape=(16, 64), ctx=device)
    with amp.autocast(policy=policy):
        product, ones = mx.nd.dot(x, x, transpose_b=True), mx.nd.ones((64, 16), ctx=device)
        low = mx.nd.FullyConnected(product, ones, num_hidden=64, no_bias=True)
        assert kind(low) == "float16"
        assert kind(run(low)) == expected


def test_empty_arrays(device, policy):
    with amp.autocast(policy=policy), mx.util.np_shape(True):
        empty = mx.nd.zeros((0, 4), ctx=device)
        assert mx.nd.relu(empty).shape == (0, 4)


# ---------------------------------------------------------------------- training


def test_one_gradient_that_overflowed_is_found(device):
    net = initialized(nn.Dense(300, in_units=300), ctx=device)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(init_scale=8.0))
    x = mx.nd.ones((2, 300), ctx=device)
    for value, stepped in ((np.inf, False), (np.nan, False), (1e30, True)):
        scaled_backward(lambda: net(x).mean(), trainer)
        net.weight.grad(device)[7, 11] = value
        trainer.step(1)
        assert trainer.amp_last_step.stepped is stepped


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag"])
def test_multi_precision_keeps_float32_weights(optimizer, device, policy):
    net = initialized(nn.Dense(8, in_units=16), ctx=device)
    net.cast("float16")
    settings = {"learning_rate": 1e-4, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), optimizer, settings)
    amp.init_trainer(trainer, amp.LossScaler(init_scale=128.0))
    x = mx.nd.ones((2, 16), ctx=device, dtype="float16")
    before = net.weight.data(device).asnumpy().astype("float32")
    with amp.autocast(policy=policy):
        for _ in range(30):
            scaled_backward(lambda: net(x).astype("float32").mean(), trainer)
            trainer.step(1)
    assert trainer.amp_steps == 30
    assert kind(net.weight.data(device)) == "float16"
    assert (net.weight.data(device).asnumpy().astype("float32") != before).any()


# ---------------------------------------------------------------------- converted models


@pytest.mark.filterwarnings("ignore:Cannot decide type")
@pytest.mark.parametrize("cast_parameters", [False, True])
def test_a_converted_model_runs_in_plain_mxnet(cast_parameters, device, policy, tmp_path):
    net, x = net_of_all_kinds(device), images(device)
    net.hybridize()
    full = net(x)
    fast = amp.convert_hybrid_block(
        net, policy=policy, example_inputs=x, cast_optional_params=cast_parameters
    )
    assert 0 < relative(fast(x), full) < 1e-2
    fast.export(str(tmp_path / "fast"))
    files = [str(tmp_path / f"fast-{part}") for part in ("symbol.json", "0000.params")]
    loaded = gluon.SymbolBlock.imports(files[0], ["data"], files[1], ctx=device)
    assert same(loaded(x), fast(x))
    dtypes = {kind(param.data(device)) for param in loaded.collect_params().values()}
    assert dtypes == ({"float16", "float32"} if cast_parameters else {"float32"})
