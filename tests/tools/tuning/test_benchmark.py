"""`benchmark` times a block in both precisions, leaves it as it was, and says what to do."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from helpers import backpropagate, initialized
from models import model
from mxamp.framework.patching import _stacks
from mxamp.policy.active import current_policy
from mxamp.tools.tuning import benchmark as module
from mxamp.tools.tuning import forms
from mxamp.tools.tuning.benchmark import Benchmark
from mxamp.tools.tuning.forms import Timing
from nets import perceptron
from tuned import benchmarked, small_net


def test_it_times_training_and_inference_in_each_form(monkeypatch):
    times, tasks = {("training", "float16"): (5.0, 5.1, 4.9)}, iter(["training", "inference"])

    def made_up(group, *_):
        task = next(tasks)
        for form in group:
            form.seconds = [one / 1e3 for one in times.get((task, form.precision), [10.0] * 3)]
        return group

    monkeypatch.setattr(module, "time_in_turns", made_up)
    net, data = small_net()
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    found = benchmarked(net, (data, mx.nd.zeros(6)), loss, dtype="float16")
    rows = [t for t in found.timings if t.way != "openvino"]
    assert [(t.task, t.way, t.precision, t.speedup) for t in rows] == [
        ("training", "plain", "float32", 1.0), ("training", "autocast", "float32", 1.0),
        ("training", "autocast", "float16", 2.0),
        ("inference", "plain", "float32", 1.0), ("inference", "autocast", "float32", 1.0),
        ("inference", "autocast", "float16", 1.0), ("inference", "fused", "float32", 1.0),
        ("inference", "converted", "float16", 1.0),
    ]  # fmt: skip
    assert [t.error is None for t in rows] == [True] * 3 + [False] * 5
    assert 0 == rows[3].error <= rows[5].error < 0.05
    assert "float16 trains this model 2 times as fast as float32. float32 with" in str(found)
    assert "\nerror: the largest relative error of an output" in str(found)


NOTHING_LOWERED = "In bfloat16 every layer of this model stays in float32"


@pytest.mark.parametrize("dtype, features, said", [
    ("bfloat16", ("avx512", "avx512_bf16"), NOTHING_LOWERED), ("bfloat16", ("avx512",), NOTHING_LOWERED),
    (None, (), "only float32 was tried"),
])  # fmt: skip
def test_a_dtype_that_lowers_nothing_is_not_timed(on_machine, dtype, features, said, caplog):
    on_machine(features=features)
    found = amp.benchmark(*small_net(), target_dtype=dtype, budget=0.01)
    assert found.dtype == (dtype or "float32")
    assert said in str(found)
    assert {t.precision for t in found.timings} == {"float32"}
    # Nothing is slow where nothing runs in bfloat16.
    assert all(one.name == "mxamp.progress" for one in caplog.records)


def test_no_form_is_tried_long_after_the_budget(monkeypatch):
    monkeypatch.setattr(forms, "GRACE", -1)
    found = benchmarked(*small_net(), dtype="float16")
    assert {t.way for t in found.timings} == {"plain"}
    assert "converted in float16 was not timed: the `budget` is over" in found.summary()
    assert module.NOT_PAID not in found.summary()


def state_of(net):
    params = net.collect_params().values()
    arrays = [p.data() for p in params] + [p.grad() for p in params if p.grad_req != "null"]
    graphs = [(b._active, b._cached_op, b._cached_graph) for b in [net, *net]]
    others = [a._fresh_grad for a in arrays], [p._trainer for p in params], graphs
    return [a.asnumpy() for a in arrays], others


@pytest.mark.parametrize("hybridized", [False, True])
def test_the_net_is_left_as_it_was(hybridized):
    net, data = small_net()
    if hybridized:
        net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    backpropagate(lambda: net(data).sum())
    before, numpy = state_of(net), np.random.get_state()[1].copy()
    benchmarked(net, data)
    assert current_policy() is None and not _stacks
    labeled = data, mx.nd.zeros((6, 2))
    amp.tune(net, labeled, gluon.loss.L2Loss(), target_dtype="float16", budget=5)
    after = state_of(net)
    assert all(map(np.array_equal, before[0], after[0])) and before[1] == after[1]
    assert np.array_equal(numpy, np.random.get_state()[1]) and current_policy() is None
    amp.shutdown()
    trainer.step(1)


@pytest.mark.parametrize("on", [False, True])
def test_each_step_sees_its_policy_its_mode_and_whether_autograd_records(on):
    net, data = small_net()
    seen = set()

    class Probe(nn.HybridSequential):
        def __call__(self, x):
            policy = current_policy()
            seen.add((policy and policy.target_dtype, self._active, autograd.is_training()))
            return super().__call__(x)

    probe = Probe()
    probe.add(net)
    with amp.autocast("bfloat16", enabled=on):
        benchmarked(probe, data, dtype="float16")
    assert seen >= {(d, True, t) for d in (None, "float32", "float16") for t in (False, True)}


def test_nets_that_do_not_train_or_hybridize():
    net, data = small_net()
    net.collect_params().setattr("grad_req", "null")
    assert {t.task for t in benchmarked(net, data).timings} == {"inference"}
    python = nn.HybridLambda(lambda F, x: x * x.shape[0])  # symbols have no shape
    for dtype in ("float32", "float16"):
        found = benchmarked(python, data, dtype=dtype)
        rows = [(t.way, t.precision) for t in found.timings]
        assert rows == [("plain", "float32"), ("autocast", dtype)]
        assert "can't be traced" in found.summary()


def test_a_saved_model_always_runs_its_graph():
    _, data, triple, _, _ = model(perceptron)
    ways = [t.way for t in benchmarked(triple, {"data": data[0]}).timings if t.way != "openvino"]
    assert ways[-1] == "fused"


def test_numpy_arrays():
    mx.npx.set_np()
    net = initialized(mx.gluon.nn.Dense(2, in_units=3))
    found = amp.benchmark(net, mx.np.ones((4, 3)), target_dtype="float16", budget=0.1)
    assert {one.task for one in found.timings} == {"training", "inference"}


# ---------------------------------------------------------------------- the sentence


def report(*speeds, ways=("autocast", "autocast", "fused", "openvino")):
    tasks = ["training"] * (len(ways) - 3) + ["inference"] * 3
    timings = [
        Timing(task, way, "bfloat16", 10 / (sum(pair) / 2), sum(pair) / 2, pair)
        for task, way, pair in zip(tasks, ways, speeds)
    ]
    return Benchmark("bfloat16", tuple(timings)).summary()


@pytest.mark.parametrize("speeds, said", [
    (((1.7, 1.9), (2.0, 2.2)), "trains this model 1.8 times as fast as float32, and runs it 2.1 times as fast."),
    (((0.98, 1.02), (0.8, 1.4)), "trains this model as fast as float32, and runs it 0.80 to 1.40 times as fast, too noisy"),
    (((1.7, 1.7), (0.8, 0.8)), "trains this model 1.7 times as fast as float32 in one round, which is too few"),
    (((0.5, 0.6), (0.9, 0.95), (0.8, 0.85)), "Run this model in plain MXNet"),
    (((1.7, 1.9), (1.5, 1.6), (2.0, 2.2)),
     "runs it 1.6 times as fast. For serving, convert the model with `fuse=True` and hybridize(static_alloc=True, static_shape=True): "
     "it then runs 2.1 times as fast."),
])  # fmt: skip
def test_the_sentence(speeds, said):
    assert said in report(*speeds)


def test_the_fastest_way_alone_is_recommended():
    said = report((1.5, 1.6), (1.4, 1.8), (2.0, 2.2), ways=("autocast", "fused", "openvino"))
    assert "export the model by `export_onnx`, and run it on OpenVINO in bfloat16 (" in said
    assert "fuse=True" in report((1.7, 1.9), (1.5, 1.6), (2.0, 2.2), (2.05, 2.2))
    assert "OpenVINO" in report((1.7, 1.9), (1.5, 1.6), (2.0, 2.2), (2.2, 2.3))
    assert "convert" not in report((1.7, 1.9), (1.5, 1.6), (1.4, 1.8))
    assert "convert" not in report((1.7, 1.9), (0.5, 0.6), (0.9, 1.1))
