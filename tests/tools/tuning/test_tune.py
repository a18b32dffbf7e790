"""`tune` finds the layers that were planted, keeps to its budget, and says what it found."""

import itertools
import math
import os
import random
import signal

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from planted import chain

import mxamp as amp
from helpers import ROOT, initialized, operators_of, sequential
from mxamp.convert.blocks import trace
from mxamp.tools.tuning import forms
from mxamp.tools.tuning import tune as module
from mxamp.tools.tuning.tune import smallest_set
from tuned import TUNING

KERNELS = not amp.Policy.default("bfloat16", "cpu").rule("Convolution").no_kernel
LOSS = mx.gluon.loss.L2Loss()
KINDS = {"overflow": "float16", "cancellation": "bfloat16"}


def tuned(net, data, loss=None, budget=120, timed=False, **options):
    return amp.tune(net, data, loss, budget=budget, timed=timed, **options)


def dense(units, inputs, prefix="small_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Dense(units, in_units=inputs), nn.Dense(units, in_units=units))
    net.initialize(mx.init.Xavier())
    return net


def small():
    return dense(3, 6), mx.nd.random.normal(shape=(5, 6))


# ---------------------------------------------------------------------- the search


@pytest.mark.parametrize("n", [1, 10, 37, 200])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_bisection_finds_the_bad_ones_alone(n, k):
    names = [str(i) for i in range(n)]
    for seed in range(20):
        bad, asked = frozenset(random.Random(seed).sample(names, min(k, n))), []
        found = smallest_set(lambda kept, a=asked, b=bad: a.append(kept) or b <= kept, names)
        assert found == bad
        assert len(asked) <= len(bad) * (math.log2(n) + 4) + 1


@pytest.mark.parametrize("seed", range(10))
def test_no_layer_can_be_taken_away_where_errors_add_up(seed):
    generator = random.Random(seed)
    errors = {str(i): generator.random() ** 3 for i in range(9)}

    def works(kept):
        return sum(error for name, error in errors.items() if name not in kept) <= 1

    found = smallest_set(works, sorted(errors, key=lambda name: -errors[name]))
    fewer = map(frozenset, itertools.combinations(errors, len(found) - 1)) if found else ()
    assert works(found) and not any(map(works, fewer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers, bad", [(11, [0, 9]), (30, [7, 8]), (60, [])])
def test_planted_layers_are_found_and_they_alone(kind, layers, bad):
    net, data, names = chain(layers, bad, kind)
    tuning = tuned(net, data, target_dtype=KINDS[kind])
    assert set(tuning.kept) == names
    assert tuning.complete
    assert tuning.error <= 0.05
    if not bad:
        assert tuning.policy == amp.Policy.default(KINDS[kind])


def test_gradients_count_in_training(monkeypatch):
    net, data, _ = chain(3, [], "overflow")
    batch = data, mx.nd.zeros_like(data)
    tuning = tuned(net, batch, LOSS, target_dtype="float16")
    assert tuning.way == "autocast" and 0 < tuning.gradient_error <= 0.5
    monkeypatch.setattr(module, "GRADIENTS", tuning.gradient_error / 1e3)
    assert not tuned(net, batch, LOSS, target_dtype="float16").policy.lowers


def test_dropout_and_norms_without_gradients_do_not_count():
    layers = nn.Dense(6, in_units=6), nn.BatchNorm(in_channels=6), nn.Dropout(0.5)
    net = sequential(*layers, init=mx.init.Xavier())
    data = mx.nd.random.normal(shape=(32, 6))
    tuning = tuned(net, (data, data), LOSS, target_dtype="bfloat16")
    assert tuning.policy.lowers and tuning.gradient_error < 0.1 and tuning.error < 0.1


def test_a_metric_in_place_of_a_tolerance():
    net, data, names = chain(10, [4], "overflow")
    labels = mx.nd.array(np.argmax(net(data).asnumpy(), axis=1))

    def accuracy(label, prediction):
        assert prediction.dtype == np.float32
        return float((prediction.argmax(1) == label).mean())

    metric = mx.metric.Accuracy()
    for one, least in ((accuracy, 1.0), (metric, None)):
        batches = [(data, labels)] * 2
        tuning = tuned(net, batches, target_dtype="float16", metric=one, min_metric=least)
        assert set(tuning.kept) == names and tuning.metric == 1.0
        assert f"Tuned for inference, with a metric from {least or 0.99:g}." in str(tuning)
    assert metric.num_inst == 0


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_that_is_all_wrong_is_not_hidden_by_larger_ones(training):
    # float16 takes the second batch's outputs for zero.
    net = initialized(nn.Dense(1, in_units=2, use_bias=False, prefix="difference_"))
    net.weight.set_data(mx.nd.array([[1, -1]]))
    batches = [mx.nd.array([[100, 0]] * 4), mx.nd.array([[1.0002, 1]] * 4)]
    data = [(batch, mx.nd.zeros((4, 1))) for batch in batches] if training else batches
    tuning = tuned(net, data, LOSS if training else None, target_dtype="float16", rtol=0.01)
    assert tuning.error <= 0.01 and not tuning.policy.lowers


# ---------------------------------------------------------------------- timing


def test_the_forms_are_timed_and_the_fastest_accurate_one_wins(monkeypatch):
    net, data = dense(64, 64), mx.nd.random.normal(shape=(64, 64))
    speeds = {"plain": 4.0, "autocast": 4.0, "converted": 3.0, "fused": 2.0, "openvino": 5.0}
    monkeypatch.setattr(forms.Form, "mean_seconds", lambda self, _=1: speeds[self.way])
    tuning = amp.tune(net, data, target_dtype="bfloat16")
    rows = [one for one in tuning.timings if one.way != "openvino"]
    assert [(one.way, one.precision, one.speedup) for one in rows] == [
        ("plain", "float32", 1.0), *[("converted", "bfloat16", 4 / 3)] * KERNELS,
        ("autocast", "float32", 1.0), ("fused", "float32", 2.0), *[("fused", "bfloat16", 2.0)] * KERNELS,
    ]  # fmt: skip
    assert tuning.way == "fused" and tuning.convert_options["fuse"]
    assert tuning.chosen.error == tuning.error
    speeds.update(converted=3.95, fused=5.0)
    tuning = amp.tune(net, data, target_dtype="bfloat16")
    assert tuning.way == "plain" and not tuning.policy.lowers and not tuning.policy.substitutions
    assert "run the model as it is" in str(tuning)
    speeds["autocast"] = 2.0
    tuning = amp.tune(net, (data, mx.nd.zeros((64, 64))), LOSS, target_dtype="bfloat16")
    assert [one.way for one in tuning.timings] == ["plain", *["autocast"] * (KERNELS + 1)]
    assert tuning.way == tuning.timings[-1].way and "Tuned for training" in str(tuning)


@pytest.mark.parametrize("layer", [nn.Dense(4, in_units=4), nn.HybridLambda("exp")])
def test_a_model_that_stays_plain_is_not_advised_to_fuse(monkeypatch, layer, caplog):
    net, data = initialized(layer), mx.nd.ones((2, 4))
    speeds = {"plain": 1.0}
    monkeypatch.setattr(forms.Form, "mean_seconds", lambda self, _=1: speeds.get(self.way, 2.0))
    tuning = amp.tune(net, data, target_dtype="float32")
    assert tuning.way == "plain" and len(tuning.timings) > 2
    plain = {"policy": tuning.policy, **tuning.convert_options}
    amp.convert_hybrid_block(net, example_inputs=data, **plain)
    assert "fuse=True" not in caplog.text


class InOpenVINO:
    """A stand-in for a model in OpenVINO, which may not be installed."""

    precision = "float32"

    def __init__(self, block, *_):
        self.block = block

    def __call__(self, *inputs):
        return [self.block(*inputs)]


@pytest.mark.parametrize("own", ["fused", "autocast", "plain"])
def test_where_openvino_wins_the_best_form_in_mxnet_is_named_beside_it(monkeypatch, tmp_path, own):
    net, data = dense(64, 64), mx.nd.random.normal(shape=(64, 64))
    speeds = {"openvino": 1.0, own: 2.0, "plain": 4.0}
    monkeypatch.setattr(forms, "OpenVINO", InOpenVINO)
    monkeypatch.setattr(forms.Form, "mean_seconds", lambda self, _=1: speeds.get(self.way, 5.0))
    tuning = amp.tune(net, data, target_dtype="float32")
    assert tuning.way == tuning.chosen.way == "openvino" and tuning.chosen.speedup == 4
    assert {one.precision for one in tuning.timings} == {tuning.policy.target_dtype} == {"float32"}
    assert not {"converted", "bfloat16"} & {*str(tuning).split()} and not tuning.kept
    assert tuning.in_mxnet.way == own and tuning.in_mxnet.speedup == 4 / speeds[own]
    _, first, second, *_ = str(tuning).splitlines()
    assert first.startswith("Chosen: openvino in float32, 4 times") and "`export_onnx`" in first
    how = {"fused": "with `fuse=True`", "autocast": "call `init(policy", "plain": "float32. "}
    assert second.startswith(f"The fastest in MXNet: {own} in float32") and how[own] in second
    tuning.save(tmp_path / "p.toml")
    assert f'\nform = "{own}"\n' in (tmp_path / "p.toml").read_text()
    assert (amp.Policy.load(tmp_path / "p.toml") == tuning.policy) and not tuning.policy.lowers
    assert bool(tuning.policy.substitutions) == (own != "plain")
    given = {"policy": tuning.policy, **tuning.convert_options}
    fast = amp.convert_hybrid_block(net, example_inputs=data, **given)
    operators = operators_of(trace(fast).symbol)
    assert ("_sg_mkldnn_fully_connected" in operators) == (own == "fused")


# ---------------------------------------------------------------------- bounds


def test_a_budget_that_is_too_short_gives_float32():
    net, data, _ = chain(30, [4], "overflow")
    tuning = tuned(net, data, target_dtype="float16", budget=1e-6)
    assert not tuning.policy.lowers and not tuning.complete and "`budget`" in str(tuning)


@pytest.mark.parametrize("after", [3, 8])
def test_ctrl_c_gives_the_best_so_far(monkeypatch, after):
    net, data, names = chain(40, [10, 30], "overflow")
    errors, calls = forms.Model.measure, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGINT)
        return errors(self, *arguments)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(forms.Model, "measure", interrupted)
        tuning = tuned(net, data, target_dtype="float16")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not tuning.complete and "Ctrl-C" in str(tuning)
    assert not tuning.policy.lowers or set(tuning.kept) >= names
    assert amp.current_policy() is None and len(calls) <= after


class Eager(mx.gluon.Block):
    def forward(self, x):
        return x * float(x.sum().asscalar())


HALF = nn.Dense(3, in_units=6)
HALF.cast("float16")


@pytest.mark.parametrize("change, words", [
    ({"rtol": 0}, "`rtol` must be a positive"),
    ({"min_metric": 0.5}, "`min_metric` needs a `metric`"),
    ({"metric": "acc", "loss": LOSS}, "without a loss"), ({"metric": "acc"}, "for a loss or metric, label last"),
    ({"metric": "mse"}, "more is better"), ({"budget": 0}, "`budget` must be"),
    ({"net": 3}, "a saved model must be"),
    ({"data": (mx.nd.ones((5, 6)), np.ones((5, 3))), "loss": LOSS}, r"NDArrays, not an ndarray of shape \(5, 3\)"),
    ({"data": np.ones((5, 6))}, r"must hold NDArrays, not an ndarray of shape \(5, 6\) in float64: write mx"),
    ({"net": Eager()}, "can't be traced"), ({"data": [mx.nd.ones((5, 6)), mx.nd.ones((5, 7))]}, "does not run on this"),
    ({"net": HALF}, "is in float16: give the float32 model, or convert this one to float32"),
    ({"policy": amp.Policy.default("float16", "gpu"), "timed": True}, "policy for the gpu, data on cpu.* float16 with `timed=False`"),
])  # fmt: skip
def test_wrong_arguments(change, words):
    net, data = small()
    given = {"net": net, "data": data, "loss": None, **change}
    with pytest.raises(amp.ArgumentError, match=words):
        tuned(given.pop("net"), given.pop("data"), given.pop("loss"), **given)


def test_float32_models_that_are_no_baseline():
    net, data = small()
    with pytest.raises(amp.StateError, match=r"`min_metric` 0\.5: the float32 model itself has 0"):
        tuned(net, (data, mx.nd.full(5, 7)), metric="acc", min_metric=0.5)
    net[1].bias.set_data(mx.nd.full(3, math.inf))
    with pytest.raises(amp.StateError, match="gives Inf or NaN"):
        tuned(net, data)


def test_float16_on_a_cpu_is_not_timed_and_many_batches_are_cut():
    net, data = small()
    tuning = amp.tune(net, (data for _ in itertools.count()), target_dtype="float16")
    assert "Nothing was timed" in str(tuning) and tuning.policy.lowers and not tuning.timings


# ---------------------------------------------------------------------- the result


def test_the_report_and_the_file_hold_the_measurements_and_the_policy(tmp_path):
    for part in ("One & only.", "milliseconds", "fused", "2.1", "0.004", "(1.8, 2.0)"):
        assert part in str(TUNING)
    TUNING.save(tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert '\nform = "fused"\n' in text and "# One & only." in text
    assert amp.Policy.load(tmp_path / "p.toml") is TUNING.policy


@pytest.mark.parametrize("whole", [False, True])
def test_the_form_of_a_policy_file_is_none_of_the_policy(tmp_path, whole):
    path = ROOT / "lists" / "bfloat16.toml" if whole else tmp_path / "p.toml"
    if not whole:
        TUNING.policy.save(path)
    text, before, path = path.read_text(), amp.Policy.load(path), tmp_path / "p.toml"
    path.write_text(f'form = "fused"\n{text}')
    assert amp.Policy.load(path) is before
    path.write_text(f"form = 1\n{text}")
    with pytest.raises(amp.ArgumentError, match="form must be a string, not 1"):
        amp.Policy.load(path)


def test_patterns_hold_for_another_block_of_the_kind():
    net, data, _ = chain(6, [2], "overflow")
    policy = tuned(net, data, target_dtype="float16").policy
    assert set(policy.fp32_layers) == {"*layer2_fwd", "*layer3_fwd"}


@pytest.mark.parametrize("label, metric, said", [
    (mx.nd.full(5, np.nan), "acc", "metric accuracy: a label holds NaN or infinity"),
    (mx.nd.one_hot(mx.nd.arange(5) % 2, 2), "acc", "metric accuracy: labels must be class numbers"),
    (mx.nd.zeros((5, 2)), "acc", "metric accuracy: labels must be class numbers"),
    (mx.nd.zeros(5), lambda label, output: label[7], "index 7 is out of bounds"),
    (mx.nd.zeros(5), "perplexity", "metric 'perplexity' can't be made by name"),
])  # fmt: skip
def test_metrics_and_labels_that_do_not_fit(label, metric, said):
    net = initialized(nn.Dense(2, in_units=3))
    with pytest.raises(amp.ArgumentError, match=said):
        amp.tune(net, [(mx.nd.ones((5, 3)), label)], metric=metric)


def test_accuracy_of_a_net_that_returns_class_numbers_but_not_of_one_score():
    label = mx.nd.array([0, 1, 1, 1])
    outputs = {"classes": np.array([0, 1, 0, 1.0]), "scores": np.array([0.1, 0.9, 0.2, 0.8])}
    assert forms.metric_of(mx.metric.Accuracy(), [label], [[outputs["classes"]]]) == 0.75
    with pytest.raises(amp.ArgumentError, match="outputs of the labels' shape too"):
        forms.metric_of(mx.metric.Accuracy(), [label], [[outputs["scores"]]])
