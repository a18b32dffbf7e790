"""Gradients leave the backward pass without the scale: scripts that know nothing see float32's."""

import numpy as np
import pytest
from mxnet import autograd, nd

import mxamp as amp
from helpers import backpropagate, leaf, randn
from mxamp.frontends import automatic
from mxamp.frontends.backward import backward_patches
from training import setup


@pytest.fixture
def run():
    """An automatic run in float16: the scale of its passes."""
    automatic.start(policy=amp.Policy.default("float16", "cpu"))
    return backward_patches.default_scale


def gradients(net):
    return [p.grad().asnumpy() for p in net.collect_params().values()]


def backward(net, data):
    backpropagate(lambda: (net(data) ** 2).mean())


def assert_close(one, other):
    for a, b in zip(one, other):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3 * abs(b).max())


@pytest.mark.parametrize("hybrid", [True, False])
def test_gradients_are_those_of_the_loss(run, hybrid):
    net, trainer = setup(hybrid=hybrid)
    backward(net, randn(16, 4))
    found = gradients(net)
    trainer.step(1)
    assert trainer.amp_last_step.stepped
    assert trainer.amp_last_step.loss_scale == 2.0**16
    amp.shutdown()
    net, _ = setup(hybrid=hybrid)
    backward(net, randn(16, 4))
    assert_close(found, gradients(net))


def test_an_overflow_that_no_trainer_owns_is_infinite_as_in_torch(run, caplog):
    """The pass is not run again, no step is skipped for it, and the scale stays."""
    net, trainer = setup()
    w, passes = leaf(nd.ones((4, 3))), []

    class Counted(autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, dy):
            passes.append(1)
            return dy

    for _ in range(3):
        backpropagate(
            lambda: (nd.dot(randn(8, 4), Counted()(w)) ** 2).sum() * 20
            + (net(randn(16, 4)) ** 2).mean()
        )
        assert not np.isfinite(w.grad.asnumpy()).all()
        trainer.step(1)
        assert trainer.amp_last_step.stepped
    assert len(passes) == 3
    assert (run.loss_scale, run.skips) == (2.0**16, 0)
    assert caplog.text.count("no trainer owns") == 1


@pytest.mark.parametrize("request_", ["write", "add"])
def test_a_script_that_skips_overflows_itself(run, request_):
    """The scale falls without a step, and what the script has dropped skips none."""
    net, trainer = setup()
    net.collect_params().setattr("grad_req", request_)
    skipped = 0
    for factor in (1, *[2.0**22] * 3, 1):
        backpropagate(lambda factor=factor: (net(randn(16, 4)) ** 2).mean() * factor)
        if np.isfinite(gradients(net)[0]).all() and skipped != 1:
            trainer.step(1)
            assert trainer.amp_last_step.stepped
        else:
            skipped += 1
        net.collect_params().zero_grad()
    assert skipped >= 2
    assert trainer.amp_skips == 0
    assert trainer.amp_last_step.loss_scale == run.loss_scale == 2.0 ** (17 - skipped)


def test_grad_and_higher_orders(run):
    _, trainer = setup()
    x = leaf(nd.array([[1.0, 2.0]]))
    with autograd.record():
        y = nd.sin(x)
        (dx,) = autograd.grad(y, [x], create_graph=True)
        penalty = dx * dx
    values = x.asnumpy()
    np.testing.assert_allclose(dx.asnumpy(), np.cos(values), rtol=1e-3)
    penalty.backward()
    np.testing.assert_allclose(x.grad.asnumpy(), -np.sin(2 * values), rtol=1e-3)
    assert trainer is not None


INNER = nd.ones(1)


class Written(autograd.Function):
    """An identity whose gradient is clipped, and has a part that ignores the one it is given."""

    def forward(self, x):
        self.save_for_backward(x)
        return x * 1

    def backward(self, dy):
        backpropagate(lambda: INNER * abs(dy).sum())
        return dy.clip(-0.01, 0.01) + self.saved_tensors[0] * 0.01


@pytest.mark.parametrize("hybrid", [True, False])
def test_functions_in_python_see_gradients_without_the_scale(run, hybrid):
    def passed():
        INNER.attach_grad()
        net, trainer = setup(hybrid=hybrid)
        backward(lambda data: Written()(net(data)), randn(16, 4))
        trainer.step(1)
        return [*gradients(net), INNER.grad.asnumpy()]

    found = []
    for scale in (256, 1):  # the second pass scales nothing: its functions must not see 256
        run.scaler.set_scale(scale)
        found += passed()
    assert (run.steps, run.skips) == (2, 0)
    amp.shutdown()
    assert_close(found, 2 * passed())
