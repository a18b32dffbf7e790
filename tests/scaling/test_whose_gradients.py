"""Steps on gradients that `scale_loss` has scaled, whichever trainer they were scaled for."""

import logging
import sys
import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import check_python, randn, values
from mxamp.scaling.hook import Stage
from mxamp.scaling.passes import passes

DATA = randn(4, 4)


def dense(units=3, in_units=4, **settings):
    net = gluon.nn.Dense(units, in_units=in_units)
    net.initialize(mx.init.Constant(0.1))
    net.hybridize()
    for param in net.collect_params().values():
        param.grad_req = settings.get("grad_req", "write")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    if settings.get("scaler"):
        amp.init_trainer(trainer, settings["scaler"])
    return net, trainer


def weight(net):
    return net.weight.data().asnumpy()


def run(program, *scalers, **settings):
    """The weights of two nets after a program with their trainers, scaled and as it should be."""
    found = []
    for given in (scalers, (None, None)):
        pairs = [dense(3, 4, scaler=given[0], **settings), dense(2, 3, scaler=given[1], **settings)]
        program(*pairs[0], *pairs[1], bool(given[0]))
        found.append([weight(pairs[0][0]), weight(pairs[1][0])])
    return found


def assert_right(found):
    for one, two in zip(*found):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def backward(loss, trainers, scaled):
    if not scaled:
        loss.backward()
        return
    with amp.scale_loss(loss, trainers) as product:
        product.backward()


def test_a_step_of_a_trainer_that_the_loss_was_not_scaled_for():
    encoder, first = dense(3, 4, scaler=amp.StaticLossScaler(2.0**16))
    decoder, second = dense(2, 3, scaler=amp.StaticLossScaler(2.0**16))
    before = weight(decoder)
    for _ in range(2):
        with autograd.record():
            loss = (decoder(encoder(DATA)) ** 2).sum()
            backward(loss, first, True)
        first.step(4)
        for step in (second.step, second.update):
            with pytest.raises(amp.StateError, match="by 65536.*another trainer.*scale_loss"):
                step(4)
    np.testing.assert_array_equal(weight(decoder), before)


@pytest.mark.parametrize("known", ["made before", "made after"])
def test_a_plain_trainer_that_the_loss_was_not_scaled_for(known):
    if known == "made before":
        decoder, second = dense(2, 3)
    encoder, first = dense(3, 4, scaler=amp.StaticLossScaler(2.0**16))
    if known == "made after":
        decoder, second = dense(2, 3)
    with autograd.record():
        backward((decoder(encoder(DATA)) ** 2).sum(), first, True)
    first.step(4)
    with pytest.raises(amp.StateError, match="another trainer"):
        second.step(4)
    with autograd.record():
        loss = (decoder(DATA[:, :3]) ** 2).sum()
    loss.backward()
    second.step(4)  # on gradients of its own again


@pytest.mark.parametrize("scales", [(1024, 1024), (4096, 16), (16, 4096)])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_loss_scaled_for_two_trainers(scales, grad_req):
    def program(encoder, first, decoder, second, scaled):
        for i in range(3):
            with autograd.record():
                loss = (decoder(encoder(DATA * (i + 1))) ** 2).sum()
                backward(loss, [first, second], scaled)
            if scaled:
                assert first.amp_loss_scale == scales[0]
                assert first._amp_loss_scaler.loss_scale == min(scales)
            first.step(4)
            second.step(4)
            for net in (encoder, decoder):
                net.collect_params().zero_grad()

    assert_right(run(program, *map(amp.StaticLossScaler, scales), grad_req=grad_req))


def test_each_of_two_trainers_reports_its_own_overflow():
    encoder, first = dense(3, 4, scaler=amp.LossScaler(2.0**12))
    decoder, second = dense(2, 3, scaler=amp.LossScaler(2.0**8))

    class Poison(autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, dy):
            return dy * np.inf

    with autograd.record():
        loss = (decoder(Poison()(encoder(DATA))) ** 2).sum()
        backward(loss, (first, second), True)
    first.step(4)
    second.step(4)
    assert (first.amp_skips, second.amp_skips) == (1, 0)
    # Where 2**8 was too much, 2**11 would be.
    assert (first.amp_loss_scale, second.amp_loss_scale) == (2.0**7, 2.0**8)


def gan(generator, first, critic, second, scaled):
    """Each loss writes gradients of both nets, which are thrown away but for one trainer's."""
    for i in range(3):
        with autograd.record():
            fake = generator(DATA * (i + 1))
            loss = (critic(fake) ** 2).sum()
        backward(loss, second, scaled)
        second.step(4)
        with autograd.record():
            loss = ((critic(generator(DATA)) - 1) ** 2).sum()
        backward(loss, first, scaled)
        first.step(4)


def partly_plain(generator, first, critic, second, scaled):
    """The second trainer's losses are never scaled."""
    for i in range(3):
        with autograd.record():
            loss = (critic(generator(DATA * (i + 1))) ** 2).sum()
        loss.backward()
        second.step(4)
        with autograd.record():
            loss = ((critic(generator(DATA)) - 1) ** 2).sum()
        backward(loss, first, scaled)
        first.step(4)


def overwritten(generator, first, critic, second, scaled):
    """Both steps use the gradients of the last pass, which was scaled for one trainer."""
    for i in range(3):
        with autograd.record():
            loss = (critic(generator(DATA * (i + 1))) ** 2).sum()
            other = ((critic(generator(DATA)) - 1) ** 2).sum()
        backward(loss, second, scaled)
        backward(other, first, scaled)
        first.step(4)
        second.step(4)


def accumulated(generator, first, critic, second, scaled):
    """A loss that is not scaled is added to one that is, before it and after it."""
    for i in range(3):
        for net in (generator, critic):
            net.collect_params().zero_grad()
        with autograd.record():
            losses = [(generator(DATA * (i + 1 + k)) ** 2).sum() for k in range(3)]
            other = (critic(DATA[:, :3]) ** 2).sum()
        losses[0].backward()
        backward(losses[1], first, scaled)
        losses[2].backward()
        backward(other, second, scaled)
        first.step(4)
        second.step(4)


PROGRAMS = [gan, partly_plain, overwritten, accumulated]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("scales", [(1024, 1024), (4096, 16), (16, 4096)])
@pytest.mark.parametrize("switched_on", [False, True])
def test_alternating_losses(program, scales, switched_on):
    grad_req = "add" if program is accumulated else "write"
    if switched_on:
        policy = amp.Policy.default("float16", "cpu").override(fp32=["FullyConnected"])
        amp.init("float16", ctx=mx.cpu(), policy=policy)
    assert_right(run(program, *map(amp.StaticLossScaler, scales), grad_req=grad_req))


@pytest.mark.parametrize("how", ["exact", "sum", "after it", "sum after it", "twice"])
def test_the_pass_is_recognized(how):
    def program(encoder, first, decoder, second, scaled):
        with autograd.record():
            loss = (encoder(DATA) ** 2).sum()
            losses = [loss, (encoder(DATA * 2) ** 2).sum()]
            if not scaled:
                autograd.backward(losses)
            else:
                with amp.scale_loss(losses, first) as products:
                    total = products[0] + products[1]
                    if how == "exact":
                        autograd.backward(products)
                    elif how == "sum":
                        total.backward()
                    elif how == "twice":
                        autograd.backward(products, retain_graph=True)
                if how == "after it":
                    autograd.backward(products)
                elif how == "sum after it":
                    total.backward()
                elif how == "twice":
                    autograd.backward(products)
        first.step(4)

    assert_right(run(program, *[amp.StaticLossScaler(1024)] * 2))


def test_scaled_losses_are_let_go_with_the_step():
    net, trainer = dense(scaler=amp.StaticLossScaler(1024))
    with autograd.record():
        loss = (net(DATA) ** 2).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(4)
    assert sys.getrefcount(scaled) == 2
    assert not passes._losses


def test_a_step_past_the_grad_scaler():
    net, trainer = dense()
    scaler = amp.GradScaler(init_scale=1024)
    for plain in (False, True):
        with autograd.record():
            loss = (net(DATA) ** 2).sum()
        scaler.scale(loss).backward()
        if plain:
            with pytest.raises(amp.StateError, match=r"scaler\.step"):
                trainer.step(4)
        scaler.step(trainer, 4)
        scaler.update()
    assert trainer.amp_steps == 2


def test_a_grad_scaler_and_a_trainer_with_its_own():
    encoder, first = dense(3, 4)
    decoder, second = dense(2, 3, scaler=amp.StaticLossScaler(8))
    scaler = amp.GradScaler(init_scale=1024)
    with autograd.record():
        loss = (decoder(encoder(DATA)) ** 2).sum()
    scaler.scale(loss).backward()
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
    with autograd.record():
        loss = (net(DATA) ** 2).sum()
        backward(loss, second, True)
    amp.unscale(second)
    with pytest.raises(amp.StateError, match="been unscaled"):
        with autograd.record():
            backward((net(DATA) ** 2).sum(), [first, second], True)
    assert first._amp_loss_scaler.stage is Stage.NONE
    second.step(4)


@pytest.mark.parametrize("use", [
    lambda s: s.backward(), autograd.backward, list, len, lambda s: s.mean(),
], ids=["backward", "autograd", "list", "len", "mean"])  # fmt: skip
def test_scale_loss_without_with(use):
    _, trainer = dense(scaler=amp.StaticLossScaler(8))
    with pytest.raises(amp.StateError, match=r"context manager.*with mxamp\.scale_loss"):
        use(amp.scale_loss(nd.ones(1), trainer))
    assert trainer._amp_loss_scaler.stage is Stage.NONE


@pytest.mark.parametrize("way", ["init", "autocast", "init_trainer"])
def test_backward_of_the_unscaled_loss_is_caught(way, caplog):
    if way == "init":
        amp.init("float16", ctx=mx.cpu())
    net, trainer = dense(scaler=amp.StaticLossScaler(8))
    with autograd.record():
        if way == "autocast":
            with amp.autocast("float16"):
                loss = (net(DATA) ** 2).sum()
        else:
            loss = (net(DATA) ** 2).sum()
        with amp.scale_loss(loss, trainer):
            loss.backward()
    assert "a loss that is not scaled" in caplog.text


@pytest.mark.parametrize("scaler, warns", [
    (None, True), (amp.StaticLossScaler(8), True), (amp.NoScaler(), False),
], ids=str)  # fmt: skip
def test_init_trainer_and_no_scale_loss(scaler, warns, caplog):
    amp.init("float16", ctx=mx.cpu())
    net, trainer = dense()
    amp.init_trainer(trainer, scaler)
    for _ in range(3):
        with autograd.record():
            loss = (net(DATA) ** 2).sum()
        loss.backward()
        trainer.step(4)
    assert caplog.text.count("no loss was ever scaled") == int(warns)


def test_no_warning_where_losses_are_scaled_or_need_no_scale(caplog):
    amp.init("bfloat16")
    net, trainer = dense()
    amp.init_trainer(trainer)
    for scaled in (False, True):
        with autograd.record():
            backward((net(DATA) ** 2).sum(), trainer, scaled)
        trainer.step(4)
    amp.shutdown()
    net, trainer = dense(scaler=amp.StaticLossScaler(8))
    for scaled in (True, False):
        with autograd.record():
            backward((net(DATA) ** 2).sum(), trainer, scaled)
        trainer.step(4)
    net, trainer = dense()
    scaler = amp.GradScaler()
    for scaled in (True, False):
        with autograd.record():
            loss = (net(DATA) ** 2).sum()
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(trainer, 4)
            scaler.update()
        else:
            loss.backward()
            trainer.step(4)
    with caplog.at_level(logging.WARNING, "mxamp"):
        assert "no loss was ever scaled" not in caplog.text


SOCKEYE = ("_loss_scale", "_next_loss_scale", "_unskipped")


def test_scripts_keep_the_attributes_of_contribs_scaler():
    """Sockeye 2.3 reads these into its checkpoints, and assigns them when it resumes."""
    net, trainer = dense(scaler=amp.LossScaler(2.0**10))
    trainer._amp_loss_scaler._scale_seq_len = 3
    for _ in range(2):
        with autograd.record():
            backward((net(DATA) ** 2).sum(), trainer, True)
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
        with autograd.record():
            loss = (net(DATA) ** 2).sum()
            with amp.scale_loss(loss, trainer) as scaled:
                seen.append(scaled.asscalar() / loss.asscalar())
                scaled.backward()
        trainer.step(4)
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
        with autograd.record():
            backward((net(DATA) ** 2).sum(), trainer, True)
        trainer.step(4)
        assert trainer.amp_last_step.loss_scale == scale
    with pytest.raises(amp.ArgumentError):
        hook._loss_scale = 0
    with pytest.raises(amp.ArgumentError):
        hook._scale_seq_len = 0


def test_contribs_attributes_of_shared_scales():
    net, trainer = dense()
    scaler = amp.GradScaler(init_scale=1024)
    with autograd.record():
        loss = (net(DATA) ** 2).sum()
    scaler.scale(loss).backward()
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
    def made(scaled):
        if scaled and first_is == "explicit":  # whose patches lie above the other ones'
            dense(scaler=amp.StaticLossScaler(8))
        found = {}
        for name in ("decorated", "explicit"):
            net, trainer = dense(*((3, 4) if name == "decorated" else (2, 3)))
            if scaled and name == "decorated":
                optimizer = amp.decorate(mx.optimizer.SGD(learning_rate=0.01), init_loss_scaling=16)
                trainer = gluon.Trainer(net.collect_params(), optimizer)
            elif scaled:
                amp.init_trainer(trainer, amp.StaticLossScaler(1024))
            found[name] = net, trainer
        return found

    results = []
    for scaled in (True, False):
        pairs = made(scaled)
        (encoder, first), (decoder, second) = pairs["decorated"], pairs["explicit"]
        for i in range(3):
            with autograd.record():
                loss = (decoder(encoder(DATA * (i + 1))) ** 2).sum()
            backward(loss, second, scaled and scaled_for == "explicit")
            first.step(4)
            second.step(4)
        results.append([weight(encoder), weight(decoder)])
    assert_right(results)


@pytest.mark.parametrize("way", ["run", "variable", "patch_contrib"])
def test_checkpoints_of_a_script_of_contrib_amp(way, tmp_path):
    """What sockeye 2.3 does with the loss scaler when it saves, and when it goes on."""
    script = tmp_path / "train.py"
    script.write_text(
        """
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.contrib import amp
amp.init()

def made():
    net = gluon.nn.Dense(1, in_units=4)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._scale_seq_len = 2
    return net, trainer

net, trainer = made()
scaler = trainer._amp_loss_scaler
scaler._loss_scale = scaler._next_loss_scale = 8.0
for _ in range(3):
    with autograd.record():
        loss = net(mx.nd.ones((2, 4))).mean()
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    trainer.step(1)
kept = scaler._loss_scale, scaler._next_loss_scale, scaler._unskipped
net, trainer = made()
scaler = trainer._amp_loss_scaler
scaler._loss_scale, scaler._next_loss_scale, scaler._unskipped = kept
print(kept, scaler.loss_scale, scaler._max_loss_scale, type(scaler).__name__)
"""
    )
    program = (
        f"import runpy, sys; sys.argv = ['mxamp', 'run', '--dtype', 'float16', {str(script)!r}]"
    )
    program += "; runpy.run_module('mxamp', run_name='__main__')"
    if way == "variable":
        program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    elif way == "patch_contrib":
        program = f"import mxamp; mxamp.patch_contrib(); exec(open({str(script)!r}).read())"
    on = "float16" if way == "variable" else "off"
    printed = check_python(program, env={"MXNET_ENABLE_AUTO_MIXED_PRECISION": on})
    assert printed.splitlines()[-1] == "(16.0, 16.0, 1) 16.0 16777216.0 TrainerHook"


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_that_another_loss_does_not_reach(grad_req):
    """A plain trainer's own gradients wait while another loss is scaled for another trainer."""

    def program(net, first, other, second, scaled):
        for i in range(3):
            with autograd.record():
                loss = (other(DATA[:, :3] * (i + 1)) ** 2).sum()
            loss.backward()
            with autograd.record():
                loss = (net(DATA * (i + 1)) ** 2).sum()
            backward(loss, first, scaled)
            second.step(4)
            first.step(4)
            for one in (net, other):
                one.collect_params().zero_grad()

    assert_right(run(program, amp.StaticLossScaler(1024), None, grad_req=grad_req))


def test_threads_that_scale_losses_of_two_trainers():
    """One thread a trainer, each with its scale; both trainers know of each other's passes."""

    def program(one, first, two, second, scaled):
        one(DATA), two(DATA[:, :3])  # tracing a block is not for several threads at once
        errors = []

        def work(net, trainer, data):
            try:
                for i in range(20):
                    with autograd.record():
                        loss = (net(data * (i % 3 + 1)) ** 2).mean()
                    backward(loss, trainer, scaled)
                    trainer.step(4)
            except Exception as error:  # noqa: BLE001
                errors.append(error)

        given = [(one, first, DATA), (two, second, DATA[:, :3])]
        threads = [threading.Thread(target=work, args=arguments) for arguments in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    assert_right(run(program, *map(amp.StaticLossScaler, (4096, 16))))


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
        with autograd.record():
            backward((net(DATA) ** 2).sum(), trainer, True)
        trainer.step(4)
        with autograd.record():
            losses = [part(DATA.as_in_context(c)).sum() for c in contexts for part in used]
        autograd.backward(losses)
        plain.step(4)
    assert plain._update_on_kvstore


@pytest.mark.parametrize("updates", ["once", "after each step"])
def test_a_grad_scaler_of_a_gan(updates):
    """The scale grows with each update: gradients that wait for a step keep the one they have."""

    def trained(scaler):
        (generator, first), (critic, second) = dense(3, 4), dense(2, 3)
        step = scaler.step if scaler else lambda trainer, size: trainer.step(size)
        for i in range(4):
            with autograd.record():
                loss = (critic(generator(DATA * (i + 1))) ** 2).sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if i % 2:  # the other one steps on gradients of the same loss
                step(first, 4)
                if scaler and updates != "once":
                    scaler.update()
                step(second, 4)
            else:
                step(second, 4)
                if scaler and updates != "once":
                    scaler.update()
                with autograd.record():
                    loss = ((critic(generator(DATA)) - 1) ** 2).sum()
                (scaler.scale(loss) if scaler else loss).backward()
                step(first, 4)
            if scaler:
                scaler.update()
        return [weight(generator), weight(critic)]

    assert_right([trained(amp.GradScaler(init_scale=16, growth_interval=1)), trained(None)])


def two_losses(scaled):
    """Weights after a step of two trainers whose losses have a layer in common."""
    first, second = gluon.nn.Dense(2, in_units=3), gluon.nn.Dense(1, in_units=2)
    trainers = []
    for net in (first, second):
        net.initialize(mx.init.One())
        trainers.append(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
    if scaled:
        amp.init_trainer(trainers[0], amp.LossScaler(init_scale=1024))
        amp.init_trainer(trainers[1], amp.LossScaler(init_scale=32))
    with autograd.record():
        features = first(mx.nd.ones((1, 3)))
        losses = [features.sum(), second(features).sum()]
        if not scaled:
            autograd.backward(losses)
        else:
            with amp.scale_loss(losses[0], trainers[0]) as one, amp.scale_loss(losses[1], trainers) as two:  # fmt: skip
                autograd.backward([one, two])
    for trainer in trainers:
        trainer.step(1)
    return [values(net.weight.data()) for net in (first, second)]


def test_one_pass_from_losses_of_several_scales():
    wanted = two_losses(False)
    amp.init("float16", ctx=mx.cpu())
    for mine, theirs in zip(two_losses(True), wanted):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("plain_second", [False, True])
def test_gradients_that_are_added_to_after_a_step(plain_second):
    """MXNet goes on adding where nobody has called `zero_grad`."""

    def trained(scaled):
        net = gluon.nn.Dense(1, in_units=2)
        net.initialize(mx.init.One())
        net.collect_params().setattr("grad_req", "add")
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        if scaled:
            amp.init_trainer(trainer, amp.LossScaler(init_scale=1024, growth_interval=1))
        for i in range(3):
            with autograd.record():
                loss = net(mx.nd.ones((1, 2))).sum()
                if scaled and not (i == 1 and plain_second):
                    with amp.scale_loss(loss, trainer) as one:
                        one.backward()
                else:
                    loss.backward()
            trainer.step(1)
        return values(net.weight.data())

    wanted = trained(False)
    amp.init("float16", ctx=mx.cpu())
    np.testing.assert_array_equal(trained(True), wanted)


PASSES_FROM = {
    "the scaled loss": lambda loss, scaled: scaled.backward(),
    "a sum of it": lambda loss, scaled: (scaled.sum() * 1.0).backward(),
    "the loss before": lambda loss, scaled: loss.backward(),
    "a mean of the loss before": lambda loss, scaled: (loss.mean() * loss.size).backward(),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", PASSES_FROM)
def test_a_step_knows_whether_a_pass_was_scaled(name, inside, caplog):
    def trained(scaled):
        net = gluon.nn.Dense(1, in_units=4)
        net.initialize(mx.init.One())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        with autograd.record():
            loss = net(DATA) ** 2
            if not scaled:
                loss.backward()
            else:
                amp.init_trainer(trainer, amp.LossScaler(init_scale=64))
                with amp.scale_loss(loss, trainer) as one:
                    if inside:
                        PASSES_FROM[name](loss, one)
                if not inside:
                    PASSES_FROM[name](loss, one)
        trainer.step(4)
        return values(net.weight.data())

    wanted = trained(False)
    np.testing.assert_allclose(trained(True), wanted, rtol=1e-6)
    assert ("a loss that is not scaled" in caplog.text) == (inside and "before" in name)


def test_a_scaled_and_an_unscaled_loss_in_one_pass():
    def trained(scaled):
        net = gluon.nn.Dense(1, in_units=4)
        net.initialize(mx.init.One())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        with autograd.record():
            losses = [(net(DATA) ** 2).sum(), net(DATA).sum()]
            if scaled:
                amp.init_trainer(trainer, amp.LossScaler(init_scale=64))
                with amp.scale_loss(losses[0], trainer) as one:
                    autograd.backward([one, losses[1]])
            else:
                autograd.backward(losses)
        trainer.step(4)
        return values(net.weight.data())

    np.testing.assert_allclose(trained(True), trained(False), rtol=1e-6)


def test_two_grad_scalers_in_one_pass():
    def trained(scales):
        nets, trainers, losses, scalers = [], [], [], []
        for scale in scales:
            net = gluon.nn.Dense(1, in_units=4)
            net.initialize(mx.init.One())
            nets.append(net)
            trainers.append(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
            scalers.append(amp.GradScaler(init_scale=scale, enabled=scale > 1))
        with autograd.record():
            losses = [s.scale((net(DATA) ** 2).sum()) for net, s in zip(nets, scalers)]
        autograd.backward(losses)
        for scaler, trainer in zip(scalers, trainers):
            scaler.step(trainer, 4)
            scaler.update()
        return [values(net.weight.data()) for net in nets]

    for mine, theirs in zip(trained((64, 1024)), trained((1, 1))):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
