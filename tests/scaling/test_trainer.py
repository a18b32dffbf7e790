from collections import namedtuple

import numpy as np
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized, kind, leaf, randn, same, scaled_backward, untuned
from training import (
    CONTEXTS,
    assert_same_weights,
    batches,
    one_step,
    poisoned,
    setup,
    train,
    weights,
)

SETTINGS = [
    ("sgd", {}), ("sgd", {"momentum": 0.9, "wd": 0.01}), ("adam", {}),
    ("sgd", {"momentum": 0.9, "multi_precision": True}),
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("precision", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("ctx", CONTEXTS)
@pytest.mark.parametrize("optimizer, settings", SETTINGS)
def test_an_overflowing_step_is_as_if_it_had_not_been(optimizer, settings, ctx, hybrid, precision):
    if precision:
        amp.init(policy=untuned(precision))
    data = batches()
    runs = []
    for bad in (True, False):
        net, trainer = setup(
            CONTEXTS[ctx], optimizer, amp.LossScaler(init_scale=1024), hybrid, **settings
        )
        train(net, trainer, data[0])
        if bad:
            train(net, trainer, poisoned(data[1]))
            assert not trainer.amp_last_step.stepped
        train(net, trainer, data[2])
        train(net, trainer, data[3])
        runs.append((net, trainer))
    (net, trainer), (control, control_trainer) = runs
    assert_same_weights(net, control)
    assert (trainer.amp_steps, trainer.amp_skips) == (3, 1)
    assert trainer.amp_loss_scale == 512
    assert control_trainer.amp_loss_scale == 1024
    assert trainer.optimizer.num_update == control_trainer.optimizer.num_update == 3
    states = (t._updaters[0].get_states() for t in (trainer, control_trainer))
    assert next(states) == next(states)


def test_the_report():
    net, trainer = setup(scaler=amp.LossScaler(init_scale=1024))
    assert trainer.amp_last_step is None
    train(net, trainer, batches(1)[0])
    assert trainer.amp_last_step == (True, 1024, 1024, ())
    train(net, trainer, poisoned(batches(1)[0]))
    report = trainer.amp_last_step
    assert (report.stepped, report.loss_scale, report.next_loss_scale) == (False, 1024, 512)
    assert net[0].weight.name in report.nonfinite
    train(
        net, trainer, batches(1)[0],
        between=lambda: net[0].weight.grad().__setitem__((0, 0), np.inf),
    )  # fmt: skip
    assert trainer.amp_last_step.nonfinite == (net[0].weight.name,)
    with pytest.raises(AttributeError):
        report.stepped = True


BETWEEN = {
    "nothing": (lambda trainer: None, 0),
    "unscale": (amp.unscale, 0),
    "clip": (lambda trainer: amp.clip_grad_global_norm(trainer, 1.0), 0),
    "the second device alone": (lambda trainer: None, -1),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_an_overflow_on_any_device_skips_the_update_of_all(name):
    between, row = BETWEEN[name]
    net, trainer = setup(CONTEXTS["two"], scaler=amp.LossScaler(init_scale=1024))
    before, data, found = weights(net), batches(1)[0], []
    data[row, 0] = np.nan
    train(net, trainer, data, between=lambda: found.append(between(trainer)))
    assert not trainer.amp_last_step.stepped
    assert name != "clip" or not np.isfinite(found[0])
    np.testing.assert_equal(weights(net), before)


def test_wrong_arguments_and_moments():
    net, trainer = setup()
    with pytest.raises(amp.StateError, match=r"mxamp\.init\(\)"):
        amp.init_trainer(trainer)
    with pytest.raises(amp.StateError, match="init_trainer"), amp.scale_loss(nd.ones(1), trainer):
        pass
    for wrong in (None, "sgd", net, trainer.optimizer):
        with pytest.raises(amp.ArgumentError, match=r"gluon\.Trainer"):
            amp.init_trainer(wrong)
        with pytest.raises(amp.ArgumentError), amp.scale_loss(nd.ones(1), wrong):
            pass
    with pytest.raises(amp.ArgumentError, match="loss_scaler"):
        amp.init_trainer(trainer, 65536)
    amp.init_trainer(trainer, amp.StaticLossScaler(4))
    amp.init_trainer(trainer, amp.StaticLossScaler(8))  # replaces it
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 8
    for call in (amp.unscale, lambda one: amp.clip_grad_global_norm(one, 1.0)):
        with pytest.raises(amp.StateError, match="no scaled gradients"):
            call(trainer)
    for wrong in (0, -1, None, "1", np.nan):
        with pytest.raises(amp.ArgumentError, match="max_norm"):
            amp.clip_grad_global_norm(trainer, wrong)
    for wrong in (1.0, "loss", [nd.ones(1), None]):
        with pytest.raises(amp.ArgumentError, match="a loss must be an NDArray"), amp.scale_loss(
            wrong, trainer
        ):
            pass


@pytest.mark.parametrize("drops", [0, 2])
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_an_overflow_after_unscaling(way, drops):
    """Clipping by value makes finite numbers of infinite ones; the program may drop both."""
    net, trainer = setup(scaler=amp.LossScaler(init_scale=1024) if way == "scale_loss" else None)
    scaler, before = amp.GradScaler(1024), weights(net)

    def clip():
        scaler.unscale_(trainer) if way == "GradScaler" else amp.unscale(trainer)
        for parameter in net.collect_params().values():
            gradient = parameter.grad()
            gradient[:] = nd.array(np.clip(np.nan_to_num(gradient.asnumpy()), -1, 1))

    data = poisoned(batches(1)[0])
    for _ in range(drops):
        one_step(net, trainer, nd.array(data), way, scaler, between=clip, takes_step=False)
    one_step(net, trainer, nd.array(data), way, scaler, between=clip)
    assert (trainer.amp_last_step.loss_scale, trainer.amp_skips) == (1024 / 2**drops, 1)
    assert trainer.amp_last_step.nonfinite
    np.testing.assert_equal(weights(net), before)


def test_losses_come_back_in_their_containers_and_in_float32():
    _, trainer = setup(scaler=amp.StaticLossScaler(2.0**16))
    Pair = namedtuple("Pair", "a b")
    one, half = nd.ones(1), nd.array([2.0], dtype="float16")
    with amp.scale_loss({"x": [one, (one,)], "y": Pair(one, half)}, trainer) as scaled:
        assert isinstance(scaled["x"], list)
        assert isinstance(scaled["x"][1], tuple)
        assert isinstance(scaled["y"], Pair)
        assert scaled["y"].b.asscalar() == 2.0**17
        assert kind(scaled["y"].b) == "float32"
    assert one.asscalar() == 1


def test_updates_are_kept_off_the_kvstore(caplog):
    net, _ = setup(CONTEXTS["two"])
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=True)
    amp.init_trainer(trainer, amp.StaticLossScaler(8))
    assert "update_on_kvstore" in caplog.text
    train(net, trainer, batches(1)[0])
    assert not trainer._update_on_kvstore

    started = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=True)
    started._init_kvstore()
    with pytest.raises(amp.StateError, match="update_on_kvstore=False"):
        amp.init_trainer(started, amp.StaticLossScaler(8))
    asynchronous = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_async")
    with pytest.raises(amp.StateError, match="dist_sync"):
        amp.init_trainer(asynchronous, amp.StaticLossScaler(8))


def test_row_sparse_gradients():
    net = initialized(nn.Embedding(10, 4, sparse_grad=True))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(init_scale=1024))
    before = net.weight.data().asnumpy()

    def step(factor):
        scaled_backward(lambda: (net(nd.array([1, 3])) * factor).sum(), trainer)
        trainer.step(1)

    step(np.inf)
    assert not trainer.amp_last_step.stepped
    np.testing.assert_array_equal(net.weight.data().asnumpy(), before)
    step(1.0)
    assert same(net.weight.data()[1], before[1] - 1)
    assert same(net.weight.data()[2], before[2])


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("ctx", CONTEXTS)
@pytest.mark.parametrize("way", ["step", "allreduce"])
def test_clipping_by_global_norm(ctx, max_norm, way):
    data = batches()
    net, trainer = setup(CONTEXTS[ctx], scaler=amp.StaticLossScaler(1024))
    control, plain = setup(CONTEXTS[ctx])
    plain._kvstore_params["update_on_kvstore"] = False
    norms = []

    def clip():
        if way == "allreduce":
            trainer.allreduce_grads()
        norms.append(amp.clip_grad_global_norm(trainer, max_norm))

    def clip_plain():
        plain.allreduce_grads()
        params = control.collect_params().values()
        grads = [p.list_grad()[0] for p in params]
        norm = np.sqrt(sum((g.asnumpy().astype("float64") ** 2).sum() for g in grads))
        assert norms[-1] == pytest.approx(norm, rel=1e-5)
        for param in params:
            for grad in param.list_grad():
                grad *= min(1.0, max_norm / norms[-1])

    for batch in data:
        update = trainer.update if way == "allreduce" else trainer.step
        train(net, trainer, batch, between=clip, step=update)
        train(control, plain, batch, scaled=False, between=clip_plain, step=plain.update)
    assert_same_weights(net, control)


OUTPUTS = ["SoftmaxOutput", *(f"{loss}RegressionOutput" for loss in ("Linear", "Logistic", "MAE"))]


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_operators_are_scaled_with_the_loss_alone(on, name):
    x, operator = leaf(randn(4, 3)), getattr(nd, name)
    label = nd.array([0, 1, 2, 0]) if name == "SoftmaxOutput" else randn(4, 3, seed=1)
    with amp.autocast(enabled=False):
        backpropagate(lambda: operator(x, label))
    plain = x.grad.asnumpy()
    _, trainer = setup(scaler=amp.StaticLossScaler(1024))
    for _ in range(3):
        scaled_backward(lambda: operator(x, label), trainer)
        np.testing.assert_array_equal(x.grad.asnumpy(), plain * 1024)
        backpropagate(lambda: operator(x, label))
        np.testing.assert_array_equal(x.grad.asnumpy(), plain)
