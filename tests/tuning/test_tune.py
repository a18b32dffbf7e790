"""`tune` finds the layers that were planted, keeps to its budget, and says what it found."""

import itertools
import math
import os
import signal
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from planted import chain

import mxamp as amp
from mxamp.policy.overrides import exact_pattern
from mxamp.tools.tuning.accuracy import Accuracy, Subject, Tolerance
from mxamp.tools.tuning.deadline import Deadline, seconds_of
from mxamp.tools.tuning.tune import Tuner

KINDS = {"overflow": "float16", "cancellation": "bfloat16"}


def tuned(net, data, loss=None, budget=120, timed=False, **options):
    return amp.tune(net, data, loss, budget=budget, timed=timed, progress=False, **options)


def accuracy_of(net, data, loss=None, dtype="float16", rtol=None):
    subject = Subject(net, data, loss, labelled=loss is not None)
    return Accuracy(subject, dtype, Tolerance(rtol=rtol), Deadline(100), 0)


def kept(tuning):
    return {layer.name for layer in tuning.layers if layer.kept}


def small(prefix="small_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(8, activation="relu", in_units=6), nn.Dense(3, in_units=8))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(5, 6))


# ---------------------------------------------------------------------- planted layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers, bad", [
    (10, [4]), (10, [0]), (11, [0, 9]), (30, [7, 8]), (30, [28]),
    pytest.param(60, [3, 40], marks=pytest.mark.slow), pytest.param(100, [0, 98], marks=pytest.mark.slow),
    pytest.param(200, [101, 102], marks=pytest.mark.slow),
])  # fmt: skip
def test_planted_layers_are_found_and_they_alone(kind, layers, bad):
    net, data, names = chain(layers, bad, kind)
    tuning = tuned(net, data, target_dtype=KINDS[kind])
    assert kept(tuning) == names
    assert tuning.complete
    assert any("no smaller set" in note for note in tuning.notes)
    count = len(names)
    assert tuning.evaluations <= 4 * math.log2(layers) + 4 * count
    with amp.autocast(policy=tuning.policy):
        net.hybridize()
        outputs = net(data)
    with amp.autocast(enabled=False):
        plain = net(data)
    error = np.linalg.norm((outputs - plain).asnumpy()) / np.linalg.norm(plain.asnumpy())
    assert error <= 0.05
    assert error == pytest.approx(tuning.error, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_where_nothing_is_broken(kind):
    net, data, _ = chain(12, [], kind)
    tuning = tuned(net, data, target_dtype=KINDS[kind])
    assert not kept(tuning)
    assert tuning.evaluations == 1
    assert tuning.policy == amp.Policy.default(KINDS[kind])


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_set_is_as_small_as_brute_force_finds(seed):
    # Errors that add up: no layer is bad, and few may be in low precision together.
    net, data, _ = chain(5, [], "cancellation", seed=seed)
    names = [f"net_layer{i}_fwd" for i in range(5)]
    base = amp.Policy.default("bfloat16")
    accuracy = accuracy_of(net, data, dtype="bfloat16")

    def error(some):
        return accuracy.measure(
            base.override(fp32_layers=[exact_pattern(name) for name in some])
        ).error

    every = {some: error(some) for size in range(6) for some in itertools.combinations(names, size)}
    sizes = set()
    for rtol in (0.001, 0.003, 0.004, 0.005):
        least = min(len(some) for some, found in every.items() if found <= rtol)
        tuning = tuned(net, data, target_dtype="bfloat16", rtol=rtol)
        assert tuning.error <= rtol
        # With all of them in float32 it is a policy for that.
        assert len(kept(tuning)) == (least if tuning.policy.lowers else 0)
        assert tuning.policy.lowers == (least < 5)
        sizes.add(least)
    assert len(sizes) > 2


def test_gradients_count_in_training():
    # In float16 this loss is fine, and its gradient with respect to the first layer is lost.
    net, data, _ = chain(12, [], "overflow")
    net[5].weight.set_data(net[5].weight.data() * 3e-5)
    net[6].weight.set_data(net[6].weight.data() / 3e-5)
    loss = mx.gluon.loss.L2Loss()
    tuning = tuned(net, (data, mx.nd.zeros_like(data)), loss, target_dtype="float16")
    assert tuning.mode == "training"
    assert tuning.gradient_error <= 0.5
    with amp.autocast(policy=tuning.policy), autograd.record():
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
    tuning = tuned(net, mx.nd.random.normal(shape=(4, 8)), target_dtype="float16")
    names = [one.name for one in tuning.layers]
    assert names.count("twice_fwd") == 1


# ---------------------------------------------------------------------- what is measured against


def test_a_metric_in_place_of_a_tolerance():
    net, data, names = chain(10, [4], "overflow")
    labels = mx.nd.array(np.argmax(net(data).asnumpy(), axis=1))
    seen = []

    def accuracy(label, prediction):
        seen.append(prediction.dtype)
        return float((prediction.argmax(1) == label).mean())

    tuning = tuned(net, (data, labels), target_dtype="float16", metric=accuracy, min_metric=1.0)
    assert kept(tuning) == names
    assert tuning.metric == 1.0
    assert set(seen) == {np.dtype("float32")}
    metric = mx.metric.Accuracy()
    again = tuned(net, [(data, labels)] * 2, target_dtype="float16", metric=metric)
    assert kept(again) == names
    assert metric.num_inst == 0


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
    tuning = tuned(net, (data, data), mx.gluon.loss.L1Loss(), target_dtype="bfloat16")
    # A bias before a BatchNorm has no gradient but rounding errors.
    [note] = [note for note in tuning.notes if "could not be compared" in note]
    assert "bias" in note


# ---------------------------------------------------------------------- bounds


def test_a_budget_that_is_too_short_gives_float32():
    net, data, _ = chain(30, [4], "overflow")
    tuning = tuned(net, data, target_dtype="float16", budget=1e-6)
    assert not tuning.policy.lowers
    assert not tuning.complete
    assert any("budget" in note for note in tuning.notes)


def raised():
    raise KeyboardInterrupt


def signalled():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("after, interrupt", [(3, raised), (5, raised), (4, signalled)])
def test_ctrl_c_gives_the_best_so_far(monkeypatch, after, interrupt):
    net, data, names = chain(40, [10, 30], "overflow")
    of, calls = Accuracy.measure, []

    def interrupted(self, policy, block=None):
        calls.append(policy)
        if len(calls) == after:
            interrupt()
        return of(self, policy, block)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(Accuracy, "measure", interrupted)
        tuning = tuned(net, data, target_dtype="float16")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not tuning.complete and any("Ctrl-C" in note for note in tuning.notes)
    assert not tuning.policy.lowers or kept(tuning) >= names
    assert amp.current_policy() is None and len(calls) < after + 4


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
        tuning = tuned(net, data, target_dtype="float16")
    assert kept(tuning) == names
    assert amp.current_policy().target_dtype == "bfloat16"


class Eager(mx.gluon.Block):
    def forward(self, x):
        return x * float(x.sum().asscalar())


X = mx.nd.ones((5, 6))
LOSS = mx.gluon.loss.L2Loss()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rtol": 0}, "`rtol` must be a positive"),
        ({"min_metric": 0.5}, "give the metric too"), ({"metric": "no such metric"}, "unknown metric"), ({"metric": 3}, "metric must be a metric of"),
        ({"metric": "acc", "min_metric": "high"}, "min_metric must be a number"),
        ({"metric": "acc", "loss": LOSS}, "asks for training"), ({"metric": "acc"}, "with a loss, a batch is a tuple"),
        ({"metric": "mse"}, "'mse' less is better"), ({"metric": mx.metric.CrossEntropy()}, "less is better"),
        ({"budget": "soon"}, "`budget` must be"), ({"budget": 0}, "`budget` must be"), ({"budget": True}, "`budget` must be"),
        ({"target_dtype": "int8"}, "target dtype must be"), ({"net": 3}, "the model must be a Block"),
        ({"net": Eager()}, "can't be traced"), ({"data": []}, "no batch"), ({"data": {"data": X}}, "does not run on this batch of 1 array: "),
        ({"data": X[:, :5]}, "does not run on this data"), ({"data": [X, mx.nd.ones((5, 7))]}, "does not run on this"),
        ({"policy": "fast"}, "policy must be"), ({"loss": "bfloat16"}, "loss must be a function of .*, not .bfloat16"), ({"seed": -1}, "seed must be"), ({"seed": "a"}, "seed must be"),
        ({"policy": amp.Policy.default("float16", "gpu")}, "is for the gpu, and the data is on cpu"),
        ({"policy": amp.Policy.default("bfloat16").in_float32()}, "computes all in float32"),
    ],
)  # fmt: skip
def test_wrong_arguments(change, words):
    net, data = small()
    given = {"net": net, "data": data, "loss": None, **change}
    with pytest.raises(amp.ArgumentError, match=words):
        tuned(given.pop("net"), given.pop("data"), given.pop("loss"), **given)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_model_of_another_dtype_is_an_error(dtype):
    net, data = small()
    net.cast(dtype)
    with pytest.raises(amp.ArgumentError, match=f"must be in float32, .* is {dtype}"):
        tuned(net, data.astype(dtype))


@pytest.mark.parametrize("bias, labels, options, words", [
    (math.inf, None, {}, "15 elements of output 0"), (math.nan, None, {}, "15 elements of output 0"),
    (0, None, {"rtol": 1e-8}, "or an `rtol` of"),
    (0, mx.nd.full(5, 7), {"metric": "acc", "min_metric": 0.5}, r"min_metric=0\.5: the float32 model itself has 0"),
    (0, mx.nd.zeros(5), {"metric": lambda _label, _prediction: math.nan}, "metric of the float32 model is nan"),
])  # fmt: skip
def test_float32_models_that_are_no_baseline(bias, labels, options, words):
    net, data = small()
    net[1].bias.set_data(mx.nd.full(3, bias))
    with pytest.raises(amp.StateError, match=words):
        tuned(net, data if labels is None else (data, labels), **options)


def test_an_unstable_model_is_an_error():
    net, data, _ = chain(8, [], "cancellation")
    for layer in net:
        layer.weight.set_data(layer.weight.data() * 1e4)
    net.add(nn.HybridLambda("sin"))
    with pytest.raises(amp.StateError, match="its outputs change by"):
        tuned(net, data)


def test_notes_say_what_was_left_out():
    net, data = small()
    tuning = amp.tune(net, (data for _ in range(40)), target_dtype="float16", progress=False)
    assert "first 16 batches" in str(tuning) and "float16 on a CPU" in str(tuning)
    assert tuning.policy.lowers and not tuning.trials


@pytest.mark.parametrize(
    "budget, seconds", [("90s", 90), ("1.5m", 90), ("2h", 7200), (" 30 ", 30), (0.5, 0.5)]
)
def test_budgets(budget, seconds):
    assert seconds_of(budget) == seconds


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
    verdict = accuracy_of(net, data, loss, rtol=0.01).measure(amp.Policy.default("float16"))
    assert verdict.error == 1 and not verdict.within
    assert verdict.gradient_error == (1 if training else None)
    tuning = tuned(net, data, loss, target_dtype="float16", rtol=0.01)
    assert tuning.error <= 0.01
    with amp.autocast(policy=tuning.policy):
        found = net(batches[1]).asnumpy()
    assert found == pytest.approx(2e-4, rel=1e-2)


def test_batches_without_a_gradient_say_nothing_of_it():
    # The first batch is cut off by relu in float32, and rounding lets a little of it through.
    net = nn.Dense(1, in_units=2, use_bias=False, activation="relu", prefix="cut_")
    net.initialize()
    net.weight.set_data(mx.nd.array([[1.0006, -1]]))
    batches = [mx.nd.array([[1.0006, 1.0014]]), mx.nd.array([[3.001, 1]])]
    data = [(batch, mx.nd.zeros((1, 1))) for batch in batches]
    accuracy = accuracy_of(net, data, lambda output, label: output + 0 * label)
    verdict = accuracy.measure(amp.Policy.default("float16"))
    assert verdict.error == 1
    assert 0 < verdict.gradient_error < 0.01


def test_gradients_that_are_zero_in_float32_are_not_compared():
    net, data = small()
    assert not accuracy_of(net, (data, data), lambda output, _: output[:, :1], "bfloat16").unknown
    accuracy = accuracy_of(net, (data, data), lambda output, _: output * 0, "bfloat16")
    assert sorted(accuracy.unknown) == sorted(net.collect_params())
    assert "4 gradients could not be compared" in accuracy.notes()[0]


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
    tunings = [tuned(net, *arguments, target_dtype="float16") for _ in range(2)]
    layers, again = (tuning.layers for tuning in tunings)
    assert [one.error for one in layers] == [one.error for one in again]
    assert {one.gain for one in layers} == {None}  # nothing was timed
    total = math.sqrt(sum(layer.error**2 for layer in layers))
    assert 0.4 < total / tunings[0].error < 2.5
    # Each alone, with all others kept in float32.
    accuracy = accuracy_of(net, *arguments)
    for layer in layers:
        if layer.operator in ("Convolution", "FullyConnected"):
            others = [exact_pattern(one.name) for one in layers if one.name != layer.name]
            alone = accuracy.measure(
                amp.Policy.default("float16").override(fp32_layers=others)
            ).error
            assert 0.3 < layer.error / alone < 3


def test_notes_name_what_exported_files_lack_and_operators_that_sort_boxes():
    def notes(way, substitutions, operators):
        tuner = SimpleNamespace(
            notes=[], timed=True, substitutions=substitutions,
            base=amp.Policy.default("bfloat16"), deadline=SimpleNamespace(complete=True),
            race=None, subject=SimpleNamespace(graph=SimpleNamespace(operators=operators)),
            accuracy=SimpleNamespace(
                notes=list, tolerance=SimpleNamespace(rtol=None), plain=SimpleNamespace(metric=None)
            ),
        )  # fmt: skip
        return " ".join(Tuner._notes(tuner, way, tuner.base))

    assert "operators in place of mean, relu: load" in notes("converted", ("mean", "relu"), set())
    assert "operators in place of mean: load" in notes("fused", ("mean", "relu"), set())
    assert "static_shape=True" in notes("fused", ("relu",), set())
    assert "in place of" not in notes("autocast", ("mean",), set())
    assert "in place of" not in notes("converted", (), set())
    assert "_contrib_box_nms selects and sorts boxes" in notes("plain", (), {"_contrib_box_nms"})
