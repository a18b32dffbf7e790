"""Call patterns found in real training scripts, unchanged but for the import line.

Each is run against a control loop in plain float32 with the same steps.
"""

from contextlib import nullcontext

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp

CTX = [mx.cpu(0), mx.cpu(1)]


def init_trainer(trainer):
    """`amp.init_trainer(trainer)`, with a scale at which no step is skipped in float16."""
    amp.init_trainer(trainer)
    if trainer.amp_loss_scale > 1:
        amp.init_trainer(trainer, amp.LossScaler(init_scale=256))


def network(outputs=2, ctx=CTX):
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu", in_units=4), nn.Dense(outputs, in_units=16))
    net.initialize(mx.init.Xavier(), ctx=ctx)
    rng = np.random.RandomState(5)
    for param in net.collect_params().values():
        param.set_data(nd.array(rng.randn(*param.shape) * 0.3))
    net.hybridize()
    return net


def make_trainer(net):
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    return gluon.Trainer(net.collect_params(), "sgd", settings, update_on_kvstore=False)


def batches(count=6, rows=8):
    rng = np.random.RandomState(6)
    return [(rng.randn(rows, 4).astype("float32"), rng.randint(0, 2, rows)) for _ in range(count)]


def split(data, label):
    load = gluon.utils.split_and_load
    return load(data, CTX), load(label.astype("float32"), CTX)


def close(net, control, dtype):
    rtol = 0.01 if dtype == "float16" else 0.05
    for mine, theirs in zip(net.collect_params().values(), control.collect_params().values()):
        for ctx in CTX:
            a, b = mine.data(ctx).asnumpy(), theirs.data(ctx).asnumpy()
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * abs(b).max())


loss_function = gluon.loss.SoftmaxCrossEntropyLoss()


def losses_of(net, parts, labels):
    return [loss_function(net(x), y) for x, y in zip(parts, labels)]


def unscaled(losses, _trainer):
    return nullcontext(losses)


def trained(step, dtype=None, prepare=None):
    """Return a network after `step` on each batch: in float32 if there is no dtype."""
    if dtype is not None:
        amp.init(dtype, ctx=CTX)
    net = network()
    trainer = make_trainer(net)
    if prepare is not None:
        prepare(net, trainer)
    if dtype is not None:
        init_trainer(trainer)
    scale = unscaled if dtype is None else amp.scale_loss
    for i, (data, label) in enumerate(batches()):
        step(net, trainer, *split(data, label), i, scale)
    return net


def backward(net, trainer, parts, labels, scale):
    with autograd.record():
        losses = losses_of(net, parts, labels)
        with scale(losses, trainer) as scaled:
            autograd.backward(scaled)


def ssd_hybridizes_again(net, trainer, parts, labels, i, scale):
    if i % 2 == 0:
        net.hybridize(static_alloc=True, static_shape=True)
    backward(net, trainer, parts, labels, scale)
    trainer.step(8)


def action_recognition_accumulates(net, trainer, parts, labels, i, scale):
    backward(net, trainer, parts, labels, scale)
    if i % 2:
        trainer.step(16)
        net.collect_params().zero_grad()


def gluonnlp_clips(net, trainer, parts, labels, i, scale):
    backward(net, trainer, parts, labels, scale)
    trainer.allreduce_grads()
    limit = 1.0 if scale is unscaled else trainer._amp_loss_scaler.loss_scale
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    grads = [p.list_grad()[0] for p in params]
    norm = np.sqrt(sum(float((g.astype("float32") ** 2).sum().asscalar()) for g in grads))
    for param in params:
        for grad in param.list_grad():
            grad *= min(1.0, limit / (norm + 1e-8))
    trainer.update(1, ignore_stale_grad=True)


def gluonnlp_2_records_twice(net, trainer, parts, labels, i, scale):
    with autograd.record():
        losses = losses_of(net, parts, labels)
    with autograd.record(), scale(losses, trainer) as scaled:
        for loss in scaled:
            loss.backward()
    if scale is not unscaled:
        assert trainer.amp_loss_scale == trainer._amp_loss_scaler.loss_scale
    trainer._scale = 1.0
    trainer.step(8)


STEPS = [
    ssd_hybridizes_again, action_recognition_accumulates, gluonnlp_clips, gluonnlp_2_records_twice,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_steps_of_scripts(step, dtype, tmp_path):
    def accumulate(net, trainer):
        net.collect_params().setattr("grad_req", "add")
        trainer.save_states(str(tmp_path / "states"))
        trainer.load_states(str(tmp_path / "states"))

    prepare = accumulate if step is action_recognition_accumulates else None
    expected = trained(step, prepare=prepare)
    close(trained(step, dtype, prepare), expected, dtype)


def test_a_trainer_like_horovods():
    class DistributedTrainer(gluon.Trainer):
        """As Horovod's: no kvstore, `_scale` over the workers, gradients summed by hand."""

        def __init__(self, params, optimizer, settings):
            super().__init__(params, optimizer, settings, kvstore=None)
            self._scale /= 4

        def _allreduce_grads(self):
            for param in self._params:
                if param.grad_req != "null":
                    for grad in param.list_grad():
                        grad *= 4

    def run(scaled):
        net = network(ctx=CTX[:1])
        trainer = DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        if scaled:
            amp.init_trainer(trainer, amp.StaticLossScaler(1024))
        for data, label in batches():
            x, y = nd.array(data), nd.array(label)
            with autograd.record():
                loss = loss_function(net(x), y)
                if scaled:
                    with amp.scale_loss(loss, trainer) as loss:
                        autograd.backward(loss)
                else:
                    autograd.backward(loss)
            trainer.step(8)
        assert trainer._scale == 0.25
        return [p.data(CTX[0]).asnumpy() for p in net.collect_params().values()]

    for mine, theirs in zip(run(True), run(False)):
        np.testing.assert_array_equal(mine, theirs)
