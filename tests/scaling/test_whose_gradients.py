"""Steps on gradients that `scale_loss` has scaled, whichever trainer they were scaled for."""

import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import mxamp as amp
from helpers import randn

DATA = randn(4, 4)


def dense(units=3, in_units=4, scaler=None, grad_req="write"):
    net = gluon.nn.Dense(units, in_units=in_units)
    net.initialize(mx.init.Constant(0.1))
    net.hybridize()
    net.collect_params().setattr("grad_req", grad_req)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    if scaler:
        amp.init_trainer(trainer, scaler)
    return net, trainer


def weight(net):
    return net.weight.data().asnumpy()


def loss_of(net, factor=1, target=0):
    with autograd.record():
        return ((net(DATA[:, : net.weight.shape[1]] * factor) - target) ** 2).sum()


def through(first, second, factor=1, target=0):
    with autograd.record():
        return ((second(first(DATA * factor)) - target) ** 2).sum()


def assert_right(program, *scalers, **settings):
    """Compare the weights of two nets after a program with scaled losses and with plain ones.

    A program that takes `scaled` scales losses itself.
    """
    found = []
    for given in (scalers, (None, None)):
        pairs = [
            dense(3, 4, given[0], **settings),
            dense(2, 3, given[1], **settings),
        ]
        program(*pairs[0], *pairs[1], given is scalers)
        found.append([weight(net) for net, _ in pairs])
    for one, two in zip(*found):
        np.testing.assert_allclose(one, two, rtol=1e-5)
        assert np.isfinite(one).all()


def static(*scales):
    return [amp.StaticLossScaler(scale) for scale in scales]


def backward(loss, trainers, scaled):
    if not scaled:
        autograd.backward(loss)
        return
    with amp.scale_loss(loss, trainers) as product:
        autograd.backward(product)


def test_each_of_two_trainers_reports_its_own_overflow():
    encoder, first = dense(3, 4, amp.LossScaler(2.0**12))
    decoder, second = dense(2, 3, amp.LossScaler(2.0**8))

    class Poison(autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, dy):
            return dy * np.inf

    backward(through(lambda x: Poison()(encoder(x)), decoder), (first, second), True)
    first.step(4)
    second.step(4)
    assert (first.amp_skips, second.amp_skips) == (1, 0)
    # 2**8 overflowed, so 2**11 would too.
    assert (first.amp_loss_scale, second.amp_loss_scale) == (2.0**7, 2.0**8)


@pytest.mark.parametrize("dtype, scaler, losses_scaled, warns", [
    ("float16", None, [False] * 3, True),
    ("float16", amp.StaticLossScaler(8), [False] * 3, True),
    ("float16", amp.NoScaler(), [False] * 3, False),
    ("bfloat16", None, [False, True], False),
    (None, amp.StaticLossScaler(8), [True, False], True),
    (None, amp.StaticLossScaler(8), [True, True], False),
], ids=str)  # fmt: skip
def test_a_step_without_scale_loss(dtype, scaler, losses_scaled, warns, caplog):
    if dtype:
        amp.init(dtype, ctx=mx.cpu())
    net, trainer = dense()
    amp.init_trainer(trainer, scaler)
    for scaled in losses_scaled:
        backward(loss_of(net), trainer, scaled)
        trainer.step(4)
    assert caplog.text.count("carry no loss scale") == int(warns)


SOCKEYE = ("_loss_scale", "_next_loss_scale", "_unskipped")


def test_scripts_keep_the_attributes_of_contribs_scaler():
    """Sockeye 2.3 reads these into its checkpoints, and assigns them when it resumes."""
    net, trainer = dense(scaler=amp.LossScaler(2.0**10))
    trainer._amp_loss_scaler._scale_seq_len = 3
    for _ in range(2):
        backward(loss_of(net), trainer, True)
        trainer.step(4)
    kept = [getattr(trainer._amp_loss_scaler, name) for name in SOCKEYE]
    assert kept == [1024, 1024, 2]
    net, trainer = dense(scaler=amp.LossScaler())
    scaler = trainer._amp_loss_scaler
    scaler._scale_seq_len, scaler._max_loss_scale = 3, 2.0**11
    for name, value in zip(SOCKEYE, kept):
        setattr(scaler, name, value)
    assert trainer.amp_loss_scale == scaler.loss_scale == 1024
    seen = []
    for _ in range(4):
        backward(loss_of(net), trainer, True)
        trainer.step(4)
        seen.append(trainer.amp_last_step.loss_scale)
    assert seen == [1024, 2048, 2048, 2048]
    assert (scaler._scale_seq_len, scaler._max_loss_scale, scaler._unskipped) == (3, 2048, 0)


def test_threads_that_scale_losses_of_two_trainers():
    """One thread a trainer, each with its scale; both trainers know of each other's passes."""

    def program(one, first, two, second, scaled):
        loss_of(one), loss_of(two)  # tracing a block is not for several threads at once
        errors = []

        def work(net, trainer):
            try:
                for i in range(20):
                    backward(loss_of(net, (i % 3 + 1) / 4), trainer, scaled)
                    trainer.step(4)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=pair) for pair in ((one, first), (two, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    assert_right(program, *static(4096, 16))


def test_a_plain_trainer_on_a_kvstore_that_uses_a_part_of_its_parameters():
    """MXNet does not note that these gradients were used: they stay fresh."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net, trainer = dense(scaler=amp.StaticLossScaler(1024))
    parts = [gluon.nn.Dense(2, in_units=4) for _ in range(2)]
    params = gluon.ParameterDict()
    for part in parts:
        part.initialize(mx.init.One(), ctx=contexts)
        params.update(part.collect_params())
    plain = gluon.Trainer(params, "sgd", {"learning_rate": 0.01})
    for used in (parts, parts[:1], parts[1:], parts):
        backward(loss_of(net), trainer, True)
        trainer.step(4)
        with autograd.record():
            losses = [part(DATA.as_in_context(c)).sum() for c in contexts for part in used]
        autograd.backward(losses)
        plain.step(4)
    assert plain._update_on_kvstore
    assert all(np.isfinite(weight(part)).all() for part in parts)


@pytest.mark.parametrize("unscaled", [(), (0,), (0, 1)], ids=str)
def test_two_trainers_that_share_a_parameter(unscaled):
    def trained(*scalers):
        one, other, shared = (gluon.Parameter(n, shape=(2,), init=mx.init.One()) for n in "abc")
        trainers = []
        for param in (one, other, shared):
            param.initialize()
        for own, scaler in zip((one, other), scalers):
            trainers.append(gluon.Trainer([own, shared], "sgd", {"learning_rate": 2.0**-6}))
            if scaler:
                amp.init_trainer(trainers[-1], scaler)
        for _ in range(2):
            with autograd.record():
                loss = (one.data() * other.data() * shared.data()).sum()
            backward(loss, trainers, scalers[0] is not None)
            for i in unscaled if scalers[0] else ():
                amp.unscale(trainers[i])
            for trainer in trainers:
                trainer.step(1, ignore_stale_grad=True)
        return [p.data().asnumpy() for p in (one, other, shared)]

    np.testing.assert_array_equal(trained(*static(8, 8)), trained(None, None))


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_plain_trainer_of_a_scaled_loss(made):
    decoder, second = dense(2, 3)
    encoder, first = dense(3, 4, *static(2.0**16))
    if made == "after":
        decoder, second = dense(2, 3)
    before = weight(decoder)
    backward(through(encoder, decoder), first, True)
    first.step(4)
    for step in (second.step, second.update):
        with pytest.raises(amp.StateError, match="another trainer"):
            step(4)
    np.testing.assert_array_equal(weight(decoder), before)
    backward(loss_of(decoder), second, False)
    second.step(4)
    assert not np.array_equal(weight(decoder), before)


def test_one_pass_from_losses_scaled_apart():
    net = dense(3, 4)[0]
    losses = [amp.GradScaler(scale).scale(loss_of(net)) for scale in (8, 16)]
    for heads in (losses, [losses[0], loss_of(net)]):
        with pytest.raises(amp.StateError, match="scale them together"):
            autograd.backward(heads)


@pytest.mark.parametrize("way", ["init_trainer", "GradScaler"])
def test_a_backward_function_that_was_stored_before_the_patches(way):
    amp.shutdown()
    stored = autograd.backward

    def program(net, trainer, _net, _trainer, scaled):
        scaler = amp.GradScaler(1024, enabled=scaled and way == "GradScaler")
        if scaled and way == "init_trainer":
            amp.init_trainer(trainer, amp.StaticLossScaler(1024))
        for _ in range(2):
            if scaled and way == "init_trainer":
                with amp.scale_loss(loss_of(net), trainer) as loss:
                    stored([loss])
                trainer.step(4)
            else:
                stored([scaler.scale(loss_of(net))])
                scaler.step(trainer, 4)
                scaler.update()

    assert_right(program, None, None)


def test_a_step_of_the_trainer_is_one_of_its_grad_scaler():
    net, trainer = dense()
    scaler = amp.GradScaler(init_scale=1024)
    for _ in range(2):
        scaler.scale(loss_of(net)).backward()
        scaler.step(trainer, 4)
        scaler.update()
    scaler.scale(loss_of(net)).backward()
    trainer.step(4)
    scaler.update()
    assert trainer.amp_steps == 3
    assert np.isfinite(weight(net)).all()
