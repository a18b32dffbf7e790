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


def test_a_scaled_loss_is_used_again_after_its_step():
    net, trainer = make()
    loss = scaled(net, trainer, retain_graph=True)
    trainer.step(1)
    loss.backward(retain_graph=True)
    trainer.step(1)
    assert_weights(net, -1, -3)


def test_an_error_after_the_backward_pass():
    net, trainer = make()
    with pytest.raises(ZeroDivisionError):
        with autograd.record(), amp.scale_loss(net(X), trainer) as loss:
            loss.backward()
            raise ZeroDivisionError
    trainer.step(1)
    assert_weights(net, 0, -1)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_two_trainers_of_one_sum(scale):
    net, trainer = make(req="add")
    make(scale, net=net)
    scaled(net, trainer)
    plain(net)
    trainer.step(1)
    assert_weights(net, -1, -3)


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


def test_a_trainer_that_replaces_another_one_takes_its_gradients():
    net, trainer = make()
    plain(make(None)[0])
    scaled(net, trainer)
    make(net=net)
    late = make(None, net=net)[1]
    with pytest.raises(amp.StateError, match="another trainer"):
        late.step(1)


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


@pytest.mark.parametrize("way", ["decorate", "scale_loss"])
def test_sparse_gradients(way):
    net = gluon.nn.Embedding(6, 2, sparse_grad=True)
    net.initialize(mx.init.One())
    optimizer = mx.optimizer.SGD(learning_rate=1.0)
    optimizer = amp.decorate(optimizer, 1024.0) if way == "decorate" else optimizer
    trainer = gluon.Trainer(net.collect_params(), optimizer)
    if way == "scale_loss":
        amp.init_trainer(trainer, amp.StaticLossScaler(1024))
    with autograd.record():
        loss = net(nd.array([1, 3])).sum()
        if way == "scale_loss":
            with amp.scale_loss(loss, trainer) as loss:
                loss.backward()
    if way == "decorate":
        loss.backward()
    trainer.step(1)
    assert net.weight.data().asnumpy()[:, 0].tolist() == [1, 0, 1, 0, 1, 1]


def test_gradients_of_other_losses_inside_scale_loss(caplog):
    net, trainer = make()
    x = X.copy()
    x.attach_grad()
    with autograd.record():
        loss = net(x)
        with amp.scale_loss(loss, trainer) as product:
            autograd.grad(loss, [x], retain_graph=True)
            product.backward()
    assert not caplog.records


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_a_loss_that_is_made_from_a_scaled_one(way):
    net, trainer = make(None if way == "GradScaler" else 1024.0)
    scaler = amp.GradScaler(1024)
    with autograd.record():
        if way == "GradScaler":
            mean = scaler.scale(net(X)).mean()
            with pytest.raises(amp.StateError, match="scaled already"):
                scaler.scale(mean)
            return
        with amp.scale_loss(net(X), trainer) as loss:
            mean = loss.mean()
        with pytest.raises(amp.StateError, match="scaled already"):
            amp.scale_loss(mean, trainer).__enter__()


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
