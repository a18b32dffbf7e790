"""Likely mistakes are named: losses that were not scaled, scales out of bounds, runs that only skip."""

import os
from functools import partial

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import check_python, initialized, kind, leaf, randn, scaled_backward, scaled_trainer
from training import batches, one_step, poisoned, setup, train


def nested(loss, trainer):
    with amp.scale_loss(loss, trainer) as scaled, amp.scale_loss([scaled], trainer) as twice:
        autograd.backward(twice)


def scaled_twice(loss, _trainer):
    scaler = amp.GradScaler(init_scale=8)
    scaler.scale({"loss": scaler.scale(loss)})


@pytest.mark.parametrize("mistake", [nested, scaled_twice])
def test_scaling_what_is_scaled(mistake):
    amp.init("float16", ctx=mx.cpu())
    net, trainer = setup(scaler=amp.StaticLossScaler(8))
    with autograd.record():
        loss = (net(randn(4, 4)) ** 2).sum()
        with pytest.raises(amp.StateError, match="scaled already"):
            mistake(loss, trainer)
    train(net, trainer, batches(1)[0])  # all is as before
    assert trainer.amp_steps == 1
    pytest.raises(AttributeError, getattr, setup()[1], "amp_steps").match("call init_trainer")


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_a_run_that_only_skips_is_warned_of(way, caplog):
    net, trainer = setup(scaler=amp.LossScaler() if way == "scale_loss" else None)
    scaler = amp.GradScaler()
    for skips in range(1, 33):
        one_step(net, trainer, nd.array(poisoned(batches(1)[0])), way, scaler)
        assert caplog.text.count("steps in a row") == (skips >= 10) + (skips >= 30)
    assert f"down to 1: the gradients of {net[0].bias.name}" in caplog.text


MIXED = [(amp.init_trainer, amp.GradScaler), (amp.GradScaler, amp.init_trainer)]


@pytest.mark.parametrize("first, second", [*MIXED, (amp.GradScaler, amp.scale_loss)])
def test_two_ways_of_scaling_for_one_trainer(first, second):
    """The error says which of them to remove."""
    net, trainer = setup()

    def use(way):
        if way is amp.init_trainer:
            amp.init_trainer(trainer, amp.StaticLossScaler(8))
        elif way is amp.scale_loss:
            amp.scale_loss(nd.ones(1), trainer)
        else:
            one_step(net, trainer, nd.array(batches(1)[0]), "GradScaler", amp.GradScaler(8))

    use(first)
    with pytest.raises(amp.StateError, match="would scale them twice"):
        use(second)


@pytest.mark.parametrize("around", ["init", "autocast", "off inside"])
def test_a_function_runs_backward_under_the_policy_of_its_forward(around):
    seen = []

    class Probe(autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, dy):
            seen.append(kind(nd.dot(dy, randn(3, 3))))
            return dy

    if around != "autocast":
        amp.init("float16", ctx=mx.cpu())
    x = leaf(randn(2, 3))
    with amp.autocast("float16", enabled=around != "off inside"), autograd.record():
        y = Probe()(x)
    y.backward()
    mx.nd.waitall()
    assert seen == ["float32" if around == "off inside" else "float16"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_another_thread_enters_regions():
    printed = check_python(
        """
        import os, signal, threading
        import mxamp as amp, mxnet as mx
        stop = False
        with amp.autocast("float16"):
            pass  # imports: a child would wait for the locks of another thread's
        def enter():
            while not stop:
                with amp.autocast("float16"):
                    pass
        thread = threading.Thread(target=enter)
        thread.start()
        good = 0
        for _ in range(10):
            child = os.fork()
            if not child:
                signal.alarm(20)  # ends a child that waits for a lock
                with amp.autocast("float16"):
                    os._exit(0)
            good += os.waitpid(child, 0)[1] == 0
        stop = True
        thread.join()
        print("good", good)
        """,
        # A process that coverage measures hangs at such a fork: another thread holds coverage's lock.
        env={"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""},
    )
    assert "good 10" in printed


def test_clipping_before_unscale_is_warned_of(caplog):
    net = initialized(gluon.nn.Dense(1, in_units=2))
    trainer = scaled_trainer(net.collect_params(), amp.LossScaler(1024))
    for unscales in (True, False):
        scaled_backward(lambda: net(nd.ones((1, 2))).sum(), trainer)
        if unscales:
            amp.unscale(trainer)
        gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 1.0)
        assert ("carry a loss scale of 1024" in caplog.text) != unscales
        trainer.step(1)


def test_a_loss_outside_record_says_so():
    net, trainer = setup()
    with amp.autocast("float16"):
        loss = net(randn(4, 4)).sum()
    scaled = amp.GradScaler().scale(loss)
    with pytest.raises(amp.StateError, match=r"inside `with autograd.record\(\):`"):
        scaled.backward()


def test_clipping_beside_a_grad_scaler_without_unscale():
    """The first step says what to write. Later ones unscale, as the trainer has the scaler then."""
    net, trainer = setup()
    scaler, data = amp.GradScaler(init_scale=8), nd.array(batches()[0])
    clip = partial(amp.clip_grad_global_norm, trainer, 0.1)
    with pytest.raises(amp.StateError, match="or GradScaler.unscale_"):
        one_step(net, trainer, data, "GradScaler", scaler, between=clip)
    one_step(net, trainer, data, "GradScaler", scaler)
    weights = [param.data() for param in net.collect_params().values()]
    before = [weight.copy() for weight in weights]
    one_step(net, trainer, data, "GradScaler", scaler, rows=1, between=clip)
    moved = sum(nd.square(new - old).sum().asscalar() for new, old in zip(weights, before))
    assert moved**0.5 == pytest.approx(0.1 * trainer.learning_rate, rel=1e-4)
