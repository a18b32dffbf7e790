"""After init("auto"), where that is float32: every call works, and trainers update as plain ones.

In bfloat16 trainers update as in float32.
"""

import copy
import pickle

import mxnet as mx
import pytest
from mxnet import autograd, nd

import mxamp as amp
from conftest import assert_unpatched
from mxamp.backends.onednn import cpu
from training import CONTEXTS, assert_same_weights, batches, poisoned, setup, train


@pytest.fixture(autouse=True)
def float32(on_machine):
    on_machine(features=cpu.onednn_features() - {"avx512_bf16", "amx_bf16"})
    amp.init("auto")


def data_with_one_overflow():
    data = batches(6)
    data[4] = poisoned(data[4])
    return data


OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}}


@pytest.mark.parametrize("scaler", [None, amp.LossScaler(4096), amp.NoScaler(), "bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", CONTEXTS)
def test_scale_loss_and_step(devices, optimizer, scaler):
    if scaler == "bfloat16":
        amp.shutdown()
        scaler = amp.init("bfloat16", ctx=mx.cpu(), tuned=False)  # None: the default
    net, trainer = setup(CONTEXTS[devices], optimizer, **OPTIMIZERS[optimizer])
    control, plain = setup(CONTEXTS[devices], optimizer, **OPTIMIZERS[optimizer])
    amp.init_trainer(trainer, scaler)
    amp.init_trainer(trainer, scaler)
    trainer._amp_loss_scaler.loaded_masters = [(nd.ones(2), nd.ones(2))]
    for number, batch in enumerate(data_with_one_overflow(), 1):
        train(net, trainer, batch)
        train(control, plain, batch, scaled=False)
        assert_same_weights(net, control)  # NaN included: plain MXNet skips no step
        assert trainer.amp_loss_scale == trainer._amp_loss_scaler.loss_scale == 1
        assert (trainer.amp_steps, trainer.amp_skips, trainer.amp_last_step[0]) == (number, 0, True)
    assert amp.current_policy() or assert_unpatched() is None
    assert trainer._amp_loss_scaler.loaded_masters == []


def test_a_trainer_whose_updates_are_on_the_kvstore_is_refused_when_it_is_to_scale():
    net, trainer = setup(CONTEXTS["two"])
    train(net, trainer, batches()[0], scaled=False)
    amp.init_trainer(trainer)
    amp.shutdown()
    amp.init("float16", ctx=mx.cpu(), tuned=False)
    with pytest.raises(amp.StateError, match="updates parameters on the kvstore"):
        amp.init_trainer(trainer)
    assert not trainer._amp_loss_scaler.scaler.is_scaling


def test_contribs_init_is_refused_too(monkeypatch):
    monkeypatch.setattr(mx.contrib.amp.amp, "_amp_initialized", True)
    with pytest.raises(amp.StateError, match=r"contrib\.amp is on"):
        amp.init("auto")


def test_grad_scaler():
    scaler = amp.GradScaler()
    net, trainer = setup(optimizer="adam")
    control, plain = setup(optimizer="adam")
    before = scaler.state_dict()
    for batch in data_with_one_overflow():
        with autograd.record(), amp.autocast():
            loss = (net(nd.array(batch)) ** 2).sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.unscale_(trainer)
        scaler.step(trainer, len(batch))
        scaler.update()
        train(control, plain, batch, scaled=False)
    assert_same_weights(net, control)
    assert scaler.get_scale() == trainer.amp_loss_scale == 1
    assert (trainer.amp_steps, trainer.amp_skips) == (6, 0)
    # A checkpoint goes on elsewhere: what this machine does not use, it does not change.
    assert scaler.state_dict() == before
    scaler.load_state_dict({**before, "loss_scale": 512.0})
    copied = pickle.loads(pickle.dumps(copy.deepcopy(scaler)))  # noqa: S301
    assert copied.get_scale() == scaler.get_scale() == 1
    assert copied.state_dict()["loss_scale"] == 512
    with pytest.raises(amp.StateError, match="no trainer has stepped"):
        scaler.update()


@pytest.mark.parametrize("saved_by", ["float16", "bfloat16"])
@pytest.mark.parametrize("init_first", [True, False])
def test_states_go_from_one_machine_to_another(tmp_path, saved_by, init_first):
    amp.shutdown()
    amp.init(saved_by, ctx=mx.cpu(), tuned=False)
    net, trainer = setup(optimizer="adam")
    amp.init_trainer(trainer)
    train(net, trainer, batches()[0])
    trainer.save_states(str(tmp_path / "half"))
    net.save_parameters(str(tmp_path / "net"))
    amp.shutdown()
    amp.init("auto")
    pairs = setup(optimizer="adam"), setup(optimizer="adam")
    (net, trainer), (control, plain) = pairs
    for one, its in pairs:
        one.load_parameters(str(tmp_path / "net"))
        if init_first and its is trainer:
            amp.init_trainer(trainer)
        its.load_states(str(tmp_path / "half"))
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 1
    skips = trainer.amp_skips  # on the other machine
    for batch in data_with_one_overflow()[3:]:
        train(net, trainer, batch)
        train(control, plain, batch, scaled=False)
    assert_same_weights(net, control)
    assert trainer.amp_skips == skips
    trainer.save_states(str(tmp_path / "full"))
    plain.load_states(str(tmp_path / "full"))  # plain MXNet reads it
    amp.shutdown()
    amp.init(saved_by, ctx=mx.cpu(), tuned=False)
    _, again = setup(optimizer="adam")
    amp.init_trainer(again)
    again.load_states(str(tmp_path / "full"))
    assert again.amp_loss_scale == (2.0**16 if saved_by == "float16" else 1)
    assert again._amp_loss_scaler.scaler.is_scaling is (saved_by == "float16")


def test_the_next_init_trainer_scales_again():
    net, trainer = setup()
    amp.init_trainer(trainer)
    train(net, trainer, batches()[0])
    amp.shutdown()
    train(net, trainer, batches()[0])  # goes on
    assert trainer.amp_steps == 2
    amp.init("float16", ctx=mx.cpu(), tuned=False)
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 2.0**16
    train(net, trainer, poisoned(batches()[0]))
    assert trainer.amp_skips == 1


def test_inside_a_half_precision_region_trainers_scale():
    _, trainer = setup()
    with amp.autocast("float16"):
        amp.init_trainer(trainer)
        assert amp.GradScaler().get_scale() == trainer.amp_loss_scale == 2.0**16
        amp.init_trainer(trainer, amp.NoScaler())
        amp.init_trainer(trainer)  # does nothing
    assert trainer.amp_loss_scale == 1
