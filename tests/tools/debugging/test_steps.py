"""`on_step` hands over the report of each step of every kind of trainer."""

import mxnet as mx
import pytest
from mxnet import gluon

import mxamp as amp
from mxamp.debugging import on_step
from training import batches, poisoned, setup, train


@pytest.mark.parametrize("kind", ["no scaler", "scale_loss", "decorate"])
def test_every_kind_of_trainer(kind):
    scalers = {"no scaler": amp.NoScaler(), "scale_loss": amp.LossScaler(512)}
    net, trainer = setup(scaler=scalers.get(kind))
    if kind == "decorate":
        optimizer = amp.decorate(mx.optimizer.SGD(learning_rate=0.1), init_loss_scaling=512)
        trainer = gluon.Trainer(net.collect_params(), optimizer)
    data, reports, weights = batches(3), [], [net[0].weight.data().asnumpy()]
    data[1] = poisoned(data[1])

    def report(step):
        assert trainer.amp_last_step is step
        reports.append(step)
        weights.append(net[0].weight.data().asnumpy())

    with on_step(trainer, report):
        for batch in data:
            train(net, trainer, batch, scaled=kind == "scale_loss")
    train(net, trainer, data[0], scaled=kind == "scale_loss")
    plain = kind == "no scaler"
    assert (weights[0] == weights[1]).all() and (weights[1] != weights[2]).any()
    assert [report.stepped for report in reports] == [True, plain, True]
    assert [r.loss_scale for r in reports] == ([1, 1, 1] if plain else [512, 512, 256])
    assert plain or len(reports[1].nonfinite) == 4


def test_nothing_is_left_behind():
    _, trainer = setup(scaler=amp.LossScaler())
    with pytest.raises(KeyError), on_step(trainer, print):
        raise KeyError
    hook = on_step(trainer, print)
    hook.remove()
    hook.remove()
    assert not trainer._amp_observers


def test_a_function_may_remove_its_own_hook():
    net, trainer = setup(scaler=amp.LossScaler(256))
    first, second = [], []
    with on_step(trainer, first.append):
        hook = on_step(trainer, lambda report: (second.append(report), hook.remove()))
        for batch in batches(2):
            train(net, trainer, batch)
    assert len(first) == 2
    assert second == first[:1]


def test_wrong_arguments():
    _, trainer = setup()
    with pytest.raises(amp.ArgumentError, match="must be a gluon.Trainer, not 3"):
        on_step(3, print)
    with pytest.raises(amp.StateError, match="init_trainer"):
        on_step(trainer, print)
