"""Tuned policies in use: with their model and another, here and elsewhere, saved and loaded."""

import logging
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from planted import chain

import mxamp as amp
from mxamp.framework.wording import counted
from mxamp.graph.ir import Graph
from mxamp.graph.recognise import fingerprint, recognised
from mxamp.policy.elsewhere import here
from tuned import EVIDENCE


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "mxamp")
    return caplog


def warnings_in(log):
    return [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]


def said(log, words):
    return [text for text in warnings_in(log) if words in text]


def tuned(net, data, dtype="float16"):
    return amp.tune(net, data, target_dtype=dtype, timed=False, progress=False)


def error(outputs, plain):
    difference = np.linalg.norm((outputs - plain).asnumpy())
    return difference / np.linalg.norm(plain.asnumpy())


@pytest.fixture(scope="module")
def planted():
    net, data, names = chain(8, [3], "overflow")
    return net, data, names, tuned(net, data), net(data)


def under_other_names(prefix):
    """The model of `planted` made anew, its layers called otherwise."""
    again, _, _ = chain(8, [3], "overflow")
    other = mx.gluon.nn.HybridSequential(prefix=prefix)
    with other.name_scope():
        for layer in again:
            other.add(mx.gluon.nn.Dense(16, use_bias=False, in_units=16))
            other[-1].initialize()
            other[-1].weight.set_data(layer.weight.data())
    other.hybridize()
    return other


# ---------------------------------------------------------------------- its own model


@pytest.mark.parametrize("way", ["init", "autocast", "convert", "symbol", "files", "saved policy"])
def test_all_ways_of_use(planted, tmp_path, log, way):
    net, data, _, policy, plain = planted
    net.hybridize()
    if way == "saved policy":
        policy.save(tmp_path / "policy.toml")
        assert amp.Policy.load(tmp_path / "policy.toml") == policy
        policy = amp.Policy.load(tmp_path / "policy.toml")
        way = "init"
    if way == "init":
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
    assert not said(log, "was tuned")


def test_the_same_model_under_other_names(planted, log):
    _, data, names, policy, plain = planted
    other = under_other_names("other_")
    with amp.autocast(policy=policy):
        assert error(other(data), plain) < 0.05
    fast = amp.convert_hybrid_block(other, policy=policy)
    assert error(fast(data), plain) < 0.05
    plan = amp.explain(other, policy=policy)
    in_float32 = {node.name for node in plan if node.precision == "float32"}
    assert len(in_float32) == len(names) == 2
    assert not in_float32 & names
    assert not said(log, "was tuned")


@pytest.mark.parametrize("way", ["override", "without evidence, named alike"])
def test_a_policy_that_was_changed_knows_its_layers(planted, log, way):
    net, data, names, policy, plain = planted
    net.hybridize()
    if way == "override":
        changed = policy.override(fp32=["relu"])
        assert [layer.name for layer in changed.evidence.layers] == sorted(
            names, key=lambda name: [one.name for one in policy.evidence.layers].index(name)
        )
        assert not changed.evidence.trials
        net = under_other_names("changed_")
    else:
        changed = policy.with_evidence(None)
    with amp.autocast(policy=changed):
        assert error(net(data), plain) < 0.05
    assert not said(log, "was tuned")


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


class Twice(mx.gluon.HybridBlock):
    """A layer that is called twice, or two layers that share their weight."""

    def __init__(self, one, **options):
        super().__init__(**options)
        with self.name_scope():
            self.first = mx.gluon.nn.Dense(6, in_units=6, use_bias=False)
            self.second = self.first
            if not one:
                self.second = mx.gluon.nn.Dense(
                    6, in_units=6, use_bias=False, params=self.first.params
                )

    def hybrid_forward(self, F, x):  # noqa: N803
        return self.second(self.first(x * 1e3) * 1e-6)


def test_layers_in_loops_are_found_under_other_names(log):
    data = mx.nd.random.normal(shape=(3, 4, 6))

    def made(prefix):
        net = Loop(prefix=prefix)
        net.initialize(mx.init.One())
        net.large.weight.set_data(net.large.weight.data() * 1e6)
        net.small.weight.set_data(net.small.weight.data() * 1e-6)
        return net

    policy = tuned(made("one_"), data)
    other = made("other_")
    plain = other(data)
    other.hybridize()
    with amp.autocast(policy=policy):
        assert error(other(data), plain) < 0.05
    assert error(amp.convert_hybrid_block(other, policy=policy)(data), plain) < 0.05
    assert not said(log, "was tuned")


def test_a_layer_that_is_called_twice_has_two_places(log):
    data = mx.nd.random.normal(shape=(4, 6))

    def made(one):
        net = Twice(one)
        net.initialize(mx.init.One())
        net.first.weight.set_data(net.first.weight.data() * 3e3)
        return net

    policy = tuned(made(one=True), data)
    other = made(one=False)
    plain = other(data)
    other.hybridize()
    with amp.autocast(policy=policy):
        assert error(other(data), plain) < 0.05
    assert not said(log, "was tuned")


def test_training_keeps_them_too(planted):
    net, data, _, policy, _ = planted
    net.hybridize()
    with amp.autocast(policy=policy), autograd.record():
        loss = net(data).sum()
    loss.backward()
    assert np.isfinite(net[0].weight.grad().asnumpy()).all()


# ---------------------------------------------------------------------- another model


def test_another_model_is_a_warning_once(planted, log):
    _, _, _, policy, _ = planted
    policy = policy.with_evidence(replace(policy.evidence, seed=policy.evidence.seed + 1))
    net, data, _ = chain(5, [], "overflow")
    net.hybridize()
    with amp.autocast(policy=policy):
        net(data)
        net(data)
        net(mx.nd.concat(data, data, dim=0))
    [text] = said(log, "tuned for another model")
    assert "of 8 operators" in text
    assert "of 5 operators" in text
    log.clear()
    with amp.autocast(policy=policy):
        # No model, but a loss: nobody tunes that.
        loss = mx.gluon.loss.L2Loss()
        loss.hybridize()
        loss(data, data)
    assert not said(log, "tuned for another model")


def test_layers_that_are_not_there_are_named(planted, log):
    _, _, names, policy, _ = planted
    policy = policy.with_evidence(replace(policy.evidence, seed=policy.evidence.seed + 2))
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
    amp.convert_symbol(net, policy=policy)
    [text] = said(log, "tuned for another model")
    assert all(name in text for name in names)


def test_fingerprints():
    one, _, _ = chain(4, [], "overflow")
    two, _, _ = chain(4, [1], "overflow")
    three, _, _ = chain(5, [], "overflow")
    graphs = [Graph.from_symbol(net(mx.sym.var("data"))) for net in (one, two, three)]
    numbers = [fingerprint(graph) for graph in graphs]
    assert numbers[0] == numbers[1] != numbers[2]
    wider = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3, name="fc")
    other = mx.sym.FullyConnected(mx.sym.var("x"), num_hidden=4, name="fc")
    assert len({fingerprint(Graph.from_symbol(one)) for one in (wider, other)}) == 2
    plain = amp.Policy.default("float16", "cpu")
    assert recognised(plain, graphs[0]) is plain


def test_eager_calls_have_no_names(planted, log):
    net, data, _, policy, _ = planted
    policy = policy.with_evidence(replace(policy.evidence, seed=policy.evidence.seed + 3))
    net.hybridize(active=False)
    with amp.autocast(policy=policy):
        net(data)
        net(data)
    net.hybridize()
    [text] = said(log, "eager calls have no names")
    assert "FullyConnected" in text


# ---------------------------------------------------------------------- another machine


def test_another_machine_is_a_warning_once(log):
    machine = tuple((name, "none such" if name == "cpu" else value) for name, value in here("cpu"))
    evidence = replace(EVIDENCE, machine=machine)
    policy = amp.Policy.default("bfloat16").with_evidence(evidence)
    for _ in range(2):
        amp.init(policy=policy)
        amp.shutdown()
        amp.autocast(policy=policy)
    [text] = said(log, "tuned on another machine")
    assert "cpu" in text
    assert "instead of none such" in text
    assert "threads" not in text


def test_another_number_of_threads_says_what_to_set(log):
    machine = tuple((name, "77" if name == "threads" else value) for name, value in here("cpu"))
    threads = dict(here("cpu"))["threads"]
    for way, warns in (("autocast", True), ("plain", False)):
        evidence = replace(EVIDENCE, machine=machine, way=way)
        amp.autocast(policy=amp.Policy.default("bfloat16").with_evidence(evidence))
        assert (
            bool(said(log, f"77 threads and runs with {counted(int(threads), 'thread')}:")) == warns
        )
        assert bool(said(log, f"OMP_NUM_THREADS={threads}")) == warns
        log.clear()


def test_this_machine_is_none(log):
    policy = amp.Policy.default("bfloat16").with_evidence(replace(EVIDENCE, machine=here("cpu")))
    amp.init(policy=policy)
    amp.shutdown()
    assert not said(log, "tuned on another machine")


# ---------------------------------------------------------------------- another way


def test_a_way_that_was_slower_is_a_warning_once(log):
    net, data, _ = chain(3, [], "overflow")
    net.hybridize()
    net(data)
    fused = replace(EVIDENCE.trials[2], way="fused", speedup=2.0)
    slow = replace(fused, way="autocast", speedup=0.7)
    graph = Graph.from_symbol(net._cached_graph[1])
    evidence = replace(
        EVIDENCE, machine=here("cpu"), trials=(slow, fused), way="fused", model=fingerprint(graph),
        layers=(),
    )  # fmt: skip
    policy = amp.Policy.default("bfloat16").with_evidence(evidence)
    with amp.autocast(policy=policy):
        net(data)
        net(data)
    [text] = said(log, "convert the model")
    assert "0.70 times" in text
    log.clear()
    amp.convert_hybrid_block(net, policy=policy, fuse=False)(data)
    assert not said(log, "convert the model")


@pytest.mark.parametrize(
    "way, cast, fused",
    [("plain", False, False), ("autocast", False, False), ("converted", True, False),
     ("fused", True, True)],
)  # fmt: skip
def test_models_are_converted_as_they_were_measured(way, cast, fused):
    net, data, _ = chain(2, [], "overflow")
    net.hybridize()
    net(data)
    graph = Graph.from_symbol(net._cached_graph[1])
    evidence = replace(
        EVIDENCE, machine=here("cpu"), way=way, model=fingerprint(graph), layers=(), trials=()
    )
    policy = amp.Policy.default("bfloat16").with_evidence(evidence)
    converted = amp.convert_hybrid_block(net, policy=policy)
    dtypes = {str(p.dtype) for p in converted.collect_params().values()}
    assert (dtypes != {"<class 'numpy.float32'>"}) == cast
    assert any(n.startswith("_sg") for n in converted._source.graph.operators) == fused
    kept = amp.convert_hybrid_block(net, policy=policy, cast_optional_params=False, fuse=False)
    assert {str(p.dtype) for p in kept.collect_params().values()} == {"<class 'numpy.float32'>"}
