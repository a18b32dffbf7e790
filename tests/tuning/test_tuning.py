"""What `tune` returns: the report, and the tuned policy in use and in a file."""

import copy
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from planted import chain

import mxamp as amp
from mxamp.tools.tuning import accuracy
from mxamp.tools.tuning.accuracy import Accuracy
from mxamp.tools.tuning.tuning import LayerCost, machine_of
from tuned import NAN, PLAIN, TUNING

# ---------------------------------------------------------------------- the report


def test_a_tuning_is_a_value():
    for other in (copy.deepcopy(TUNING), pickle.loads(pickle.dumps(TUNING))):  # noqa: S301
        assert (other.policy, other.trials, str(other)) == (
            TUNING.policy,
            TUNING.trials,
            str(TUNING),
        )
    with pytest.raises(AttributeError):
        TUNING.error = 3


def test_the_ranking_is_by_error_then_by_gain():
    assert [layer.name for layer in TUNING.ranking] == ["d", "b<i>", "c", "a"]


def test_the_report_holds_all_numbers():
    first, *tables = str(TUNING).split("\n\n")
    for number in (" 0.01.", " 1.9 times", "2.1 ms", "0.05 ms", "2 layers", "12 operators", " 0.004.",
                   "0.91", "0.9.", "7 accuracy", "33.25 seconds", "seed 0", "ended early"):  # fmt: skip
        assert number in first
    assert [table.splitlines()[0] for table in tables] == [
        "Trials", "Layers, largest error first", "Machine", "Inputs", "Notes",
    ]  # fmt: skip
    assert [line.split()[0] for line in tables[1].splitlines()[2:]] == ["d", "b<i>", "c", "a"]
    assert "1x3x8x8" in tables[3]
    assert tables[4].endswith("One & only.")


def test_a_report_of_little():
    text = str(replace(TUNING, way="plain", chosen=PLAIN, error=0.0))
    assert "float32 as it is, 4 ms a run" in text
    layers = tuple(LayerCost(f"l{i}", "dot", False, i) for i in range(25))
    text = str(replace(
        TUNING, tolerance=None, metric=None, gradient_error=0.5, complete=True, notes=(), trials=(),
        chosen=None, layers=layers,
    ))  # fmt: skip
    assert "of a gradient 0.5." in text and "float32: 0 layers" in text
    assert "first 20 of 25" in text and "l24" in text and "l4 " not in text
    assert not any(word in text for word in ("metric", "Notes", "ended early", "Trials"))


def test_a_saved_tuning_is_a_policy_under_comments(tmp_path):
    path = tmp_path / "p.toml"
    odd = replace(TUNING, notes=("a\r\nb\x00",), inputs=(("in\nput\ud800", "float32", (1, 3)),))
    odd.save(path)
    assert amp.Policy.load(path) is TUNING.policy
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for words in ("1.9 times", "0.01", "cpu: Xeon", "threads: 2", "in put", "[1, 3]"):
        assert any(words in line for line in comments)
    names = dict(machine_of("cpu"))
    assert names["device"] == "cpu" and int(names["threads"]) > 0


@pytest.mark.parametrize("use", [
    lambda given: amp.init(policy=given), lambda given: amp.autocast(policy=given),
    lambda given: amp.explain(mx.sym.var("x") * 2, policy=given),
    lambda given: amp.tune(*chain(2, [], "overflow")[:2], policy=given),
])  # fmt: skip
def test_a_tuning_given_as_a_policy_is_an_error(use):
    with pytest.raises(amp.ArgumentError, match=r"tuning\.policy"):
        use(TUNING)


@pytest.mark.parametrize("way, cast, fused", [
    ("plain", False, False), ("autocast", False, False), ("converted", True, False), ("fused", True, True),
])  # fmt: skip
def test_models_are_converted_as_they_were_measured(way, cast, fused):
    net, data, _ = chain(2, [], "overflow")
    net.hybridize()
    net(data)
    tuning = replace(TUNING, way=way, policy=amp.Policy.default("bfloat16"))
    converted = amp.convert_hybrid_block(net, policy=tuning.policy, **tuning.convert_options)
    dtypes = {str(p.dtype) for p in converted.collect_params().values()}
    assert (dtypes != {"<class 'numpy.float32'>"}) == cast
    assert any(n.startswith("_sg") for n in converted._source.graph.operators) == fused


def test_layers_without_a_figure_have_none_in_plans():
    layers = (LayerCost("fc", "FullyConnected", True, NAN, 0.5),)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    plan = replace(TUNING, layers=layers).annotated(amp.explain(net, policy=TUNING.policy))
    assert (plan["fc"].error, plan["fc"].gain) == (None, 0.5)


# ---------------------------------------------------------------------- the policy in use


def tuned(net, data, dtype="float16"):
    return amp.tune(net, data, target_dtype=dtype, timed=False, progress=False)


def error(outputs, plain):
    difference = np.linalg.norm((outputs - plain).asnumpy())
    return difference / np.linalg.norm(plain.asnumpy())


@pytest.fixture(scope="module")
def planted():
    net, data, names = chain(8, [3], "overflow")
    return net, data, names, tuned(net, data), net(data)


@pytest.mark.parametrize("way", ["init", "autocast", "convert", "symbol", "files", "saved"])
def test_all_ways_of_use(planted, tmp_path, way):
    net, data, _, tuning, plain = planted
    policy = tuning.policy
    net.hybridize()
    if way == "saved":
        tuning.save(tmp_path / "policy.toml")
        policy = amp.Policy.load(tmp_path / "policy.toml")
        assert policy is tuning.policy
    if way in ("init", "saved"):
        amp.init(policy=policy)
        outputs = net(data)
        amp.shutdown()
    elif way == "autocast":
        with amp.autocast(policy=policy):
            outputs = net(data)
    elif way == "convert":
        outputs = amp.convert_hybrid_block(net, policy=policy, example_inputs=data)(data)
    else:
        net(data)
        net.export(str(tmp_path / "net"))
        if way == "files":
            amp.convert_files(tmp_path / "net", tmp_path / "low", policy=policy)
            symbol, args, auxs = mx.model.load_checkpoint(str(tmp_path / "low"), 0)
        else:
            symbol, args, auxs = mx.model.load_checkpoint(str(tmp_path / "net"), 0)
            amp.init(policy=policy)
        executor = symbol.bind(mx.cpu(), {**args, "data": data}, aux_states=auxs)
        [outputs] = executor.forward()
        amp.shutdown()
    assert error(outputs, plain) < 0.05


def test_training_and_changed_policies_keep_the_layers_too(planted):
    net, data, _, tuning, plain = planted
    net.hybridize()
    with amp.autocast(policy=tuning.policy), autograd.record():
        loss = net(data).sum()
    loss.backward()
    assert np.isfinite(net[0].weight.grad().asnumpy()).all()
    with amp.autocast(policy=tuning.policy.override(fp32=["relu"])):
        assert error(net(data), plain) < 0.05


def test_kept_layers_are_found_under_another_prefix(planted):
    net, data, names, tuning, plain = planted
    assert set(tuning.policy.fp32_layers) == {f"*{name[len('net_') :]}" for name in names}
    other = mx.gluon.nn.HybridSequential(prefix="other_")
    with other.name_scope():
        for i, layer in enumerate(net):
            other.add(mx.gluon.nn.Dense(16, use_bias=False, in_units=16, prefix=f"layer{i}_"))
            other[-1].initialize()
            other[-1].weight.set_data(layer.weight.data())
    other.hybridize()
    with amp.autocast(policy=tuning.policy):
        assert error(other(data), plain) < 0.05
    plan = amp.explain(other, policy=tuning.policy)
    in_float32 = {node.name for node in plan if node.precision == "float32"}
    assert in_float32 == {name.replace("net_", "other_") for name in names}


class Nested(mx.gluon.HybridBlock):
    """Blocks of which a relative pattern of one would fit the other's layer too."""

    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.large = mx.gluon.nn.Dense(16, in_units=16, use_bias=False, prefix="a_")
            self.small = mx.gluon.nn.Dense(16, in_units=16, use_bias=False, prefix="b_a_")

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.small(F.relu(self.large(x)) * 1e-6)


class Own(mx.gluon.HybridBlock):
    """A block whose own product overflows float16."""

    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.out = mx.gluon.nn.Dense(16, in_units=32, use_bias=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.out(F.dot(x, x, transpose_b=True) * 1e-7)


def test_names_that_a_pattern_would_not_tell_apart_are_full():
    net = Nested(prefix="net_")
    net.initialize(mx.init.One())
    net.large.weight.set_data(net.large.weight.data() * 1e6)
    tuning = tuned(net, mx.nd.ones((32, 16)))
    assert "net_a_fwd" in tuning.policy.fp32_layers and "*a_fwd" not in tuning.policy.fp32_layers
    net = Own(prefix="net_")
    net.initialize(mx.init.One())
    tuning = tuned(net, mx.nd.ones((32, 16)) * 100)
    assert tuning.policy.fp32_layers == ("net_dot0",)


class Loop(mx.gluon.HybridBlock):
    """Two layers in a loop, of which the first overflows float16."""

    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.large = mx.gluon.nn.Dense(6, in_units=6, use_bias=False)
            self.small = mx.gluon.nn.Dense(6, in_units=6, use_bias=False)

    def hybrid_forward(self, F, x):  # noqa: N803
        step = lambda data, state: (self.small(self.large(data)), state)  # noqa: E731
        outputs, _ = F.contrib.foreach(step, x, [F.zeros((1,))])
        return outputs


def test_layers_in_loops_are_kept_under_another_prefix():
    data = mx.nd.random.normal(shape=(3, 4, 6))

    def made(prefix):
        net = Loop(prefix=prefix)
        net.initialize(mx.init.One())
        net.large.weight.set_data(net.large.weight.data() * 1e6)
        net.small.weight.set_data(net.small.weight.data() * 1e-6)
        return net

    tuning = tuned(made("one_"), data)
    other = made("other_")
    plain = other(data)
    other.hybridize()
    with amp.autocast(policy=tuning.policy):
        assert error(other(data), plain) < 0.05
    converted = amp.convert_hybrid_block(other, policy=tuning.policy)
    assert error(converted(data), plain) < 0.05


@pytest.mark.parametrize("metric, least", [(0.8, 0.792), (-2.0, -2.02), (0.0, 0.0)])
def test_one_per_cent_of_a_metric_may_be_lost_by_default(metric, least):
    given = SimpleNamespace(tolerance=SimpleNamespace(min_metric=None))
    assert Accuracy._min_metric(given, metric) == pytest.approx(least)


@pytest.mark.parametrize(
    "metric, rtol, error, within",
    [
        (0.9, None, 0.5, True),
        (0.9, 0.1, 0.5, False),
        (0.9, 0.1, 0.05, True),
        (0.7, None, 0.0, False),
    ],
)
def test_a_metric_decides_with_an_rtol_only_if_one_is_given(metric, rtol, error, within):
    name = f"{accuracy._OUTPUT}0"
    stub = SimpleNamespace(
        tolerance=SimpleNamespace(rtol=rtol),
        min_metric=0.8,
        limits={name: rtol or math.inf} if rtol else {name: 0.01},
        subject=SimpleNamespace(training=False),
        _distances=lambda runs: {name: SimpleNamespace(relative=error, lost=0)},
        _metric_value=lambda runs: metric,
    )
    assert Accuracy._verdict_on(stub, []).within is within
