"""The SGD step in NumPy: bit for bit MXNet's."""

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

import mxamp as amp
from helpers import randn, same, values
from mxamp.framework.machine import threads
from mxamp.patches import optimizers as updates

B = amp.Policy.default("bfloat16")
PLAIN = B.override(substitutions=[name for name in B.substitutions if name != "sgd"])
# MXNet refuses numbers that float32 can't hold.
FLOATS = st.one_of(st.just(0.0), st.floats(1e-9, 1))


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """One core, and NumPy for arrays of any size."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(updates, "_LEAST", 0)


@pytest.fixture
def counted(monkeypatch):
    """The arrays that were updated in NumPy."""
    calls, original = [], updates._sgd
    monkeypatch.setattr(updates, "_sgd", lambda *a: (calls.append(a[1]), original(*a)))
    return calls


def arrays(seed, odd):
    random = np.random.RandomState(seed)
    for size in (1, 7, 40000):
        array = random.randn(size) * 10 ** random.uniform(-6, 3, size)
        array[:: random.randint(3, 9)] = odd
        yield nd.array(array.astype("float32"))


def stepped(options, seed, odd, policy):
    """Weights, states and the number of updates after some steps."""
    optimizer = mx.optimizer.create("sgd", **options)
    updater = mx.optimizer.get_updater(optimizer)
    weights = list(arrays(seed, -0.0))
    with amp.autocast(policy=policy):
        for step in range(3):
            updater(list(range(len(weights))), list(arrays(seed + 1 + step, odd)), weights)
    states = [updater.states[i] for i in range(len(weights)) if updater.states[i] is not None]
    return [values(a) for a in (*weights, *states)], optimizer.num_update


@pytest.mark.slow
@given(
    rate=FLOATS, decay=st.one_of(st.just(0.0), FLOATS), rescale=FLOATS,
    momentum=st.one_of(st.just(0.0), FLOATS), clip=st.one_of(st.none(), st.floats(1e-3, 10)),
    odd=st.sampled_from([0.0, -0.0, 1e30, np.inf, np.nan, 1e-40]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25)
def test_bit_for_bit_as_mxnet(rate, decay, rescale, momentum, clip, odd, seed):
    options = {
        "learning_rate": rate, "wd": decay, "rescale_grad": rescale, "clip_gradient": clip,
        "momentum": momentum,
    }  # fmt: skip
    plain, count = stepped(options, seed, odd, PLAIN)
    found, same_count = stepped(options, seed, odd, B)
    assert count == same_count
    assert all(same(mine, theirs) for mine, theirs in zip(found, plain))


class Mine(mx.optimizer.SGD):
    pass


@pytest.mark.parametrize(
    "optimizer, policy, options, used",
    [
        (mx.optimizer.SGD, B, {}, True),
        (mx.optimizer.SGD, B.untuned(), {}, False),
        (mx.optimizer.SGD, PLAIN, {}, False),
        (mx.optimizer.SGD, amp.Policy.default("float16", "cpu"), {}, False),
        (lambda: mx.optimizer.SGD(multi_precision=True), B, {"dtype": "float16"}, False),
        (mx.optimizer.SGD, B, {"dtype": "float64"}, False),
        (mx.optimizer.SGD, B, {"stype": "row_sparse"}, False),
        (mx.optimizer.SGD, B, {"cores": "16"}, False),
        (Mine, B, {}, False),
        (mx.optimizer.NAG, B, {}, False),
    ],
)
def test_when_numpy_updates(optimizer, policy, options, used, counted, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", options.get("cores", "1"))
    updater = mx.optimizer.get_updater(optimizer())
    weight, grad = (nd.ones((3, 2), dtype=options.get("dtype", "float32")) for _ in range(2))
    with amp.autocast(policy=policy):
        updater(0, weight.tostype(options.get("stype", "default")), grad)
    assert bool(counted) == used


def test_small_arrays_are_updated_by_mxnet(monkeypatch, counted):
    monkeypatch.setattr(updates, "_LEAST", 2**10)
    weights = [nd.ones((size,)) for size in (64, 2**10, 64)]
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    with amp.autocast("bfloat16"):
        gradients = [nd.ones((weight.size,)) for weight in weights]
        mx.optimizer.get_updater(optimizer)([0, 1, 2], gradients, weights)
    assert [weight.size for weight in counted] == [2**10] and optimizer.num_update == 1
    assert all((weight.asnumpy() == 0.5).all() for weight in weights)


def trained(policy, steps=4):
    """Weights, and outputs in between, of a small network trained with a pass of inference a step."""
    mx.random.seed(3)
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, 3, in_channels=16), nn.BatchNorm(), nn.Activation("relu"),
        nn.Conv2D(32, 1, groups=16), nn.Dense(5),
    )  # fmt: skip
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    seen = []
    with amp.autocast(policy=policy):
        amp.init_trainer(trainer)
        for step in range(steps):
            x = randn(4, 16, 6, 6, seed=step)
            with autograd.record():
                loss = (net(x) ** 2).mean()
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(1)
            seen.append(net(x))
    seen += [p.data() for p in net.collect_params().values()]
    return [values(a) for a in seen]


def test_training_with_inference_between_steps(counted):
    found = trained(B)
    assert counted
    assert all(same(mine, theirs) for mine, theirs in zip(found, trained(PLAIN)))


def test_overflow_still_skips_the_step(counted):
    net = nn.Dense(2, in_units=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    with amp.autocast("bfloat16"):
        amp.init_trainer(trainer)
        before = values(net.weight.data())
        with autograd.record():
            loss = net(nd.ones((1, 3))).sum() * float("inf")
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
    assert not counted
    assert same(values(net.weight.data()), before)


def test_the_number_of_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads() == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert threads() >= 1


BATCH_SIZES = {
    "mx.np": lambda: mx.np.array(4.0), "mx.nd": lambda: nd.array([4]), "np.int64": lambda: np.int64(4),
    "np.float32": lambda: np.float32(4), "np.array": lambda: np.array(4.0),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["scale_loss", "GradScaler", "decorate", "plain"])
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_a_batch_size_may_be_an_array(batch_size, optimizer, way, dtype):
    if batch_size == "mx.np":
        mx.npx.set_np()
    if (batch_size, way) == ("mx.nd", "plain") and (dtype == "float16" or optimizer == "rmsprop"):
        pytest.skip("MXNet's own operators take no such array")
    found = []
    for number in (4, BATCH_SIZES[batch_size]()):
        amp.init(dtype, ctx=mx.cpu())
        net = gluon.nn.Dense(2, in_units=3)
        net.initialize(mx.init.One())
        given = mx.optimizer.create(optimizer, learning_rate=0.1)
        given = amp.decorate(given, init_loss_scaling=16) if way == "decorate" else given
        trainer = gluon.Trainer(net.collect_params(), given)
        if way == "scale_loss":
            amp.init_trainer(trainer, amp.StaticLossScaler(16))
        scaler = amp.GradScaler(init_scale=16) if way == "GradScaler" else None
        data = (mx.np if mx.util.is_np_array() else nd).ones((4, 3))
        for step in (trainer.step, trainer.update):
            with autograd.record():
                loss = (net(data) ** 2).sum()
            if way == "scale_loss":
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
                step(number)
            elif scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(trainer, number)
                scaler.update()
            else:
                loss.backward()
                step(number)
        found.append(net.weight.data().asnumpy())
        amp.shutdown()
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert found[0].max() < 1
