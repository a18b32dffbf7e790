"""Several devices in one process: two CPU contexts stand for two GPUs."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import mxamp as amp
from training import (
    CONTEXTS,
    OwnOptimizer,
    assert_as_plain,
    batches,
    one_step,
    poisoned,
    run_backward,
    setup,
    trainer_in,
    weights,
)

SCALE = 1024


def trained(contexts, data, way, scale=SCALE, own_sums=False, **settings):
    """Train in one of the ways; with `own_sums` the program sums gradients, and drops a step."""
    net, _ = setup(contexts)
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    trainer, scaler = trainer_in(way, net.collect_params(), scale, optimizer, **settings)
    stepped = []
    for i, batch in enumerate(data):
        between = trainer.allreduce_grads if own_sums else None
        takes_step = not own_sums or way == "GradScaler" or i != 1
        one_step(net, trainer, batch, way, scaler, between=between, takes_step=takes_step)
        stepped.append(trainer.amp_last_step.stepped)
    return net, trainer, stepped


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate"])
@pytest.mark.parametrize("kvstore, on_kvstore", [
    ("device", True), ("device", False), ("local", True), ("local", False), ("device", None),
])  # fmt: skip
def test_two_devices_equal_one_on_the_joined_batch(kvstore, on_kvstore, way):
    """Weights after four steps, one of which overflows, up to the order of float32 sums."""
    data = batches(5)
    data[1] = poisoned(data[1])  # its first row: on the first device alone
    data[3] = data[3][::-1].copy()
    data[3][-1, 0] = np.nan  # on the second device alone
    net, trainer, stepped = trained(
        CONTEXTS["two"], data, way, kvstore=kvstore, update_on_kvstore=on_kvstore
    )
    control, alone, _ = trained(CONTEXTS["one"], data, way)
    assert stepped == [True, False, True, False, True]
    assert trainer.amp_loss_scale == alone.amp_loss_scale == SCALE / 4
    values = weights(net)
    for first, second, expected in zip(values[::2], values[1::2], weights(control)):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate"])
@pytest.mark.parametrize("scale", [1, SCALE])
def test_gradients_that_the_program_sums_itself_are_summed_once(way, scale):
    nets = []
    for contexts in CONTEXTS.values():
        given = contexts, batches(4), way, scale, True
        nets.append(trained(*given, update_on_kvstore=False)[0])
    for expected, first, second in zip(
        weights(nets[0]), weights(nets[1])[::2], weights(nets[1])[1::2]
    ):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)


def test_compression_that_would_hide_an_overflow_is_refused():
    settings = {"type": "2bit", "threshold": 0.25}
    params = setup(CONTEXTS["two"])[0].collect_params()
    trainer = gluon.Trainer(params, "sgd", compression_params=settings)
    with pytest.raises(amp.StateError, match="leave out compression_params"):
        amp.init_trainer(trainer, amp.LossScaler(init_scale=SCALE))


class OwnAdam(mx.optimizer.Adam):
    """An optimizer of a script's own, which reads `rescale_grad`."""


@pytest.mark.parametrize("make", [OwnOptimizer, OwnAdam, mx.optimizer.LARS, mx.optimizer.LAMB])
@pytest.mark.parametrize("ctx", CONTEXTS)
def test_optimizers_of_a_scripts_own_see_no_scale(make, ctx):
    def run(net, _, scaled):
        way, given = "scale_loss" if scaled else "plain", (SCALE, make(learning_rate=0.01), 2)
        trainer, _ = trainer_in(way, net.collect_params(), *given, update_on_kvstore=False)
        for batch in batches(4):
            one_step(net, trainer, nd.array(batch), way)

    assert_as_plain(run, ctx=CONTEXTS[ctx])


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("scale", [1024.0, 3000.0, 2.0**16, 2.0**24])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_float16_weights_without_masters_are_updated_by_small_learning_rates(momentum, scale):
    """Times the learning rate, 1 / scale would be 0 in float16."""
    weights = []

    def loss_of(parameter):  # small enough for the scaled gradient to be a float16
        return parameter.data().astype("float32").sum() * min(0.1, 2e4 / scale)

    for way in ("plain", "scale_loss"):
        parameter = gluon.Parameter("weight", shape=(3,), dtype="float16")
        parameter.initialize(mx.init.Constant(0.01))
        optimizer = mx.optimizer.SGD(learning_rate=0.002, momentum=momentum)
        trainer, _ = trainer_in(way, [parameter], scale, optimizer, update_on_kvstore=False)
        for _ in range(2):
            run_backward(partial(loss_of, parameter), trainer, way)
            trainer.step(1)
        weights.append(parameter.data().asnumpy())
    if scale < 2**17:
        assert (weights[0] < np.float16(0.01)).all()
    assert np.allclose(*weights, rtol=1e-3)
