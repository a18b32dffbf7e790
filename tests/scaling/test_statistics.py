"""BatchNorm's running statistics after a step that overflowed: those of a recent finite step."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

import mxamp as amp
from helpers import randn, scaled_backward, sequential
from models import module_of
from mxamp.frontends import automatic
from mxamp.frontends.backward import backward_patches
from training import CONTEXTS, one_step, run_backward, trainer_in

GOOD, BAD = randn(8, 4), randn(8, 4) * 1e6  # float16 ends at 65504
WAYS = ["scale_loss", "GradScaler", "decorate", "automatic"]


def statistics(net):
    params = net.collect_params(".*running.*").values()
    return [data.asnumpy() for param in params for data in param.list_data()]


def assert_one_of(found, states):
    """Assert that statistics are equal to those after a step."""
    assert any(all((a == b).all() for a, b in zip(found, state)) for state in states)


def program(way, contexts, hybrid, scale=16.0):
    """Return a net with BatchNorm, its trainer, and a function that trains it on a batch."""
    if way == "automatic":
        automatic.start(policy=amp.Policy.default("float16", "cpu"))
        backward_patches.default_scale.scaler.set_scale(scale)
    else:
        amp.init("float16", ctx=mx.cpu())
    layers = gluon.nn.Dense(3, in_units=4), gluon.nn.BatchNorm(in_channels=3), gluon.nn.Dense(2)
    net = sequential(*layers, init=mx.init.One(), ctx=contexts, hybridize=hybrid)
    optimizer = mx.optimizer.SGD(learning_rate=1e-3)
    trainer, scaler = trainer_in(way, net.collect_params(), scale, optimizer)

    def train(data, takes_step=True):
        called = "decorate" if way == "automatic" else way
        unscale = partial(scaler.unscale_, trainer) if scaler and not takes_step else None
        one_step(net, trainer, data, called, scaler, between=unscale, takes_step=takes_step)
        return trainer.amp_last_step.stepped

    return net, train


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("devices", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_puts_them_back(way, devices, hybrid, caplog):
    net, train = program(way, CONTEXTS[devices], hybrid)
    states = [statistics(net)]
    assert not train(BAD)
    assert_one_of(statistics(net), states)
    for _ in range(13):
        assert train(GOOD)
        states.append(statistics(net))
    assert not train(BAD)
    assert_one_of(statistics(net), states[-10:])
    assert not train(BAD)
    assert caplog.text.count("earlier ones are back") == 1
    assert "running_mean on cpu(0)" in caplog.text
    train(BAD, takes_step=False)  # the program skips it itself
    assert train(GOOD)
    assert all(np.isfinite(array).all() for array in statistics(net))
    train(GOOD)
    assert not np.array_equal(statistics(net)[0], states[0][0])


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=list(CONTEXTS))
def test_modules(contexts, caplog):
    amp.init("float16", ctx=mx.cpu())
    optimizer = amp.decorate("sgd", 64.0)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    net = mx.sym.LinearRegressionOutput(mx.sym.BatchNorm(net, name="bn"), mx.sym.var("label"))
    module = module_of(net, (8, 4), ("label", (8, 3)), context=contexts)
    module.init_optimizer(optimizer=optimizer)
    found = []
    for i, data in enumerate((BAD, *[GOOD] * 13, BAD, BAD, GOOD, GOOD)):
        module.forward_backward(mx.io.DataBatch([data], [nd.ones((8, 3))]))
        if i == 15:  # the program skips it itself
            continue
        module.update()
        arrays = module._exec_group.aux_arrays
        found.append([array.asnumpy() for of_one in arrays for array in of_one])
    assert all(np.isfinite(array).all() for arrays in found for array in arrays)
    assert_one_of(found[14], found[4:14])
    assert not all((a == b).all() for a, b in zip(found[15], found[16]))
    assert caplog.text.count("earlier ones are back") == 1


@pytest.mark.parametrize("scales", [False, True])
def test_the_first_step_of_several_devices_keeps_them(scales):
    """With static_shape MXNet's kvstore may send those from before the first pass."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    norms = [gluon.nn.BatchNorm(in_channels=4, momentum=0.5) for _ in range(66)]
    layers = gluon.nn.Conv2D(4, 3, padding=1, in_channels=3), *norms, gluon.nn.GlobalAvgPool2D()
    net = sequential(*layers, gluon.nn.Dense(2, in_units=4), init=mx.init.Xavier(), ctx=contexts)
    net.hybridize(static_alloc=True, static_shape=True)
    amp.init("float16", ctx=mx.cpu())
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    if scales:
        amp.init_trainer(trainer, amp.LossScaler(64))

    def losses():
        found = [net(randn(4, 3, 6, 6).as_in_context(ctx)) for ctx in contexts]
        return [(one.astype("float32") ** 2).mean() for one in found]

    run_backward(losses, trainer, "scale_loss" if scales else "plain")
    trainer.step(1)
    variances = net[1].running_var.list_data()
    assert all((one.asnumpy() != 1).any() for one in variances)


def test_statistics_of_mx_np():
    mx.npx.set_np()
    amp.init("float16", ctx=mx.cpu())
    net = sequential(gluon.nn.Dense(3, in_units=4), gluon.nn.BatchNorm(in_channels=3))
    trainer, _ = trainer_in("scale_loss", net.collect_params(), 16, "sgd")
    for factor, stepped in ((1, True), (1e6, False)):
        data = mx.np.ones((8, 4)) * factor
        scaled_backward(lambda data=data: net(data).astype("float32").sum(), trainer)
        trainer.step(8)
        assert trainer.amp_last_step.stepped == stepped
    assert (net[1].running_var.data().asnumpy() == 1).all()
