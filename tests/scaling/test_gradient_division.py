"""Updates see gradients without the loss scale, whatever the optimizer does with `rescale_grad`."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import initialized, scaled_backward
from training import OPTIMIZERS, OwnOptimizer, end_step, run_backward, trainer_in

X = nd.array([[1.0, 2.0]])


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_own_optimizers_at_every_level(level, writes):
    net = initialized(nn.Dense(1, in_units=2, use_bias=False), init=mx.init.One())
    optimizer = OwnOptimizer(learning_rate=0.125)
    optimizer.writes = writes
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    amp.initialize(net, trainer, opt_level=level, loss_scale=1024.0, ctx=mx.cpu())
    for step in (1, 2):
        scaled_backward(lambda: net(X.astype(net.weight.dtype)).astype("float32").sum(), trainer)
        trainer.step(1)
        found = net.weight.data().astype("float32").asnumpy()
        np.testing.assert_allclose(found, [[1 - step / 8, 1 - step / 4]], atol=1e-3)
    assert "update_multi_precision" not in vars(trainer._optimizer)


def test_small_gradients_of_master_weights_are_divided_in_float32():
    """2**-26 is 0 in float16."""
    net = initialized(nn.Dense(1, in_units=2, use_bias=False), init=mx.init.Zero())
    optimizer = OwnOptimizer(learning_rate=0.125)
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    amp.initialize(net, trainer, opt_level="O2", loss_scale=2.0**20, ctx=mx.cpu())
    scaled_backward(lambda: net(X.astype("float16")).astype("float32").sum() * 2.0**-26, trainer)
    trainer.step(1)
    master = trainer._updaters[0].states[0][0]
    np.testing.assert_array_equal(master.asnumpy(), [[-(2.0**-29), -(2.0**-28)]])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"test", "ccsgd"}))
def test_gradients_that_are_kept_over_steps(name):
    """With grad_req="add" and no `zero_grad`, for every optimizer of MXNet."""

    def trained(way):
        mx.random.seed(1)
        param = initialized(gluon.Parameter("w", shape=(2, 1), init="ones", grad_req="add"))
        optimizer = mx.optimizer.create(name, learning_rate=0.1)
        trainer, _ = trainer_in(way, [param], 4, optimizer, interval=1, kvstore=None)
        for factor in (1.0, -0.2, -0.2, -0.2):
            run_backward(lambda factor=factor: (param.data() * factor).sum(), trainer, way)
            trainer.step(2)
        return param.data().asnumpy()

    np.testing.assert_allclose(trained("scale_loss"), trained("plain"), rtol=1e-5)


def test_gradients_on_the_second_device_alone_are_clipped():
    devices = [mx.cpu(0), mx.cpu(1)]
    net = initialized(nn.Dense(1, in_units=2, use_bias=False), init=mx.init.One(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(init_scale=8))
    scaled_backward(lambda: (net(mx.nd.ones((1, 2), ctx=devices[1])) * 30).sum(), trainer)
    norm = amp.clip_grad_global_norm(trainer, 1.0)
    trainer.step(1, ignore_stale_grad=True)
    assert norm == pytest.approx(30 * 2**0.5)
    weight = net.weight.data(devices[1]).asnumpy()
    np.testing.assert_allclose(weight, np.full((1, 2), 1 - 2**-0.5), rtol=1e-6)


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_a_gradient_penalty_is_plain_mxnets(way):
    """The first derivative is that of the loss, with the scale as head gradient."""

    def trained(way):
        param = initialized(gluon.Parameter("w", shape=(3,)), init=mx.init.Constant(0.5))
        trainer, scaler = trainer_in(way, [param], 1024, update_on_kvstore=False)
        scale = 1024.0 if way else 1.0
        with autograd.record():
            loss = nd.sin(param.data())
            first = loss
            if way == "GradScaler":
                first = scaler.scale(loss)
            elif way:
                with amp.scale_loss(loss, trainer) as first:
                    pass
            (slope,) = autograd.grad(first, [param.data()], create_graph=True, retain_graph=True)
            total = loss + nd.square(slope / scale)
            if way == "scale_loss":
                with amp.scale_loss(total, trainer) as total:
                    pass
        total = scaler.scale(total) if way == "GradScaler" else total
        total.backward()
        end_step(trainer, scaler)
        return param.data().asnumpy()

    np.testing.assert_allclose(trained(way), trained(None), rtol=1e-5)
