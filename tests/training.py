"""A small net, its trainer, and steps of training, some of which overflow."""

from functools import partial

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.utils import split_and_load

import mxamp as amp
from helpers import BF16, sequential

CONTEXTS = {"one": [mx.cpu(0)], "two": [mx.cpu(0), mx.cpu(1)]}


def setup(ctx=None, optimizer="sgd", scaler=None, hybrid=True, dtype=None, **settings):
    mx.random.seed(3)
    layers = nn.Dense(8, activation="relu", in_units=4), nn.Dense(2, in_units=8)
    net = sequential(*layers, init=mx.init.Xavier(), ctx=ctx or [mx.cpu()])
    rng = np.random.RandomState(3)
    for param in net.collect_params().values():
        param.set_data(nd.array(rng.randn(*param.shape) * 0.3))
    if dtype:
        net.cast(dtype)
    if hybrid:
        net.hybridize()
    settings = {"learning_rate": 0.1, **settings}
    trainer = gluon.Trainer(net.collect_params(), optimizer, settings)
    if scaler is not None:
        amp.init_trainer(trainer, scaler)
    return net, trainer


def train(net, trainer, data, *, scaled=True, between=None, step=None):
    def losses():
        for part, where in zip(np.split(data, len(trainer._contexts)), trainer._contexts):
            x = nd.array(part, ctx=where)
            x = x.astype(net[0].weight.dtype) if net[0].weight.dtype != BF16 else x
            yield (net(x).astype("float32") ** 2).sum()

    run_backward(lambda: [*losses()], trainer, "scale_loss" if scaled else "plain")
    if between:
        between()
    (step or trainer.step)(len(data))


#: MXNet's own optimizers by name, without those of SVRG modules, which wrap one.
OPTIMIZERS = {
    name: kind
    for name, kind in sorted(mx.optimizer.Optimizer.opt_registry.items())
    if kind.__module__.startswith("mxnet.optimizer")
}


def run_backward(function, trainer, way, scaler=None):
    """Record the losses that a function returns, scale them in one of the ways, run backward."""
    with autograd.record():
        losses = function()
        if way == "scale_loss":
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
    if way == "GradScaler":
        autograd.backward(scaler.scale(losses))
    elif way != "scale_loss":
        autograd.backward(losses)


def trainer_in(way, params, scale, optimizer=None, interval=2000, **settings):
    """Return a trainer that scales in one of the ways, and its `GradScaler`, or None."""
    optimizer = optimizer or mx.optimizer.SGD(learning_rate=0.1)
    if way == "decorate":
        optimizer = amp.decorate(optimizer, scale, interval)
    trainer = gluon.Trainer(params, optimizer, **settings)
    if way == "scale_loss":
        amp.init_trainer(trainer, amp.LossScaler(scale, growth_interval=interval))
    scaler = amp.GradScaler(scale, growth_interval=interval)
    return trainer, scaler if way == "GradScaler" else None


class OwnOptimizer(mx.optimizer.Optimizer):
    """A script's optimizer, which knows no `rescale_grad`."""

    momentum, writes = 0.0, False

    def create_state(self, index, weight):
        return nd.zeros_like(weight)

    def update(self, index, weight, grad, state):
        assert grad.dtype == weight.dtype
        state[:] = self.momentum * state - self._get_lr(index) * grad
        weight += state
        if self.writes:
            grad[:] = 1000


def squares(net, parts):
    return [(net(part) ** 2).sum() for part in parts]


def one_step(
    net, trainer, data, way, scaler=None, accumulate=1, between=None, rows=None, takes_step=True
):
    """Scale the losses of all devices in one of the ways there are, and step.

    Each micro-batch has its own pass; `between` is called after the last one. `rows` are those of
    all workers. Without `takes_step` the program drops the gradients.
    """
    for micro_batch in np.split(data, accumulate) if accumulate > 1 else [data]:
        parts = split_and_load(micro_batch, trainer._contexts)
        run_backward(partial(squares, net, parts), trainer, way, scaler)
    if between:
        between()
    if takes_step:
        end_step(trainer, scaler if way == "GradScaler" else None, rows or len(data))
    elif way == "GradScaler":
        scaler.update()


def end_step(trainer, scaler=None, batch_size=1):
    """Step by a GradScaler, or without one by the trainer."""
    if scaler is None:
        trainer.step(batch_size)
    else:
        scaler.step(trainer, batch_size)
        scaler.update()


def weights(net):
    return [p.data(c).asnumpy() for p in net.collect_params().values() for c in p.list_ctx()]


def assert_same_weights(one, two):
    np.testing.assert_equal(weights(one), weights(two))


def assert_as_plain(run, scaler=None, **settings):
    """Call `run(net, trainer, scaled)` with a scaled and a plain trainer; compare the weights."""
    nets = []
    for scaled in (True, False):
        net, trainer = setup(
            scaler=(scaler or amp.StaticLossScaler(1024)) if scaled else None, **settings
        )
        run(net, trainer, scaled)
        nets.append(net)
    assert_same_weights(*nets)


def batches(count=4, seed=0):
    rng = np.random.RandomState(seed)
    return [rng.randn(4, 4).astype("float32") for _ in range(count)]


def poisoned(data):
    bad = data.copy()
    bad[0, 0] = np.inf
    return bad
