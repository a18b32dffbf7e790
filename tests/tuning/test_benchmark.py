"""`benchmark` times a block in both precisions, leaves it as it was, and says what to do."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import mxamp as amp
from mxamp.framework.patching import _stacks
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


def benchmarked(net, batch, *arguments, dtype="bfloat16"):
    return amp.benchmark(net, batch, *arguments, target_dtype=dtype, budget=0.01)


def test_it_times_training_and_inference_in_both_modes(monkeypatch):
    names = [(task, mode) for task in ("training", "inference") for mode in ("eager", "hybridized")]
    times = {("training", "hybridized"): 5.0, ("training", "eager"): 20.0}

    def made_up(groups, ends):
        for name, (plain, *lows) in zip(names, groups):
            plain.seconds = [0.01] * 3
            for low in lows:
                low.seconds = [times.get(name, 10.0) / 1e3] * 3

    monkeypatch.setattr(module, "time_in_turns", made_up)
    net, data = small_net()
    found = benchmarked(net, (data, mx.nd.zeros(6)), gluon.loss.SoftmaxCrossEntropyLoss())
    assert [(t.task, t.mode, t.speedup) for t in found.timings] == [
        ("training", "eager", 0.5), ("training", "hybridized", 2.0), ("inference", "eager", 1.0),
        ("inference", "hybridized", 1.0), *[("inference", "converted", 1.0)] * KERNELS,
    ]  # fmt: skip
    assert (found.dtype, found.timings[1].low_ms) == ("bfloat16", pytest.approx(5))
    said = "bfloat16 trains this model 2 times as fast as float32, and runs it as fast"
    assert said in str(found)


def test_ways_take_turns():
    order = []
    ways = [Timed(lambda name=name: order.append(name)) for name in ("plain", "low")]
    ways[0].mean_seconds = ways[1].mean_seconds = lambda repeats=1: 0.02
    module.time_in_turns([ways], 0)
    assert [len(way.seconds) for way in ways] == [3, 3]
    assert ways[1].measured(ways[0]) == (20, 1, (1, 1))


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
    with autograd.record():
        loss = net(data).sum()
    loss.backward()
    before, numpy = state_of(net), np.random.get_state()[1].copy()
    benchmarked(net, data)
    after = state_of(net)
    assert all(map(np.array_equal, before[0], after[0])) and before[1] == after[1]
    assert np.array_equal(numpy, np.random.get_state()[1])
    assert current_policy() is None and not _stacks
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
        benchmarked(probe, data)
    flags = False, True
    wanted = {(d, a, t) for d in (None, "bfloat16") for a in flags for t in flags}
    assert seen >= wanted


def test_nets_that_do_not_train_or_hybridize():
    net, data = small_net()
    net.collect_params().setattr("grad_req", "null")
    assert {t.task for t in benchmarked(net, data).timings} == {"inference"}
    python = nn.HybridLambda(lambda F, x: x * x.shape[0])  # symbols have no shape
    assert {t.mode for t in benchmarked(python, data).timings} == {"eager"}


def test_a_saved_model_always_runs_its_graph(tmp_path):
    net, data = small_net()
    net.hybridize()
    net(data)
    net.export(str(tmp_path / "net"))
    model = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
    found = benchmarked(model, {"data": data})
    assert [t.mode for t in found.timings][-1] == ["hybridized", "converted"][KERNELS]


def test_the_converted_model_is_fused_and_leaves_out_what_can_not_be_converted(monkeypatch):
    net, data = small_net()
    made, convert = [], module.convert_hybrid_block

    def watched(*args, **options):
        made.append(options["fuse"])
        return convert(*args, **options)

    monkeypatch.setattr(module, "convert_hybrid_block", watched)
    for dtype in ("bfloat16", "float16"):
        benchmarked(net, data, dtype=dtype)
    assert made == [True, False]  # the fused kernels are oneDNN's

    def fails(*_, **__):
        raise amp.ArgumentError("no")

    monkeypatch.setattr(module, "convert_hybrid_block", fails)
    assert "converted" not in {t.mode for t in benchmarked(net, data).timings}


# ---------------------------------------------------------------------- the sentence


def report(*speeds):
    tasks = [("training", "hybridized"), ("inference", "hybridized"), ("inference", "converted")]
    timings = [
        Timing(*task, 10.0, 10 / (sum(pair) / 2), sum(pair) / 2, pair)
        for task, pair in zip(tasks, speeds)
    ]
    return Benchmark("bfloat16", tuple(timings)).summary()


@pytest.mark.parametrize(
    "speeds, said",
    [
        (((1.7, 1.9), (2.0, 2.2)), "trains this model 1.8 times as fast as float32, and runs it 2.1 times as fast."),
        (((0.98, 1.02), (0.8, 1.4)), "trains this model as fast as float32, and runs it 0.80 to 1.40 times as fast, too noisy"),
        (((0.5, 0.6), (0.9, 0.95)), "Stay in float32 for this model"),
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


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda net, data: amp.benchmark(3, data), "must be a Block, or a saved one"),
        (lambda net, data: amp.benchmark(net, (data, data)), "only where a loss"),
        (lambda net, data: amp.benchmark(net, mx.nd.ones((2, 5))), "does not run on this batch"),
        (lambda net, data: amp.benchmark(net, data, budget="soon"), "`budget` must be"),
        (lambda net, data: amp.benchmark(net.cast("float16") or net, data), "give a float32 model"),
    ],
)  # fmt: skip
def test_wrong_calls(call, said):
    with pytest.raises(amp.ArgumentError, match=said):
        call(*small_net())
    assert not _stacks
