"""Scales that gradients carry in unusual programs: as in float32, or an error."""

import ast

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import check_python

X = nd.array([[1.0, 2.0]])


def make(scale=1024.0, req="write", net=None):
    if net is None:
        net = gluon.nn.Dense(1, in_units=2, use_bias=False)
        net.initialize(mx.init.One())
        net.weight.grad_req = req
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    if scale:
        amp.init_trainer(trainer, amp.StaticLossScaler(scale))
    return net, trainer


def scaled(net, trainer, **options):
    with autograd.record(), amp.scale_loss(net(X), trainer) as loss:
        loss.backward(**options)
    return loss


def plain(net):
    with autograd.record():
        loss = net(X)
    loss.backward()


def assert_weights(net, *expected):
    np.testing.assert_array_equal(net.weight.data().asnumpy()[0], expected)


@pytest.mark.parametrize("own", ["scaled", "plain"])
def test_a_trainer_that_is_made_after_passes_of_several_scales(own, caplog):
    """MXNet's error of stale gradients, in place of a wrong update."""
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    other, trainer = make()
    if own == "scaled":
        with autograd.record(), amp.scale_loss(net(X) + other(X), trainer) as loss:
            loss.backward()
        plain(make(None)[0])
    else:
        plain(net)
        scaled(other, trainer)
    late = make(None, net=net)[1]
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        late.step(1)
    assert "is older than its trainer" in caplog.text
    assert_weights(net, 1, 1)


def test_the_scale_that_scripts_clip_by_is_what_gradients_carry():
    net, trainer = make(req="add")
    scaled(net, trainer)
    plain(net)
    trainer.allreduce_grads()
    gradients = [net.weight.grad()]
    gluon.utils.clip_global_norm(gradients, 0.1 * trainer._amp_loss_scaler.loss_scale)
    trainer.update(1)
    norm = np.sqrt(20.0)
    np.testing.assert_allclose(
        net.weight.data().asnumpy()[0], 1 - 0.1 * np.array([2, 4]) / norm, rtol=1e-5
    )


@pytest.mark.parametrize("scale", [2.0**-30, 0.3, 2.0**60])
def test_extreme_scales(scale):
    net, trainer = make(scale)
    scaled(net, trainer)
    trainer.step(1)
    np.testing.assert_allclose(net.weight.data().asnumpy()[0], [0, -1], atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**64, 1e-20])
def test_scales_that_no_scalar_holds_are_refused(scale):
    net, trainer = make(scale)
    with pytest.raises(amp.StateError, match="is not between"):
        scaled(net, trainer)


SVRG = """
import mxamp as amp, mxnet as mx, numpy as np
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule
if {way!r} == "decorate":
    optimizer = amp.decorate("sgd", 16.0)
else:
    import os
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    optimizer = "sgd"
rng = np.random.RandomState(0)
data = rng.randn(64, 4).astype("float32")
labels = data @ np.array([1, 2, 3, 4], "float32")
rows = mx.io.NDArrayIter(data, labels, 16, label_name="label")
net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc")
net = mx.sym.LinearRegressionOutput(net, mx.sym.var("label"))
module = SVRGModule(net, label_names=["label"], context=[mx.cpu(0), mx.cpu(1)], update_freq=2)
module.bind(rows.provide_data, rows.provide_label)
module.init_params(mx.init.One())
module.init_optimizer("local", optimizer, (("learning_rate", 0.05),))
for epoch in range(3):
    if epoch % 2 == 0:
        module.update_full_grads(rows)
    rows.reset()
    for batch in rows:
        module.forward_backward(batch)
        module.update()
print(module.get_params()[0]["fc_weight"].asnumpy().tolist())
"""


@pytest.mark.slow
def test_svrg_on_several_devices():
    printed = [check_python(SVRG.format(way=way)) for way in ("plain", "decorate")]
    found = [np.array(ast.literal_eval(one.splitlines()[-1])) for one in printed]
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_a_plain_trainer_from_before_init_is_left_alone(caplog):
    """Its gradients carry no scale, also before the first backward pass in mixed precision."""
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    old = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, update_on_kvstore=False)
    with autograd.record():
        loss = net(X).sum()
    loss.backward()
    other, trainer = make()
    scaled(other, trainer)
    assert "older than its trainer" not in caplog.text
    old.step(1)
    assert_weights(net, 0, -1)
