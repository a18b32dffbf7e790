"""What workers compare, and what they do with gradients that others alone have computed."""

from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import down, scaled_backward
from mxamp.patches import table as patched
from mxamp.scaling import distributed
from mxamp.scaling.distributed import check_settings
from mxamp.scaling.scaler import LossScaler, StaticLossScaler
from training import batches, poisoned, setup, train, weights


class Store:
    """One of three workers on a parameter server; `others` is the sum of what the others send."""

    num_workers = 3

    def __init__(self, rank, others=0.0):
        self.rank, self.others = rank, others

    def init(self, key, value):
        pass

    def push(self, key, value):
        self.sent = value.asnumpy()

    def pull(self, key, out):
        out[:] = mx.nd.array(self.sent + self.others)


@pytest.mark.parametrize("what", ["nothing", "policy", "version", "scale", "kind"])
def test_a_worker_with_other_settings_is_named_in_all(what, monkeypatch):
    def compare(store):
        differs = store.rank == 2
        policy, scaler = amp.Policy.default("bfloat16", "cpu"), LossScaler(1024)
        if what == "policy" and differs:
            policy = policy.override(fp32=["FullyConnected"])
        if differs:
            scaler = {"scale": LossScaler(512), "kind": StaticLossScaler(1024)}.get(what, scaler)
        version = "9.9" if what == "version" and differs else "2.0"
        monkeypatch.setattr(distributed, "__version__", version)
        try:
            with amp.autocast(policy=policy):
                check_settings(store, scaler.state_dict())
        except amp.StateError as error:
            return str(error)

    stores = [Store(rank) for rank in range(3)]
    for store in stores:
        compare(store)
    total = sum(store.sent for store in stores)
    for store in stores:
        error = compare(Store(store.rank, total - store.sent))
        assert (error is None) == (what == "nothing")
        if error:
            assert error.startswith("worker 2 differs from worker 0 in mxamp's version, policy")
            assert f"Worker {store.rank} has mxamp" in error
            assert "<Policy bfloat16 on cpu" in error
            assert "'loss_scale': " in error


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "uint8"])
def test_what_would_end_the_servers_is_refused(monkeypatch, dtype):
    zeros = mx.nd.zeros((2,))
    array = down(zeros, dtype) if dtype == "bfloat16" else zeros.astype(dtype)
    store = mx.kv.create("local")
    monkeypatch.setattr(patched, "is_distributed", lambda _: True)
    with amp.autocast("bfloat16"):
        for name in ("init", "broadcast", "push", "pushpull"):
            with pytest.raises(amp.ArgumentError, match=f"array of key 3 is {dtype}.*float32"):
                getattr(store, name)(3, [zeros, array])


def trainer_of(net, **settings):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, **settings)


def test_a_second_trainer_on_the_servers_is_refused(monkeypatch):
    """MXNet gives both trainers' parameters the same keys, and hangs."""
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setattr(distributed, "_on_servers", [])
    trainers = [trainer_of(setup()[0], kvstore="dist_sync") for _ in range(2)]
    amp.init_trainer(trainers[0], LossScaler())
    amp.init_trainer(trainers[0], LossScaler(2))
    with pytest.raises(amp.StateError, match="another trainer .* make one trainer"):
        amp.init_trainer(trainers[1], LossScaler())
    amp.init_trainer(trainer_of(setup()[0]), LossScaler())  # in this process alone


def computed_by_others(monkeypatch, gradient, name=""):
    """Let another worker's gradients, of parameters with this name, be `gradient` everywhere."""
    original = gluon.Trainer._allreduce_grads

    def with_another(self):
        original(self)
        for param in self._params:
            if name in param.name:
                param.grad()[:] += gradient

    monkeypatch.setattr(gluon.Trainer, "_allreduce_grads", with_another)


def alone(way):
    """A trainer that takes itself for one worker of several, and sums nothing."""
    net, optimizer = setup()[0], mx.optimizer.SGD(learning_rate=0.1)
    optimizer = amp.decorate(optimizer, 1024.0) if way == "decorate" else optimizer
    trainer = gluon.Trainer(net.collect_params(), optimizer)
    if way == "init_trainer":
        amp.init_trainer(trainer, LossScaler(1024))
    hook = trainer._amp_loss_scaler
    hook.workers = SimpleNamespace(rank=1)
    return net, trainer


@pytest.fixture
def worker():
    return alone("init_trainer")


def first_layer_alone(net, trainer, unscales=False):
    """A step whose backward pass does not reach the last layer."""
    scaled_backward(lambda: (net[0](mx.nd.ones((2, 4))) ** 2).sum(), trainer)
    if unscales:
        amp.unscale(trainer)
    trainer.step(2, ignore_stale_grad=True)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_stale_gradient_that_overflowed_is_not_summed_again(worker, unscales):
    net, trainer = worker
    train(net, trainer, poisoned(batches()[0]))
    assert not trainer.amp_last_step.stepped
    last = net[1].weight
    assert not np.isfinite(last.grad().asnumpy()).all()
    first_layer_alone(net, trainer, unscales)
    assert trainer.amp_last_step.stepped
    assert np.isfinite(last.grad().asnumpy()).all()


@pytest.mark.parametrize("other", [0.0, 2.0, np.inf])
def test_parameters_that_other_workers_alone_have_used(monkeypatch, worker, other):
    """All update them with what those have computed; none does where nobody has used them."""
    net, trainer = worker
    train(net, trainer, batches()[0])
    last = net[1].weight
    computed_by_others(monkeypatch, other, last.name)
    for _ in range(2):
        before, scale = last.data().asnumpy(), trainer.amp_loss_scale
        first_layer_alone(net, trainer)
        report = trainer.amp_last_step
        assert report.stepped == np.isfinite(other)
        assert report.nonfinite == (() if report.stepped else (last.name,))
        expected = before - (0.1 * other / 2 / scale if report.stepped else 0)
        np.testing.assert_allclose(last.data().asnumpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("gradient, steps", [(2.0, [True, True]), (np.inf, [False, False])])
@pytest.mark.parametrize("way", ["init_trainer", "decorate"])
def test_a_worker_without_rows_does_as_the_others(monkeypatch, way, gradient, steps):
    """Theirs carry the scale, though it has scaled no loss; it skips what they skip."""
    net, trainer = alone(way)
    computed_by_others(monkeypatch, gradient)
    before, decisions = weights(net), []
    for _ in steps:
        trainer.step(4)
        decisions.append(trainer.amp_last_step.stepped)
    assert decisions == steps
    carried = 1024 if way == "init_trainer" else 1
    assert trainer.amp_loss_scale == (1024 if steps[0] else 256)
    change = 2 * 0.1 * gradient / 4 / carried if steps[0] else 0
    for mine, start in zip(weights(net), before):
        np.testing.assert_allclose(mine, start - change, rtol=1e-5, atol=1e-7)


def test_a_worker_without_rows_does_not_unscale_what_carries_no_scale(monkeypatch, worker):
    """Where no loss was scaled in the last step either, it is a plain step of MXNet's."""
    net, trainer = worker
    train(net, trainer, batches()[0], scaled=False)
    computed_by_others(monkeypatch, 2.0)
    before = weights(net)
    trainer.step(4)
    for mine, start in zip(weights(net), before):
        np.testing.assert_allclose(mine, start - 0.1 * 2 / 4, rtol=1e-5, atol=1e-7)


def test_a_clipped_overflow_is_sent_as_one(worker):
    net, trainer = worker
    train(net, trainer, batches()[0], scaled=False, step=lambda _: None)
    hook = trainer._amp_loss_scaler
    weight = net[0].weight
    hook.note_unscaled(1024, {id(weight.data())})
    trainer.allreduce_grads()
    assert np.isinf(weight.grad().asnumpy()).all()
    assert np.isfinite(net[1].weight.grad().asnumpy()).all()
    trainer.update(4)
    assert not trainer.amp_last_step.stepped
