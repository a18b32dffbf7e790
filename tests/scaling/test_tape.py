"""Which losses lie behind a head, and which patches and records are left after a program."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.symbol import Symbol

import mxamp as amp
from helpers import initialized, leaf, scaled_backward
from mxamp.scaling import tape


def recorded(function, *arrays):
    with autograd.record():
        return function(*arrays)


HEADS = {
    "itself": (lambda s, t, w: s, {8.0}),
    "a sum": (lambda s, t, w: s + t, {8.0}),
    "a mean of parts": (lambda s, t, w: nd.concat(s, t, dim=0)[0:1].mean(), {8.0}),
    "times a constant": (lambda s, t, w: s * nd.array([2.0]), {8.0}),
    "times a variable": (lambda s, t, w: s * w, {8.0}),
    "beside another loss": (lambda s, t, w: s + w * 3, {8.0}),
    "detached": (lambda s, t, w: w * s.detach(), set()),
    "behind BlockGrad": (lambda s, t, w: w * nd.BlockGrad(s), set()),
    "no loss": (lambda s, t, w: w * 2, set()),
    "a variable": (lambda s, t, w: w, set()),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_scales_behind_a_head(name):
    build, scales = HEADS[name]
    w = leaf(nd.ones(1))
    losses = [recorded(lambda: tape.scaled(w * 2, 8.0)) for _ in range(2)]
    head = recorded(build, *losses, w)
    assert set(tape.marks_behind(head).values()) == scales


@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", [2.0**-30, 0.3, 1000.1, 65536.0])
def test_a_scaled_loss_has_the_bits_of_a_product(scale, ndim):
    mx.npx.set_np()
    loss = mx.np.random.normal(size=(2,) * ndim).astype("float64")
    for dtype in ("float32", "float64"):
        array = leaf(loss.astype(dtype))
        product = recorded(lambda array: tape.scaled(array * 1, scale), array)
        expected = array.asnumpy() * np.dtype(dtype).type(scale)
        np.testing.assert_array_equal(product.asnumpy(), expected)
        product.backward()
        np.testing.assert_array_equal(array.grad.asnumpy(), np.full_like(expected, scale))


def nets():
    net = initialized(gluon.nn.Dense(2, in_units=3))
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    return net, trainer


@pytest.mark.parametrize("way", ["sum", "decorate", "plain beside scaled"])
def test_no_tape_is_written_as_text(way, monkeypatch):
    """Which takes 8 to 20 ms a pass for an eager ResNet-50."""
    if way == "decorate":
        net, _ = nets()
        trainer = gluon.Trainer(net.collect_params(), amp.decorate(mx.optimizer.SGD(), 8.0))
    else:
        net, trainer = nets()
        amp.init_trainer(trainer, amp.StaticLossScaler(8))
    monkeypatch.setattr(Symbol, "tojson", lambda symbol: pytest.fail("the tape was written"))
    x = nd.ones((4, 3))
    with autograd.record():
        losses = [net(x).sum(), (net(x) ** 2).sum()]
        if way != "decorate":
            with amp.scale_loss(losses, trainer) as losses:
                pass
        total = losses[0] + losses[1]
    if way == "plain beside scaled":
        w = leaf(nd.ones(1))
        recorded(lambda: w * 2).backward()
    total.backward()
    trainer.step(4)


def test_a_pass_frees_the_marks_of_its_losses():
    w = leaf(nd.ones(1))
    before = len(tape._marks)
    net, trainer = nets()
    amp.init_trainer(trainer, amp.StaticLossScaler(8))
    for build in (lambda s: s[0], lambda s: s[0] + s[1], lambda s: s[1].mean()):
        with autograd.record():
            with amp.scale_loss([w * 2, w * 3], trainer) as scaled:
                build(scaled).backward()
        del scaled
    assert len(tape._marks) - before <= 2  # those of which no pass was run


def test_a_retained_loss_is_plain_after_the_last_patches():
    """Nothing would divide its gradients by the scale."""
    net, trainer = nets()
    amp.init_trainer(trainer, amp.StaticLossScaler(8))
    x = nd.ones((4, 3))
    with autograd.record(), amp.scale_loss(net(x).sum(), trainer) as scaled:
        scaled.backward(retain_graph=True)
    trainer.step(4)
    amp.shutdown()
    scaled.backward()
    np.testing.assert_array_equal(net.weight.grad().asnumpy(), np.full((2, 3), 4))


def test_two_trainers_of_one_scaler_agree_at_once():
    scaler = amp.LossScaler(1024)
    (net, one), (_, other) = nets(), nets()
    for trainer in (one, other):
        amp.init_trainer(trainer, scaler)
    scaled_backward(lambda: net(nd.full((4, 3), np.inf)).sum(), one)
    one.step(4)
    assert one.amp_loss_scale == other.amp_loss_scale == 512
    assert (one.amp_skips, other.amp_skips) == (1, 0)


def test_initialize_is_whole_or_nothing():
    net, _ = nets()
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", compression_params={"type": "2bit", "threshold": 0.5}
    )
    with pytest.raises(amp.StateError, match="compress"):
        amp.initialize(net, trainer, opt_level="O2", ctx=mx.cpu())
    assert net.weight.data().dtype == np.float32
    assert not trainer._optimizer.multi_precision
    assert not amp.is_enabled()
