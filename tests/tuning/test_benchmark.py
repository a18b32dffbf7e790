"""`benchmark` times a block in both precisions, leaves it as it was, and says what to do."""

import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from mxamp.framework.patching import patched
from mxamp.policy.active import current_policy
from mxamp.tools.tuning import benchmark as module
from mxamp.tools.tuning.benchmark import Benchmark, Timing
from mxamp.tools.tuning.turns import Timed

KERNELS = not amp.Policy.default("bfloat16", "cpu").rule("Convolution").missing


def small_net():
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4), nn.BatchNorm(in_channels=8), nn.Dropout(0.5), nn.Dense(2))
    net.initialize(mx.init.Xavier())
    return net, mx.nd.random.normal(shape=(6, 4))


def benchmarked(net, batch, *arguments, **options):
    return amp.benchmark(net, batch, *arguments, target_dtype="bfloat16", budget=0.01, **options)


@pytest.fixture
def clock(monkeypatch):
    """Make times up: milliseconds by task, mode and whether a policy is in force."""
    times, plain = {}, Timed.mean_seconds

    def turn(self, repeats=1):
        plain(self)
        return times.get(self.key, 10.0) / 1e3

    def keyed(groups, ends):
        for (task, mode), (plain, *lows) in zip(asked, groups):
            for way, name in zip((plain, *lows), ("float32", "low", "converted")):
                way.key = (task, mode, name)
        return time_in_turns(groups, ends)

    asked = [(task, mode) for task in ("training", "inference") for mode in ("eager", "hybridized")]
    time_in_turns = module.time_in_turns
    monkeypatch.setattr(Timed, "key", None, raising=False)
    monkeypatch.setattr(Timed, "mean_seconds", turn)
    monkeypatch.setattr(module, "time_in_turns", keyed)
    return times


def test_it_times_training_and_inference_in_both_modes(clock):
    clock.update({("training", "hybridized", "low"): 5, ("training", "eager", "low"): 20})
    net, data = small_net()
    found = benchmarked(net, (data, mx.nd.zeros(6)), gluon.loss.SoftmaxCrossEntropyLoss())
    assert [(t.task, t.mode, t.speedup) for t in found.timings] == [
        ("training", "eager", 0.5),
        ("training", "hybridized", 2.0),
        ("inference", "eager", 1.0),
        ("inference", "hybridized", 1.0),
        ("inference", "converted", 1.0),
    ][: 4 + KERNELS]
    assert found.dtype == "bfloat16"
    assert found.timings[1].low_ms == pytest.approx(5)
    assert "bfloat16 trains this model 2 times as fast as float32, and runs it as fast" in str(
        found
    )


def state_of(net):
    params = net.collect_params().values()
    arrays = [p.data() for p in params] + [p.grad() for p in params if p.grad_req != "null"]
    trainers = [p._trainer for p in params]
    blocks = [net, *net]
    graphs = [(b._active, b._cached_op, b._cached_graph) for b in blocks]
    return [a.asnumpy() for a in arrays], [a._fresh_grad for a in arrays], trainers, graphs


@pytest.mark.parametrize("hybridized", [False, True])
def test_the_net_is_left_as_it_was(hybridized):
    net, data = small_net()
    if hybridized:
        net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with autograd.record():
        loss = net(data).sum()
    loss.backward()
    before, numpy = state_of(net), np.random.get_state()[1].copy()
    benchmarked(net, data)
    after = state_of(net)
    for one, other in zip(before[0], after[0]):
        np.testing.assert_array_equal(one, other)
    assert before[1:] == after[1:]
    assert np.array_equal(numpy, np.random.get_state()[1])
    assert current_policy() is None and not patched()
    trainer.step(1)


def test_it_measures_what_it_says(monkeypatch):
    # Each step sees its policy, its mode, and whether autograd records.
    net, data = small_net()
    seen = set()

    class Probe(nn.HybridSequential):
        def __call__(self, x):
            policy = current_policy()
            seen.add((policy and policy.target_dtype, self._active, autograd.is_training()))
            return super().__call__(x)

    probe = Probe()
    probe.add(net)
    with amp.autocast("bfloat16"):
        benchmarked(probe, data)
    assert seen >= {
        (dtype, active, training)
        for dtype in (None, "bfloat16")
        for active in (False, True)
        for training in (False, True)
    }


def test_the_mode_inside_a_policy_that_is_on_is_still_float32():
    net, data = small_net()
    amp.init("bfloat16")
    try:
        found = benchmarked(net, data)
    finally:
        amp.shutdown()
    assert len(found.timings) == 4 + KERNELS


def test_nets_that_do_not_train_or_hybridize():
    net, data = small_net()
    net.collect_params().setattr("grad_req", "null")
    assert {t.task for t in benchmarked(net, data).timings} == {"inference"}

    python = nn.HybridLambda(lambda F, x: x * x.shape[0])  # symbols have no shape
    found = benchmarked(python, data)
    assert {t.mode for t in found.timings} == {"eager"}


def test_a_symbol_block_always_runs_its_graph(tmp_path):
    net, data = small_net()
    net.hybridize()
    net(data)
    net.export(str(tmp_path / "net"))
    files = (str(tmp_path / "net-symbol.json"), str(tmp_path / "net-0000.params"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet's, of types that it can't infer
        block = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    found = benchmarked(block, data)
    assert [t.mode for t in found.timings][-1] == ["hybridized", "converted"][KERNELS]


def test_the_converted_model_is_fused_and_leaves_out_what_can_not_be_converted(monkeypatch):
    net, data = small_net()
    made, convert = [], module.convert_hybrid_block

    def watched(*args, **options):
        made.append((options["fuse"], convert(*args, **options)))
        return made[-1][1]

    monkeypatch.setattr(module, "convert_hybrid_block", watched)
    benchmarked(net, data)
    amp.benchmark(net, data, target_dtype="float16", budget=0.01)
    # The fused kernels are oneDNN's.
    assert [fuse for fuse, _ in made] == [True] * KERNELS + [False]
    for (_, block), dtype in zip(reversed(made), (np.float16, amp.bfloat16)):
        assert dtype in {p.dtype for p in block.collect_params().values()}

    def fails(*_args, **_options):
        raise amp.ArgumentError("no")

    monkeypatch.setattr(module, "convert_hybrid_block", fails)
    assert "converted" not in {t.mode for t in benchmarked(net, data).timings}


# ---------------------------------------------------------------------- the sentence


def report(*speeds, dtype="bfloat16"):
    tasks = [("training", "hybridized"), ("inference", "hybridized"), ("inference", "converted")]
    timings = [
        Timing(*task, 10.0, 10 / (sum(pair) / 2), sum(pair) / 2, pair)
        for task, pair in zip(tasks, speeds)
    ]
    return Benchmark(dtype, tuple(timings)).summary()


@pytest.mark.parametrize(
    "speeds, said",
    [
        (((1.7, 1.9), (2.0, 2.2)),
         "bfloat16 trains this model 1.8 times as fast as float32, and runs it 2.1 times as fast."),
        (((0.98, 1.02), (0.8, 1.4)),
         "bfloat16 trains this model as fast as float32, and runs it 0.80 to 1.40 times as fast, "
         "too noisy to tell."),
        (((0.5, 0.6), (0.9, 0.95)), "Stay in float32 for this model"),
        (((1.7, 1.9), (0.9, 0.95), (1.3, 1.4)), "and runs it 0.93 times as fast. For serving, convert"),
        (((0.5, 0.6), (0.9, 0.95), (0.8, 0.85)), "Stay in float32 for this model"),
        (((1.7, 1.9), (1.5, 1.6), (2.0, 2.2)),
         "runs it 1.6 times as fast. For serving, convert the model with `fuse=True`: it then runs 2.1 times as fast."),
    ],
)  # fmt: skip
def test_the_sentence(speeds, said):
    assert said in report(*speeds)


def test_a_converted_model_that_is_no_faster_is_not_recommended():
    assert "convert" not in report((1.7, 1.9), (1.5, 1.6), (1.4, 1.8))
    assert "convert" not in report((1.7, 1.9), (0.5, 0.6), (0.9, 1.1))


# ---------------------------------------------------------------------- wrong calls


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda net, data: amp.benchmark(3, data), "must be a Block, or a saved one"),
        (lambda net, data: amp.benchmark(net, 3), "a batch is an NDArray"),
        (lambda net, data: amp.benchmark(net, (data, data)), "Without loss="),
        (lambda net, data: amp.benchmark(net, data, gluon.loss.L2Loss()), "inputs and the label"),
        (lambda net, data: amp.benchmark(net, mx.nd.ones((2, 5))), "does not run on this batch"),
        (lambda net, data: amp.benchmark(net, data, budget="soon"), "`budget` must be"),
        (lambda net, data: amp.benchmark(net, data, target_dtype="int8"), "'float16' or 'bfloat16'"),
    ],
)  # fmt: skip
def test_wrong_calls(call, said):
    net, data = small_net()
    with pytest.raises(amp.ArgumentError, match=said):
        call(net, data)
    assert not patched()


def test_a_model_in_half_precision_is_an_error():
    net, data = small_net()
    net.cast("float16")
    with pytest.raises(amp.ArgumentError, match="give a float32 model"):
        amp.benchmark(net, data)
