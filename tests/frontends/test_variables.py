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
from mxamp.frontends import automatic, variables

DTYPES = ("float16", "bfloat16")
#: A scale with which no gradient overflows here.
FITS = 2.0**4
STARTS = ("decorate", "automatic")


class Plain:
    """Plain float32 MXNet."""

    def __init__(self, scale=None):
        self.scale = scale

    def start(self):
        """Begin, with whatever has been made before."""

    def trainer(self, net):
        return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})


class Decorated(Plain):
    def start(self):
        self.optimizer = amp.decorate(mx.optimizer.SGD(learning_rate=1), self.scale)

    def trainer(self, net):
        return gluon.Trainer(net.collect_params(), self.optimizer)


class Automatic(Plain):
    def start(self):
        amp.shutdown()
        automatic.start(policy=amp.Policy.default(self.dtype, "cpu"))
        automatic._run.scale.scaler.set_scale(self.scale)


def way(start, dtype, scale):
    """Return a way to train: with mixed precision on where things are made after it."""
    if start == "automatic":
        made = Automatic(scale)
        made.dtype = dtype
        return made
    amp.init(dtype)
    return Decorated(scale)


def dense(units=2, hybrid=False, **options):
    net = nn.Dense(units, in_units=3, use_bias=False, **options)
    net.initialize(mx.init.One())
    if hybrid:
        net.hybridize()
    return net


X = nd.array([[1, 2, 3], [4, 5, 6]])


def two_nets(run, hybrid):
    """A decorated trainer, and a plain one of a second net."""
    one, two = dense(hybrid=hybrid), dense(hybrid=hybrid)
    run.start()
    trainers = run.trainer(one), gluon.Trainer(two.collect_params(), "sgd", {"learning_rate": 1})
    with autograd.record():
        loss = one(X).sum() + two(X * 2).sum()
    loss.backward()
    found = [one.weight.grad().copy(), two.weight.grad().copy()]
    for trainer in trainers:
        trainer.step(1)
    return [*found, one.weight.data(), two.weight.data()]


def inputs(run, hybrid):
    """Gradients of the data."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    return [x.grad, net.weight.grad()]


def gradients_that_outlive(run, hybrid):
    """A gradient is kept, its array is not, and backward runs three times."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(x * x).sum()
    gradient = x.grad
    del x
    found = []
    for retain in (True, True, False):
        loss.backward(retain_graph=retain)
        found.append(gradient.copy())
    return found


def two_graphs(run, hybrid):
    """A gradient is kept, its array is not, and two graphs write it one after the other."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    with autograd.record():
        losses = [net(x).sum(), net(x * 2).sum()]
    gradient = x.grad[0]
    del x
    found = []
    for loss in losses:
        loss.backward()
        found.append(gradient.copy())
    return found


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


def numpy_view(run, hybrid):
    """A second array stands for the variable, the first one is gone."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    view = x.as_np_ndarray()
    with autograd.record():
        loss = net(x).sum()
    del x
    loss.backward(retain_graph=True)
    loss.backward()
    return [view.grad.as_nd_ndarray()]


def shared_gradient(run, hybrid, req="add"):
    """Two variables add into one gradient."""
    net, one, two, gradient = dense(hybrid=hybrid), X.copy(), X * 2, nd.ones(X.shape)
    run.start()
    run.trainer(net)
    autograd.mark_variables([one, two], [gradient, gradient], req)
    for _ in range(2):
        with autograd.record():
            loss = net(one).sum() + net(two * 2).sum()
        loss.backward()
    return [gradient]


def shared_gradient_written(run, hybrid):
    """Two variables write one gradient: one graph each."""
    net, one, two, gradient = dense(hybrid=hybrid), X.copy(), X * 2, nd.ones(X.shape)
    autograd.mark_variables([one, two], [gradient, gradient])
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(one).sum()
    loss.backward()
    return [gradient]


def parts_of_one_buffer(run, hybrid):
    """Gradients are slices of one array, which is what the script reads."""
    net, x, buffer = dense(hybrid=hybrid), X.copy(), nd.zeros((4, 3))
    run.start()
    run.trainer(net)
    mx.contrib.autograd.mark_variables([x], [buffer[1:3]])
    with autograd.record():
        loss = net(x).sum()
    del x
    loss.backward(retain_graph=True)
    loss.backward()
    return [buffer]


def added(run, hybrid):
    """`grad_req="add"`, of a net that no trainer owns and of data."""
    net, other, x = dense(hybrid=hybrid), dense(hybrid=hybrid), X.copy()
    x.attach_grad("add")
    other.collect_params().setattr("grad_req", "add")
    run.start()
    run.trainer(net)
    for _ in range(3):
        with autograd.record():
            loss = net(x).sum() + other(x).sum()
        loss.backward()
    return [x.grad, other.weight.grad(), net.weight.grad()]


def asked_for(run, hybrid):
    """`autograd.grad`, which leaves all other gradients as they are."""
    net, x = dense(hybrid=hybrid), X.copy()
    x.attach_grad()
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(x).sum()
    gradients = autograd.grad(loss, [x, net.weight.data()], retain_graph=True)
    return [*gradients, x.grad]


def not_on_the_tape(run, hybrid):
    """A gradient that this pass does not write stays as it was."""
    net, x, y = dense(hybrid=hybrid), X.copy(), X.copy()
    for array in (x, y):
        array.attach_grad()
        array.grad[:] = 7
    run.start()
    run.trainer(net)
    with autograd.record():
        loss = net(x).sum()
    loss.backward()
    return [x.grad, y.grad]


PROGRAMS = (
    two_nets, inputs, gradients_that_outlive, two_graphs, marked_again, numpy_view,
    shared_gradient, shared_gradient_written, parts_of_one_buffer, added, asked_for,
    not_on_the_tape,
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("hybrid", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_gradients_leave_the_pass_without_the_scale(program, start, dtype, hybrid):
    wanted = program(Plain(), hybrid)
    found = program(way(start, dtype, FITS), hybrid)
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


# ---------------------------------------------------------------------- as MXNet does by itself


@pytest.mark.parametrize("start", STARTS)
def test_two_backward_passes_before_two_steps(start):
    run = way(start, "float16", FITS)
    run.start()
    nets = [dense(), dense()]
    trainers = [run.trainer(net) for net in nets]
    for net in nets:
        with autograd.record():
            loss = net(X).sum()
        loss.backward()
    for trainer, net in zip(trainers, nets):
        trainer.step(1)  # raises where gradients are stale
        np.testing.assert_array_equal(net.weight.data().asnumpy(), [[-4, -6, -8]] * 2)
        with pytest.raises(UserWarning, match="stale"):
            trainer.step(1)


@pytest.mark.parametrize("start", STARTS)
def test_a_pass_that_fails_changes_nothing_for_the_next_step(start):
    run = way(start, "float16", FITS)
    run.start()
    net = dense()
    trainer = run.trainer(net)
    with autograd.record():
        loss = net(X).sum()
    loss.backward()
    with pytest.raises(mx.MXNetError):
        nd.ones(2).backward()
    trainer.step(1)  # raises where gradients are stale
    np.testing.assert_array_equal(net.weight.data().asnumpy(), [[-4, -6, -8]] * 2)


@pytest.mark.parametrize("owner", [nd.NDArray, autograd])
@pytest.mark.parametrize("start", STARTS)
def test_a_graph_is_not_kept_unasked(start, owner, monkeypatch):
    # Arrays of other tests that are still alive would be taken for the program's.
    monkeypatch.setattr(variables.gc, "get_objects", list)
    run = way(start, "float16", FITS)
    run.start()
    net = dense()
    run.trainer(net)
    with autograd.record():
        loss = net(X).sum()
    owner.backward(loss)
    with pytest.raises(mx.MXNetError):
        owner.backward(loss)


@pytest.mark.parametrize("name", ["backward", "grad"])
def test_functions_that_a_script_has_imported_by_name(monkeypatch, name):
    module = types.ModuleType("script")
    for one in ("backward", "grad", "mark_variables"):
        setattr(module, one, getattr(autograd, one))
    monkeypatch.setitem(sys.modules, "script", module)
    run = way("decorate", "float16", 2.0**16)
    run.start()
    net, x, gradient = dense(), X * 1e-7, nd.zeros(X.shape)
    run.trainer(net)
    module.mark_variables([x], [gradient])
    with autograd.record():
        loss = (net(x) * nd.array([1e-7])).sum()
    if name == "backward":
        module.backward([loss])
    else:
        (gradient,) = module.grad([loss], [x])
    np.testing.assert_allclose(gradient.asnumpy(), 2e-7, rtol=1e-3)
    amp.shutdown()
    assert module.backward is autograd.backward


@pytest.mark.parametrize("same_net", [True, False])
def test_a_trainer_that_is_no_longer_used_does_not_lower_the_scale(same_net):
    amp.init("float16")
    before = dense()
    trainer = gluon.Trainer(before.collect_params(), amp.decorate(mx.optimizer.SGD(), 2.0))
    net = before if same_net else dense()
    if not same_net:
        del before
    trainer = gluon.Trainer(net.collect_params(), amp.decorate(mx.optimizer.SGD(), FITS))
    with autograd.record():
        loss = net(X).sum()
    loss.backward()
    trainer.step(1)
    assert trainer.amp_last_step.loss_scale == FITS
