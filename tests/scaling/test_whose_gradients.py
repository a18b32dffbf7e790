"""Scales that gradients carry in unusual programs: as in float32, or an error."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule

import mxamp as amp
from helpers import backpropagate, initialized, scaled_backward
from mxamp.frontends import automatic
from mxamp.scaling.backward_passes import scaling_patches
from training import end_step, run_backward, squares, trainer_in

X = nd.array([[1.0, 2.0]])


def dense(**options):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    return initialized(net, init=mx.init.One(), **options)


def make(scale=1024.0, req="write", net=None, scaler=None):
    if net is None:
        net = dense()
        net.weight.grad_req = req
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    if scale or scaler:
        amp.init_trainer(trainer, scaler or amp.StaticLossScaler(scale))
    return net, trainer


def scaled(net, trainer, **options):
    with autograd.record(), amp.scale_loss(net(X), trainer) as loss:
        loss.backward(**options)
    return loss


def plain(net):
    backpropagate(lambda: net(X))


def assert_weights(net, *expected):
    np.testing.assert_array_equal(net.weight.data().asnumpy()[0], expected)


@pytest.mark.parametrize("own", ["scaled", "plain"])
def test_a_trainer_that_is_made_after_passes_of_several_scales(own, caplog):
    """MXNet's error of stale gradients, in place of a wrong update."""
    net, (other, trainer) = dense(), make()
    if own == "scaled":
        scaled_backward(lambda: net(X) + other(X), trainer)
        plain(make(None)[0])
    else:
        plain(net)
        scaled(other, trainer)
    late = make(None, net=net)[1]
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        late.step(1)
    assert "is older than its trainer" in caplog.text
    assert_weights(net, 1, 1)


def test_the_scale_that_scripts_clip_by_is_what_gradients_carry():
    net, trainer = make(req="add")
    scaled(net, trainer)
    plain(net)
    trainer.allreduce_grads()
    gradients = [net.weight.grad()]
    gluon.utils.clip_global_norm(gradients, 0.1 * trainer._amp_loss_scaler.loss_scale)
    trainer.update(1)
    norm = np.sqrt(20.0)
    np.testing.assert_allclose(
        net.weight.data().asnumpy()[0], 1 - 0.1 * np.array([2, 4]) / norm, rtol=1e-5
    )


@pytest.mark.parametrize("second", ["scaled", "plain", "unscaled before", "grown"])
def test_the_stale_gradient_of_another_device_is_summed_at_one_scale(second):
    contexts = [mx.cpu(0), mx.cpu(1)]
    param = initialized(gluon.Parameter("p", shape=(1,), init="ones"), ctx=contexts)
    trainer = gluon.Trainer({"p": param}, "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, amp.LossScaler(growth_interval=1 if second == "grown" else 9))
    for used in (contexts, contexts[:1]):
        way = "scale_loss" if used is contexts or second != "plain" else "plain"
        run_backward(lambda used=used: [param.data(ctx).sum() for ctx in used], trainer, way)
        if used is contexts and second == "unscaled before":
            amp.unscale(trainer)
        trainer.step(1, ignore_stale_grad=True)
    # The second step adds the sum of the first, as in float32.
    np.testing.assert_allclose(param.data(contexts[0]).asnumpy(), [0.5], rtol=1e-6)


@pytest.mark.parametrize("way", ["scale_loss", "unscale", "step", "later", "contrib", "GradScaler"])
def test_losses_and_gradients_scaled_before_shutdown(way):
    """They keep their scale: the program may run backward, step, replace or unscale them."""
    amp.init("float16", ctx=mx.cpu())
    net, trainer = make(None if way == "GradScaler" else 1024.0)
    scaler = amp.GradScaler(1024) if way == "GradScaler" else None
    if scaler:
        with autograd.record():
            loss = scaler.scale(net(X))
    else:
        loss = scaled(net, trainer, retain_graph=True)
    amp.shutdown()
    if way in ("later", "GradScaler"):
        loss.backward()
    elif way == "contrib":
        mx.contrib.autograd.backward([loss])  # another function of MXNet's C API
    elif way == "scale_loss":
        scaled(net, trainer)
    elif way == "unscale":
        amp.unscale(trainer)
    end_step(trainer, scaler)
    assert_weights(net, 0, -1)
    if way == "scale_loss":  # it scaled another loss
        amp.shutdown()
    # Else the step has undone the last patches.
    assert (trainer.amp_steps, scaling_patches.is_open) == (1, False)


@pytest.mark.parametrize("scale", [2.0**-30, 0.3, 2.0**60, 2.0**128, 1e-40])
def test_extreme_scales_are_right_or_refused(scale):
    net, trainer = make(scale)
    if scale in (2.0**128, 1e-40):  # which float32 does not hold
        with pytest.raises(amp.StateError, match="is not between"):
            scaled(net, trainer)
        return
    scaled(net, trainer)
    trainer.step(1)
    np.testing.assert_allclose(net.weight.data().asnumpy()[0], [0, -1], atol=1e-5)


def test_svrg_on_several_devices(monkeypatch):
    data = np.random.RandomState(0).randn(64, 4).astype("float32")
    labels, found = data @ np.array([1, 2, 3, 4], "float32"), []
    for decorated in (False, True):
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", str(int(decorated)))
        rows = mx.io.NDArrayIter(data, labels, 16, label_name="label")
        net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc")
        net = mx.sym.LinearRegressionOutput(net, mx.sym.var("label"))
        optimizer = amp.decorate("sgd", 16.0) if decorated else "sgd"
        contexts = [mx.cpu(0), mx.cpu(1)]
        module = SVRGModule(net, label_names=["label"], context=contexts, update_freq=2)
        module.bind(rows.provide_data, rows.provide_label)
        module.init_params(mx.init.One())
        module.init_optimizer("local", optimizer, (("learning_rate", 0.05),))
        for epoch in range(3):
            if epoch % 2 == 0:
                module.update_full_grads(rows)
            rows.reset()
            for batch in rows:
                module.forward_backward(batch)
                module.update()
        found.append(module.get_params()[0]["fc_weight"].asnumpy())
    np.testing.assert_allclose(*found, rtol=1e-4)


def test_a_plain_trainer_from_before_init_is_left_alone(caplog):
    """Its gradients carry no scale, also before the first backward pass in mixed precision."""
    net = dense()
    old = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, update_on_kvstore=False)
    plain(net)
    other, trainer = make()
    scaled(other, trainer)
    assert "older than its trainer" not in caplog.text
    old.step(1)
    assert_weights(net, 0, -1)


@pytest.mark.parametrize("dtype, scaler, losses_scaled, warns", [
    ("float16", None, [False] * 3, True),
    ("float16", amp.StaticLossScaler(8), [False] * 3, True),
    ("float16", amp.NoScaler(), [False] * 3, False),
    ("bfloat16", None, [False, True], False),
    (None, amp.StaticLossScaler(8), [True, False], True),
    (None, amp.StaticLossScaler(8), [True, True], False),
], ids=str)  # fmt: skip
def test_a_step_without_scale_loss(dtype, scaler, losses_scaled, warns, caplog):
    if dtype:
        amp.init(dtype, ctx=mx.cpu())
    net, trainer = make(None)
    amp.init_trainer(trainer, scaler)
    for is_scaled in losses_scaled:
        scaled(net, trainer) if is_scaled else plain(net)
        trainer.step(4)
    assert caplog.text.count("carry no loss scale") == int(warns)


@pytest.mark.parametrize("way", ["plain", "scale_loss", "decorate", "GradScaler", "automatic"])
def test_a_trainer_in_float16_without_loss_scaling_warns(way, caplog):
    if way == "automatic":
        automatic.start(policy=amp.Policy.default("float16", "cpu"))
    else:
        amp.init("float16", ctx=mx.cpu())
    net = dense()
    trainer, scaler = trainer_in(way, net.collect_params(), 8)
    for _ in range(2):
        scaled(net, trainer) if way == "scale_loss" else plain(net)
        end_step(trainer, scaler)
    assert caplog.text.count("call init_trainer(trainer), and backward inside") == (way == "plain")


SOCKEYE = ("_loss_scale", "_next_loss_scale", "_unskipped")


def test_scripts_keep_the_attributes_of_contribs_scaler():
    """Sockeye 2.3 reads these into its checkpoints, and assigns them when it resumes."""
    net, trainer = make(scaler=amp.LossScaler(2.0**10))
    trainer._amp_loss_scaler._scale_seq_len = 3
    for _ in range(2):
        scaled(net, trainer)
        trainer.step(4)
    kept = [getattr(trainer._amp_loss_scaler, name) for name in SOCKEYE]
    assert kept == [1024, 1024, 2]
    net, trainer = make(scaler=amp.LossScaler())
    scaler = trainer._amp_loss_scaler
    scaler._scale_seq_len, scaler._max_loss_scale = 3, 2.0**11
    for name, value in zip(SOCKEYE, kept):
        setattr(scaler, name, value)
    assert trainer.amp_loss_scale == scaler.loss_scale == 1024
    seen = []
    for _ in range(4):
        scaled(net, trainer)
        trainer.step(4)
        seen.append(trainer.amp_last_step.loss_scale)
    assert seen == [1024, 2048, 2048, 2048]
    assert (scaler._scale_seq_len, scaler._max_loss_scale, scaler._unskipped) == (3, 2048, 0)


def test_a_plain_trainer_on_a_kvstore_that_uses_a_part_of_its_parameters():
    """MXNet does not note that these gradients were used: they stay fresh."""
    contexts, (net, trainer) = [mx.cpu(0), mx.cpu(1)], make()
    parts, params = [dense(ctx=contexts) for _ in range(2)], gluon.ParameterDict()
    for part in parts:
        params.update(part.collect_params())
    plain = gluon.Trainer(params, "sgd", {"learning_rate": 0.01})
    for used in (parts, parts[:1], parts[1:], parts):
        scaled(net, trainer)
        trainer.step(4)
        backpropagate(lambda used=used: [p(X.as_in_context(c)) for c in contexts for p in used])
        plain.step(4)
    assert plain._update_on_kvstore
    assert all(np.isfinite(part.weight.data(c).asnumpy()).all() for part in parts for c in contexts)


@pytest.mark.parametrize("unscaled", [(), (0,), (0, 1)], ids=str)
def test_two_trainers_that_share_a_parameter(unscaled):
    def trained(way):
        params = [initialized(gluon.Parameter(n, shape=(2,), init="ones")) for n in "abc"]
        one, other, shared = params
        optimizers = [mx.optimizer.SGD(learning_rate=2.0**-6) for _ in "ab"]
        trainers = [
            trainer_in(way, [own, shared], 8, sgd)[0] for own, sgd in zip(params, optimizers)
        ]
        for _ in range(2):
            run_backward(lambda: (one.data() * other.data() * shared.data()).sum(), trainers, way)
            for i in unscaled if way == "scale_loss" else ():
                amp.unscale(trainers[i])
            for trainer in trainers:
                trainer.step(1, ignore_stale_grad=True)
        return [param.data().asnumpy() for param in params]

    np.testing.assert_array_equal(trained("scale_loss"), trained("plain"))


def test_each_of_two_trainers_reports_its_own_overflow():
    (one, first), (two, second) = (
        make(scaler=amp.LossScaler(scale)) for scale in (2.0**12, 2.0**8)
    )

    def loss():
        zero = (one.weight.data() - one.weight.data().detach()).sum()
        return zero.sqrt() + two(X).sum()  # the gradient of the square root is infinite

    scaled_backward(loss, [first, second])
    first.step(4)
    second.step(4)
    assert (first.amp_skips, second.amp_skips) == (1, 0)
    # 2**8 overflowed, so 2**11 would too.
    assert (first.amp_loss_scale, second.amp_loss_scale) == (2.0**7, 2.0**8)


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_plain_trainer_of_a_scaled_loss(made):
    net, second = make(None)
    other, first = make(2.0**16)
    second = make(None, net=net)[1] if made == "after" else second
    scaled_backward(lambda: net(X) + other(X), first)
    first.step(1)
    for step in (second.step, second.update):
        with pytest.raises(amp.StateError, match="nothing takes it out"):
            step(1)
    assert_weights(net, 1, 1)
    plain(net)
    second.step(1)
    assert_weights(net, 0, -1)


def test_one_pass_from_losses_scaled_apart():
    net = make(None)[0]
    with autograd.record():
        losses = [net(X) for _ in range(3)]
    one, other = (amp.GradScaler(n).scale(loss) for n, loss in zip((8, 16), losses))
    for heads in ([one, other], [one, losses[2]]):
        with pytest.raises(amp.StateError, match="scale them together"):
            autograd.backward(heads)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_gradients_summed_before_a_grad_scaler_knows_the_trainer(idle, unscales):
    found, contexts = [], [mx.cpu(0), mx.cpu(1)]
    for way in ("plain", "GradScaler"):
        net, sgd = dense(ctx=contexts), mx.optimizer.SGD(learning_rate=2.0**-6)
        options = {"update_on_kvstore": False}
        trainer, scaler = trainer_in(way, net.collect_params(), 256, sgd, **options)
        for i in range(3):
            data = [nd.ones((2, 2), ctx=one) for one in (contexts[:1] if idle else contexts)]
            run_backward(partial(squares, net, data), trainer, way, scaler)
            if i == 0:
                trainer.allreduce_grads()
                if scaler and unscales:
                    scaler.unscale_(trainer)
            if scaler:
                scaler.step(trainer, 1, ignore_stale_grad=True)
                scaler.update()
            elif i == 0:
                trainer.update(1, ignore_stale_grad=True)
            else:
                trainer.step(1, ignore_stale_grad=True)
        found.append([data.asnumpy() for data in net.weight.list_data()])
    np.testing.assert_allclose(found[1], found[0])


def test_unscale_divides_stale_gradients_too():
    init = mx.init.One()
    one, other = (initialized(gluon.Parameter(name, shape=(2,)), init=init) for name in "ab")
    trainer = gluon.Trainer([one, other], "sgd", {"learning_rate": 1.0})
    amp.init_trainer(trainer, amp.StaticLossScaler(1024))
    scaled_backward(lambda: (one.data() + 2 * other.data()).sum(), trainer)
    trainer.step(1)
    scaled_backward(lambda: (3 * one.data()).sum(), trainer)
    amp.unscale(trainer)
    assert [param.grad().asnumpy().tolist() for param in (one, other)] == [[3, 3], [2, 2]]


def test_an_overflow_that_was_unscaled_and_clipped_stays_in_the_sum():
    net, trainer = make(req="add", scaler=amp.LossScaler(1024))
    for value in (np.inf, 1.0):
        scaled(net, trainer)
        net.weight.grad()[:] *= value
        amp.unscale(trainer)
        net.weight.grad()[:] = 1.0  # finite, as by clipping
    trainer.step(1)
    assert trainer.amp_skips == 1
    assert_weights(net, 1, 1)
