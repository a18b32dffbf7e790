"""Decorated optimizers, in the Module API and with Gluon's Trainer."""

import os

import mxnet as mx
import pytest
from mxnet import gluon, nd

import digits
import mxamp as amp
from helpers import backpropagate, initialized, randn
from models import bound_module as bound
from training import end_step, run_backward, trainer_in

pytestmark = pytest.mark.usefixtures("unfused")


@pytest.mark.parametrize("value", [None, "1"])
def test_the_environment_is_left_as_it_was(value, monkeypatch):
    monkeypatch.delenv("MXNET_UPDATE_ON_KVSTORE", raising=False)
    if value is not None:
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", value)
    optimizer = amp.decorate("sgd")
    module = bound()
    with pytest.raises(TypeError):
        module.init_optimizer(optimizer=optimizer, optimizer_params={"none": 1})
    assert os.environ.get("MXNET_UPDATE_ON_KVSTORE") == value


def test_doors_are_not_mixed():
    amp.init("float16", ctx=mx.cpu())
    net = digits.network()
    optimizer = amp.decorate(mx.optimizer.SGD())
    with pytest.raises(amp.StateError, match="decorated already"):
        amp.decorate(optimizer)
    trainer = digits.trainer_of(net, optimizer)
    with pytest.raises(amp.StateError, match="decorate already; init_trainer"):
        amp.init_trainer(trainer)
    with pytest.raises(amp.StateError, match="decorate already; GradScaler"):
        amp.GradScaler().step(trainer, 1)
    with pytest.raises(amp.StateError, match="on asynchronous servers"):
        gluon.Trainer(net.collect_params(), amp.decorate(mx.optimizer.SGD()), kvstore="dist_async")


def test_states_of_a_decorated_trainer(tmp_path):
    path = str(tmp_path / "states")
    amp.init("float16", ctx=mx.cpu())
    net = digits.network()
    optimizer = amp.decorate(mx.optimizer.SGD(), 2.0**24)
    trainer = digits.trainer_of(net, optimizer)
    backpropagate(lambda: net(next(digits.batches())[0]).sum())
    trainer.step(digits.BATCH)
    trainer.save_states(path)
    with open(path, "rb") as file:
        assert b"mxamp" not in file.read(), "plain MXNet has to load it"
    other = amp.decorate(mx.optimizer.SGD())
    resumed = digits.trainer_of(digits.network(), other)
    resumed.load_states(path)
    assert other._amp_scaling.loss_scale == optimizer._amp_scaling.loss_scale
    assert (resumed.amp_steps, resumed.amp_skips) == (trainer.amp_steps, trainer.amp_skips)


def test_the_optimizer_that_was_given_keeps_its_own_counts():
    original = mx.optimizer.Adam(learning_rate=0.1)
    original.set_lr_mult({0: 2.0})
    decorated = amp.decorate(original)
    net = initialized(gluon.nn.Dense(2, in_units=3))
    trainer = gluon.Trainer(net.collect_params(), decorated)
    backpropagate(lambda: net(randn(4, 3)).sum())
    trainer.step(1)
    decorated.set_lr_mult({0: 3.0})
    assert original._index_update_count == {}
    assert original.lr_mult == {0: 2.0}


def test_a_trainer_has_its_own_scale_beside_others_that_are_done():
    scales, nets = (4.0, 1024.0), []
    for scale in scales:
        net = initialized(gluon.nn.Dense(1, in_units=2))
        nets.append((net, gluon.Trainer(net.collect_params(), amp.decorate("sgd", scale))))
    for (net, trainer), scale in zip(nets, scales):
        backpropagate(lambda net=net: net(nd.ones((1, 2))).sum())
        trainer.step(1)
        assert trainer.amp_last_step.loss_scale == scale


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_a_loss_with_a_scale_of_its_own_gets_no_other(way):
    amp.init("float16", ctx=mx.cpu())
    net, other = (gluon.nn.Dense(1, in_units=2) for _ in range(2))
    net.initialize(), other.initialize()
    decorated = gluon.Trainer(other.collect_params(), amp.decorate("sgd", 2.0**16))
    trainer, scaler = trainer_in(way, net.collect_params(), 2.0**10)
    run_backward(lambda: net(nd.ones((1, 2))).sum(), trainer, way, scaler)
    assert net.bias.grad().asscalar() == 2.0**10
    end_step(trainer, scaler)
    assert trainer.amp_last_step.stepped
    assert decorated.amp_last_step is None
