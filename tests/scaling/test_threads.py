"""Training in several threads: each pass and step is right beside those of other threads."""

import threading
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

import mxamp as amp
from helpers import custom_operator, initialized, parallel, scaled_backward, scaled_trainer
from mxamp.scaling.backward_passes import scaling_patches
from training import end_step, trainer_in
from training import run_backward as backward_in


def param_of(req="write", value="zeros"):
    return initialized(gluon.Parameter("w", shape=(1,), init=value, grad_req=req))


def trainer_of(param, scale):
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": 1.0}, kvstore=None)
    if scale:
        amp.init_trainer(trainer, amp.StaticLossScaler(scale))
    return trainer


def run_backward(param, trainer, factor=3.0):
    way = "scale_loss" if hasattr(trainer, "amp_loss_scale") else "plain"
    backward_in(lambda: param.data() * factor, trainer, way)


@pytest.fixture
def long_pass(monkeypatch):
    """Passes of other threads than this one wait in MXNet's C code for `done`."""
    from mxnet.base import _LIB

    begun, done, main = threading.Event(), threading.Event(), threading.current_thread()
    call = _LIB.MXAutogradBackwardEx

    def backward(*args):
        if threading.current_thread() is not main:
            begun.set()
            assert done.wait(20)
        return call(*args)

    monkeypatch.setattr(_LIB, "MXAutogradBackwardEx", backward)
    yield begun, done
    amp.shutdown()


def beside(long_pass, function, action):
    """Do something while another thread runs a pass."""
    begun, done = long_pass
    with parallel(function):
        assert begun.wait(20)
        try:
            return action()
        finally:
            done.set()


@pytest.mark.parametrize("other", [None, 4.0])
def test_gradients_are_clipped_beside_a_pass(long_pass, other):
    mine, theirs = param_of(), param_of()
    trainer, second = trainer_of(mine, 2.0), trainer_of(theirs, other)
    run_backward(mine, trainer)
    clip = partial(amp.clip_grad_global_norm, trainer, 1.0)
    norm = beside(long_pass, lambda: run_backward(theirs, second), clip)
    trainer.step(1)
    assert (norm, mine.data().asscalar()) == (3, -1)


def test_gradients_are_unscaled_and_checked_beside_a_pass(long_pass):
    mine, theirs = param_of(), param_of()
    trainer, second = trainer_of(mine, 2.0), trainer_of(theirs, 4.0)
    run_backward(mine, trainer, np.inf)

    def step():
        amp.unscale(trainer), mine.zero_grad(), trainer.step(1)

    beside(long_pass, lambda: run_backward(theirs, second), step)
    assert (trainer.amp_skips, mine.data().asscalar()) == (1, 0)


@pytest.mark.parametrize("scales", [(2.0, 4.0), (2.0, None), (None, 4.0)], ids=str)
def test_gradients_set_to_zero_beside_a_pass_stay_zero(long_pass, scales):
    mine, theirs = param_of("add", "ones"), param_of()
    trainer, second = trainer_of(mine, scales[0]), trainer_of(theirs, scales[1])
    run_backward(mine, trainer, 1.0)
    trainer.step(1)
    beside(long_pass, lambda: run_backward(theirs, second), mine.zero_grad)
    run_backward(mine, trainer, 1.0)
    trainer.step(1)
    assert mine.data().asscalar() == -1


def test_summed_gradients_are_not_summed_again_after_a_pass_of_another_thread():
    contexts = [mx.cpu(0), mx.cpu(1)]
    mine, theirs = gluon.Parameter("w", shape=(1,), init="zeros"), param_of()
    mine.initialize(ctx=contexts)
    trainer = scaled_trainer([mine], amp.StaticLossScaler(8), "sgd", {"learning_rate": 1.0})
    second = trainer_of(theirs, 2.0)
    scaled_backward(lambda: [mine.data(ctx) * 3 for ctx in contexts], trainer)
    amp.clip_grad_global_norm(trainer, np.inf)
    with parallel(lambda: run_backward(theirs, second)):
        pass
    trainer.step(1)
    assert mine.data(contexts[0]).asscalar() == -6


class Copied(autograd.Function):
    def forward(self, x):
        return x * 1

    def backward(self, dy):
        return dy * 1


@custom_operator("test_threads_own")
class Own(mx.operator.CustomOp):
    """A loss: its gradient is what it was given before, not the incoming one."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], in_data[0] * 0 + 0.5)


def softmax(x):
    return nd.SoftmaxOutput(x, nd.array([0.0]))


LOSSES = {
    "SoftmaxOutput": (softmax, [[-0.5, 0.5]]),
    "MakeLoss": (nd.MakeLoss, [[1.0, 1.0]]),
    "CustomOp": (lambda x: nd.Custom(x, op_type="test_threads_own"), [[0.5, 0.5]]),
    "Function": (lambda x: Copied()(x), [[1.0, 1.0]]),
}


@pytest.mark.parametrize(
    "name, hybrid",
    [*((name, False) for name in LOSSES), ("MakeLoss", True), ("CustomOp", True)],
)
def test_operators_that_ignore_the_loss_in_threads_of_several_scales(name, hybrid):
    """One thread a scale, and a plain one."""
    loss, gradient = LOSSES[name]
    amp.init("float16", ctx=mx.cpu())
    gate = threading.Barrier(3)

    def work(scale):
        param = initialized(gluon.Parameter("w", shape=(1, 2), init="zeros"))
        trainer = trainer_of(param, scale)
        block = gluon.nn.HybridLambda(lambda F, x: F.MakeLoss(x * 1))
        if name == "CustomOp":
            block = gluon.nn.HybridLambda(lambda F, x: F.Custom(x, op_type="test_threads_own"))
        block.hybridize()
        gate.wait(60)
        for _ in range(60):
            way = "scale_loss" if scale else "plain"
            backward_in(lambda: (block if hybrid else loss)(param.data()), trainer, way)
            found = param.grad().asnumpy()
            np.testing.assert_array_equal(found, np.array(gradient) * (scale or 1.0))

    with parallel(*(lambda scale=scale: work(scale) for scale in (1024.0, 4.0, None))):
        pass


def test_trainers_of_two_scales_that_step_in_threads():
    """Both trainers know of each other's passes."""
    params = [param_of() for _ in range(2)]

    def work(param, scale):
        trainer = trainer_of(param, scale)
        for _ in range(20):
            run_backward(param, trainer)
            trainer.step(4)

    pairs = zip(params, (4096.0, 16.0))
    with parallel(*(lambda pair=pair: work(*pair) for pair in pairs)):
        pass
    assert [param.data().asscalar() for param in params] == [-15, -15]


def test_a_tape_recorded_in_another_thread():
    """As `DataParallelModel` of GluonCV: forward in threads, backward in the main one."""
    amp.init("float16", ctx=mx.cpu())
    param = initialized(gluon.Parameter("w", shape=(1, 2), init="zeros"))
    trainer, outs = trainer_of(param, 64.0), []

    def forward():
        with autograd.record():
            outs.append(nd.MakeLoss(param.data()))

    with parallel(forward):
        pass
    scaled_backward(lambda: outs, trainer)
    trainer.step(1)
    np.testing.assert_array_equal(param.data().asnumpy(), [[-1, -1]])


@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate", "plain"])
def test_data_parallel_threads_of_one_trainer(way):
    """As GluonCV's R-CNN: a thread a device scales and runs its own loss."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    param = initialized(gluon.Parameter("w", shape=(1,), init="zeros"), ctx=contexts)
    trainer, scaler = trainer_in(way, [param], 8.0, mx.optimizer.SGD(learning_rate=1.0))

    def work(ctx):
        backward_in(lambda: param.data(ctx) * 3, trainer, way, scaler)

    for step in range(1, 11):
        with parallel(*(lambda ctx=ctx: work(ctx) for ctx in contexts)):
            pass
        end_step(trainer, scaler, 2)
        assert param.data(contexts[0]).asscalar() == -3 * step


def test_losses_of_one_call_run_backward_one_after_another():
    """Each has a mark of its own: MXNet frees a tape's inputs with it."""
    param = param_of("add")
    trainer = trainer_of(param, 8.0)
    with autograd.record():
        losses = [param.data() * factor for factor in (1, 2)]
        with amp.scale_loss(losses, trainer) as scaled:
            for one in scaled:
                one.backward()
    trainer.step(1)
    assert param.data().asscalar() == -3


def test_a_trainer_stepped_while_its_pass_runs_loses_no_overflow(long_pass):
    param = param_of()
    trainer = trainer_of(param, 8.0)
    run_backward(param, trainer, np.inf)
    beside(long_pass, lambda: run_backward(param, trainer), lambda: amp.unscale(trainer))
    trainer.step(1)
    assert np.isfinite(param.data().asscalar())


def test_shutdown_beside_a_pass_waits_for_its_step(long_pass):
    param = param_of()
    trainer = trainer_of(param, 8.0)
    beside(long_pass, lambda: run_backward(param, trainer), amp.shutdown)
    assert scaling_patches.is_open
    trainer.step(1)
    assert param.data().asscalar() == -3
    assert not scaling_patches.is_open
