"""`tune` finds the layers that were planted, keeps to its budget, and says what it found."""

import itertools
import logging
import math
import os
import signal

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from planted import chain

import mxamp as amp
from mxamp.policy.layers import exactly
from mxamp.tools.tuning.accuracy import Accuracy, Tolerance
from mxamp.tools.tuning.deadline import Deadline, seconds_of
from mxamp.tools.tuning.subject import Subject

KINDS = {"overflow": "float16", "cancellation": "bfloat16"}


def tuned(net, data, loss=None, budget=120, timed=False, **options):
    return amp.tune(net, data, loss, budget=budget, timed=timed, progress=False, **options)


def kept(policy):
    return {layer.name for layer in policy.evidence.layers if layer.kept}


def small(prefix="small_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(5, 6))


# ---------------------------------------------------------------------- planted layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layers, bad",
    [
        (10, [4]),
        (10, [0]),
        (11, [0, 9]),
        (30, [7, 8]),
        (30, [28]),
        pytest.param(60, [3, 40], marks=pytest.mark.slow),
        pytest.param(100, [0, 98], marks=pytest.mark.slow),
        pytest.param(200, [57], marks=pytest.mark.slow),
        pytest.param(200, [101, 102], marks=pytest.mark.slow),
    ],
)
def test_planted_layers_are_found_and_they_alone(kind, layers, bad):
    net, data, names = chain(layers, bad, kind)
    policy = tuned(net, data, target_dtype=KINDS[kind])
    assert kept(policy) == names
    assert policy.evidence.complete
    assert any("no smaller set" in note for note in policy.evidence.notes)
    count = len(names)
    assert policy.evidence.evaluations <= 4 * math.log2(layers) + 4 * count
    with amp.autocast(policy=policy):
        net.hybridize()
        outputs = net(data)
    with amp.autocast(enabled=False):
        plain = net(data)
    error = np.linalg.norm((outputs - plain).asnumpy()) / np.linalg.norm(plain.asnumpy())
    assert error <= 0.05
    assert error == pytest.approx(policy.evidence.error, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_where_nothing_is_broken(kind):
    net, data, _ = chain(12, [], kind)
    policy = tuned(net, data, target_dtype=KINDS[kind])
    assert not kept(policy)
    assert policy.evidence.evaluations == 1
    assert policy.with_evidence(None) == amp.Policy.default(KINDS[kind])


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_set_is_as_small_as_brute_force_finds(seed):
    # Errors that add up: no layer is bad, and few may be in low precision together.
    net, data, _ = chain(5, [], "cancellation", seed=seed)
    names = [f"net_layer{i}_fwd" for i in range(5)]
    base = amp.Policy.default("bfloat16")
    accuracy = Accuracy(
        Subject(net, data, None, labelled=False), "bfloat16", Tolerance(), Deadline(100), 0
    )

    def error(some):
        return accuracy.of(base.override(fp32_layers=[exactly(name) for name in some])).error

    every = {some: error(some) for size in range(6) for some in itertools.combinations(names, size)}
    sizes = set()
    for rtol in (0.001, 0.003, 0.004, 0.005):
        least = min(len(some) for some, found in every.items() if found <= rtol)
        policy = tuned(net, data, target_dtype="bfloat16", rtol=rtol)
        assert policy.evidence.error <= rtol
        # With all of them in float32 it is a policy for that.
        assert len(kept(policy)) == (least if policy.lowers else 0)
        assert policy.lowers == (least < 5)
        sizes.add(least)
    assert len(sizes) > 2


def test_gradients_count_in_training():
    # In float16 this loss is fine, and its gradient with respect to the first layer is lost.
    net, data, _ = chain(12, [], "overflow")
    net[5].weight.set_data(net[5].weight.data() * 3e-5)
    net[6].weight.set_data(net[6].weight.data() / 3e-5)
    loss = mx.gluon.loss.L2Loss()
    policy = tuned(net, (data, mx.nd.zeros_like(data)), loss, target_dtype="float16")
    assert policy.evidence.mode == "training"
    assert policy.evidence.gradient_error <= 0.5
    with amp.autocast(policy=policy), autograd.record():
        net.hybridize()
        found = loss(net(data), mx.nd.zeros_like(data))
    found.backward()
    assert np.isfinite(net[0].weight.grad().asnumpy()).all()


def test_the_same_seed_gives_the_same_layers():
    net, data, _ = chain(6, [], "cancellation")
    sets = [
        kept(tuned(net, data, target_dtype="bfloat16", rtol=0.003, seed=seed)) for seed in (7, 7)
    ]
    assert sets[0] == sets[1]
    assert sets[0]


def test_nodes_of_one_name_are_one_layer():
    layer = nn.Dense(8, in_units=8, prefix="twice_")
    layer.initialize(mx.init.Xavier())

    class Net(nn.HybridBlock):
        def hybrid_forward(self, F, x):  # noqa: N803
            return layer(F.relu(layer(x)))

    net = Net(prefix="net_")
    net.register_child(layer)
    policy = tuned(net, mx.nd.random.normal(shape=(4, 8)), target_dtype="float16")
    names = [one.name for one in policy.evidence.layers]
    assert names.count("twice_fwd") == 1


# ---------------------------------------------------------------------- what is measured against


def test_a_metric_in_place_of_a_tolerance():
    net, data, names = chain(10, [4], "overflow")
    labels = mx.nd.array(np.argmax(net(data).asnumpy(), axis=1))
    seen = []

    def accuracy(label, prediction):
        seen.append(prediction.dtype)
        return float((prediction.argmax(1) == label).mean())

    policy = tuned(net, (data, labels), target_dtype="float16", metric=accuracy, min_metric=1.0)
    assert kept(policy) == names
    assert policy.evidence.metric == 1.0
    assert set(seen) == {np.dtype("float32")}
    metric = mx.metric.Accuracy()
    again = tuned(net, [(data, labels)] * 2, target_dtype="float16", metric=metric)
    assert kept(again) == names
    assert metric.num_inst == 0


def test_no_policy_is_better_than_float32():
    net, data = small()
    labels = mx.nd.full(5, 7)
    with pytest.raises(amp.StateError, match=r"min_metric=0\.5: the float32 model itself has 0"):
        tuned(net, (data, labels), metric="acc", min_metric=0.5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_float32_model_that_is_not_finite_is_an_error(value):
    net, data = small()
    net[1].bias.set_data(mx.nd.full(3, value))
    with pytest.raises(amp.StateError, match="in float32 already, 15 elements of its outputs"):
        tuned(net, data)


def test_an_unstable_model_is_an_error():
    net, data, _ = chain(8, [], "cancellation")
    for layer in net:
        layer.weight.set_data(layer.weight.data() * 1e4)

    class Chaotic(nn.HybridBlock):
        def hybrid_forward(self, F, x):  # noqa: N803
            return F.sin(net(x))

    chaotic = Chaotic()
    chaotic.register_child(net)
    with pytest.raises(amp.StateError, match="its outputs change by"):
        tuned(chaotic, data)
    net, data = small()
    with pytest.raises(amp.StateError, match="or an `rtol` of"):
        tuned(net, data, rtol=1e-8)


def test_gradients_that_float32_does_not_know_are_left_out():
    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.dense = nn.Dense(6, in_units=6)
                self.norm = nn.BatchNorm(in_channels=6)

        def hybrid_forward(self, F, x):  # noqa: N803
            return self.norm(self.dense(x))

    net = Net()
    net.initialize(mx.init.Xavier())
    data = mx.nd.random.normal(shape=(32, 6))
    policy = tuned(net, (data, data), mx.gluon.loss.L1Loss(), target_dtype="bfloat16")
    # A bias before a BatchNorm has no gradient but rounding errors.
    [note] = [note for note in policy.evidence.notes if "could not be compared" in note]
    assert "bias" in note


# ---------------------------------------------------------------------- bounds


def test_a_budget_that_is_too_short_gives_float32():
    net, data, _ = chain(30, [4], "overflow")
    policy = tuned(net, data, target_dtype="float16", budget=1e-6)
    assert not policy.lowers
    assert not policy.evidence.complete
    assert any("budget" in note for note in policy.evidence.notes)


@pytest.mark.parametrize("after", [3, 5])
def test_ctrl_c_gives_the_best_so_far(monkeypatch, after):
    net, data, names = chain(40, [10, 30], "overflow")
    of, calls = Accuracy.of, []

    def interrupted(self, policy, block=None, forced=False):
        calls.append(policy)
        if len(calls) == after:
            raise KeyboardInterrupt
        return of(self, policy, block, forced)

    monkeypatch.setattr(Accuracy, "of", interrupted)
    policy = tuned(net, data, target_dtype="float16")
    assert not policy.evidence.complete
    assert any("Ctrl-C" in note for note in policy.evidence.notes)
    assert not policy.lowers or kept(policy) >= names
    assert amp.current_policy() is None


def test_a_signal_ends_it_between_two_measurements(monkeypatch):
    net, data, names = chain(40, [10, 30], "overflow")
    of, calls = Accuracy.of, []

    def signalled(self, policy, block=None, forced=False):
        calls.append(policy)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return of(self, policy, block, forced)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(Accuracy, "of", signalled)
        policy = tuned(net, data, target_dtype="float16")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not policy.evidence.complete
    assert any("Ctrl-C" in note for note in policy.evidence.notes)
    assert not policy.lowers or kept(policy) >= names
    assert len(calls) < 8


def test_what_the_caller_holds_stays_as_it_is():
    net, data = small()
    net.hybridize()
    labels = mx.nd.zeros(5)
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    with autograd.record():
        loss(net(data), labels).backward()
    params = net.collect_params().values()
    before = [(p.data().asnumpy(), p.grad().asnumpy()) for p in params]
    graph, op = net._cached_graph, net._cached_op
    mx.random.seed(3)
    expected = mx.nd.random.normal(shape=(2,)).asnumpy()
    mx.random.seed(3)
    np.random.seed(3)
    drawn = np.random.RandomState(3).rand()
    tuned(net, (data, labels), loss, timed=True, budget=20)
    assert np.array_equal(mx.nd.random.normal(shape=(2,)).asnumpy(), expected)
    assert np.random.rand() == drawn
    assert (net._cached_graph, net._cached_op) == (graph, op)
    for (data_before, grad_before), param in zip(before, params):
        assert np.array_equal(param.data().asnumpy(), data_before)
        assert np.array_equal(param.grad().asnumpy(), grad_before)


def test_other_modes_around_it_do_not_matter():
    net, data, names = chain(10, [4], "overflow")
    amp.init("bfloat16")
    with amp.autocast("float16"):
        policy = tuned(net, data, target_dtype="float16")
    assert kept(policy) == names
    assert amp.current_policy().target_dtype == "bfloat16"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mode": "serving"}, "mode must be 'inference' or 'training'"),
        ({"mode": "training"}, "give the loss"),
        ({"mode": "inference", "loss": mx.gluon.loss.L2Loss()}, "leave one of the two out"),
        ({"rtol": 0}, "`rtol` must be a positive finite number"),
        ({"min_metric": 0.5}, "give the metric too"),
        ({"metric": "no such metric"}, "metric must be a metric of MXNet's"),
        ({"metric": "acc", "min_metric": "high"}, "min_metric must be a number"),
        ({"metric": "acc", "loss": mx.gluon.loss.L2Loss()}, "asks for training"),
        ({"budget": "soon"}, "`budget` must be"),
        ({"budget": 0}, "`budget` must be"),
        ({"budget": True}, "`budget` must be"),
        ({"target_dtype": "int8"}, "target dtype must be"),
        ({"net": 3}, "the model must be a Block"),
        ({"data": []}, "no batch"),
        ({"metric": "acc"}, "with a loss, a batch is a tuple"),
        ({"metric": "mse"}, "of the metric 'mse' less is better"),
        ({"metric": mx.metric.CrossEntropy()}, "less is better"),
        ({"data": {"data": mx.nd.ones((2, 6))}}, "can't be traced on this data"),
        ({"policy": "fast"}, "policy must be"),
        (
            {"policy": amp.Policy.default("float16", "gpu")},
            "is for the gpu, and the data is on cpu",
        ),
        ({"policy": amp.Policy.default("bfloat16").in_float32()}, "computes all in float32"),
        ({"seed": -1}, "seed must be"),
        ({"seed": "a"}, "seed must be"),
        ({"data": mx.nd.ones((2, 5))}, "does not run on this data"),
    ],
)
def test_wrong_arguments(change, message):
    net, data = small()
    given = {"net": net, "data": data, "loss": None, **change}
    with pytest.raises(amp.ArgumentError, match=message):
        tuned(given.pop("net"), given.pop("data"), given.pop("loss"), **given)


def test_a_block_that_can_not_be_traced():
    class Eager(mx.gluon.Block):
        def forward(self, x):
            return x * float(x.sum().asscalar())

    with pytest.raises(amp.ArgumentError, match="can't be traced"):
        tuned(Eager(), mx.nd.ones((2, 2)))


@pytest.mark.parametrize(
    "budget, seconds", [("90s", 90), ("1.5m", 90), ("2h", 7200), (" 30 ", 30), (0.5, 0.5)]
)
def test_budgets(budget, seconds):
    assert seconds_of(budget) == seconds


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_model_of_another_dtype_is_an_error(dtype):
    net, data = small()
    net.cast(dtype)
    with pytest.raises(amp.ArgumentError, match=f"tune takes a float32 model.* is {dtype}"):
        tuned(net, data.astype(dtype))


def test_a_metric_without_a_value_is_an_error():
    net, data = small()
    with pytest.raises(amp.StateError, match="metric of the float32 model is nan"):
        tuned(net, (data, mx.nd.zeros(5)), metric=lambda _label, _prediction: math.nan)


def difference():
    """A net, and batches of which float16 takes the second's outputs for zero."""
    net = nn.Dense(1, in_units=2, use_bias=False, prefix="difference_")
    net.initialize()
    net.weight.set_data(mx.nd.array([[1, -1]]))
    return net, [mx.nd.array([[100, 0]] * 4), mx.nd.array([[1.0002, 1]] * 4)]


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_that_is_all_wrong_is_not_hidden_by_larger_ones(training):
    net, batches = difference()
    data = [(batch, mx.nd.zeros((4, 1))) for batch in batches] if training else batches
    loss = mx.gluon.loss.L2Loss() if training else None
    subject = Subject(net, data, loss, labelled=training)
    accuracy = Accuracy(subject, "float16", Tolerance(rtol=0.01), Deadline(100), 0)
    verdict = accuracy.of(amp.Policy.default("float16"))
    assert verdict.error == 1 and not verdict.within
    assert verdict.gradient_error == (1 if training else None)
    policy = tuned(net, data, loss, target_dtype="float16", rtol=0.01)
    assert policy.evidence.error <= 0.01
    with amp.autocast(policy=policy):
        found = net(batches[1]).asnumpy()
    assert found == pytest.approx(2e-4, rel=1e-2)


def test_batches_without_a_gradient_say_nothing_of_it():
    # The first batch is cut off by relu in float32, and rounding lets a little of it through.
    net = nn.Dense(1, in_units=2, use_bias=False, activation="relu", prefix="cut_")
    net.initialize()
    net.weight.set_data(mx.nd.array([[1.0006, -1]]))
    batches = [mx.nd.array([[1.0006, 1.0014]]), mx.nd.array([[3.001, 1]])]
    data = [(batch, mx.nd.zeros((1, 1))) for batch in batches]
    subject = Subject(net, data, lambda output, label: output + 0 * label, labelled=True)
    accuracy = Accuracy(subject, "float16", Tolerance(), Deadline(100), 0)
    verdict = accuracy.of(amp.Policy.default("float16"))
    assert verdict.error == 1
    assert 0 < verdict.gradient_error < 0.01


def test_batches_of_other_shapes_are_an_error():
    net, data = small()
    with pytest.raises(amp.ArgumentError, match="does not run on this data"):
        tuned(net, [data, mx.nd.ones((5, 7))])


@pytest.mark.parametrize("training", [False, True])
def test_costs_are_those_of_layers_alone(training):
    class Net(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.conv = nn.Conv2D(8, 3, in_channels=4)
                self.norm = nn.BatchNorm(in_channels=8)
                self.dense = nn.Dense(5, in_units=72)

        def hybrid_forward(self, F, x):  # noqa: N803
            x = F.Pooling(self.norm(self.conv(x)), kernel=(2, 2), stride=(2, 2), pool_type="max")
            return self.dense(F.Dropout(x, p=0.5))

    net = Net()
    net.initialize(mx.init.Xavier())
    net(mx.nd.ones((1, 4, 8, 8)))
    net.norm.running_var.set_data(mx.nd.full(8, 1e-2))
    data, labels = mx.nd.random.normal(shape=(16, 4, 8, 8)), mx.nd.zeros((16, 5))
    arguments = ((data, labels), mx.gluon.loss.L2Loss()) if training else (data,)
    policies = [tuned(net, *arguments, target_dtype="float16") for _ in range(2)]
    layers, again = (policy.evidence.layers for policy in policies)
    assert [one.error for one in layers] == [one.error for one in again]
    assert {one.gain for one in layers} == {None}  # nothing was timed
    total = math.sqrt(sum(layer.error**2 for layer in layers))
    assert 0.4 < total / policies[0].evidence.error < 2.5
    # Each alone, with all others kept in float32.
    accuracy = Accuracy(
        Subject(net, *(arguments if training else (data, None)), labelled=training),
        "float16", Tolerance(), Deadline(100), 0,
    )  # fmt: skip
    for layer in layers:
        if layer.operator in ("Convolution", "FullyConnected"):
            others = [exactly(one.name) for one in layers if one.name != layer.name]
            alone = accuracy.of(amp.Policy.default("float16").override(fp32_layers=others)).error
            assert 0.3 < layer.error / alone < 3


def test_batches_beyond_the_first_are_counted_out():
    net, data = small()
    policy = tuned(net, (data for _ in range(40)))
    assert any("first 16 batches" in note for note in policy.evidence.notes)


def test_it_says_why_nothing_was_timed(caplog):
    net, data = small()
    caplog.set_level(logging.INFO, "mxamp")
    policy = amp.tune(net, data, target_dtype="float16", progress=False)
    assert "accuracy alone" in str(policy.evidence)
    assert policy.lowers
    assert not policy.evidence.trials
