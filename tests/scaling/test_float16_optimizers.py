"""Optimizers of MXNet with float16 weights make sound updates, or an error says what to write.

No optimizer of MXNet 1.9.1 ends the process or fails later than in the call, so they run here.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import randn, sequential
from training import OPTIMIZERS, run_backward

#: Their default epsilon is 0 in float16, or too small.
LOSE_EPSILON = {**dict.fromkeys(["adam", "nadam", "ftml"], "1e-08 is 0"), "lamb": "1e-06 is 1.01"}
DATA, LABELS = randn(16, 12), randn(16, 3, seed=1)
LOSS = gluon.loss.L2Loss()

pytestmark = pytest.mark.filterwarnings("ignore:Accumulating with float16")


def made(optimizer, **options):
    """A net and its trainer."""
    mx.random.seed(0)
    bias = optimizer != "groupadagrad"  # which takes matrices alone
    hidden = gluon.nn.Dense(8, activation="relu", in_units=12, use_bias=bias)
    last = gluon.nn.Dense(3, in_units=8, use_bias=bias)
    net = sequential(hidden, last, init=mx.init.Xavier())
    return net, gluon.Trainer(net.collect_params(), optimizer, options)


def trained(net, trainer, level=None):
    """The weights after some steps at a level, or of plain MXNet."""
    if level is not None:
        amp.initialize(net, trainer, level, loss_scale=64, ctx=mx.cpu())
    data = DATA.astype("float16") if level else DATA
    for _ in range(6):
        way = "plain" if level is None else "scale_loss"
        run_backward(lambda: LOSS(net(data).astype("float32"), LABELS), trainer, way)
        trainer.step(16)
    params = net.collect_params().values()
    return np.concatenate([p.data().astype("float32").asnumpy().ravel() for p in params])


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_makes_sound_updates_or_is_refused(optimizer, level):
    net, trainer = made(optimizer)
    # The states of the first two are float32.
    if level == "O3" and optimizer in {"rmsprop", "ftrl", *LOSE_EPSILON}:
        with pytest.raises(amp.ArgumentError) as raised:
            trained(net, trainer, level)
        assert type(trainer.optimizer).__name__ in str(raised.value)
        assert "opt_level='O2'" in str(raised.value)
        named = f"its epsilon={LOSE_EPSILON.get(optimizer)}" in str(raised.value)
        assert named == (optimizer in LOSE_EPSILON)
        net.cast("float16")
        for scaler in (amp.LossScaler(), amp.NoScaler()):
            amp.init_trainer(trainer, scaler)
            with pytest.raises(amp.ArgumentError, match=type(trainer.optimizer).__name__):
                with amp.scale_loss(mx.nd.ones(1), trainer):
                    trainer.step(16)
        return
    weights = trained(net, trainer, level)
    amp.shutdown()
    assert np.isfinite(weights).all()
    if optimizer not in ("sgld", "test"):  # the first adds noise, and the second diverges
        np.testing.assert_allclose(weights, trained(*made(optimizer)), atol=0.02)


def test_a_refused_optimizer_changes_nothing():
    net, trainer = made("adam")
    with pytest.raises(amp.ArgumentError):
        amp.initialize(net, trainer, "O3", ctx=mx.cpu())
    assert amp.current_policy() is None
    assert {param.data().dtype for param in net.collect_params().values()} == {np.float32}
    assert not hasattr(trainer, "_amp_loss_scaler")
    amp.initialize(net, trainer, "O2", ctx=mx.cpu())


@pytest.mark.parametrize("optimizer", LOSE_EPSILON)
def test_the_epsilon_that_the_error_names_is_sound(optimizer):
    weights = trained(*made(optimizer, epsilon=1e-3), "O3")
    amp.shutdown()
    # FTML subtracts nearly equal numbers.
    atol = 0.1 if optimizer == "ftml" else 0.02
    np.testing.assert_allclose(weights, trained(*made(optimizer, epsilon=1e-3)), atol=atol)
