"""BatchNorm's running statistics after a step that overflowed: those of the last finite step."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon.utils import split_and_load

import mxamp as amp
from helpers import randn
from mxamp.frontends import automatic
from mxamp.frontends.backward import backward_patches
from training import CONTEXTS, end_step

GOOD, BAD = randn(8, 4), randn(8, 4) * 1e6  # float16 ends at 65504
WAYS = ["scale_loss", "GradScaler", "decorate", "automatic"]


def statistics(net):
    params = net.collect_params(".*running.*").values()
    return [data.asnumpy() for param in params for data in param.list_data()]


def program(way, contexts, hybrid, scale=16.0):
    """Return a net with BatchNorm, its trainer, and a function that trains it on a batch."""
    if way == "automatic":
        automatic.start(policy=amp.Policy.default("float16", "cpu"))
        backward_patches.default_scale.scaler.set_scale(scale)
    else:
        amp.init("float16", ctx=mx.cpu())
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(3, in_units=4), gluon.nn.BatchNorm(in_channels=3), gluon.nn.Dense(2))
    net.initialize(mx.init.One(), ctx=contexts)
    if hybrid:
        net.hybridize()
    optimizer = mx.optimizer.SGD(learning_rate=1e-3)
    optimizer = amp.decorate(optimizer, scale) if way == "decorate" else optimizer
    trainer, scaler = gluon.Trainer(net.collect_params(), optimizer), amp.GradScaler(scale)
    if way == "scale_loss":
        amp.init_trainer(trainer, amp.LossScaler(scale))

    def train(data):
        with autograd.record():
            losses = [(net(part) ** 2).mean() for part in split_and_load(data, contexts)]
            if way == "scale_loss":
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
            elif way == "GradScaler":
                losses = scaler.scale(losses)
        if way != "scale_loss":
            autograd.backward(losses)
        end_step(trainer, scaler if way == "GradScaler" else None)
        return trainer.amp_last_step.stepped

    return net, train


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("devices", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_puts_them_back(way, devices, hybrid, caplog):
    net, train = program(way, CONTEXTS[devices], hybrid)
    assert train(GOOD)
    before = statistics(net)
    assert not train(BAD)
    for found, expected in zip(statistics(net), before):
        np.testing.assert_array_equal(found, expected)
    assert not train(BAD)
    assert caplog.text.count("last finite are back") == 1
    assert "running_mean on cpu(0)" in caplog.text
    assert train(GOOD)
    assert all(np.isfinite(array).all() for array in statistics(net))
    assert not np.array_equal(statistics(net)[0], before[0])


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler"])
def test_the_first_step(way):
    net, train = program(way, CONTEXTS["one"], hybrid=False)
    assert not train(BAD)
    mean, variance = statistics(net)
    assert (mean == 0).all() and (variance == 1).all()


@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=list(CONTEXTS))
def test_modules(contexts, caplog):
    amp.init("float16", ctx=mx.cpu())
    optimizer = amp.decorate("sgd", 64.0)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    net = mx.sym.LinearRegressionOutput(mx.sym.BatchNorm(net, name="bn"), mx.sym.var("label"))
    module = mx.mod.Module(net, label_names=["label"], context=contexts)
    module.bind([("data", (8, 4))], [("label", (8, 3))])
    module.init_params(mx.init.One())
    module.init_optimizer(optimizer=optimizer)
    found = []
    for data in (BAD, GOOD, BAD, GOOD):
        module.forward_backward(mx.io.DataBatch([data], [nd.ones((8, 3))]))
        module.update()
        arrays = module._exec_group.aux_arrays
        found.append([array.asnumpy() for of_one in arrays for array in of_one])
    assert all(np.isfinite(array).all() for arrays in found for array in arrays)
    assert all((a == b).all() for a, b in zip(found[1], found[2]))
    assert not all((a == b).all() for a, b in zip(found[2], found[3]))
    assert caplog.text.count("last finite are back") == 1
