"""Whose gradients a backward pass has written: all come back without the scale, whoever owns them.

All values are small integers, exact in half precision, and the scale is a power of two: gradients
are those of plain float32 MXNet bit for bit.
"""

import sys
import types

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized, same
from mxamp.frontends import automatic
from mxamp.frontends.backward import backward_patches

DTYPES = ("float16", "bfloat16")
#: A scale with which no gradient overflows here.
FITS = 2.0**4
STARTS = ("decorate", "automatic")


class Run:
    """A way to train: with mixed precision on where things are made after `start`; or plain."""

    def __init__(self, way, dtype="float16", scale=FITS):
        self.way, self.dtype, self.scale, self.optimizer = way, dtype, scale, "sgd"

    def start(self):
        policy = amp.Policy.default(self.dtype, "cpu")
        if self.way == "decorate":
            amp.init(policy=policy)
            self.optimizer = amp.decorate(mx.optimizer.SGD(), self.scale)
        elif self.way == "automatic":
            automatic.start(policy=policy)
            if self.dtype == "float16":
                backward_patches.default_scale.scaler.set_scale(self.scale)

    def trainer(self, net):
        trainer = gluon.Trainer(net.collect_params(), self.optimizer)
        trainer.set_learning_rate(1)
        return trainer


def dense(units=2, hybrid=False, **options):
    net = nn.Dense(units, in_units=3, use_bias=False, **options)
    return initialized(net, hybrid, init=mx.init.One())


X = nd.array([[1, 2, 3], [4, 5, 6]])


def marked_again(run, hybrid):
    """An array gets another gradient before the graph writes the first one."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(x).sum()
    first = x.grad
    x.attach_grad()
    loss.backward()
    return [first, x.grad]


def shared_gradient(run, hybrid, req="add"):
    """Two variables add into one gradient."""
    net, one, two, gradient = dense(hybrid=hybrid), X.copy(), X * 2, nd.ones(X.shape)
    run.start()
    run.trainer(net)
    autograd.mark_variables([one, two], [gradient, gradient], req)
    for _ in range(2):
        backpropagate(lambda: net(one).sum() + net(two * 2).sum())
    return [gradient]


def added(run, hybrid):
    """`grad_req="add"`, of a net that no trainer owns and of data."""
    net, other, x = dense(hybrid=hybrid), dense(hybrid=hybrid), X.copy()
    x.attach_grad("add")
    other.collect_params().setattr("grad_req", "add")
    run.start()
    run.trainer(net)
    for _ in range(3):
        backpropagate(lambda: net(x).sum() + other(x).sum())
    return [x.grad, other.weight.grad(), net.weight.grad()]


PROGRAMS = (marked_again, shared_gradient, added)


@pytest.mark.matrix
@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_gradients_leave_the_pass_without_the_scale(program, start, dtype, hybrid):
    wanted = program(Run(None), hybrid)
    found = program(Run(start, dtype), hybrid)
    assert all(map(same, found, wanted))


# ---------------------------------------------------------------------- as MXNet does by itself


@pytest.mark.parametrize("start", STARTS)
def test_a_pass_that_fails_changes_nothing_for_the_next_step(start):
    run = Run(start)
    run.start()
    net = dense()
    trainer = run.trainer(net)
    backpropagate(lambda: net(X).sum())
    with pytest.raises(mx.MXNetError):
        nd.ones(2).backward()
    trainer.step(1)  # raises where gradients are stale
    np.testing.assert_array_equal(net.weight.data().asnumpy(), [[-4, -6, -8]] * 2)


def test_functions_that_a_script_has_imported_by_name(monkeypatch):
    module = types.ModuleType("script")
    for one in ("backward", "mark_variables"):
        setattr(module, one, getattr(autograd, one))
    monkeypatch.setitem(sys.modules, "script", module)
    run = Run("decorate", scale=2.0**16)
    run.start()
    net, x, gradient = dense(), X * 1e-7, nd.zeros(X.shape)
    run.trainer(net)
    module.mark_variables([x], [gradient])
    with autograd.record():
        loss = (net(x) * nd.array([1e-7])).sum()
    module.backward([loss])
    np.testing.assert_allclose(gradient.asnumpy(), 2e-7, rtol=1e-3)
    amp.shutdown()
    assert module.backward is autograd.backward
