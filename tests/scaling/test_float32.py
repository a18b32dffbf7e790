"""After init("auto"), where that is float32: every call works, and computes as plain MXNet does."""

import copy
import pickle
import sys

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from conftest import assert_unpatched
from helpers import BF16
from mxamp.framework import machine
from mxamp.scaling import distributed
from training import (
    CONTEXTS,
    assert_as_plain,
    assert_same_weights,
    batches,
    one_step,
    poisoned,
    setup,
    train,
)


@pytest.fixture(autouse=True)
def float32(monkeypatch):
    monkeypatch.setattr(machine, "_gpu_count", lambda: 0)
    usable = machine.onednn_features() - {"avx512_bf16", "amx_bf16"}
    monkeypatch.setattr(machine, "onednn_features", lambda: usable)
    amp.init("auto")


def data_with_one_overflow():
    data = batches(6)
    data[4] = poisoned(data[4])
    return data


OPTIMIZERS = {"sgd": {"momentum": 0.9}, "adam": {}}


@pytest.mark.parametrize("scaler", [None, amp.LossScaler(init_scale=2.0**12), amp.NoScaler()])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", CONTEXTS)
def test_scale_loss_and_step(devices, optimizer, scaler):
    net, trainer = setup(CONTEXTS[devices], optimizer, **OPTIMIZERS[optimizer])
    control, plain = setup(CONTEXTS[devices], optimizer, **OPTIMIZERS[optimizer])
    amp.init_trainer(trainer, scaler)
    amp.init_trainer(trainer, scaler)
    for number, batch in enumerate(data_with_one_overflow(), 1):
        train(net, trainer, batch)
        train(control, plain, batch, scaled=False)
        assert_same_weights(net, control)  # NaN included: plain MXNet skips no step
        assert trainer.amp_loss_scale == trainer._amp_loss_scaler.loss_scale == 1
        assert (trainer.amp_steps, trainer.amp_skips) == (number, 0)
        assert trainer.amp_last_step.stepped
    assert_unpatched()


COMPRESSION = {"off": None, "on": {"type": "2bit", "threshold": 0.25}}


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate"])
@pytest.mark.parametrize("compression", COMPRESSION)
@pytest.mark.parametrize("on_kvstore", [True, False])
def test_two_devices(on_kvstore, compression, way):
    pairs = []
    for its_way in (way, "plain"):
        net, _ = setup(CONTEXTS["two"])
        optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
        trainer = gluon.Trainer(
            net.collect_params(),
            amp.decorate(optimizer) if its_way == "decorate" else optimizer,
            kvstore="device",
            compression_params=COMPRESSION[compression],
            update_on_kvstore=on_kvstore,
        )
        if its_way == "scale_loss":
            amp.init_trainer(trainer)
        pairs.append((net, trainer, its_way, amp.GradScaler()))
    for batch in data_with_one_overflow():
        for net, trainer, its_way, scaler in pairs:
            one_step(net, trainer, batch, its_way, scaler)
        assert_same_weights(pairs[0][0], pairs[1][0])


def trainer_on_servers(net, **settings):
    return gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_sync", **settings)


def test_nothing_is_refused_on_a_parameter_server_until_trainers_scale(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setattr(distributed, "_on_servers", [])
    compressed = {"compression_params": {"type": "2bit"}}
    refused = {
        "is bfloat16": trainer_on_servers(setup(dtype=BF16)[0]),
        "leave out compression_params": trainer_on_servers(setup()[0], **compressed),
    }
    first, second = (trainer_on_servers(setup()[0]) for _ in range(2))
    for trainer in (*refused.values(), first, second):
        amp.init_trainer(trainer)
        assert trainer.amp_loss_scale == 1
    amp.shutdown()
    amp.init("float16", ctx=mx.cpu(), tuned=False)
    amp.init_trainer(first)
    for words, trainer in {**refused, "another trainer": second}.items():
        with pytest.raises(amp.AmpError, match=words):
            amp.init_trainer(trainer)


def test_workers_compare_nothing(monkeypatch):
    """The weights are waited for, as updates are not on the kvstore; no message is sent."""
    monkeypatch.setattr(distributed.transports, "is_distributed", lambda _: True)
    net, trainer = setup(CONTEXTS["two"])
    control, plain = setup(CONTEXTS["two"])
    hook = sys.excepthook
    amp.init_trainer(trainer)
    train(net, trainer, poisoned(batches()[0]))
    train(control, plain, poisoned(batches()[0]), scaled=False)
    assert_same_weights(net, control)
    assert trainer._amp_loss_scaler.workers is None
    assert sys.excepthook is hook


def test_a_trainer_whose_updates_are_on_the_kvstore_is_refused_when_it_is_to_scale():
    net, trainer = setup(CONTEXTS["two"])
    train(net, trainer, batches()[0], scaled=False)
    amp.init_trainer(trainer)
    amp.shutdown()
    amp.init("float16", ctx=mx.cpu(), tuned=False)
    with pytest.raises(amp.StateError, match="updates parameters on the kvstore"):
        amp.init_trainer(trainer)
    assert not trainer._amp_loss_scaler.scaler.checks


def clip_as_gluonnlp(trainer):
    """Return GluonNLP's step, which multiplies the norm by the loss scale."""

    def update(size):
        trainer.allreduce_grads()
        scale = getattr(trainer, "_amp_loss_scaler", None)
        gradients = [p.grad(c) for p in trainer._params for c in p.list_ctx()]
        gluon.utils.clip_global_norm(gradients, 0.5 * (scale.loss_scale if scale else 1))
        trainer.update(size)

    return update


@pytest.mark.parametrize(
    "way, devices", [("unscale", "one"), ("unscale", "two"), ("gluonnlp", "one")]
)
def test_unscale_and_clip(way, devices):
    def run(net, trainer, scaled):
        unscales = scaled and way == "unscale"
        for batch in batches():
            train(
                net, trainer, batch, scaled=scaled, between=unscales and (lambda: amp.unscale(trainer)),
                step=clip_as_gluonnlp(trainer) if way == "gluonnlp" else None,
            )  # fmt: skip

    assert_as_plain(run, ctx=CONTEXTS[devices])


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


def test_a_grad_scaler_in_use_stays_what_it_is():
    amp.shutdown()
    scaler = amp.GradScaler(init_scale=1024)
    net, trainer = setup()
    control, plain = setup()
    with autograd.record():
        loss = scaler.scale((net(nd.array(batches()[0])) ** 2).sum())
    amp.init("auto")
    loss.backward()
    scaler.step(trainer, 4)
    train(control, plain, batches()[0], scaled=False)
    assert_same_weights(net, control)


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
    assert again._amp_loss_scaler.scaler.checks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_next_init_trainer_scales_again(dtype):
    net, trainer = setup()
    amp.init_trainer(trainer)
    train(net, trainer, batches()[0])
    amp.shutdown()
    train(net, trainer, batches()[0])  # goes on
    assert trainer.amp_steps == 2
    amp.init(dtype, ctx=mx.cpu(), tuned=False)
    amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == (2.0**16 if dtype == "float16" else 1)
    train(net, trainer, poisoned(batches()[0]))
    assert trainer.amp_skips == 1


def test_inside_a_half_precision_region_trainers_scale():
    _, trainer = setup()
    with amp.autocast("float16"):
        amp.init_trainer(trainer)
        assert amp.GradScaler().get_scale() == 2.0**16
    assert trainer.amp_loss_scale == 2.0**16


def test_a_region_is_enough():
    amp.shutdown()
    _, trainer = setup()
    with amp.autocast("auto"):
        amp.init_trainer(trainer)
    assert trainer.amp_loss_scale == 1
    with pytest.raises(amp.StateError, match="mixed precision is off"):
        amp.init_trainer(setup()[1])


def test_updates_that_must_stay_on_the_kvstore_stay_there():
    nets = []
    for scaled in (True, False):
        net, trainer = setup(CONTEXTS["two"])
        train(net, trainer, batches()[0], scaled=False)
        assert trainer._update_on_kvstore
        if scaled:
            amp.init_trainer(trainer)
        for batch in batches()[1:]:
            train(net, trainer, batch, scaled=scaled)
        nets.append(net)
    assert_same_weights(*nets)
    weight = gluon.Parameter("weight", shape=(4, 2), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize()
    sparse = gluon.Trainer([weight], "sgd")
    amp.init_trainer(sparse)
    assert sparse.amp_loss_scale == 1
