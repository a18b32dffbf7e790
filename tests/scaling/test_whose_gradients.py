"""Steps on gradients that `scale_loss` has scaled, whichever trainer they were scaled for."""

import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import randn
from mxamp.scaling.state import Stage

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


@pytest.mark.parametrize("way", ["init_trainer", "plain, made before", "plain, made after"])
def test_a_step_of_a_trainer_that_the_loss_was_not_scaled_for(way):
    other = dense(2, 3, *static(2.0**16)) if way == "init_trainer" else dense(2, 3)
    encoder, first = dense(3, 4, *static(2.0**16))
    decoder, second = dense(2, 3) if way == "plain, made after" else other
    before = weight(decoder)
    for _ in range(2):
        backward(through(encoder, decoder), first, True)
        first.step(4)
        for step in (second.step, second.update):
            with pytest.raises(amp.StateError, match="by 65536.*another trainer.*scale_loss"):
                step(4)
    np.testing.assert_array_equal(weight(decoder), before)
    backward(loss_of(decoder), second, way == "init_trainer")
    second.step(4)
    assert not np.array_equal(weight(decoder), before)


@pytest.mark.parametrize("scales", [(1024, 1024), (4096, 16), (16, 4096)])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_loss_scaled_for_two_trainers(scales, grad_req):
    def program(encoder, first, decoder, second, scaled):
        for i in range(3):
            backward(through(encoder, decoder, i + 1), [first, second], scaled)
            if scaled:
                assert first.amp_loss_scale == scales[0]
                assert first._amp_loss_scaler.loss_scale == min(scales)
            for net, trainer in ((encoder, first), (decoder, second)):
                trainer.step(4)
                net.collect_params().zero_grad()

    assert_right(program, *static(*scales), grad_req=grad_req)


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


def gan(generator, first, critic, second, scaled):
    """Each loss writes gradients of both nets; one trainer uses its own."""
    for i in range(3):
        backward(through(generator, critic, i + 1), second, scaled)
        second.step(4)
        backward(through(generator, critic, target=1), first, scaled)
        first.step(4)


def partly_plain(generator, first, critic, second, scaled):
    """The second trainer's losses are never scaled."""
    for i in range(3):
        through(generator, critic, i + 1).backward()
        second.step(4)
        backward(through(generator, critic, target=1), first, scaled)
        first.step(4)


def overwritten(generator, first, critic, second, scaled):
    """Both steps use the gradients of the last pass, which was scaled for one trainer."""
    for i in range(3):
        backward(through(generator, critic, i + 1), second, scaled)
        backward(through(generator, critic, target=1), first, scaled)
        first.step(4)
        second.step(4)


def accumulated(generator, first, critic, second, scaled):
    """Unscaled losses are added before and after a scaled one."""
    for i in range(3):
        for net in (generator, critic):
            net.collect_params().zero_grad()
        for k in range(3):
            backward(loss_of(generator, i + 1 + k), first, scaled and k == 1)
        backward(loss_of(critic), second, scaled)
        first.step(4)
        second.step(4)


@pytest.mark.parametrize("program", [gan, partly_plain, overwritten, accumulated])
@pytest.mark.parametrize("scales", [(1024, 1024), (4096, 16), (16, 4096)])
@pytest.mark.parametrize("switched_on", [False, True])
def test_alternating_losses(program, scales, switched_on):
    grad_req = "add" if program is accumulated else "write"
    if switched_on:
        policy = amp.Policy.default("float16", "cpu").override(fp32=["FullyConnected"])
        amp.init("float16", ctx=mx.cpu(), policy=policy)
    assert_right(program, *static(*scales), grad_req=grad_req)


PASSES = {
    "exact": autograd.backward,
    "sum": lambda products: products[0].backward(),
    "twice": lambda products: [autograd.backward(products, retain_graph=True), autograd.backward(products)],
}  # fmt: skip


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("how", PASSES)
def test_the_pass_is_recognized(how, inside):
    def program(encoder, first, decoder, second, scaled):
        with autograd.record():
            losses = [loss_of(encoder), loss_of(encoder, 2)]
            if scaled:
                with amp.scale_loss(losses, first) as products:
                    heads = [products[0] + products[1]] if how == "sum" else products
                    if inside:
                        PASSES[how](heads)
        if not scaled:
            autograd.backward(losses)
        elif not inside:
            PASSES[how](heads)
        first.step(4)

    assert_right(program, *static(1024, 1024))


@pytest.mark.parametrize("ends", ["step", "error", "GradScaler"])
def test_scaled_losses_are_let_go(ends):
    net, trainer = dense(scaler=None if ends == "GradScaler" else amp.StaticLossScaler(1024))
    loss = loss_of(net)
    if ends == "GradScaler":
        scaler = amp.GradScaler(1024)
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(trainer, 4)
        scaler.update()
    else:
        try:
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
                1 / (ends == "step")
        except ZeroDivisionError:
            pass
        else:
            trainer.step(4)
    assert sys.getrefcount(scaled) == 2


def test_a_step_past_the_grad_scaler():
    net, trainer = dense()
    scaler = amp.GradScaler(init_scale=1024)
    for plain in (False, True):
        scaler.scale(loss_of(net)).backward()
        if plain:
            with pytest.raises(amp.StateError, match=r"scaler\.step"):
                trainer.step(4)
        scaler.step(trainer, 4)
        scaler.update()
    assert trainer.amp_steps == 2


def test_a_grad_scaler_and_a_trainer_with_its_own():
    encoder, first = dense(3, 4)
    decoder, second = dense(2, 3, *static(8))
    scaler = amp.GradScaler(init_scale=1024)
    scaler.scale(through(encoder, decoder)).backward()
    scaler.step(first, 4)
    with pytest.raises(amp.StateError, match="another trainer"):
        second.step(4)
    scaler.update()


@pytest.mark.parametrize("wrong", [[], [None], "sgd"])
def test_lists_of_no_trainers(wrong):
    with pytest.raises(amp.ArgumentError), amp.scale_loss(nd.ones(1), wrong):
        pass


def test_an_error_with_several_trainers_takes_all_back():
    _, first = dense(scaler=amp.StaticLossScaler(8))
    net, second = dense(scaler=amp.StaticLossScaler(8))
    backward(loss_of(net), second, True)
    amp.unscale(second)
    with pytest.raises(amp.StateError, match="been unscaled"):
        backward(loss_of(net), [first, second], True)
    assert first._amp_loss_scaler.stage is Stage.NONE
    second.step(4)


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


def test_a_plain_step_between_those_of_a_grad_scaler_is_no_mistake(caplog):
    net, trainer = dense()
    scaler = amp.GradScaler()
    scaler.scale(loss_of(net)).backward()
    scaler.step(trainer, 4)
    scaler.update()
    loss_of(net).backward()
    trainer.step(4)
    assert "carry no loss scale" not in caplog.text


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


@pytest.mark.parametrize("scaler", [amp.LossScaler(), amp.StaticLossScaler(8), amp.NoScaler()])
def test_an_assigned_scale_is_used(scaler):
    net, trainer = dense(scaler=scaler)
    hook = trainer._amp_loss_scaler
    hook._scale_seq_len, hook._unskipped = 100, 7
    for scale in (0.5, 2.0**25):  # outside the limits: contrib's scaler has no lower one
        hook._loss_scale = scale
        assert hook._loss_scale == hook._next_loss_scale == trainer.amp_loss_scale == scale
        backward(loss_of(net), trainer, True)
        trainer.step(4)
        assert trainer.amp_last_step.loss_scale == scale
    with pytest.raises(amp.ArgumentError):
        hook._loss_scale = 0
    with pytest.raises(amp.ArgumentError):
        hook._scale_seq_len = 0


def test_contribs_attributes_of_shared_scales():
    net, trainer = dense()
    scaler = amp.GradScaler(init_scale=1024)
    scaler.scale(loss_of(net)).backward()
    scaler.step(trainer, 4)
    scaler.update()
    trainer._amp_loss_scaler._loss_scale = 256
    assert scaler.get_scale() == 256
    optimizer = amp.decorate(mx.optimizer.SGD(), init_loss_scaling=64)
    trainer = gluon.Trainer(net.collect_params(), optimizer)
    trainer._amp_loss_scaler._loss_scale = 32
    assert optimizer.scaling.loss_scale == 32


@pytest.mark.parametrize("first_is", ["decorated", "explicit"])
@pytest.mark.parametrize("scaled_for", ["explicit", "nobody"])
def test_a_decorated_trainer_beside_one_that_scales_explicitly(first_is, scaled_for):
    def program(encoder, first, decoder, second, scaled):
        if scaled:
            if first_is == "explicit":  # its patches then lie above the decorated trainer's
                dense(scaler=amp.StaticLossScaler(8))
            optimizer = amp.decorate(mx.optimizer.SGD(learning_rate=0.01), init_loss_scaling=16)
            first = gluon.Trainer(encoder.collect_params(), optimizer)
            amp.init_trainer(second, amp.StaticLossScaler(1024))
        for i in range(3):
            backward(through(encoder, decoder, i + 1), second, scaled and scaled_for == "explicit")
            first.step(4)
            second.step(4)

    assert_right(program, None, None)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_that_another_loss_does_not_reach(grad_req):
    """A plain trainer's own gradients wait while another loss is scaled for another trainer."""

    def program(net, first, other, second, scaled):
        for i in range(3):
            loss_of(other, i + 1).backward()
            backward(loss_of(net, i + 1), first, scaled)
            second.step(4)
            first.step(4)
            for one in (net, other):
                one.collect_params().zero_grad()

    assert_right(program, amp.StaticLossScaler(1024), None, grad_req=grad_req)


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


@pytest.mark.parametrize("updates", ["once", "after each step"])
def test_a_grad_scaler_of_a_gan(updates):
    """The scale grows with each update: gradients that wait for a step keep theirs."""

    def program(generator, first, critic, second, scaled):
        scaler = amp.GradScaler(init_scale=16, growth_interval=1, enabled=scaled)
        for i in range(4):
            scaler.scale(through(generator, critic, i + 1)).backward()
            one, other = (first, second) if i % 2 else (second, first)
            scaler.step(one, 4)
            if updates != "once":
                scaler.update()
            if one is second:  # else both step on gradients of the same loss
                scaler.scale(through(generator, critic, target=1)).backward()
            scaler.step(other, 4)
            scaler.update()

    assert_right(program, None, None)


@pytest.mark.parametrize("way", ["two scales", "one unscaled", "two GradScalers"])
def test_one_pass_from_losses_scaled_apart(way):
    encoder, first = dense(3, 4, *static(1024))
    decoder, second = dense(2, 3, *static(32))
    with autograd.record():
        features = encoder(DATA)
        losses = [features.sum(), (decoder(features) ** 2).sum()]
        if way == "two GradScalers":
            losses = [amp.GradScaler(n).scale(loss) for n, loss in zip((8, 16), losses)]
        with pytest.raises(amp.StateError, match="scale them together"):
            if way == "two GradScalers":
                autograd.backward(losses)
            with amp.scale_loss(losses[0], first) as one:
                if way == "one unscaled":
                    autograd.backward([one, losses[1]])
                with amp.scale_loss(losses[1], [first, second]) as two:
                    autograd.backward([one, two])
    assert first._amp_loss_scaler.stage is second._amp_loss_scaler.stage is Stage.NONE


@pytest.mark.parametrize("plain_second", [False, True])
def test_gradients_that_are_added_to_after_a_step(plain_second):
    """MXNet adds to old gradients until `zero_grad` is called."""

    def program(net, trainer, _net, _trainer, scaled):
        for i in range(3):
            backward(loss_of(net), trainer, scaled and not (i == 1 and plain_second))
            trainer.step(4)

    scalers = (amp.LossScaler(1024, growth_interval=1) for _ in range(2))
    assert_right(program, *scalers, grad_req="add")


PASSES_FROM = {
    "the scaled loss": lambda loss, scaled: scaled.backward(),
    "a sum of it": lambda loss, scaled: (scaled.sum() * 1.0).backward(),
    "the loss before": lambda loss, scaled: autograd.backward([loss]),
    "a mean of the loss before": lambda loss, scaled: (loss.mean() * loss.size).backward(),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", PASSES_FROM)
@pytest.mark.parametrize("way", ["init_trainer", "init", "autocast"])
def test_a_step_knows_whether_a_pass_was_scaled(name, inside, way, caplog):
    policy = amp.Policy.default("float16", "cpu").override(fp32=["FullyConnected"])
    if way == "init":
        amp.init(policy=policy)

    def program(net, trainer, _net, _trainer, scaled):
        with autograd.record(), amp.autocast(policy=policy, enabled=way == "autocast"):
            loss = net(DATA) ** 2
            if not scaled:
                loss.backward()
            else:
                with amp.scale_loss(loss, trainer) as one:
                    if inside:
                        PASSES_FROM[name](loss, one)
                if not inside:
                    PASSES_FROM[name](loss, one)
        trainer.step(4)

    assert_right(program, amp.LossScaler(64), amp.LossScaler(64))
    assert ("carry no loss scale" in caplog.text) == ("before" in name)


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
