import copy
import pickle
from functools import partial

import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from training import assert_same_weights, batches, one_step, poisoned, setup, weights
from training import train as step


def train(scaler, pair, data, clip=None):
    net, trainer = pair

    def unscale_and_clip():
        scaler.unscale_(trainer)
        clip(net)

    between = unscale_and_clip if clip else None
    one_step(net, trainer, nd.array(data), "GradScaler", scaler, between=between)


def plain(pair, data, clip=None):
    step(*pair, data, scaled=False, between=clip and partial(clip, pair[0]))


def clip(net):
    gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 0.5)


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
        train(scaler, mine, batch, clip)
        plain(control, batch, clip)
    assert_same_weights(mine[0], control[0])
    assert scaler.get_scale() == 1
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()
    assert not hasattr(mine[1], "amp_loss_scale")
    scaler.load_state_dict({})


def test_states():
    scaler = amp.GradScaler(init_scale=64, hysteresis=2)
    pair = setup()
    train(scaler, pair, poisoned(batches(1)[0]))
    other = amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert "64" in repr(scaler)
    with pytest.raises(amp.ArgumentError, match="what state_dict"):
        other.load_state_dict({})


@pytest.mark.parametrize("pickled", [False, True])
def test_a_copy_takes_over_the_trainers_between_updates(pickled):
    """As in PyTorch; the other scaler may take them back."""
    scaler, mine, control = amp.GradScaler(), setup(), setup()
    first, *others = batches(5)
    train(scaler, mine, first)
    plain(control, first)
    other = pickle.loads(pickle.dumps(scaler)) if pickled else copy.deepcopy(scaler)  # noqa: S301
    for i, data in enumerate(others):
        train([other, scaler][i % 2], mine, data)
        plain(control, data)
    assert_same_weights(mine[0], control[0])
    with autograd.record():
        loss = mine[0](nd.array(first)).sum()
    scaler.scale(loss).backward()
    other.step(mine[1], 4)  # the wrong one
    with pytest.raises(amp.StateError, match="no trainer has stepped"):
        scaler.update()
    other.scale(loss)
    with pytest.raises(amp.StateError, match="stepped already"):
        other.step(mine[1], 4)


def test_a_loss_used_again_after_the_update_does_not_lower_the_scale_to_1():
    scaler, (net, trainer) = amp.GradScaler(1024), setup()
    with autograd.record():
        scaled = scaler.scale((net(nd.ones((4, 4))) * 2.0**120).sum())
    for scale in (512, 256):
        scaled.backward(retain_graph=True)
        scaler.step(trainer, 4)
        scaler.update()
        assert scaler.get_scale() == trainer.amp_last_step.next_loss_scale == scale


@pytest.mark.filterwarnings("ignore:nan or inf is detected")  # by MXNet's clipping
@pytest.mark.parametrize("clipping", [None, clip])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_program_that_resumes_loads_states_before_any_step(tmp_path, clipping, overflows):
    path = str(tmp_path / "states")
    scaler, pair = amp.GradScaler(init_scale=8, growth_interval=3), setup(momentum=0.9)
    first, second, third = batches(3)
    train(scaler, pair, poisoned(first))
    train(scaler, pair, first)
    pair[1].save_states(path)
    values = weights(pair[0])

    resumed, other = amp.GradScaler(init_scale=512), setup(momentum=0.9)
    for param, value in zip(other[0].collect_params().values(), values):
        param.set_data(nd.array(value))
    other[1].load_states(path)
    for data in (poisoned(second) if overflows else second, third):
        train(scaler, pair, data, clipping)
        train(resumed, other, data, clipping)
        assert resumed.state_dict() == scaler.state_dict()
    assert_same_weights(other[0], pair[0])
    assert other[1].amp_loss_scale == pair[1].amp_loss_scale
    assert (other[1].amp_steps, other[1].amp_skips) == (pair[1].amp_steps, pair[1].amp_skips)
