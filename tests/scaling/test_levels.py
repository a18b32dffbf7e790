"""Trainer states move between optimization levels, both dtypes, plain trainers and `init_trainer`.

"contrib" is a script of mxnet.contrib.amp that casts its net and has `multi_precision=True`: its
files hold master weights inside the states.
"""

import itertools
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import mxamp as amp
from helpers import initialized, randn, scaled_backward, sequential, with_avx512
from training import run_backward

#: Ways to train, and the dtype that each is meant for.
WAYS = ["plain", "init_trainer float16", "init_trainer bfloat16"] + [
    f"{level} {dtype}" for level in ("O0", "O1", "O2", "O3") for dtype in ("float16", "bfloat16")
]
OPTIMIZERS = {
    "momentum": ("sgd", {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01, "epsilon": 1e-3}),
    "plain sgd": ("sgd", {"learning_rate": 0.05}),
    "nag": ("nag", {"learning_rate": 0.05, "momentum": 0.9}),
}
CASES = [*itertools.product(WAYS, WAYS, ("momentum", "adam"))]
CASES += itertools.product(
    ["plain", "O2 float16", "O3 float16"], ["O0 float16", "O2 float16"], ("plain sgd", "nag")
)
CASES += [
    pair
    for way in WAYS
    for optimizer in ("momentum", "adam", "plain sgd")
    for pair in (("contrib", way, optimizer), (way, "contrib", optimizer))
    if pair[:2] != ("contrib", "plain")  # plain MXNet does not drop master weights
]
DATA, LABELS = randn(16, 12), randn(16, 3, seed=1)
LOSS = gluon.loss.L2Loss()


class Run:
    """A small net and its trainer, trained one way."""

    def __init__(self, way, optimizer, load=None):
        mx.random.seed(0)
        layers = (
            gluon.nn.Dense(8, activation="tanh", in_units=12),
            gluon.nn.LayerNorm(in_channels=8),
        )
        self.net = sequential(*layers, gluon.nn.Dense(3, in_units=8), init=mx.init.Xavier())
        name, settings = OPTIMIZERS[optimizer]
        if way == "contrib":
            self.net.cast("float16")
            settings = {**settings, "multi_precision": True}
        self.trainer = gluon.Trainer(self.net.collect_params(), name, dict(settings))
        self.scales = way != "plain"
        level, _, dtype = way.partition(" ")
        if level in ("init_trainer", "contrib"):
            amp.init(dtype or "float16", ctx=mx.cpu())
            amp.init_trainer(self.trainer, amp.StaticLossScaler(64))
        elif level != "plain":
            amp.initialize(self.net, self.trainer, level, loss_scale=64, dtype=dtype, ctx=mx.cpu())
        if load is not None:
            self.net.load_parameters(f"{load}.params", cast_dtype=True)
            self.trainer.load_states(f"{load}.states")

    def loss(self):
        data = DATA.astype(self.net[0].weight.dtype) if self.scales else DATA
        return LOSS(self.net(data).astype("float32"), LABELS)

    def train(self, steps):
        for _ in range(steps):
            run_backward(self.loss, self.trainer, "scale_loss" if self.scales else "plain")
            self.trainer.step(16)
        return self

    def save(self, path):
        self.net.save_parameters(f"{path}.params")
        self.trainer.save_states(f"{path}.states")

    def weights(self):
        params = self.net.collect_params().values()
        return np.concatenate([p.data().astype("float32").asnumpy().ravel() for p in params])


@pytest.fixture(scope="module")
def uninterrupted():
    return {name: Run("plain", name).train(6).weights() for name in OPTIMIZERS}


@with_avx512
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.matrix
@pytest.mark.parametrize("first, then, optimizer", CASES)
def test_three_more_steps_are_those_of_the_run_that_was_not_interrupted(
    first, then, optimizer, uninterrupted, tmp_path
):
    Run(first, optimizer).train(3).save(tmp_path / "net")
    amp.shutdown()
    weights = Run(then, optimizer, tmp_path / "net").train(3).weights()
    expected = uninterrupted[optimizer]
    error = np.linalg.norm(weights - expected) / np.linalg.norm(expected)
    assert error < 0.01


@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("first", ["plain", "O0 float16", "O2 float16", "contrib"])
@pytest.mark.parametrize("then", ["O0 float16", "O2 float16", "O3 float16", "init_trainer float16"])
def test_parameters_may_be_loaded_after_the_states(first, then, uninterrupted, tmp_path):
    Run(first, "momentum").train(3).save(tmp_path / "net")
    amp.shutdown()
    other = Run(then, "momentum", tmp_path / "net").train(3).weights()
    amp.shutdown()
    run = Run(then, "momentum")
    run.trainer.load_states(str(tmp_path / "net.states"))
    run.net.load_parameters(str(tmp_path / "net.params"), cast_dtype=True)
    weights, expected = run.train(3).weights(), uninterrupted["momentum"]
    assert (weights == other).all()
    assert np.linalg.norm(weights - expected) < 0.01 * np.linalg.norm(expected)


class Counting(mx.optimizer.Optimizer):
    """A custom optimizer that counts the states it makes, with a number in each."""

    made = 0

    def create_state(self, index, weight):
        self.made += 1
        return [0, mx.nd.zeros_like(weight), None]

    def update(self, index, weight, grad, state):
        state[0] += 1
        state[1][:] += grad


def described(state):
    """A state with the dtypes and sums of its arrays."""
    if isinstance(state, mx.nd.NDArray):
        return state.dtype, float(state.sum().asscalar())
    return type(state)(map(described, state)) if isinstance(state, (tuple, list)) else state


@pytest.mark.filterwarnings("ignore:Optimizer created manually")
@pytest.mark.parametrize("first, then", itertools.permutations(("O0", "O2"), 2))
def test_states_of_custom_optimizers(first, then, tmp_path, monkeypatch):
    """They are converted if a new state has their form, and kept as they are if not."""
    monkeypatch.setitem(OPTIMIZERS, "custom", (Counting(), {}))
    saved = Run(f"{first} float16", "custom").train(2)
    saved.save(tmp_path / "net")
    amp.shutdown()
    monkeypatch.setitem(OPTIMIZERS, "custom", (Counting(), {}))
    loaded = Run(f"{then} float16", "custom", tmp_path / "net")
    assert saved.trainer._optimizer.made == loaded.trainer._optimizer.made == 6
    for index, before in saved.trainer._updaters[0].states.items():
        after = loaded.trainer._updaters[0].states[index]
        half = loaded.trainer._params[index].dtype == "float16"
        assert isinstance(after, tuple) == half
        before, after = (one[1] if isinstance(one, tuple) else one for one in (before, after))
        assert after[0] == 2
        assert described(after) == described(before)


def losses_of(net, dtype):
    """Return the losses of a net on each of its devices."""
    devices = net.weight.list_ctx()
    outputs = [net(DATA.as_in_context(ctx).astype(dtype)).astype("float32") for ctx in devices]
    return [LOSS(out, LABELS.as_in_context(ctx)) for out, ctx in zip(outputs, devices)]


def test_each_device_has_its_own_master_weights(tmp_path):
    trainers = []
    for _ in range(2):
        net = gluon.nn.Dense(3, in_units=12)
        net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
        trainers.append(gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}))
        amp.initialize(net, trainers[-1], "O2", loss_scale=64, ctx=mx.cpu())
        if len(trainers) == 2:
            trainers[1].load_states(str(tmp_path / "states"))
        for _ in range(2):
            scaled_backward(partial(losses_of, net, "float16"), trainers[-1])
            trainers[-1].step(32)
        amp.shutdown()
        trainers[0].save_states(str(tmp_path / "states"))
        one, other = (w.asnumpy() for w in net.weight.list_data())
        assert (one == other).all()


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("order", ["parameters first", "states first"])
def test_a_plain_trainer_between_two_levels_makes_saved_master_weights_stale(
    optimizer, order, tmp_path
):
    Run("O2 float16", optimizer).train(3).save(tmp_path / "net")
    amp.shutdown()
    Run("plain", optimizer, tmp_path / "net").train(3).save(tmp_path / "net")
    if order == "parameters first":
        run = Run("O2 float16", optimizer, tmp_path / "net")
    else:
        run = Run("O2 float16", optimizer)
        run.trainer.load_states(str(tmp_path / "net.states"))
        run.net.load_parameters(str(tmp_path / "net.params"))
    weights = run.train(3).weights()
    before, expected = Run("plain", optimizer).train(6), Run("plain", optimizer).train(9).weights()
    step = np.linalg.norm(expected - before.weights())
    assert np.linalg.norm(weights - expected) < 0.05 * step


@pytest.mark.parametrize("first", ["init_trainer", "load_states"])
def test_devices_count_steps_alike_after_a_trainer_that_updates_on_its_kvstore(first, tmp_path):
    contexts, path = [mx.cpu(0), mx.cpu(1)], str(tmp_path / "states")

    def trained(options, load):
        net = initialized(gluon.nn.Dense(3, in_units=12), init=mx.init.One(), ctx=contexts)
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1}, **options)
        if load and first == "load_states":
            trainer.load_states(path)
        if load:
            amp.init_trainer(trainer, amp.StaticLossScaler(64))
        if load and first == "init_trainer":
            trainer.load_states(path)
        for _ in range(3):
            way = "scale_loss" if load else "plain"
            run_backward(partial(losses_of, net, "float32"), trainer, way)
            trainer.step(32)
        trainer.save_states(path)
        return [weight.asnumpy() for weight in net.weight.list_data()]

    trained({"update_on_kvstore": True}, load=False)
    amp.init("float16", ctx=mx.cpu())
    one, other = trained({"update_on_kvstore": False}, load=True)
    assert (one == other).all()
