import copy
from functools import partial

import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import digits
import mxamp as amp
from training import CONTEXTS, assert_same_weights, batches, poisoned, setup, weights
from training import train as step


def train(scaler, pairs, data, clip=None, update=True):
    for net, trainer in pairs:
        with autograd.record():
            losses = [
                (net(nd.array(part, ctx=ctx)) ** 2).sum()
                for part, ctx in zip(np.split(data, len(trainer._contexts)), trainer._contexts)
            ]
        autograd.backward(scaler.scale(losses))
        if clip:
            scaler.unscale_(trainer)
            clip(net)
        scaler.step(trainer, len(data))
    if update:
        scaler.update()


def plain(pairs, data, clip=None):
    for net, trainer in pairs:
        step(net, trainer, data, scaled=False, between=clip and partial(clip, net))


def clip(net):
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 0.5)


@pytest.mark.parametrize("clipping", [None, clip])
def test_it_trains_as_plain_loops_do(clipping):
    scaler = amp.GradScaler(init_scale=1024)
    mine, control = setup(), setup()
    for batch in batches():
        train(scaler, [mine], batch, clipping)
        plain([control], batch, clipping)
    assert_same_weights(mine[0], control[0])
    assert scaler.get_scale() == mine[1].amp_loss_scale == 1024


def test_one_scaler_over_two_trainers():
    scaler = amp.GradScaler(init_scale=1024, growth_interval=2)
    pairs = [setup(), setup(optimizer="adam")]
    good = batches(1)[0]
    before = weights(pairs[1][0])
    (first, first_trainer), (second, second_trainer) = pairs
    # An overflow in one skips that one, and the scale falls for both.
    with autograd.record():
        losses = [(first(nd.array(good)) ** 2).sum(), (second(nd.array(poisoned(good))) ** 2).sum()]
    autograd.backward(scaler.scale(losses))
    scaler.step(first_trainer, 4)
    scaler.step(second_trainer, 4)
    assert first_trainer.amp_last_step.stepped
    assert not second_trainer.amp_last_step.stepped
    assert scaler.get_scale() == 1024
    scaler.update()
    assert scaler.get_scale() == first_trainer.amp_loss_scale == 512
    for a, b in zip(before, weights(second)):
        np.testing.assert_array_equal(a, b)
    train(scaler, pairs, good)
    train(scaler, pairs, good)
    assert scaler.get_scale() == 1024


def test_two_devices():
    scaler = amp.GradScaler(init_scale=1024)
    mine, control = setup(CONTEXTS["two"]), setup()
    train(scaler, [mine], batches()[0])
    plain([control], batches()[0])
    # A plain step in between.
    net, trainer = mine
    with autograd.record():
        losses = [(net(nd.ones((2, 4), ctx=ctx)) ** 2).sum() for ctx in CONTEXTS["two"]]
    autograd.backward(losses)
    trainer.step(4)
    plain([control], np.ones((4, 4), "float32"))
    for batch in batches():
        train(scaler, [mine], batch)
        plain([control], batch)
    for a, b in zip(weights(mine[0])[::2], weights(control[0])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


#: The stage after each legal move, by API; every other move is an error.
def test_wrong_arguments():
    scaler = amp.GradScaler()
    with pytest.raises(amp.ArgumentError, match="scale"):
        scaler.update(0)
    with pytest.raises(amp.ArgumentError, match=r"gluon\.Trainer"):
        scaler.step("trainer", 4)
    with pytest.raises(amp.ArgumentError, match="growth_factor"):
        amp.GradScaler(growth_factor=1)
    scaler.update(new_scale=128)
    assert scaler.get_scale() == 128


def test_disabled_is_plain():
    scaler = amp.GradScaler(enabled=False)
    mine, control = setup(), setup()
    loss = nd.ones(1)
    assert scaler.scale(loss) is loss
    for batch in batches():
        train(scaler, [mine], batch, clip)
        plain([control], batch, clip)
    assert_same_weights(mine[0], control[0])
    assert scaler.get_scale() == 1
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()
    assert not hasattr(mine[1], "amp_loss_scale")
    scaler.load_state_dict({})


def test_calls_out_of_order():
    net, trainer = setup()
    scaler = amp.GradScaler(8)
    with pytest.raises(amp.StateError, match="no trainer has stepped"):
        scaler.update()
    train(scaler, [(net, trainer)], batches(1)[0], update=False)
    for call in (lambda: scaler.step(trainer, 4), lambda: scaler.unscale_(trainer)):
        with pytest.raises(amp.StateError, match="stepped already"):
            call()
    scaler.update()
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


def test_states():
    scaler = amp.GradScaler(init_scale=64, hysteresis=2)
    pair = setup()
    train(scaler, [pair], poisoned(batches(1)[0]))
    other = amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert "64" in repr(scaler)
    with pytest.raises(amp.ArgumentError, match="what state_dict"):
        other.load_state_dict({})


@pytest.mark.filterwarnings("ignore:nan or inf is detected")  # by MXNet's clipping
@pytest.mark.parametrize("clipping", [None, clip])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_program_that_resumes_loads_states_before_any_step(tmp_path, clipping, overflows):
    path = str(tmp_path / "states")
    scaler, pair = amp.GradScaler(init_scale=8, growth_interval=3), setup(momentum=0.9)
    first, second, third = batches(3)
    train(scaler, [pair], poisoned(first))
    train(scaler, [pair], first)
    pair[1].save_states(path)
    values = weights(pair[0])

    resumed, other = amp.GradScaler(init_scale=512), setup(momentum=0.9)
    for param, value in zip(other[0].collect_params().values(), values):
        param.set_data(nd.array(value))
    other[1].load_states(path)
    for data in (poisoned(second) if overflows else second, third):
        train(scaler, [pair], data, clipping)
        train(resumed, [other], data, clipping)
        assert resumed.state_dict() == scaler.state_dict()
    assert_same_weights(other[0], pair[0])
    assert other[1].amp_loss_scale == pair[1].amp_loss_scale
    assert (other[1].amp_steps, other[1].amp_skips) == (pair[1].amp_steps, pair[1].amp_skips)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loop_in_pytorchs_manner_reaches_float32s_accuracy(dtype):
    plain = digits.network()
    digits.train(plain, digits.trainer_of(plain), lambda loss: loss.backward(), overflow_at=-1)
    net = digits.network()
    net.hybridize()
    trainer = digits.trainer_of(net)
    scaler = amp.GradScaler(init_scale=2.0**20, max_scale=2.0**24)

    def step():
        scaler.step(trainer, digits.BATCH)
        scaler.update()

    with amp.autocast(dtype):
        skipped = digits.train(net, trainer, lambda loss: scaler.scale(loss).backward(), step)
    assert skipped
    assert trainer.amp_skips >= 1
    assert abs(digits.accuracy(net) - digits.accuracy(plain)) < 0.02
    assert digits.accuracy(net) > digits.ACCURACY
    assert not amp.is_enabled()
